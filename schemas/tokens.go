package schemas

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Tokens is a range of tokens of one turn of a text, published as they are made, or given. Only the events that the
// sample's Trajectory names count.
type Tokens struct {
	V           int64  `msgpack:"v" digest:"-"`
	Run         Run    `msgpack:"run" form:"token" digest:"-"`
	UID         UID    `msgpack:"uid" form:"token"`
	SampleIndex int64  `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	Stage       Stage  `msgpack:"stage" form:"token"`
	Attempt     string `msgpack:"attempt" form:"token" digest:"-"`
	// N counts the events of the sample, from 0.
	N int64 `msgpack:"n" range:"0..MaxTokenEvents-1"`
	// Turn is the turn that the tokens are of, from 0; TurnPosition the place of the first of them in the turn,
	// Position in the sequence.
	Turn         int64 `msgpack:"turn" range:"0..MaxTurns-1"`
	Position     int64 `msgpack:"position" range:"0..MaxTokens"`
	TurnPosition int64 `msgpack:"turn_position" range:"0..MaxTokens"`
	// Generated says that the model made them. What was given has no log-probs, and is not trained on.
	Generated bool `msgpack:"generated"`
	// IDs are the tokens. A turn that was generated with none has one event without any.
	IDs []int64 `msgpack:"ids" size:"0..MaxTokensPerEvent" range:"0..MaxVocabulary-1"`
	// Engine is the server that drew the tokens, with its release; absent: the sampler. With it, lists of numbers that
	// the server does not give are empty; one of LogProbs and ProcessedLogProbs is there.
	Engine string `msgpack:"engine,omitempty" size:"0..MaxName"`
	// LogProbs are the model's, one a token, before temperature and filters, in nats.
	LogProbs []float32 `msgpack:"log_probs" size:"0..MaxTokensPerEvent" range:"..0,null"`
	// ProcessedLogProbs drew the tokens: they are after temperature and filters. At temperature 0 they are 0.
	ProcessedLogProbs []float32 `msgpack:"processed_log_probs" size:"0..MaxTokensPerEvent" range:"..0,null"`
	// LogSumExps cover all V logits of LogitsKind, even where few are stored: a log-prob is the logit minus it.
	LogSumExps []float32 `msgpack:"log_sum_exps" size:"0..MaxTokensPerEvent"`
	// Entropies are of the distributions that LogProbs come from, in nats; TopLogProbs are of their likeliest tokens.
	Entropies   []float32 `msgpack:"entropies" size:"0..MaxTokensPerEvent" range:"0.."`
	TopLogProbs []float32 `msgpack:"top_log_probs" size:"0..MaxTokensPerEvent" range:"..0,null"`
	// LogitsKind is raw, as the model gives them, or processed: after temperature and filters.
	LogitsKind string       `msgpack:"logits_kind" enum:"LogitsKinds"`
	Logits     *TokenLogits `msgpack:"logits,omitempty"`
	// Vocabulary is V, the number of logits of a token.
	Vocabulary  int64   `msgpack:"vocabulary" range:"1..MaxVocabulary"`
	Temperature float64 `msgpack:"temperature" range:"0..MaxTemperature" digest:"-"`
	TopK        int64   `msgpack:"top_k" range:"0..MaxVocabulary" digest:"-"`
	TopP        float64 `msgpack:"top_p" range:"(0..1]" digest:"-"`
	MinP        float64 `msgpack:"min_p" range:"0..1" digest:"-"`
	// FinishReason is there on the last event of a turn that was generated: stop or length.
	FinishReason   string `msgpack:"finish_reason,omitempty" enum:"FinishReasons?"`
	PolicyVersion  int64  `msgpack:"policy_version" range:"0.."`
	WeightsDigest  string `msgpack:"weights_digest" size:"0..MaxName"`
	ScheduleDigest string `msgpack:"schedule_digest" form:"digest"`
	Sampler        string `msgpack:"sampler" size:"0..MaxName" digest:"-"`
	Backend        string `msgpack:"backend" size:"0..MaxName" digest:"-"`
	// DeviceNS is the tokens' share of device time, nanoseconds.
	DeviceNS int64 `msgpack:"device_ns" range:"0.." digest:"-"`
	// Seal is a message authentication code over this event and all before it, as of a Step.
	Seal string `msgpack:"seal,omitempty" form:"sha256?" digest:"-"`
}

// TokenLogits are the logits that are stored of some tokens.
type TokenLogits struct {
	// Form is topk, ids or full.
	Form string `msgpack:"form" enum:"LogitsForms"`
	// IDs are the tokens that the values are of, U32: of topk [tokens, k], falling by value, and rising by id where
	// those are equal; of ids [k], the same for all tokens; of full absent.
	IDs *Tensor `msgpack:"ids,omitempty"`
	// Values are the logits, [tokens, k] or [tokens, V].
	Values Tensor `msgpack:"values"`
	// Masked is how many of the values are -inf: tokens that filters left out.
	Masked int64 `msgpack:"masked" range:"0..MaxTensorBytes"`
}

// Append adds the rows of more, of the same form, behind those of e; an empty e becomes a copy.
func (e *TokenLogits) Append(more *TokenLogits) {
	if e.Form == "" {
		e.Form, e.Values.DType, e.Values.Shape = more.Form, more.Values.DType, []int64{0, more.Values.Shape[1]}
		switch {
		case more.IDs == nil:
		case more.Form == LogitsTopK:
			e.IDs = &Tensor{DType: more.IDs.DType, Shape: []int64{0, more.IDs.Shape[1]}}
		default:
			e.IDs = new(*more.IDs)
		}
	}
	e.Masked += more.Masked
	e.Values.Shape[0] += more.Values.Shape[0]
	e.Values.Data = append(e.Values.Data, more.Values.Data...)
	if more.Form == LogitsTopK {
		e.IDs.Shape[0] += more.IDs.Shape[0]
		e.IDs.Data = append(e.IDs.Data, more.IDs.Data...)
	}
}

// Bytes returns how many bytes values and ids take.
func (e *TokenLogits) Bytes() int {
	n := len(e.Values.Data)
	if e.IDs != nil {
		n += len(e.IDs.Data)
	}
	return n
}

// Check returns an error unless these are logits of so many tokens: of the shape of their form, without NaN, +inf and
// rows that are all zero, and without -inf where the kind is raw.
func (e *TokenLogits) Check(tokens, vocabulary int64, kind string) error {
	f := faults{}
	e.checkValues(&f, tokens, vocabulary, kind)
	return errors.Join(f.errs...)
}

// StepEvent is what a sampler publishes while it makes a sample, a Step of an image or Tokens of a text.
type StepEvent interface {
	Keyed
	// Tensors are all that the event has, in the order in which they are encoded: what is assigned to them is assigned
	// to the event.
	Tensors() []*Tensor
	// Detached is a copy of the event whose tensors can be replaced without a change of the original.
	Detached() StepEvent
	// Place counts the events of the sample, from 0.
	Place() int64
	// Mark gives the event its sender.
	Mark(m StepMark)
	// SealedBy is the code under which it was sealed, Sealed gives it one.
	SealedBy() string
	Sealed(code string)
}

// StepMark says which sample a StepEvent is of, and what made it.
type StepMark struct {
	Run              Run
	UID              UID
	SampleIndex      int64
	Stage            Stage
	Attempt          string
	PolicyVersion    int64
	WeightsDigest    string
	Sampler, Backend string
	DeviceNS         int64
}

var (
	_ StepEvent = (*Step)(nil)
	_ StepEvent = (*Tokens)(nil)
)

// Type returns the type name of the event.
func (*Tokens) Type() string { return TypeTokens }

func (e *Tokens) Subject() string {
	return TokensSubject(e.Run, e.UID, e.SampleIndex, e.Stage, e.Attempt, e.N)
}

// Tensors returns the tensors of the logits.
func (e *Tokens) Tensors() []*Tensor {
	if e.Logits == nil {
		return nil
	}
	if e.Logits.IDs == nil {
		return []*Tensor{&e.Logits.Values}
	}
	return []*Tensor{e.Logits.IDs, &e.Logits.Values}
}

// Detached returns a copy whose tensors can be replaced.
func (e *Tokens) Detached() StepEvent {
	c := *e
	if e.Logits != nil {
		c.Logits = new(*e.Logits)
		if e.Logits.IDs != nil {
			c.Logits.IDs = new(*e.Logits.IDs)
		}
	}
	return &c
}

// Place returns N.
func (e *Tokens) Place() int64 { return e.N }

// Mark sets which sample the event is of, and what made it.
func (e *Tokens) Mark(m StepMark) {
	e.Run, e.UID, e.SampleIndex, e.Stage, e.Attempt = m.Run, m.UID, m.SampleIndex, m.Stage, m.Attempt
	e.PolicyVersion, e.WeightsDigest, e.Sampler, e.Backend, e.DeviceNS = m.PolicyVersion, m.WeightsDigest, m.Sampler,
		m.Backend, m.DeviceNS
}

// SealedBy returns the seal.
func (e *Tokens) SealedBy() string { return e.Seal }

// Sealed sets the seal.
func (e *Tokens) Sealed(code string) { e.Seal = code }

// Validate returns all faults of the event, joined. Logits that travel beside it are checked once they are joined.
func (e *Tokens) Validate() error { return CheckFields(e) }

// checkRules checks that generated tokens have their numbers, one for each token, and that given tokens have none.
func (e *Tokens) checkRules(f *faults) {
	n := len(e.IDs)
	if n == 0 && e.FinishReason == "" {
		f.add("ids", "0 items", "must be at least 1, unless it is a turn that was generated and is empty")
	}
	if e.FinishReason != "" && !e.Generated {
		f.add("finish_reason", quote(e.FinishReason), "must be absent where the tokens were given")
	}
	of, why := 0, "none: the tokens were given"
	if e.Generated {
		of, why = n, "one a token"
	}
	for _, list := range []struct {
		name   string
		values []float32
	}{
		{"log_probs", e.LogProbs},
		{"processed_log_probs", e.ProcessedLogProbs},
		{"log_sum_exps", e.LogSumExps},
		{"entropies", e.Entropies},
		{"top_log_probs", e.TopLogProbs},
	} {
		if e.Engine == "" || len(list.values) > 0 {
			f.requireLength(list.name, len(list.values), of, why)
		}
		nan := func(x float32) bool { return x != x }
		scored := e.Engine != "" || !strings.HasSuffix(list.name, "log_probs")
		if i := slices.IndexFunc(list.values, nan); i >= 0 && !scored {
			f.add(list.name+"["+strconv.Itoa(i)+"]", "NaN", "must be finite, unless a server draws the tokens")
		}
	}
	if of > 0 && len(e.LogProbs) == 0 && len(e.ProcessedLogProbs) == 0 {
		f.add("log_probs", "0 items", "must be there, or processed_log_probs")
	}
	for i, id := range e.IDs {
		if id >= e.Vocabulary && e.Vocabulary >= 1 {
			f.add("ids["+strconv.Itoa(i)+"]", strconv.FormatInt(id, 10), "must be below the vocabulary, "+
				strconv.FormatInt(e.Vocabulary, 10))
			break
		}
	}
	if e.Logits == nil {
		return
	}
	if of == 0 {
		f.add("logits", "present", "must be absent where no token was generated")
		return
	}
	e.Logits.checkValues(f.inStruct("logits"), int64(n), e.Vocabulary, e.LogitsKind)
}

// checkValues checks form, shapes and values of the logits of n tokens. Values that travel beside the event are not
// checked.
func (e *TokenLogits) checkValues(f *faults, n, vocabulary int64, kind string) {
	k := vocabulary
	if e.Form == LogitsNone {
		f.add("form", quote(e.Form), "must be topk, ids or full: of none there are no logits")
		return
	}
	if e.Form == LogitsFull != (e.IDs == nil) {
		f.add("ids", "absent or present", "must be there exactly unless form is full")
		return
	}
	if e.IDs != nil {
		if len(e.IDs.Shape) == 0 || e.IDs.DType != "U32" {
			f.add("ids", e.IDs.DType, "must be U32 [tokens, k], or [k] of form ids")
			return
		}
		k = e.IDs.Shape[len(e.IDs.Shape)-1]
		if want := map[string]int{LogitsTopK: 2, LogitsIDs: 1}[e.Form]; len(e.IDs.Shape) != want || want == 2 &&
			e.IDs.Shape[0] != n || k > vocabulary {
			f.add("ids.shape", fmt.Sprint(e.IDs.Shape), fmt.Sprintf("must be of %d tokens, with at most %d ids each", n,
				vocabulary))
			return
		}
	}
	if len(e.Values.Shape) != 2 || e.Values.Shape[0] != n || e.Values.Shape[1] != k {
		f.add("values.shape", fmt.Sprint(e.Values.Shape), fmt.Sprintf("must be [%d, %d]: tokens, logits of a token", n,
			k))
		return
	}
	size, ok := DTypeSize(e.Values.DType)
	if !ok || int64(len(e.Values.Data)) != n*k*size {
		return // beside the event, or said by its tag
	}
	masked := int64(0)
	for i := range n {
		row := e.Values.Data[i*k*size : (i+1)*k*size]
		m, fault := scanLogits(e.Values.DType, row)
		if fault != "" {
			f.add("values["+strconv.FormatInt(i, 10)+"]", fault,
				"must be logits: finite numbers, or -inf where a token is left out")
			return
		}
		masked += m
	}
	if masked != e.Masked {
		f.add("masked", strconv.FormatInt(e.Masked, 10), fmt.Sprintf("must be %d, the values that are -inf", masked))
	}
	if masked > 0 && kind == LogitsRaw {
		f.add("masked", strconv.FormatInt(e.Masked, 10), "must be 0 of raw logits: nothing has left tokens out")
	}
}

// scanLogits returns how many values of a vector are -inf, and a fault if it cannot be logits: it has NaN or +inf, or
// several values that are all zero.
func scanLogits(dtype string, row []byte) (masked int64, fault string) {
	type layout struct {
		width     int
		inf, sign uint32
	}
	l, ok := map[string]layout{
		"F32": {4, 0x7f800000, 0x80000000}, "F16": {2, 0x7c00, 0x8000}, "BF16": {2, 0x7f80, 0x8000},
	}[dtype]
	if !ok {
		return 0, dtype
	}
	zeros := true
	for i := 0; i+l.width <= len(row); i += l.width {
		bits := uint32(binary.LittleEndian.Uint16(row[i:]))
		if l.width == 4 {
			bits = binary.LittleEndian.Uint32(row[i:])
		}
		magnitude := bits &^ l.sign
		zeros = zeros && magnitude == 0
		switch {
		case magnitude > l.inf:
			return 0, "NaN"
		case magnitude == l.inf && bits&l.sign == 0:
			return 0, "+inf"
		case magnitude == l.inf:
			masked++
		}
	}
	if zeros && len(row) > l.width {
		return 0, "all zero"
	}
	return masked, ""
}
