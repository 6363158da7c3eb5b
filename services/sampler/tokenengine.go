package sampler

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/decoding"
	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// tokenEngine makes texts: pkg/lm says how likely each token is, pkg/decoding draws one.
type tokenEngine struct {
	model lm.Model
	card  lm.Card
	share bool // what the model made of a prompt, between its samples
	// distributions are those that no Step uses now.
	distributions sync.Pool
	prefixes      prefixes
	resting       resting
}

func newTokenEngine(m lm.Model, share bool) *tokenEngine {
	e := &tokenEngine{model: m, share: share, card: m.Card(), distributions: sync.Pool{New: func() any { return &decoding.Distribution{} }}}
	e.prefixes.model, e.prefixes.makeRoom = m, e.makeRoom
	return e
}

// Backend is the model's.
func (e *tokenEngine) Backend() string { return e.card.Backend }

// tokenEpisode is one sequence. A Step draws one token.
type tokenEpisode struct {
	transcript
	e      *tokenEngine
	params decoding.Params

	sequence lm.Sequence
	unseen   []int32 // of ids, behind those of sequence
	// logits [V] are those of the next token where unseen is empty.
	logits []float32
	err    error
}

// transcript is what a text has come to: its tokens with what is kept of each, its turns and its events. Whoever draws
// the tokens adds them.
type transcript struct {
	req      *schemas.Request
	language lm.Language
	most     int                  // tokens of the sequence
	numbers  schemas.TokenNumbers // that there are of each

	ids                               []int32
	mask                              []byte
	logProbs, processed, entropy, top []float32

	turns   []schemas.Turn
	decoder lm.Decoder
	text    strings.Builder // of the turn that is generated
	events  []schemas.StepEvent
	open    *schemas.Tokens // that tokens go to
	n       int64           // events so far
	ended   bool            // all tokens are there
	conversing
}

// Start checks what only the model can, and has the model see the prompt: samples of one prompt share that.
func (e *tokenEngine) Start(ctx context.Context, req *schemas.Request, _ *schemas.SegmentStart) (Episode, error) {
	ids, err := promptIDs(req, e.model)
	if err != nil {
		return nil, err
	}
	x := req.Text
	p := &tokenEpisode{transcript: newTranscript(req, e.model, ids, e.card.MaxPositions, allNumbers), e: e, params: ParamsOf(x, nil), logits: make([]float32, e.card.Vocabulary)}
	if x.MaxNewTokens > 0 && len(ids) < e.card.MaxPositions {
		if !e.share {
			return p, p.see(ctx)
		}
		if p.sequence, err = e.prefixes.fork(ctx, ids, p.logits); err != nil {
			return nil, fmt.Errorf("prefill: %w", err)
		}
	}
	return p, nil
}

// promptIDs are the tokens that a request's messages are, once it is checked for what only the model can.
func promptIDs(req *schemas.Request, of lm.Language) ([]int32, error) {
	x, card := req.Text, of.Card()
	if x == nil {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("text: null; must be there: the model %s makes texts", card.Name))
	}
	if got := req.ComputeScheduleDigest(); got != req.ScheduleDigest {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("schedule_digest: %q; the request's fields give %q", req.ScheduleDigest, got))
	}
	if x.Vocabulary != int64(card.Vocabulary) {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("text.vocabulary: %d; must be %d, that of the model %s", x.Vocabulary, card.Vocabulary, card.Name))
	}
	ids, err := of.Prompt(MessagesOf(x))
	if err == nil && x.Interaction != nil && x.Answers() > 1 { // no answer is generated that could not be replied to
		_, err = of.Reply(MessagesOf(x), "A", false, []lm.Message{{Role: schemas.RoleUser, Content: "B"}})
	}
	if errors.Is(err, lm.ErrPrompt) {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("messages: %w", err))
	}
	if err != nil {
		return nil, fmt.Errorf("encode the messages: %w", err)
	}
	if n, most := len(ids), card.MaxPositions; n == 0 || n > most {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("messages: %d tokens in the model's template; must be between 1 and %d, the context of %s", n, most, card.Name))
	}
	return ids, nil
}

// allNumbers are those of tokens that are drawn here.
var allNumbers = schemas.TokenNumbers{LogProbs: true, ProcessedLogProbs: true, LogSumExps: true, Entropies: true, TopLogProbs: true}

// newTranscript begins with the prompt, of a sequence of most tokens at most.
func newTranscript(req *schemas.Request, of lm.Language, ids []int32, most int, numbers schemas.TokenNumbers) transcript {
	p := transcript{
		req: req, language: of, ids: slices.Clone(ids), most: most, numbers: numbers,
		turns: []schemas.Turn{{End: int64(len(ids))}, {Begin: int64(len(ids)), End: int64(len(ids)), Generated: true}},
	}
	p.grow(len(ids))
	p.first = p.n
	return p
}

// MessagesOf is the conversation that a text answers.
func MessagesOf(x *schemas.TextRequest) []lm.Message { return messages(x.Messages) }

func messages(of []schemas.Message) []lm.Message {
	out := make([]lm.Message, len(of))
	for i, m := range of {
		out[i] = lm.Message(m)
	}
	return out
}

// ParamsOf is how tokens of a text are drawn, by a server where there is one.
func ParamsOf(x *schemas.TextRequest, by *schemas.TextEngine) decoding.Params {
	return decoding.Params{Temperature: x.Temperature, TopK: int(x.TopK), TopP: x.TopP, MinP: x.MinP, MinPFirst: by.MinPFirst()}
}

// grow adds n tokens that were given to what is kept of each.
func (p *transcript) grow(n int) {
	p.mask = append(p.mask, make([]byte, n)...)
	for _, list := range []*[]float32{&p.logProbs, &p.processed, &p.entropy, &p.top} {
		*list = append(*list, make([]float32, n)...)
	}
	for at := len(p.ids) - n; at < len(p.ids); at += schemas.MaxTokensPerEvent {
		ids := p.ids[at:min(at+schemas.MaxTokensPerEvent, len(p.ids))]
		event := p.event(int64(at))
		event.Turn, event.TurnPosition = int64(len(p.turns))-2, int64(at)-p.turns[len(p.turns)-2].Begin
		for _, id := range ids {
			event.IDs = append(event.IDs, int64(id))
		}
		p.publish(event)
	}
}

// event is one that begins at a position, without tokens.
func (p *transcript) event(position int64) *schemas.Tokens {
	x := p.req.Text
	return &schemas.Tokens{
		Position: position, LogitsKind: x.LogitsKind(), Vocabulary: x.Vocabulary, Temperature: x.Temperature, TopK: x.TopK, TopP: x.TopP, MinP: x.MinP,
		ScheduleDigest: p.req.ScheduleDigest, IDs: []int64{},
	}
}

// begin has the next token go to an event.
func (p *transcript) begin() {
	if turn, at := p.turns[len(p.turns)-1], int64(len(p.ids)); p.open == nil {
		p.open = p.event(at)
		p.open.Generated, p.open.Turn, p.open.TurnPosition = true, int64(len(p.turns))-1, at-turn.Begin
	}
}

// full says that the turn that is generated may have no more tokens.
func (p *transcript) full() bool {
	turn := p.turns[len(p.turns)-1]
	return turn.End-turn.Begin == p.req.Text.MaxNewTokens || len(p.ids) >= p.most
}

// rests says that no more tokens are generated for now: all are there, or the interaction is asked.
func (p *transcript) rests() bool { return p.ended || p.ask != nil }

// keep adds a token, which its event has, to the sequence, and ends the turn where it is its last.
func (p *transcript) keep(id int32, c decoding.Choice, best float32) error {
	p.ids, p.mask = append(p.ids, id), append(p.mask, 1)
	p.logProbs, p.processed = append(p.logProbs, c.LogProb), append(p.processed, c.Processed)
	p.entropy, p.top = append(p.entropy, c.Entropy), append(p.top, best)
	turn := &p.turns[len(p.turns)-1]
	turn.End++
	return p.look(id, turn)
}

func (p *transcript) publish(e *schemas.Tokens) {
	e.N = p.n
	p.n++
	if e.Generated && p.req.Text.Interaction != nil {
		p.lse = append(p.lse, e.LogSumExps...)
		p.conversing.logits.add(e.Logits)
	}
	p.events = append(p.events, e)
}

// Bucket is one for all: sequences of any length are rows of one call.
func (p *transcript) Bucket() string { return "" }

// Step has the model see what each sequence got last, and draws the next token of each.
func (e *tokenEngine) Step(ctx context.Context, episodes []Episode) error {
	var of []*tokenEpisode
	for _, ep := range episodes {
		if p := ep.(*tokenEpisode); len(p.unseen) > 0 {
			of = append(of, p)
		}
	}
	for len(of) > 0 {
		faults, err := e.forward(ctx, of)
		for i, p := range of {
			p.err = faults[i]
		}
		if err == nil {
			break
		}
		if !errors.Is(err, lm.ErrFull) {
			return err
		}
		if e.makeRoom() {
			continue
		}
		// The youngest makes room for the others, and is made again, to the same tokens.
		last := len(of) - 1
		if of[last].err = err; last == 0 {
			of[last].err = bus.Terminal(schemas.CodeFailed, err)
		}
		_ = of[last].Close()
		of = of[:last]
	}
	d := e.distributions.Get().(*decoding.Distribution)
	defer e.distributions.Put(d)
	for _, ep := range episodes {
		p := ep.(*tokenEpisode)
		if p.err == nil {
			p.unseen = nil
			p.err = guarded(func() error { return p.draw(d) })
		}
	}
	return nil
}

// forward has the model see the unseen tokens of sequences. One that is computed again begins anew: what a call that
// failed left in the cache does not count.
func (e *tokenEngine) forward(ctx context.Context, of []*tokenEpisode) (map[int]error, error) {
	tried := map[*tokenEpisode]bool{}
	return isolate(ctx, of, func(of []*tokenEpisode) (map[int]error, error) {
		rows := make([]lm.Row, len(of))
		for i, p := range of {
			if tried[p] {
				p.restart()
			}
			tried[p] = true
			rows[i] = lm.Row{Sequence: p.sequence, IDs: p.unseen, Logits: p.logits}
		}
		if err := e.model.Forward(ctx, rows); err != nil {
			return nil, fmt.Errorf("evaluate model: %w", err)
		}
		faults := map[int]error{}
		for i, p := range of {
			if _, err := decoding.Check(p.logits); err != nil {
				faults[i] = bus.Terminal(schemas.CodeFailed, fmt.Errorf("token %d: %w", len(p.ids), err))
			}
		}
		return faults, nil
	})
}

// draw adds one token, unless there is to be none.
func (p *tokenEpisode) draw(d *decoding.Distribution) error {
	x, at := p.req.Text, len(p.ids)
	if p.begin(); p.full() {
		p.end(schemas.FinishLength)
		return nil
	}
	if err := d.Reset(p.logits, p.params); err != nil {
		return bus.Terminal(schemas.CodeFailed, fmt.Errorf("token %d: %w", at, err))
	}
	id := d.Draw(p.req.SampleSeed, uint32(at))
	c, best := RecordToken(p.open, x, d, id, p.logits)
	if err := KeepLogits(p.open, x, p.logits); err != nil {
		return bus.Terminal(schemas.CodeFailed, fmt.Errorf("token %d: %w", at, err))
	}
	if err := p.keep(id, c, best); err != nil || p.rests() {
		return err
	}
	p.unseen = []int32{id}
	return nil
}

// RecordToken adds a token to an event, with the numbers that d has of it, and returns them, with the log-prob of the likeliest one.
// Where processed logits are to be stored it makes them of the logits [V].
func RecordToken(e *schemas.Tokens, x *schemas.TextRequest, d *decoding.Distribution, id int32, logits []float32) (c decoding.Choice, best float32) {
	c, best = d.At(id), d.At(decoding.Top(logits, 1)[0]).LogProb
	lse := c.LSE
	if x.LogitsKind() == schemas.LogitsProcessed {
		lse = c.ProcessedLSE
	}
	e.IDs = append(e.IDs, int64(id))
	e.LogProbs, e.ProcessedLogProbs = append(e.LogProbs, c.LogProb), append(e.ProcessedLogProbs, c.Processed)
	e.LogSumExps, e.Entropies, e.TopLogProbs = append(e.LogSumExps, lse), append(e.Entropies, c.Entropy), append(e.TopLogProbs, best)
	if x.LogitsKind() == schemas.LogitsProcessed && x.PerToken() > 0 {
		d.Process(logits)
	}
	return c, best
}

// look sees whether a turn ends with the token that it got last.
func (p *transcript) look(id int32, turn *schemas.Turn) error {
	x, card := p.req.Text, p.language.Card()
	before := p.text.Len()
	p.text.WriteString(p.decoder.Push(p.language.Piece(id)))
	if p.text.Len() > schemas.MaxAnswerBytes {
		return bus.Terminal(schemas.CodeFailed, fmt.Errorf("the answer has more than %d bytes; ask for fewer tokens with max_new_tokens", schemas.MaxAnswerBytes))
	}
	switch matched, end := FindStop(p.text.String(), before, x.Stop); {
	case matched != "":
		turn.Matched, turn.Text = matched, p.text.String()[:end]
		p.end(schemas.FinishStop)
	case slices.Contains(card.EOS, id) || slices.Contains(x.StopTokenIDs, int64(id)):
		p.end(schemas.FinishStop)
	case p.full():
		p.end(schemas.FinishLength)
	case int64(len(p.open.IDs)) == x.TokensPerEvent:
		p.publish(p.open)
		p.open = nil
	}
	return nil
}

// FindStop finds the first of some texts that appears in an answer, of which all but the bytes from fresh on were
// looked at before; end is where it begins. Of several at one place the first in the list counts.
func FindStop(answer string, fresh int, stops []string) (matched string, end int) {
	end = len(answer)
	for _, s := range stops {
		from := max(0, fresh-len(s)+1)
		if i := strings.Index(answer[from:], s); i >= 0 && (from+i < end || matched == "") {
			matched, end = s, from+i
		}
	}
	return matched, end
}

// end closes the turn that is generated.
func (p *transcript) end(reason string) {
	turn := &p.turns[len(p.turns)-1]
	turn.FinishReason = reason
	if turn.Matched == "" {
		turn.Text = p.text.String() + p.decoder.Flush()
	}
	p.open.FinishReason = reason
	p.publish(p.open)
	if p.open = nil; p.req.Text.Interaction == nil {
		p.ended = true
	} else {
		p.ask = p.asked()
	}
}

// KeepLogits adds to an event what is to be stored of the logits [V] of its last token.
func KeepLogits(e *schemas.Tokens, x *schemas.TextRequest, logits []float32) error {
	n := int(x.PerToken())
	if !x.StoresLogits(answerOf(e.Turn)) {
		return nil
	}
	if e.Logits == nil {
		e.Logits = &schemas.TokenLogits{Form: x.Logits.Form, Values: schemas.Tensor{DType: x.Logits.DType, Shape: []int64{0, int64(n)}}}
	}
	l, values := e.Logits, logits
	switch l.Form {
	case schemas.LogitsTopK:
		ids := decoding.Top(logits, n)
		if l.IDs == nil {
			l.IDs = &schemas.Tensor{DType: string(tensor.U32), Shape: []int64{0, int64(n)}}
		}
		values = pick(logits, ids)
		l.IDs.Shape[0]++
		l.IDs.Data = appendIDs(l.IDs.Data, ids)
	case schemas.LogitsIDs:
		ids := make([]int32, n)
		for i, id := range x.Logits.IDs {
			ids[i] = int32(id)
		}
		values = pick(logits, ids)
		if l.IDs == nil {
			l.IDs = &schemas.Tensor{DType: string(tensor.U32), Shape: []int64{int64(n)}, Data: appendIDs(nil, ids)}
		}
	}
	dtype := tensor.DType(l.Values.DType)
	for _, z := range values {
		switch a := math.Abs(float64(z)); {
		case math.IsInf(float64(z), -1):
			l.Masked++
		case dtype == tensor.F16 && a >= 65520, dtype == tensor.BF16 && a >= 0x1.ffp127: // what would be rounded to infinity
			return fmt.Errorf("logits: %g; %s cannot hold it, store them as F32", z, dtype)
		}
	}
	l.Values.Shape[0]++
	l.Values.Data = dtype.AppendFloats(l.Values.Data, values)
	return nil
}

func pick(logits []float32, ids []int32) []float32 {
	out := make([]float32, len(ids))
	for i, id := range ids {
		out[i] = logits[id]
	}
	return out
}

// appendIDs adds 32-bit integers, little-endian.
func appendIDs(data []byte, ids []int32) []byte {
	for _, id := range ids {
		data = append(data, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
	}
	return data
}

// Take returns the events that the last Step completed, before the first those of what was given.
func (p *tokenEpisode) Take() ([]schemas.StepEvent, error) {
	if p.err != nil {
		return nil, p.err
	}
	return p.take(), nil
}

func (p *transcript) take() []schemas.StepEvent {
	events := p.events
	p.events = nil
	return events
}

// Done says that the last turn has ended and its events are taken.
func (p *transcript) Done() bool { return p.ended && len(p.events) == 0 }

// Switch has the next token drawn by another engine. Its model sees the whole sequence anew.
func (p *tokenEpisode) Switch(to Engine) {
	_ = p.Close()
	p.e = to.(*tokenEngine)
	p.restart()
}

// restart has the model see the whole sequence anew.
func (p *tokenEpisode) restart() {
	_ = p.Close()
	p.sequence, p.unseen = p.e.model.NewSequence(), slices.Clone(p.ids)
}

// Close gives the cache back.
func (p *tokenEpisode) Close() error {
	p.e.resting.remove(p)
	if p.sequence != nil {
		p.sequence.Close()
	}
	return nil
}

// Finish adds the sequence.
func (p *transcript) Finish(_ context.Context, t *schemas.Trajectory) (Images, error) {
	n := []int64{int64(len(p.ids))}
	floats := func(x []float32) *schemas.Tensor {
		return &schemas.Tensor{DType: string(tensor.F32), Shape: n, Data: tensor.F32.AppendFloats(nil, x)}
	}
	x := t.Text
	x.IDs = &schemas.Tensor{DType: string(tensor.I32), Shape: n, Data: appendIDs(nil, p.ids)}
	x.Mask = &schemas.Tensor{DType: string(tensor.U8), Shape: n, Data: p.mask}
	x.LogProbs, x.ProcessedLogProbs, x.Entropies, x.TopLogProbs = floats(p.logProbs), floats(p.processed), floats(p.entropy), floats(p.top)
	x.Turns, x.Conversation = p.turns, p.conversation
	return Images{}, nil
}
