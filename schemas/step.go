package schemas

// Step is one denoising step of one attempt at one sample, published as it
// happens. Only the attempt that the sample's Trajectory names counts.
type Step struct {
	V                 int64  `msgpack:"v"`
	Run               string `msgpack:"run"`
	UID               string `msgpack:"uid"`
	SampleIndex       int64  `msgpack:"sample_index"`
	Attempt           string `msgpack:"attempt"`
	StepIndex         int64  `msgpack:"step_index"`
	NumInferenceSteps int64  `msgpack:"num_inference_steps"`
	// Transition is what ran: sde, cps, dance_sde or ode.
	Transition string  `msgpack:"transition"`
	NoiseLevel float64 `msgpack:"noise_level"`
	Sigma      float32 `msgpack:"sigma"`
	SigmaNext  float32 `msgpack:"sigma_next"`
	// Timestep is the float32 product 1000 * Sigma: to the bit what diffusers' scheduler
	// has, so that its index_for_timestep finds it.
	Timestep float32 `msgpack:"timestep"`
	// StdDevT is the diffusion coefficient g; NoiseStd is the standard deviation of the transition.
	StdDevT  float64 `msgpack:"std_dev_t"`
	NoiseStd float64 `msgpack:"noise_std"`
	// LogProb is in nats, the mean over ElementCount elements; null on an ode step.
	LogProb     *float64 `msgpack:"log_prob"`
	LogProbKind string   `msgpack:"log_prob_kind"`
	// LogProbSum is the sum of which LogProb is the mean; null on an ode step.
	LogProbSum   *float64 `msgpack:"log_prob_sum"`
	ElementCount int64    `msgpack:"element_count"`
	// Latents holds the state before this step when its index was asked for, and on
	// the last step also the final latents. Shape [S, C], packed tokens.
	Latents        []IndexedTensor `msgpack:"latents"`
	Debug          []NamedTensor   `msgpack:"debug"`
	PolicyVersion  int64           `msgpack:"policy_version"`
	WeightsDigest  string          `msgpack:"weights_digest"`
	ScheduleDigest string          `msgpack:"schedule_digest"`
	Sampler        string          `msgpack:"sampler"`
	Backend        string          `msgpack:"backend"`
	// DeviceNS is this step's share of device time, nanoseconds.
	DeviceNS int64 `msgpack:"device_ns"`
}
