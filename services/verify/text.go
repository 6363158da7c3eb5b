package verify

import (
	"context"
	"math"
	"reflect"
	"slices"

	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
)

// textSample is a sample of text, with the state of the model that computes its tokens again.
type textSample struct {
	*sample
	ids []int32 // all tokens: of the prompt, of answers, of replies

	given   *texts.Given // the model's evaluation of ids with the weights of version; nil: none yet
	d       decoding.Distribution
	answer  []byte // the text of the current answer so far
	decoder lm.Decoder
}

// weightsDigest returns the digest of the weights to compute with: those of the sample. Where a server drew the tokens
// its own weights are not known: those of the model's folder take their place, unless the sample's are those that a
// policy has pushed. An error is of the server.
func (s *sample) weightsDigest(ctx context.Context) (string, error) {
	if s.drawnBy() == nil {
		return s.t.WeightsDigest, nil
	}
	p, err := s.policyWith(ctx, s.t.Lineage(), s.t.WeightsDigest)
	if p != nil && !p.IsCheckpoint() {
		return s.t.WeightsDigest, err
	}
	return s.model.Digest(), err
}

// checkText computes the logits of every generated token again from the stored tokens before it, draws the token
// again, and compares everything that is stored about it. Differences are faults; an error is of the server, the
// model or ctx.
func (s *sample) checkText(ctx context.Context) error {
	m := s.version.text
	if m == nil {
		s.fault(-1, "text: present; the model %q makes images", s.version.network.Name())
		return nil
	}
	x := &textSample{sample: s}
	defer x.forget()
	if ok, err := x.loadIDs(ctx); !ok || err != nil {
		return err
	}
	x.checkPrompt()
	var content [][32]byte
	at, whole := 0, true
	for i := range s.t.Steps {
		e, err := s.loadTokens(ctx, i)
		if err != nil {
			return err
		}
		if e == nil {
			whole, at = false, x.nextAfterGone(i, at)
			continue
		}
		digest, err := schemas.ContentDigest(e)
		if err != nil {
			s.fault(int64(i), "%v", err)
		}
		content = append(content, digest)
		if at, err = x.checkEvent(ctx, e, at); err != nil {
			return err
		}
	}
	if got := schemas.StepsDigest(content); whole && got != s.t.ContentDigest {
		s.fault(-1, "content_digest: stored %.16s, the events give %.16s", s.t.ContentDigest, got)
	}
	x.checkConversation(ctx)
	if whole && at != len(x.ids) {
		s.fault(-1, "ids: %d; the events have %d", len(x.ids), at)
	}
	return nil
}

// forget frees what the model has evaluated.
func (x *textSample) forget() {
	if x.given != nil {
		x.given.Close()
		x.given = nil
	}
}

// nextAfterGone returns where the event after event i begins if i is gone: -1, the next event says it. After the last
// one it is the end of all tokens. The tokens of the event that is gone stay unproven.
func (x *textSample) nextAfterGone(i, at int) int {
	if i+1 == len(x.t.Steps) {
		return len(x.ids)
	}
	return -1 // the next says
}

// loadIDs loads the token ids of the whole sequence. It returns false, and reports that, if they are gone or not valid.
// The error is of ctx.
func (x *textSample) loadIDs(ctx context.Context) (bool, error) {
	tensor := new(*x.t.Text.IDs)
	if err := x.bus.LoadTensors(ctx, tensor); err != nil {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		x.report.StepsGone++
		return false, nil
	}
	ids, err := texts.IDsOf(tensor, x.version.text.Card().Vocabulary)
	if err != nil {
		x.fault(-1, "%v", err)
		return false, nil
	}
	x.ids = ids
	return true, nil
}

// checkPrompt compares the first tokens of the sample with the prompt's messages in the model's template.
func (x *textSample) checkPrompt() {
	ids, err := x.version.text.With(x.t.Text.Settings.ChatTemplateKwargs).Prompt(texts.MessagesOf(&x.t.Text.Settings))
	if err != nil {
		x.fault(-1, "messages: %v", err)
		return
	}
	if turns := x.t.Text.Turns; len(turns) == 0 || !slices.Equal(ids, x.ids[:min(len(x.ids), int(turns[0].End))]) {
		x.fault(-1, "ids: those that were given are not the messages in the model's template")
	}
}

// loadTokens loads event i of a text sample and checks it against the trajectory; nil, and reported, if it is gone or
// cannot be read. An error is of the server.
func (s *sample) loadTokens(ctx context.Context, i int) (*schemas.Tokens, error) {
	m, err := s.storedMessage(ctx, int64(i), s.t.Steps[i])
	if m == nil || err != nil {
		return nil, err
	}
	e, err := s.bus.LoadTokens(ctx, m)
	if err != nil {
		return nil, s.onLoadError(ctx, int64(i), err)
	}
	t := s.t
	if e.UID != t.UID || e.SampleIndex != t.SampleIndex || e.Attempt != t.StepAttempt(i) || e.N != int64(i) {
		s.fault(int64(i), "sequence %d holds event %d of %s #%d, attempt %s", t.Steps[i].Seq, e.N, e.UID, e.SampleIndex,
			e.Attempt)
	}
	if v := e.PolicyVersion; v < t.PolicyVersionMin || v > t.PolicyVersionMax {
		s.fault(int64(i), "policy_version: %d, the trajectory has %d to %d", v, t.PolicyVersionMin, t.PolicyVersionMax)
	}
	if e.ScheduleDigest != t.ScheduleDigest {
		s.fault(int64(i), "schedule_digest: %.16s, the trajectory has %.16s", e.ScheduleDigest, t.ScheduleDigest)
	}
	return e, nil
}

// checkEvent computes the tokens of one event again and compares. at is where they begin in the sequence, -1: not
// known. It returns where the next event begins. An error is of the server, the model or ctx.
func (x *textSample) checkEvent(ctx context.Context, e *schemas.Tokens, at int) (int, error) {
	if at < 0 {
		at = int(e.Position)
	}
	end := at + len(e.IDs)
	if int(e.Position) != at || end > len(x.ids) {
		x.fault(e.N, "position: %d of %d tokens; must be %d of %d", e.Position, len(e.IDs), at, len(x.ids))
		return len(x.ids), nil
	}
	for i, id := range e.IDs {
		if x.ids[at+i] != int32(id) {
			x.fault(e.N, "ids[%d]: %d, the trajectory has %d", i, id, x.ids[at+i])
			return end, nil
		}
	}
	if !e.Generated {
		return end, nil
	}
	if by := x.drawnBy(); (by == nil) != (e.Engine == "") || by != nil && e.Engine != by.String() {
		x.fault(e.N, "engine: %q; the trajectory says otherwise", e.Engine)
	}
	if x.drawnBy() == nil && e.WeightsDigest != x.version.digest {
		x.forget() // before others are loaded: it is memory, too
		with, err := x.versionWith(ctx, e.WeightsDigest)
		if err != nil || !x.isAvailable(with, e.N) {
			return end, err
		}
		x.version = with
	}
	again := &schemas.Tokens{Turn: e.Turn}
	for i := range e.IDs {
		if err := x.drawAgain(ctx, e, again, at+i); err != nil {
			return end, err
		}
	}
	x.compareEvent(e, again)
	x.checkTurnEnd(e, end)
	return end, nil
}

// drawAgain computes the logits of the token at an index of the sequence, and draws it again if the sampler drew it. It
// adds the numbers that are recorded of a token to again.
func (x *textSample) drawAgain(ctx context.Context, e, again *schemas.Tokens, at int) error {
	settings := &x.t.Text.Settings
	if x.given == nil {
		x.given = texts.NewGiven(x.version.text, x.ids)
	}
	logits, err := x.given.Logits(ctx, at)
	if err != nil {
		return err
	}
	if err := x.d.Reset(logits, texts.ParamsOf(settings, x.drawnBy())); err != nil {
		x.fault(e.N, "token %d: %v", at, err)
		return nil
	}
	if x.inexactServer() != nil {
		x.report.Drawn++
	} else {
		x.report.Tokens++
		if id := x.d.Draw(x.t.SampleSeed, uint32(at)); id != x.ids[at] {
			x.fault(e.N, "token %d: %d is stored, %d is drawn", at, x.ids[at], id)
		}
	}
	texts.RecordToken(again, settings, &x.d, x.ids[at], logits)
	if err := texts.KeepLogits(again, settings, logits); err != nil {
		x.fault(e.N, "token %d: %v", at, err)
	}
	return nil
}

// compareEvent compares the numbers of an event e with those that were computed again, and records the largest
// difference.
func (x *textSample) compareEvent(e, again *schemas.Tokens) {
	for _, of := range []struct {
		name             string
		stored, computed []float32
	}{
		{"log_prob", e.LogProbs, again.LogProbs},
		{"processed_log_prob", e.ProcessedLogProbs, again.ProcessedLogProbs},
		{"log_sum_exp", e.LogSumExps, again.LogSumExps},
		{"entropy", e.Entropies, again.Entropies},
		{"top_log_prob", e.TopLogProbs, again.TopLogProbs},
	} {
		if x.drawnBy() == nil || len(of.stored) > 0 { // otherwise the server does not give them
			x.recordDifferences(e, of.name, of.stored, of.computed)
		}
	}
	switch {
	case (e.Logits == nil) != (again.Logits == nil):
		x.fault(e.N, "logits: not as they were asked for")
	case e.Logits == nil:
	case x.inexactServer() == nil && !reflect.DeepEqual(e.Logits.IDs, again.Logits.IDs),
		e.Logits.Masked != again.Logits.Masked, e.Logits.Form != again.Logits.Form:
		x.fault(e.N, "logits.ids: not those of the %s", again.Logits.Form)
	default:
		x.report.Logits += len(e.IDs)
		x.recordDifferences(e, "logit", floats(&e.Logits.Values), floats(&again.Logits.Values))
	}
	x.compareWithTrajectory(e)
}

// floats decodes a tensor; nil if its bytes are not valid.
func floats(t *schemas.Tensor) []float32 {
	dtype := tensor.DType(t.DType)
	out := make([]float32, len(t.Data)/max(1, dtype.Size()))
	if dtype.DecodeFloats(out, t.Data) != nil {
		return nil
	}
	return out
}

// recordDifferences raises the report's largest difference of a number of a token to that of two lists: the numbers of
// an event's tokens as stored, as many of each, and the same computed again. NaN counts as +Inf, equal
// infinities do not differ. Lists of different lengths are a fault. The largest difference is MaxTokenDifference, or of
// an inexact server that of recordServed.
func (x *textSample) recordDifferences(e *schemas.Tokens, name string, stored, computed []float32) {
	by := x.inexactServer()
	if len(stored) != len(computed) {
		x.fault(e.N, "%ss: %d; must be %d", name, len(stored), len(computed))
		return
	}
	for i := range stored {
		if stored[i] == computed[i] {
			continue
		}
		if by != nil && math.IsNaN(float64(stored[i])) {
			x.report.Unscored++
			continue
		}
		if by != nil {
			token := e.Position + int64(i/(len(stored)/len(e.IDs)))
			x.recordServed(by, Deviation{StepIndex: e.N, Token: &token, Quantity: name}, float64(stored[i]),
				float64(computed[i]))
			continue
		}
		x.report.MaxTokenDifference = max(x.report.MaxTokenDifference,
			magnitude(float64(stored[i])-float64(computed[i])))
	}
}

// compareWithTrajectory compares the numbers of an event with those of the same tokens in the trajectory.
func (x *textSample) compareWithTrajectory(e *schemas.Tokens) {
	of := x.t.Text
	for _, list := range []struct {
		name   string
		values []float32
		in     *schemas.Tensor
	}{
		{"log_probs", e.LogProbs, of.LogProbs},
		{"processed_log_probs", e.ProcessedLogProbs, of.ProcessedLogProbs},
		{"entropies", e.Entropies, of.Entropies},
		{"top_log_probs", e.TopLogProbs, of.TopLogProbs},
	} {
		if list.in == nil {
			if len(list.values) > 0 {
				x.fault(e.N, "%s: %d in the event, none in the trajectory", list.name, len(list.values))
			}
			continue
		}
		if list.in.Ref != nil {
			continue // a blob: its digest is checked elsewhere, and the events that it is made of are compared
		}
		all := floats(list.in)
		end := int(e.Position) + len(e.IDs)
		if end > len(all) || !slices.EqualFunc(all[e.Position:end], list.values, sameBits) {
			x.fault(e.N, "%s: the event and the trajectory differ", list.name)
		}
	}
}

// sameBits reports whether two numbers are the same, or both not there.
func sameBits(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }

// checkTurnEnd adds an event's tokens to the text of the current answer. If the event is the last of its turn, it
// compares the text of the turn, and why it ended, with what is stored.
func (x *textSample) checkTurnEnd(e *schemas.Tokens, end int) {
	m := x.version.text
	for _, id := range e.IDs {
		x.answer = append(x.answer, x.decoder.Push(m.Piece(int32(id)))...)
	}
	if e.FinishReason == "" {
		return
	}
	i := slices.IndexFunc(x.t.Text.Turns, func(t schemas.Turn) bool {
		return t.Generated && int(t.End) == end && t.Begin == e.Position-e.TurnPosition
	})
	if i < 0 {
		x.fault(e.N, "turns: none ends at %d", end)
		return
	}
	turn := x.t.Text.Turns[i]
	if e.Turn != int64(i) {
		x.fault(e.N, "turn: %d; must be %d", e.Turn, i)
	}
	matched, cut := texts.FindStop(string(x.answer), 0, x.t.Text.Settings.Stop)
	text := string(x.answer[:cut])
	if matched == "" {
		text += x.decoder.Flush()
	}
	if turn.Text != text || turn.Matched != matched || turn.FinishReason != e.FinishReason {
		x.fault(e.N, "turns[%d]: %.40q, %s, stopped by %q; the tokens say %.40q, %s, %q", i, turn.Text,
			turn.FinishReason, turn.Matched, text, e.FinishReason, matched)
	}
	x.answer, x.decoder = nil, lm.Decoder{}
}

// checkConversation checks the turns between the model's answers. The tokens that were given must be the stored reply
// in the model's template. A built-in interaction is asked again: its reply, its score, and whether it ends the
// conversation must be those that are stored.
func (x *textSample) checkConversation(ctx context.Context) {
	of := x.t.Text
	for i := 1; i+1 < len(of.Turns); i += 2 {
		answer, given := of.Turns[i], of.Turns[i+1]
		part := schemas.TextResult{Settings: of.Settings, Turns: of.Turns[:i+1]}
		want, err := texts.ReplyIDs(x.version.text, &part, x.ids[:answer.End])
		if err != nil {
			x.fault(-1, "turns[%d].reply: %v", i, err)
		} else if !slices.Equal(want, x.ids[given.Begin:given.End]) {
			x.fault(-1, "turns[%d]: the tokens that were given are not turns[%d].reply in the model's template", i+1, i)
		}
	}
	if of.Settings.Interaction == nil || !interaction.Builtin(of.Settings.Interaction.Name) {
		return
	}
	for i := 1; i < len(of.Turns); i += 2 {
		part := schemas.TextResult{Settings: of.Settings, Turns: of.Turns[:i+1]}
		turn := of.Turns[i]
		got, err := interaction.Ask(ctx, nil, &schemas.InteractRequest{
			Name: of.Settings.Interaction.Name, Messages: append(part.Messages(),
				schemas.Message{Role: schemas.RoleAssistant, Content: turn.Text}), FinishReason: turn.FinishReason,
			GroundTruth: x.t.Group.GroundTruth(),
		}, 0)
		if err != nil {
			x.fault(-1, "turns[%d].reply: %v", i, err)
			continue
		}
		ended := i == len(of.Turns)-1 && of.Conversation == schemas.ConversationTerminated
		if got.Terminate != ended || got.Content != turn.Reply || !reflect.DeepEqual(got.Score, turn.Score) ||
			len(turn.Metadata) > 0 {
			x.fault(-1, "turns[%d].reply: %q; %s says %q now", i, turn.Reply, of.Settings.Interaction.Name, got.Content)
		}
	}
}
