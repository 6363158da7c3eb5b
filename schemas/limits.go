package schemas

// Limits on the encoded bytes of an event, checked before anything is allocated.
const (
	// MaxEventBytes is the longest event, whatever payload limit the server has. The
	// server's own limit (1 MiB unless its operator raised it) is usually reached first.
	MaxEventBytes = 8 << 20
	// MaxDepth is how deep maps and lists nest; the event itself is level 1.
	MaxDepth = 12
	// MaxElements is the number of msgpack values in one event, keys included.
	MaxElements = 1 << 16
	// MaxListItems is the length of any list.
	MaxListItems = 8192
	// MaxMapKeys is the number of keys of any map, MaxKeyBytes the length of a key.
	MaxMapKeys  = 128
	MaxKeyBytes = 256
	// MaxMetadataBytes and MaxMetadataDepth bound the encoded metadata map.
	MaxMetadataBytes = 16 << 10
	MaxMetadataDepth = 8
)

// Limits on fields.
const (
	// MaxGroupSize is the number of samples of one prompt.
	MaxGroupSize = 1024
	// MaxBranches is the number of branch points of a tree, as many as MaxGroupSize has room for.
	MaxBranches = 10
	// MaxSigma bounds the sigmas of a resolved schedule: 1, and what the roundings of a
	// schedule may add to it.
	MaxSigma = 1 + 1.0/(1<<19)
	// MaxSteps is T, the number of denoising steps.
	MaxSteps = 1000
	// MaxPromptBytes bounds a prompt, a negative prompt and a ground truth, in bytes of UTF-8.
	MaxPromptBytes = 16 << 10
	// MaxSide bounds height and width in pixels. Which sizes a lane makes, its policy says:
	// multiples of pixels_per_token.
	MaxSide = 8192
	// MaxFrames is the number of frames of a video, MaxFPS how many are shown in a second, MaxVideoPixels the product
	// of frames, height and width. Which counts a lane makes, its policy says: see frames_per_token.
	MaxFrames      = 1024
	MaxFPS         = 240
	MaxVideoPixels = 1 << 30
	// MaxMedia is the number of files of a sample, MaxAudio the number of samples of a sound in all its channels,
	// MaxAudioRate how many are played in a second.
	MaxMedia     = 3
	MaxAudio     = 1 << 28
	MaxAudioRate = 384_000
	// MaxCFGScale bounds true_cfg_scale, MaxNoiseLevel noise_level, MaxEpsilon epsilon.
	MaxCFGScale   = 100
	MaxNoiseLevel = 10
	MaxEpsilon    = 1
	// MaxPriority bounds the magnitude of a priority.
	MaxPriority = 1_000_000
	// MaxRewards is the number of reward functions of a prompt, MaxWeight the magnitude of a weight.
	MaxRewards = 16
	MaxWeight  = 1e6
	// MaxScore is the magnitude of a score and of a reward: a trainer's float32 holds it, and its sums.
	MaxScore = 1e30
	// MaxPresentRewards is the number of reward functions of a service.
	MaxPresentRewards = 512
	// MaxMaking is the number of samples that a sampler says it has in hand.
	MaxMaking = 1024
	// MaxTenants is the number of tenants of a lane, besides main.
	MaxTenants = 64
	// MaxParams, MaxParamName and MaxParamBytes bound a reward function's params.
	MaxParams     = 32
	MaxParamName  = 64
	MaxParamBytes = 4096
	// MaxScoreReply bounds the encoded answer of a scoring worker, MaxGroupReply that to a whole group, MaxPreferences
	// the comparisons in it, and MaxGroupFiles the bytes of files in one request for a group.
	MaxScoreReply  = 64 << 10
	MaxGroupReply  = 1 << 20
	MaxPreferences = MaxListItems
	MaxGroupFiles  = 64 << 20
	// MaxBatchGroups is the number of groups of a batch, MaxMetrics the number of its metrics.
	MaxBatchGroups = 4096
	MaxMetrics     = 1024
	// MaxOutcomes is the number of outcomes that a status counts.
	MaxOutcomes = 32
	// MaxRefillRounds bounds how often a group is replaced, MaxPolicySpan the versions of the
	// weights in one group, MaxAdvClip a clamp of advantages.
	MaxRefillRounds = 16
	MaxPolicySpan   = 1 << 20
	MaxAdvClip      = 1e6
	// MaxDetail bounds what a reward function says it saw.
	MaxDetail = 256
	// MaxDebug is the number of debug tensors of a step: one of each name.
	MaxDebug = 4
	// MaxStages is the number of stages of a sample, MaxRounds how often they run, MaxStageSamples the most samples of
	// a group times its stages times its rounds. MaxStageName is the length of a name: a token has the round, too.
	MaxStages       = 8
	MaxStageName    = 32
	MaxRounds       = 8
	MaxStageSamples = 4096
	// MaxTracks is the number of tracks of a state.
	MaxTracks = 8
	// MaxCredits is the number of lists of values by stage and track in an advantage.
	MaxCredits = 64
	// MaxStepLatents is the number of latents one step carries: before it, and after the last.
	MaxStepLatents = 2
	// MaxConditioning is the number of conditioning tensors of a trajectory.
	MaxConditioning = 16
	// MaxTensorDims is the number of dimensions of a tensor, MaxTensorBytes the size of
	// its elements wherever they are.
	MaxTensorDims  = 8
	MaxTensorBytes = 1 << 30
	// MaxPartBytes is the size of one part of a tensor that was too large for one
	// message, MaxPartIndex the largest number of parts of one event. Part n travels on
	// the event's subject followed by ".<n>".
	MaxPartBytes = 512 << 10
	MaxParts     = 4096
	// MaxInlineImage is the size of an image carried inside the trajectory; larger ones are blobs.
	MaxInlineImage = 512 << 10
	// MaxPolicyFiles bounds the files of a transformer.
	MaxPolicyFiles = 256
	// MaxWeightsFile is the size of one of them, MaxPath the length of its path.
	MaxWeightsFile = 1 << 42
	MaxPath        = 1024
	// MaxBlobBytes is the size of an object in the blob bucket that an event may point to.
	MaxBlobBytes = 1 << 36
	// MaxText bounds an error or a reason, MaxName a name of a model, instance, version or backend.
	MaxText = 4096
	MaxName = 256
	// MaxWarnings is the number of warnings of a receipt, and of faults that one error names.
	MaxWarnings = 32
	// MaxSubject bounds the subject of a dead letter.
	MaxSubject = 1024
	// MaxHeaders, MaxHeaderName and MaxHeaderValue bound a dead letter's headers.
	MaxHeaders     = 128
	MaxHeaderName  = 256
	MaxHeaderValue = 16 << 10
	// MaxMu bounds a policy's mu_constant: e^MaxMu is the largest shift.
	MaxMu = 50
	// MaxSchedulerConfig bounds a policy's scheduler_config.json.
	MaxSchedulerConfig = 64 << 10
	// MaxAdapterConfig bounds adapter_config.json, MaxAdapterScale the magnitude of an adapter's scale.
	MaxAdapterConfig = 64 << 10
	MaxAdapterScale  = 1000
	// MaxTokens is the length of a sequence of text, prompt and answer; MaxVocabulary the number of its logits.
	MaxTokens     = 1 << 17
	MaxVocabulary = 1 << 20
	// MaxTokensPerEvent is the tokens of one event, MaxTokenEvents the events of one sample, MaxTopLogits the logits
	// of a token where not all are stored.
	MaxTokensPerEvent = 1024
	MaxTokenEvents    = 6000
	MaxTopLogits      = 4096
	// MaxSubsteps is the evaluations of a teacher inside one step.
	MaxSubsteps = 100
	// MinTemperature and MaxTemperature bound a temperature above 0, MaxStops the texts or tokens that end an answer,
	// MaxStopBytes such a text.
	MinTemperature = 0.001
	MaxTemperature = 100
	MaxStops       = 16
	MaxStopBytes   = 1024
	// MaxMessages and MaxTurns bound a conversation, MaxAnswerBytes the text of one answer, and of a message, which may
	// be one.
	MaxMessages    = 256
	MaxTurns       = 256
	MaxAnswerBytes = 512 << 10
	// MaxAnswers is how often a model answers in one conversation, MaxInteractMS how long an interaction may take to
	// say something to an answer, in milliseconds. MaxInteractTokens and MaxInteractLogits bound the tokens, and the
	// bytes of logits, that it is handed itself, MaxInteractReply what it says, encoded.
	MaxAnswers        = MaxTurns / 2
	MaxInteractMS     = 3_600_000
	MaxInteractTokens = 4096
	MaxInteractLogits = 1 << 20
	MaxInteractReply  = 64 << 10
	// MaxLatentChannels and MaxPixelsPerToken bound what a policy announces.
	MaxLatentChannels = 65536
	MaxPixelsPerToken = 1024
)
