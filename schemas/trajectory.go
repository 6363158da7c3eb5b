package schemas

// Trajectory is the authority on one sample: which attempt counts, which steps it
// has, and all a trainer needs to recompute each log-prob.
type Trajectory struct {
	V           int64  `msgpack:"v"`
	Run         string `msgpack:"run"`
	UID         string `msgpack:"uid"`
	SampleIndex int64  `msgpack:"sample_index"`
	GroupSize   int64  `msgpack:"group_size"`
	Lane        string `msgpack:"lane"`
	Attempt     string `msgpack:"attempt"`
	// StopReason is completed; failed: the sample cannot be made; or cancelled: someone
	// called its uid or run off.
	StopReason string `msgpack:"stop_reason"`
	// Error says why there is no picture, unless completed.
	Error          string `msgpack:"error,omitempty"`
	Prompt         string `msgpack:"prompt"`
	NegativePrompt string `msgpack:"negative_prompt"`
	// TruncatePrompt is the prompt's choice, TruncatedTokens how many tokens of the prompt in
	// its template were cut off because of it; absent: none.
	TruncatePrompt  bool  `msgpack:"truncate_prompt,omitempty"`
	TruncatedTokens int64 `msgpack:"truncated_tokens,omitempty"`
	Height          int64 `msgpack:"height"`
	Width           int64 `msgpack:"width"`
	// TrueCFGScale and CFGRule (rescaled or plain) say how v was combined.
	TrueCFGScale float64 `msgpack:"true_cfg_scale"`
	CFGRule      string  `msgpack:"cfg_rule"`
	SampleSeed   uint64  `msgpack:"sample_seed"`
	NoiseSeed    uint64  `msgpack:"noise_seed"`
	// InitialLatents are the group's x_T [n, S, C] where the prompt gave them.
	InitialLatents *Tensor `msgpack:"initial_latents,omitempty"`
	// Sigmas [T+1]; Timesteps [T+1] = 1000 * sigma in float32, as diffusers has them.
	Sigmas    []float32 `msgpack:"sigmas"`
	Timesteps []float32 `msgpack:"timesteps"`
	// Transitions [T], LogProbs [T] (null on ode steps).
	Transitions []string   `msgpack:"transitions"`
	LogProbs    []*float64 `msgpack:"log_probs"`
	LogProbKind string     `msgpack:"log_prob_kind"`
	NoiseLevel  float64    `msgpack:"noise_level"`
	Solver      string     `msgpack:"solver"`
	// LatentStepIndices are the latents stored, ascending; LatentsShape is [S, C].
	LatentStepIndices []int64 `msgpack:"latent_step_indices"`
	LatentsShape      []int64 `msgpack:"latents_shape"`
	LatentsDType      string  `msgpack:"latents_dtype"`
	// Steps are the stored step events of the attempt, in step order.
	Steps []StepRef `msgpack:"steps"`
	// ContentDigest is the sha-256 over the content of the steps in order, in lower-case hex: equal
	// for equal rollouts, whoever sampled them and when. Empty unless completed.
	ContentDigest string `msgpack:"content_digest"`
	// Image is the decoded picture; absent unless completed.
	Image *Image `msgpack:"image,omitempty"`
	// Conditioning are the stored prompt embeddings, once per prompt; empty for models that take text.
	Conditioning   []NamedTensor `msgpack:"conditioning"`
	ScheduleDigest string        `msgpack:"schedule_digest"`
	WeightsDigest  string        `msgpack:"weights_digest"`
	// PolicyVersionMin and PolicyVersionMax are the oldest and newest weights the attempt used.
	PolicyVersionMin int64  `msgpack:"policy_version_min"`
	PolicyVersionMax int64  `msgpack:"policy_version_max"`
	Sampler          string `msgpack:"sampler"`
	Backend          string `msgpack:"backend"`
	Group            Group  `msgpack:"group"`
	// Timings say when the attempt was received and what its parts took.
	Timings SampleTimings `msgpack:"timings"`
}

// StepRef points to one stored step event.
type StepRef struct {
	// Seq is its sequence in MDR_STEPS.
	Seq uint64 `msgpack:"seq"`
	// Digest is the sha-256 of the event's stored payload in lower-case hex.
	Digest string `msgpack:"digest"`
}

// Image is an encoded picture. Exactly one of Data and Ref carries the bytes.
type Image struct {
	// Format of the bytes: always png.
	Format string `msgpack:"format"`
	Width  int64  `msgpack:"width"`
	Height int64  `msgpack:"height"`
	// Digest is the sha-256 of the pixels: RGB, 8 bits, row-major, in lower-case hex.
	Digest string `msgpack:"digest"`
	Data   []byte `msgpack:"data,omitempty"`
	Ref    *Ref   `msgpack:"ref,omitempty"`
}

// SampleTimings are wall-clock moments, Unix nanoseconds, and durations in nanoseconds.
type SampleTimings struct {
	Received  int64 `msgpack:"received"`
	Started   int64 `msgpack:"started"`
	Finished  int64 `msgpack:"finished"`
	EncodeNS  int64 `msgpack:"encode_ns"`
	DenoiseNS int64 `msgpack:"denoise_ns"`
	DecodeNS  int64 `msgpack:"decode_ns"`
}
