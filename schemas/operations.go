package schemas

// Dead is input that could not be used, with the reason. Nothing is dropped
// without one.
type Dead struct {
	V int64 `msgpack:"v"`
	// Stage is the service that refused it: intake, sampler, reward or advantage.
	Stage string `msgpack:"stage"`
	// Code is the class of the reason, one of a fixed list; Reason is for people.
	Code   string `msgpack:"code"`
	Reason string `msgpack:"reason"`
	// Run and UID are the original's, where they could be read.
	Run string `msgpack:"run"`
	UID string `msgpack:"uid"`
	// OriginalSubject, Stream and StreamSeq say where the original was.
	OriginalSubject string `msgpack:"subject"`
	Stream          string `msgpack:"stream"`
	StreamSeq       uint64 `msgpack:"stream_seq"`
	Deliveries      uint64 `msgpack:"deliveries"`
	// Headers and Data are those of the original message, unchanged.
	Headers []Header `msgpack:"headers"`
	Data    []byte   `msgpack:"data"`
	// At is when the input was refused, Unix nanoseconds.
	At int64 `msgpack:"at"`
}

// Header is one header line of a message.
type Header struct {
	// Name and Value are as they were received.
	Name  string `msgpack:"name"`
	Value string `msgpack:"value"`
}

// Receipt is intake's answer to a client that asked for one by the header
// HeaderReply. It is a core NATS message, not stored: the durable evidence is in
// MDR_REQUESTS or MDR_DEAD.
type Receipt struct {
	V        int64  `msgpack:"v"`
	Accepted bool   `msgpack:"accepted"`
	Run      string `msgpack:"run"`
	UID      string `msgpack:"uid"`
	// Waiting says what the prompt waits for: it is neither accepted nor refused yet, and
	// another receipt will say which. Only Run and UID are set beside it.
	Waiting string `msgpack:"waiting,omitempty"`
	// Code and Error are set when refused.
	Code    string `msgpack:"code,omitempty"`
	Error   string `msgpack:"error,omitempty"`
	Samples int64  `msgpack:"samples"`
	// NumInferenceSteps and SDEStepIndices are what was resolved.
	NumInferenceSteps int64   `msgpack:"num_inference_steps"`
	SDEStepIndices    []int64 `msgpack:"sde_step_indices"`
	// Warnings are what was let be: fields that no prompt has.
	Warnings []string `msgpack:"warnings,omitempty"`
}

// Policy announces what a lane serves. The latest one of each lane is kept in
// the key-value bucket PolicyBucket; MDR_POLICIES keeps the history.
type Policy struct {
	V    int64  `msgpack:"v"`
	Lane string `msgpack:"lane"`
	// Model and Family name the network; PolicyVersion counts weight updates.
	Model         string `msgpack:"model"`
	Family        string `msgpack:"family"`
	PolicyVersion int64  `msgpack:"policy_version"`
	WeightsDigest string `msgpack:"weights_digest"`
	// SchedulerConfig is the model's scheduler_config.json, as in the diffusers layout.
	SchedulerConfig []byte `msgpack:"scheduler_config"`
	// LatentChannels is C of the packed latents [S, C]; one token covers PixelsPerToken^2 pixels.
	LatentChannels int64 `msgpack:"latent_channels"`
	PixelsPerToken int64 `msgpack:"pixels_per_token"`
	// Height and Width in pixels, NumInferenceSteps and TrueCFGScale are for prompts that leave
	// them out.
	Height            int64   `msgpack:"height"`
	Width             int64   `msgpack:"width"`
	NumInferenceSteps int64   `msgpack:"num_inference_steps"`
	TrueCFGScale      float64 `msgpack:"true_cfg_scale"`
	// MaxPixels is the largest product of height and width that the lane makes.
	MaxPixels int64 `msgpack:"max_pixels"`
	// Announced is when the sampler said so, Unix nanoseconds.
	Announced int64 `msgpack:"announced"`
	// Reward lists the reward functions of prompts that name none; empty: the service's.
	Reward []string `msgpack:"reward,omitempty"`
}
