package schemas

import "slices"

// Transition is what is true of a transition (Rollout.SDEType, Sampling.Transitions, Step.Transition). Its formulas are
// in pkg/flow.
type Transition struct {
	Name string `json:"name"`
	// Stochastic transitions draw noise, and have log-probs.
	Stochastic bool `json:"stochastic,omitempty"`
	// LevelIsShare says that the noise level is a share: at most 1.
	LevelIsShare bool `json:"level_is_share,omitempty"`
	// EndsWithoutNoise says that there is no noise, and no density, in the last step, whose next sigma is 0.
	EndsWithoutNoise bool `json:"ends_without_noise,omitempty"`
	// Served says that servers of images have it.
	Served bool `json:"served,omitempty"`
}

// Transitions are all there are, in the order in which messages name them. Not to be modified.
var Transitions = []Transition{
	{Name: TransitionSDE, Stochastic: true, Served: true},                                     // of Flow-GRPO
	{Name: "cps", Stochastic: true, LevelIsShare: true, EndsWithoutNoise: true, Served: true}, // keeps coefficients
	{Name: "dance_sde", Stochastic: true},                                                     // of DanceGRPO
	{Name: "ddim", Stochastic: true, LevelIsShare: true, EndsWithoutNoise: true},              // of DDPO
	{Name: TransitionODE, Served: true},
}

// The transitions of steps where a prompt names no others.
const (
	TransitionSDE = "sde"
	TransitionODE = "ode"
)

// TransitionNamed returns what is true of the transition of a name; one that is not known counts as stochastic.
func TransitionNamed(name string) Transition {
	i := slices.IndexFunc(Transitions, func(t Transition) bool { return t.Name == name })
	if i < 0 {
		return Transition{Name: name, Stochastic: true}
	}
	return Transitions[i]
}

// namesOfTransitions returns the names of those that have a property; nil: of all.
func namesOfTransitions(has func(Transition) bool) (names []string) {
	for _, t := range Transitions {
		if has == nil || has(t) {
			names = append(names, t.Name)
		}
	}
	return names
}

// Actions of a control, and the states of a run.
const (
	ControlCancel = "cancel"
	ControlPause  = "pause"
	ControlResume = "resume"
	ControlStatus = "status"
	ControlPrune  = "prune"

	RunRunning = "running"
	RunPaused  = "paused"
)

// Kinds of log-prob. They are not comparable with each other.
const (
	LogProbDensity = "density" // the full Gaussian log-density
	LogProbScaled  = "scaled"  // -(x-m)^2 / 2n^2, without the logarithms
	LogProbSquared = "squared" // -(x-m)^2, a score and no density
)

// Places of x_T's randomness.
const (
	NoisePerSample = "per_sample" // x_T of its own for each sample
	NoiseShared    = "shared"     // one x_T for the whole group
)

// Strategies of an SDEWindow.
const (
	WindowRandom        = "random"
	WindowProgressive   = "progressive"
	WindowNoncontiguous = "noncontiguous"
)

// Scales of an advantage, the bases of the standard deviation, and what a group of one gets.
const (
	StdGroup  = "group"
	StdGlobal = "global"
	StdNone   = "none"

	BasisSample     = "sample"     // unbiased, n-1
	BasisExpanded   = "expanded"   // unbiased over rewards repeated for each trained step
	BasisPopulation = "population" // n

	SingletonReward = "reward"
	SingletonZero   = "zero"

	BranchSiblings = "siblings"
	BranchDepth    = "depth"
	BranchLeaves   = "leaves"
)

// Why a trajectory ended.
const (
	StopCompleted = "completed"
	StopFailed    = "failed"
	StopPruned    = "pruned" // a rule of the prompt, or a control, ended it at a step boundary
)

// Statuses of rewards, scores, members and groups.
const (
	StatusScored    = "scored"
	StatusFailed    = "failed"
	StatusMissing   = "missing"
	StatusComplete  = "complete"
	StatusPartial   = "partial"
	StatusMixed     = "mixed" // of a group: its samples are of policy versions too far apart, or of several schedules
	StatusStale     = "stale" // of a group: its samples are of policy versions too old
	StatusFiltered  = "filtered"
	StatusShort     = "short"
	StatusRefused   = "refused"   // of a group: intake took its prompt for none
	StatusPruned    = "pruned"    // of a reward or a member: its sample was ended in the middle
	StatusCancelled = "cancelled" // of a group or a member: a control ended it
)

// What becomes of a group that does not count.
const (
	GroupKeep   = "keep"
	GroupDrop   = "drop"
	GroupRefill = "refill"
)

// What becomes of fields of a prompt that no prompt has.
const (
	UnknownRefuse = "refuse"
	UnknownWarn   = "warn"
)

// How the two velocities of classifier-free guidance are combined.
const (
	CFGRescaled     = "rescaled" // rescaled to the norm of the positive one, per token
	CFGPlain        = "plain"
	CFGPlainClamped = "plain_clamped" // shortened to the norm of the positive one, of the whole sample
	CFGInside       = "inside"        // by the network's own pipeline, which answers with the guided velocity
)

// The sigmas of a policy's schedule before they are shifted, and how the shift of a dynamic one is found.
const (
	GridLinspace  = "linspace"
	GridTorch     = "linspace_torch"
	GridScheduler = "scheduler"
	GridUniFlow   = "uni_flow"
	GridDiffusion = "diffusion"
	GridPipeline  = "pipeline"

	MuLinear   = "linear"
	MuNone     = "none"
	MuFlux2    = "flux2"
	MuConstant = "constant"
)

// How scheduled sampling draws offsets, steps, ramps and keeps; what a model predicts; and why
// a sample does not roll.
const (
	CompatExact       = "exact"
	CompatSimpleTuner = "simpletuner"

	ReflexAuto = "auto"
	ReflexOn   = "on"
	ReflexOff  = "off"

	KeepDigests = "digests"
	KeepTensors = "tensors"
)

// Whose a message is, which logits are stored, and why an answer ended.
const (
	RoleSystem    = "system"
	RoleUser      = "user"
	RoleAssistant = "assistant"

	LogitsNone = "none"
	LogitsTopK = "topk"
	LogitsIDs  = "ids"
	LogitsFull = "full"

	LogitsRaw       = "raw"       // as the model gives them
	LogitsProcessed = "processed" // after temperature and filters

	EngineVLLM   = "vllm"
	EngineSGLang = "sglang"
	// EngineSGLangDiffusion makes images.
	EngineSGLangDiffusion = "sglang-diffusion"

	EngineRaw       = "raw"       // log-probs before temperature and filters
	EngineTempered  = "tempered"  // log-probs after temperature, before filters
	EngineProcessed = "processed" // log-probs after both
	EngineLogits    = "logits"    // all logits, as the model gives them

	VerifyExact     = "exact"     // the same bits
	VerifyTolerance = "tolerance" // numbers close to those that are computed again
	VerifyNone      = "none"      // steps and digests alone: nothing is computed again

	FiltersMinPFirst = "min_p,top_k,top_p"
	FiltersMinPLast  = "top_k,top_p,min_p" // that of noise.md

	FinishStop   = "stop"   // a token or a text that ends answers
	FinishLength = "length" // max_new_tokens, or the model's context

	// How a conversation with an interaction ended: those of completed samples, then those of failed ones.
	ConversationTerminated = "terminated" // the interaction said so
	ConversationMaxTurns   = "max_turns"  // the last answer that was asked for
	ConversationContext    = "context"    // the model's context has no room for more
	ConversationTimeout    = "timeout"    // it did not answer in time
	ConversationAbsent     = "absent"     // no worker is there to answer
	ConversationError      = "error"      // it said that it cannot
	ConversationGarbage    = "garbage"    // its answer is none
)

// Kinds of media, and the format of each.
const (
	KindImage = "image"
	KindVideo = "video"
	KindAudio = "audio"

	ImagePNG  = "png"
	VideoAPNG = "apng" // animated PNG
	AudioWAV  = "wav"  // 32-bit floats
)

// Classes of reasons in a dead letter or a refused receipt.
const (
	CodeDecode        = "decode"         // the bytes are not an event
	CodeInvalid       = "invalid"        // an event that breaks a rule
	CodeUnknownModel  = "unknown_model"  // no lane serves the model
	CodeUnknownReward = "unknown_reward" // no such reward function or estimator
	CodeUIDConflict   = "uid_conflict"   // the run already used the uid for another prompt
	CodeExhausted     = "exhausted"      // retried until the deliveries ran out
	CodeLate          = "late"           // its group had closed
	CodeFailed        = "failed"         // the work itself failed, and would fail again
	CodePanic         = "panic"          // the program has a fault
	CodeTooLarge      = "too_large"      // larger than the bus carries
	CodeCancelled     = "cancelled"      // a control has ended its run or its group
	CodeDisplaced     = "displaced"      // not the event that its subject is for, which took its place
)

// The legal values of the contract's enumerations, in the order messages list
// them. Not to be modified. Names of reward functions and estimators are not among
// them: the services know those.
var (
	SDETypes         = namesOfTransitions(nil)
	LogProbKinds     = []string{LogProbDensity, LogProbScaled, LogProbSquared}
	Solvers          = []string{"euler", "heun", "unipc", "dpm", "rk4"}
	DebugTensors     = []string{"noise", "mean", "std", "model_output"}
	LatentsDTypes    = []string{"F32", "F16", "BF16"}
	InitialNoises    = []string{NoisePerSample, NoiseShared}
	WindowStrategies = []string{WindowRandom, WindowProgressive, WindowNoncontiguous}
	OffsetStrategies = []string{"uniform", "biased_early", "biased_late"}
	RolloutSamplers  = []string{"euler", "dpm", "unipc", "unip", "rk4"}
	RolloutCompats   = []string{CompatExact, CompatSimpleTuner}
	RampShapes       = []string{"linear", "cosine"}
	ReflexModes      = []string{ReflexAuto, ReflexOn, ReflexOff}
	PredictionKeeps  = []string{KeepDigests, KeepTensors}
	Predictions      = []string{"flow_prediction", "epsilon", "v_prediction"}
	RollReasons      = []string{"disabled", "masked", "zero_offset", "clipped"}
	StdScales        = []string{StdGroup, StdGlobal, StdNone}
	StdBases         = []string{BasisSample, BasisExpanded, BasisPopulation}
	Singletons       = []string{SingletonReward, SingletonZero}
	BranchScopes     = []string{BranchSiblings, BranchDepth, BranchLeaves}
	Roles            = []string{RoleSystem, RoleUser, RoleAssistant}
	LogitsForms      = []string{LogitsNone, LogitsTopK, LogitsIDs, LogitsFull}
	LogitsKinds      = []string{LogitsRaw, LogitsProcessed}
	Engines          = []string{EngineVLLM, EngineSGLang, EngineSGLangDiffusion}
	EngineValues     = []string{EngineRaw, EngineTempered, EngineProcessed, EngineLogits}
	VerifyModes      = []string{VerifyExact, VerifyTolerance, VerifyNone}
	FilterOrders     = []string{FiltersMinPFirst, FiltersMinPLast}
	FinishReasons    = []string{FinishStop, FinishLength}
	// ConversationStates are how a conversation with an interaction ended.
	ConversationStates = []string{
		ConversationTerminated, ConversationMaxTurns, ConversationContext, ConversationTimeout, ConversationAbsent,
		ConversationError, ConversationGarbage,
	}
	StopReasons  = []string{StopCompleted, StopFailed, StopPruned}
	CFGRules     = []string{CFGRescaled, CFGPlain, CFGPlainClamped, CFGInside}
	Grids        = []string{GridLinspace, GridTorch, GridScheduler, GridUniFlow, GridDiffusion, GridPipeline}
	MuRules      = []string{MuLinear, MuNone, MuFlux2, MuConstant}
	MediaKinds   = []string{KindImage, KindVideo, KindAudio}
	MediaFormats = []string{ImagePNG, VideoAPNG, AudioWAV} // of MediaKinds
	// ScoreImageFormats are how images travel to reward functions.
	ScoreImageFormats = []string{ImagePNG, "jpeg"}
	RewardStatuses    = []string{StatusScored, StatusFailed, StatusPruned}
	MemberStatuses    = []string{StatusScored, StatusFailed, StatusMissing, StatusCancelled, StatusPruned}
	GroupStatuses     = []string{
		StatusComplete, StatusPartial, StatusFailed, StatusMixed, StatusStale, StatusFiltered,
		StatusRefused, StatusCancelled,
	}
	BatchStatuses   = []string{StatusComplete, StatusShort, StatusPartial}
	ZeroStdPolicies = []string{GroupKeep, GroupDrop, GroupRefill}
	// KeepRules are by what Prune chooses the samples that go on.
	KeepRules      = []string{KeepHighest, KeepSpread}
	PruneEnds      = []string{ThenEnd, ThenBranch}
	FailedPolicies = []string{GroupKeep, GroupRefill}
	TeacherCodes   = []string{CodeUnknownSample, CodeGone, CodeUnfit, CodeInvalid, CodeFailed}
	ControlActions = []string{ControlCancel, ControlPause, ControlResume, ControlPrune, ControlStatus}
	// RunStates are those of runs that go on, then what became of those that have ended.
	RunStates = []string{
		RunRunning, RunPaused, StatusComplete, StatusPartial, StatusFailed, StatusMixed, StatusStale, StatusFiltered,
		StatusRefused, StatusCancelled,
	}
	RuleNames       = namesOfRules()
	RuleActions     = []string{RuleTell, RulePause, RuleOff}
	UnknownPolicies = []string{UnknownRefuse, UnknownWarn}
	ConditionTypes  = []string{"image", "mask", "video", "audio"}
	SwapRules       = []string{SwapFinish, SwapSwitch, SwapRestart}
	AppliedStates   = []string{AppliedApplied, AppliedRefused}
	Services        = []string{"intake", "sampler", "reward", "advantage"}
	PresentServices = []string{ServiceSampler, ServiceReward, ServiceStarting, ServiceIntake}
	DeadCodes       = []string{
		CodeDecode, CodeInvalid, CodeUnknownModel, CodeUnknownReward, CodeUIDConflict, CodeExhausted,
		CodeLate, CodeFailed, CodeTooLarge, CodeDisplaced, CodeCancelled, CodePanic,
	}
)

// DTypeSize returns the bytes of one element of a tensor's dtype, named as in
// safetensors; false for a name that no event may carry.
func DTypeSize(dtype string) (int64, bool) {
	switch dtype {
	case "F64", "I64", "U64":
		return 8, true
	case "F32", "I32", "U32":
		return 4, true
	case "F16", "BF16", "I16", "U16":
		return 2, true
	case "I8", "U8", "BOOL":
		return 1, true
	}
	return 0, false
}

// DTypes are the element types a tensor may have.
var DTypes = []string{"F32", "F16", "BF16", "U8", "F64", "I8", "I16", "I32", "I64", "U16", "U32", "U64", "BOOL"}
