package schemas

// ScoreRequest is one sample for a worker of the reward function nats:NAME: a core NATS
// request on ScoreSubject(NAME), which the queue group NAME hands to one worker. It is
// not stored.
type ScoreRequest struct {
	V int64 `msgpack:"v"`
	// Name is the instance, NAME of nats:NAME.
	Name   string `msgpack:"name"`
	Prompt string `msgpack:"prompt"`
	// GroundTruth is what the image is compared with; empty: nothing was named.
	GroundTruth string `msgpack:"ground_truth"`
	// Params are the prompt's for this function, handed on unread.
	Params map[string]string `msgpack:"params"`
	// Image is a file of ImageFormat, png or jpeg: RGB, 8 bits a channel.
	Image       []byte `msgpack:"image"`
	ImageFormat string `msgpack:"image_format"`
}

// ScoreReply is a worker's answer, at most MaxScoreReply bytes.
type ScoreReply struct {
	V int64 `msgpack:"v"`
	// Score is there unless Error is: a finite number.
	Score *float64 `msgpack:"score,omitempty"`
	// Detail may say what was seen.
	Detail string `msgpack:"detail,omitempty"`
	// Error says why there is no score; with Retry it may pass, and the sample is asked for
	// again.
	Error string `msgpack:"error,omitempty"`
	Retry bool   `msgpack:"retry,omitempty"`
}

// Validate joins every fault of the request.
func (e *ScoreRequest) Validate() error {
	var f faults
	f.version(e.V)
	f.token("name", e.Name)
	f.text("prompt", e.Prompt, 0, MaxPromptBytes)
	f.text("ground_truth", e.GroundTruth, 0, MaxPromptBytes)
	f.enum("image_format", e.ImageFormat, ScoreImageFormats)
	return f.err()
}

// Validate joins every fault of the reply.
func (e *ScoreReply) Validate() error {
	var f faults
	f.version(e.V)
	f.finiteOrNull("score", e.Score)
	if e.Score == nil {
		f.text("error", e.Error, 1, MaxScoreReply)
	}
	return f.err()
}
