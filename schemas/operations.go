package schemas

import "strconv"

// Dead is input that could not be used, with the reason. Nothing is dropped
// without one.
type Dead struct {
	V int64 `msgpack:"v"`
	// Service is the one that refused it: intake, sampler, reward or advantage.
	Service string `msgpack:"service" enum:"Services"`
	// Code is the class of the reason, one of a fixed list; Reason is for people.
	Code   string `msgpack:"code" enum:"DeadCodes"`
	Reason string `msgpack:"reason" size:"1..MaxText,cut"`
	// Run and UID are the original's, where they could be read.
	Run Run `msgpack:"run" size:"0..MaxToken,cut"`
	UID UID `msgpack:"uid" size:"0..MaxToken,cut"`
	// OriginalSubject, Stream and StreamSeq say where the original was.
	OriginalSubject string `msgpack:"subject" size:"0..MaxSubject,cut"`
	Stream          string `msgpack:"stream" size:"0..MaxName,cut"`
	StreamSeq       uint64 `msgpack:"stream_seq"`
	Deliveries      uint64 `msgpack:"deliveries"`
	// Headers and Data are copied from the original message, unchanged.
	Headers []Header `msgpack:"headers" size:"0..MaxHeaders,cut"`
	Data    []byte   `msgpack:"data" size:"0..MaxEventBytes"`
	// At is when the input was refused, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// Header is one header line of a message.
type Header struct {
	// Name and Value are as they were received.
	Name  string `msgpack:"name" size:"1..MaxHeaderName,cut"`
	Value string `msgpack:"value" size:"0..MaxHeaderValue,cut"`
}

// Receipt is intake's answer to a client that asked for one by the header
// HeaderReply. It is a core NATS message, not stored: the durable evidence is in
// MDR_REQUESTS or MDR_DEAD.
type Receipt struct {
	V        int64 `msgpack:"v"`
	Accepted bool  `msgpack:"accepted"`
	Run      Run   `msgpack:"run" size:"0..MaxToken"`
	UID      UID   `msgpack:"uid" size:"0..MaxToken"`
	// Waiting says what the prompt waits for: it is neither accepted nor refused yet, and
	// another receipt will say which. Only Run and UID are set beside it.
	Waiting string `msgpack:"waiting,omitempty" size:"0..MaxText,cut"`
	// Code and Error are set when refused.
	Code    string `msgpack:"code,omitempty" enum:"DeadCodes"`
	Error   string `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	Samples int64  `msgpack:"samples" range:"0..MaxGroupSize"`
	// NumInferenceSteps and SDEStepIndices are the resolved values.
	NumInferenceSteps int64   `msgpack:"num_inference_steps" range:"0..MaxSteps"`
	SDEStepIndices    []int64 `msgpack:"sde_step_indices" size:"0..MaxSteps,unique" range:"0..MaxSteps-1"`
	// StartStepIndex and StopStepIndex are the part of the steps that runs; absent: from 0, and to T.
	StartStepIndex int64 `msgpack:"start_step_index,omitempty" range:"0..MaxSteps-1"`
	StopStepIndex  int64 `msgpack:"stop_step_index,omitempty" range:"0..MaxSteps-1"`
	// TotalSteps is how many steps all samples run, where they differ: under scheduled sampling and in a tree; of texts
	// the most events that their answers can have.
	TotalSteps *int64 `msgpack:"total_steps,omitempty" range:"0.."`
	// Warnings name what intake ignored: fields that no prompt has.
	Warnings []string `msgpack:"warnings,omitempty" size:"0..MaxWarnings"`
}

// AllSteps returns how many steps all samples run together.
func (e *Receipt) AllSteps() int64 {
	if e.TotalSteps != nil {
		return *e.TotalSteps
	}
	return e.Samples * e.Steps()
}

// Steps returns how many steps each sample runs, if that is the same for all.
func (e *Receipt) Steps() int64 {
	if e.StopStepIndex > 0 {
		return e.StopStepIndex - e.StartStepIndex
	}
	return e.NumInferenceSteps - e.StartStepIndex
}

// Validate returns all faults of the dead letter, joined. Encode repairs over-long text, so
// only what it cannot know is a fault.
func (e *Dead) Validate() error { return CheckFields(e) }

// checkRules checks the receipt by its kind: the prompt waits, was accepted, or was refused.
func (e *Receipt) checkRules(f *faults) {
	for i, w := range e.Warnings {
		f.requireText("warnings["+strconv.Itoa(i)+"]", w)
	}
	switch {
	case e.Waiting != "":
		if e.Accepted || e.Code != "" || e.Error != "" {
			f.add("accepted", strconv.FormatBool(e.Accepted), "must be false, and code and error empty, while it waits")
		}
	case e.Accepted:
		if e.Code != "" || e.Error != "" {
			f.add("code", quote(e.Code), "must be empty, as error, when accepted")
		}
		f.checkToken("run", string(e.Run))
		f.checkToken("uid", string(e.UID))
		if e.Samples == 0 {
			f.checkWithin("samples", e.Samples, 1, MaxGroupSize)
		}
		if e.NumInferenceSteps == 0 {
			f.checkWithin("num_inference_steps", e.NumInferenceSteps, 1, MaxSteps)
		}
		f.checkIndices("sde_step_indices", e.SDEStepIndices, 0, e.NumInferenceSteps-1, MaxSteps-1)
		if e.StopStepIndex >= e.NumInferenceSteps && e.StopStepIndex < MaxSteps {
			f.checkWithin("stop_step_index", e.StopStepIndex, 0, e.NumInferenceSteps-1)
		}
		if e.StartStepIndex >= e.NumInferenceSteps && e.StartStepIndex < MaxSteps {
			f.checkWithin("start_step_index", e.StartStepIndex, 0, e.NumInferenceSteps-1)
		}
	default:
		f.requireOneOf("code", e.Code, DeadCodes)
		f.requireText("error", e.Error)
	}
}
