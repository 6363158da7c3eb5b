package schemas

import "strconv"

// TeacherRequest asks for the log-probs that a teacher, the model of a lane of its own, gives a stored sample: a core
// NATS request on TeacherSubject(NAME), which the queue group NAME hands to one replica. It is not stored. A reference
// model is a teacher, too.
type TeacherRequest struct {
	V int64 `msgpack:"v"`
	// Name is what the teacher was started with, and the end of its subject.
	Name string `msgpack:"name" form:"token"`
	// Run, UID, SampleIndex and Stage name a completed trajectory.
	Run         Run   `msgpack:"run" form:"token"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	Stage       Stage `msgpack:"stage" form:"token"`
	// TopK asks for the K likeliest tokens at each token that was generated; absent: for none. Images have none.
	TopK int64 `msgpack:"top_k,omitempty" range:"0..MaxTopLogits"`
	// Substeps asks for the velocities of an image, too: in each step the mean one of so many steps of the sample's
	// solver, evenly spaced in sigma; with 1 the one at the state before it. Log-probs are then by these velocities.
	Substeps int64 `msgpack:"substeps,omitempty" range:"0..MaxSubsteps"`
}

// TeacherReply is what a teacher gives a sample, or why it gives nothing. Tensors of texts are as long as the sample's
// ids, n, and 0 where a token was given, as in the trajectory; large ones are a ref to a blob, which goes when the
// janitor sweeps: no event names it.
type TeacherReply struct {
	V int64 `msgpack:"v"`
	// Error says why there is nothing, Code its class; with Retry it may pass, and is asked again.
	Error string `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	Code  string `msgpack:"code,omitempty" enum:"TeacherCodes?"`
	Retry bool   `msgpack:"retry,omitempty"`
	// Model, WeightsDigest and Backend name what computed, as in trajectories.
	Model         string `msgpack:"model" size:"0..MaxName"`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName"`
	Backend       string `msgpack:"backend" size:"0..MaxName"`
	// LogProbs [n], F32, are before temperature and filters, in nats.
	LogProbs *Tensor `msgpack:"log_probs,omitempty"`
	// ProcessedLogProbs [n], F32, are those after temperature and filters, which are the sample's own; -inf where the
	// teacher's filters leave the token out.
	ProcessedLogProbs *Tensor `msgpack:"processed_log_probs,omitempty"`
	// LogSumExps and Entropies [n], F32, cover all logits of a token, before temperature and filters.
	LogSumExps *Tensor `msgpack:"log_sum_exps,omitempty"`
	Entropies  *Tensor `msgpack:"entropies,omitempty"`
	// TopIDs [n, k], I32, are the likeliest tokens, falling, and TopLogits [n, k], F32, their logits, before
	// temperature and filters: less LogSumExps they are log-probs. k is TopK, the vocabulary at most.
	TopIDs    *Tensor `msgpack:"top_ids,omitempty"`
	TopLogits *Tensor `msgpack:"top_logits,omitempty"`
	// StepIndices are the stochastic steps of an image whose states before and after are stored, StepLogProbs the
	// log-probs of their transitions, of LogProbKind, a mean over elements as in trajectories. StepsLeftOut are the
	// stochastic steps whose states were not kept.
	StepIndices  []int64   `msgpack:"step_indices,omitempty" size:"0..MaxSteps,unique" range:"0..MaxSteps-1"`
	StepLogProbs []float64 `msgpack:"step_log_probs,omitempty" size:"0..MaxSteps"`
	StepsLeftOut []int64   `msgpack:"steps_left_out,omitempty" size:"0..MaxSteps,unique" range:"0..MaxSteps-1"`
	LogProbKind  string    `msgpack:"log_prob_kind,omitempty" enum:"LogProbKinds?"`
	// Velocities [k, S, C], F32, are by the k StepIndices what the log-probs were computed with, where Substeps asked.
	Velocities *Tensor `msgpack:"velocities,omitempty"`
}

// Classes of reasons why a teacher gives nothing, beside CodeInvalid (the request) and CodeFailed (the model).
const (
	CodeUnknownSample = "unknown_sample" // no such trajectory is stored
	CodeGone          = "gone"           // a part of it is no longer stored
	CodeUnfit         = "unfit"          // the model cannot score such a sample
)

// Type returns the type name of the event.
func (*TeacherRequest) Type() string { return TypeTeacherRequest }

// Type returns the type name of the event.
func (*TeacherReply) Type() string { return TypeTeacherReply }

// Tensors returns the tensors that the reply has, with their wire names.
func (e *TeacherReply) Tensors() (list []NamedTensor) {
	for _, t := range e.tensors() {
		if *t.of != nil {
			list = append(list, NamedTensor{t.name, **t.of})
		}
	}
	return list
}

// tensors lists the fields of tensors, all that a text has, those of the top k, and that of an image, with dtype and
// dimensions.
func (e *TeacherReply) tensors() []teacherTensor {
	return []teacherTensor{
		{"log_probs", &e.LogProbs, "F32", 1},
		{"processed_log_probs", &e.ProcessedLogProbs, "F32", 1},
		{"log_sum_exps", &e.LogSumExps, "F32", 1},
		{"entropies", &e.Entropies, "F32", 1},
		{"top_ids", &e.TopIDs, "I32", 2},
		{"top_logits", &e.TopLogits, "F32", 2},
		{"velocities", &e.Velocities, "F32", 3},
	}
}

type teacherTensor struct {
	name  string
	of    **Tensor
	dtype string
	dims  int
}

// checkRules checks that a reply has an error, or what a text has, or what an image has, and that lists and tensors of
// one sample are of one length.
func (e *TeacherReply) checkRules(f *faults) {
	text := e.LogProbs != nil
	switch {
	case e.Error == "" && e.Code != "", e.Error == "" && e.Retry:
		f.add("error", quote(e.Error), "must be there beside code and retry")
	case e.Error != "" && (text || len(e.StepIndices) > 0):
		f.add("log_probs", "present", "must be absent beside an error")
	case e.Error == "" && text == (len(e.StepIndices) > 0):
		f.add("log_probs", strconv.FormatBool(text), "must be there, or step_indices, and not both")
	}
	if len(e.StepLogProbs) != len(e.StepIndices) {
		f.add("step_log_probs", strconv.Itoa(len(e.StepLogProbs)), "must be "+strconv.Itoa(len(e.StepIndices))+
			", one of each of step_indices")
	}
	if (len(e.StepIndices) > 0) != (e.LogProbKind != "") {
		f.add("log_prob_kind", quote(e.LogProbKind), "must be there beside step_indices, and only there")
	}
	if (e.TopIDs == nil) != (e.TopLogits == nil) {
		f.add("top_ids", strconv.FormatBool(e.TopIDs != nil), "must be there with top_logits")
	}
	for _, t := range e.tensors() {
		x, of, beside, n := *t.of, "log_probs", text, int64(-1)
		if text && len(e.LogProbs.Shape) == 1 {
			n = e.LogProbs.Shape[0]
		}
		if t.dims == 3 {
			of, beside, n = "step_indices", len(e.StepIndices) > 0, int64(len(e.StepIndices))
		}
		switch g := f.inStruct(t.name); {
		case x == nil && t.dims == 1 && text:
			g.add("data", "none", "must be there: a text has it")
		case x == nil:
		case !beside:
			g.add("data", "present", "must be absent without "+of)
		case x.DType != t.dtype || len(x.Shape) != t.dims || x.Parts != nil:
			g.add("dtype", quote(x.DType), "must be "+t.dtype+" of "+strconv.Itoa(t.dims)+" dimensions, without parts")
		case n >= 0 && x.Shape[0] != n:
			g.add("shape", strconv.FormatInt(x.Shape[0], 10), "must be as long as "+of)
		}
	}
	if e.TopIDs != nil && e.TopLogits != nil && len(e.TopIDs.Shape) == 2 && len(e.TopLogits.Shape) == 2 &&
		e.TopIDs.Shape[1] != e.TopLogits.Shape[1] {
		f.inStruct("top_logits").add("shape", strconv.FormatInt(e.TopLogits.Shape[1], 10), "must be that of top_ids")
	}
}
