package schemas

// ScoreRequest is one sample for a worker of the reward function nats:NAME: a core NATS
// request on ScoreSubject(NAME), which the queue group NAME hands to one worker. It is
// not stored.
type ScoreRequest struct {
	V int64 `msgpack:"v"`
	// Name is the instance, NAME of nats:NAME.
	Name   string `msgpack:"name" form:"token"`
	Prompt string `msgpack:"prompt" size:"0..MaxPromptBytes"`
	// GroundTruth is what the sample is compared with, a text or any value of JSON; empty: nothing was named.
	GroundTruth Truth `msgpack:"ground_truth" size:"0..MaxPromptBytes"`
	// Params are the prompt's for this function, handed on unread.
	Params map[string]string `msgpack:"params"`
	// Metadata is the prompt's: the record that it came with.
	Metadata Metadata `msgpack:"metadata,omitempty"`
	// Image is a file of ImageFormat, png or jpeg: RGB, 8 bits a channel. Of a text both are empty.
	Image       []byte `msgpack:"image"`
	ImageFormat string `msgpack:"image_format" enum:"ScoreImageFormats?"`
	// Frames are files of ImageFormat, in order: the frames of a video, where the function's settings ask for several.
	// Image is the one in the middle.
	Frames [][]byte `msgpack:"frames,omitempty" size:"0..MaxFrames"`
	// Conditions are the files that the network was given besides the prompt, as they are stored, sorted by name.
	Conditions []ScoreCondition `msgpack:"conditions,omitempty" size:"0..MaxConditioning"`
	// Audio is a WAV file of 32-bit floats, where the function judges a sound: Image is empty then.
	Audio []byte `msgpack:"audio,omitempty"`
	// Text is an answer of a language model, Messages the conversation that it is to. Of an image both are absent.
	Text     *string   `msgpack:"text,omitempty" size:"0..MaxAnswerBytes"`
	Messages []Message `msgpack:"messages,omitempty" size:"0..MaxMessages"`
	// Trajectory is the subject in MDR_TRAJECTORIES of a sample of text: its events have log-probs and logits.
	Trajectory string `msgpack:"trajectory,omitempty" size:"0..MaxSubject"`
}

// ScoreCondition is a Condition of a sample, such as the image that it edits, with its file.
type ScoreCondition struct {
	// Name is the input of the network.
	Name string `msgpack:"name" form:"token"`
	// Type is the input's.
	Type string `msgpack:"type" enum:"ConditionTypes"`
	// File is a PNG, of a video an animated one.
	File []byte `msgpack:"file"`
}

// ScoreReply is a worker's answer, at most MaxScoreReply bytes.
type ScoreReply struct {
	V int64 `msgpack:"v"`
	// Score is there unless Error is: a finite number.
	Score *float64 `msgpack:"score,omitempty"`
	// Detail may describe what the function saw.
	Detail string `msgpack:"detail,omitempty" size:"0..MaxScoreReply"`
	// Error says why there is no score; with Retry it may pass, and the sample is asked for
	// again.
	Error string `msgpack:"error,omitempty" size:"0..MaxScoreReply"`
	Retry bool   `msgpack:"retry,omitempty"`
}

func (e *ScoreRequest) checkRules(f *faults) {
	if e.Text == nil && e.Audio == nil {
		f.requireOneOf("image_format", e.ImageFormat, ScoreImageFormats)
	}
}

func (e *ScoreReply) checkRules(f *faults) {
	if e.Score == nil {
		f.requireText("error", e.Error)
	}
}
