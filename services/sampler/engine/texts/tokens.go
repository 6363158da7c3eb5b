package texts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// tokenEngine makes texts: pkg/models/lm gives the logits of the next token, pkg/models/decoding draws it.
type tokenEngine struct {
	model lm.Model
	card  lm.Card
	share bool // the samples of a prompt share its evaluation
	// distributions are memory that Steps reuse.
	distributions sync.Pool
	prefixes      prefixes
	resting       resting
}

func newTokenEngine(m lm.Model, share bool) *tokenEngine {
	e := &tokenEngine{model: m, share: share, card: m.Card(), distributions: sync.Pool{New: func() any {
		return &decoding.Distribution{}
	}}}
	e.prefixes.model, e.prefixes.freeCache = m, e.freeCache
	return e
}

// Backend is the model's.
func (e *tokenEngine) Backend() string { return e.card.Backend }

// tokenEpisode is one sample. A Step draws one token.
type tokenEpisode struct {
	transcript
	e      *tokenEngine
	params decoding.Params

	sequence lm.Sequence
	unseen   []int32 // the last of ids, which the model has not evaluated yet
	// logits [V] are those of the next token; valid while unseen is empty.
	logits []float32
	err    error
}

// transcript is the text of a sample so far: its tokens with what is kept of each, its turns and its events.
type transcript struct {
	req       *schemas.Request
	language  lm.Language
	maxTokens int                  // tokens of the sequence
	numbers   schemas.TokenNumbers // that there are of each

	ids    []int32
	mask   []byte
	values [4][]float32 // of each token, in the order of given

	turns      []schemas.Turn
	decoder    lm.Decoder
	text       strings.Builder // of the turn that is generated
	events     []schemas.StepEvent
	open       *schemas.Tokens // that tokens go to
	eventCount int64           // events so far
	ended      bool            // all tokens are there
	conversing
}

// Start checks the request against the model, which evaluates the prompt once for the samples of a prompt.
func (e *tokenEngine) Start(ctx context.Context, req *schemas.Request, _ *schemas.SegmentStart,
) (engine.Episode, error) {
	ids, err := promptIDs(req, e.model)
	if err != nil {
		return nil, err
	}
	x := req.Text
	p := &tokenEpisode{
		transcript: newTranscript(req, e.model, ids, e.card.MaxPositions, allNumbers), e: e,
		params: ParamsOf(x, nil), logits: make([]float32, e.card.Vocabulary),
	}
	if x.MaxNewTokens > 0 && len(ids) < e.card.MaxPositions {
		if !e.share {
			return p, p.prefill(ctx)
		}
		if p.sequence, err = e.prefixes.forkSequence(ctx, ids, p.logits); err != nil {
			return nil, fmt.Errorf("prefill: %w", err)
		}
	}
	return p, nil
}

// promptIDs checks a text request against the model and returns the tokens of its messages. Faults are terminal errors.
func promptIDs(req *schemas.Request, of lm.Language) ([]int32, error) {
	x, card := req.Text, of.Card()
	if x == nil {
		return nil, engine.Invalid("text: null; must be there: the model %s makes texts", card.Name)
	}
	if err := req.CheckSchedule(); err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	if x.Vocabulary != int64(card.Vocabulary) {
		return nil, engine.Invalid("text.vocabulary: %d; must be %d, that of the model %s", x.Vocabulary,
			card.Vocabulary, card.Name)
	}
	with := of.With(x.ChatTemplateKwargs)
	ids, err := with.Prompt(MessagesOf(x))
	if err == nil && x.Interaction != nil && x.Answers() > 1 { // the template must be able to hold a reply
		_, err = with.Reply(MessagesOf(x), "A", false, []lm.Message{{Role: schemas.RoleUser, Content: "B"}})
	}
	if errors.Is(err, lm.ErrPrompt) {
		return nil, engine.Invalid("messages: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("encode the messages: %w", err)
	}
	if n, most := len(ids), card.MaxPositions; n == 0 || n > most {
		return nil,
			engine.Invalid("messages: %d tokens in the model's template; must be between 1 and %d, the context of %s",
				n, most, card.Name)
	}
	return ids, nil
}

// allNumbers says which values there are of tokens that the sampler draws: all.
var allNumbers = schemas.TokenNumbers{
	LogProbs: true, ProcessedLogProbs: true, LogSumExps: true, Entropies: true,
	TopLogProbs: true,
}

// newTranscript returns a transcript of the prompt; numbers says which values there are of each token.
func newTranscript(req *schemas.Request, of lm.Language, ids []int32, maxTokens int, numbers schemas.TokenNumbers,
) transcript {
	p := transcript{
		req: req, language: of, ids: slices.Clone(ids), maxTokens: maxTokens, numbers: numbers,
		turns: []schemas.Turn{{End: int64(len(ids))}, {Begin: int64(len(ids)), End: int64(len(ids)), Generated: true}},
	}
	p.appendGiven(len(ids))
	p.firstEvent = p.eventCount
	return p
}

// MessagesOf returns the messages of a request for pkg/models/lm.
func MessagesOf(x *schemas.TextRequest) []lm.Message { return messages(x.Messages) }

func messages(of []schemas.Message) []lm.Message {
	out := make([]lm.Message, len(of))
	for i, m := range of {
		out[i] = lm.Message(m)
	}
	return out
}

// ParamsOf returns how the tokens of a request are drawn. by is the server that draws them; nil: the sampler.
func ParamsOf(x *schemas.TextRequest, by *schemas.Engine) decoding.Params {
	return decoding.Params{
		Temperature: x.Temperature, TopK: int(x.TopK), TopP: x.TopP, MinP: x.MinP,
		MinPFirst: by.MinPFirst(),
	}
}

// appendGiven adds mask, values and events for the last n of ids, which were given: their values are 0.
func (p *transcript) appendGiven(n int) {
	p.mask = append(p.mask, make([]byte, n)...)
	for i := range p.values {
		p.values[i] = append(p.values[i], make([]float32, n)...)
	}
	for at := len(p.ids) - n; at < len(p.ids); at += schemas.MaxTokensPerEvent {
		ids := p.ids[at:min(at+schemas.MaxTokensPerEvent, len(p.ids))]
		event := p.newEvent(int64(at))
		event.Turn, event.TurnPosition = int64(len(p.turns))-2, int64(at)-p.turns[len(p.turns)-2].Begin
		for _, id := range ids {
			event.IDs = append(event.IDs, int64(id))
		}
		p.queueEvent(event)
	}
}

// newEvent returns an event without tokens that begins at a position of the sequence.
func (p *transcript) newEvent(position int64) *schemas.Tokens {
	x := p.req.Text
	return &schemas.Tokens{
		Position: position, LogitsKind: x.LogitsKind(), Vocabulary: x.Vocabulary, Temperature: x.Temperature,
		TopK: x.TopK, TopP: x.TopP, MinP: x.MinP,
		ScheduleDigest: p.req.ScheduleDigest, IDs: []int64{},
	}
}

// openEvent makes sure that there is an event for the next token.
func (p *transcript) openEvent() {
	if turn, at := p.turns[len(p.turns)-1], int64(len(p.ids)); p.open == nil {
		p.open = p.newEvent(at)
		p.open.Generated, p.open.Turn, p.open.TurnPosition = true, int64(len(p.turns))-1, at-turn.Begin
	}
}

// turnFull reports whether the answer has all the tokens that it may have.
func (p *transcript) turnFull() bool {
	turn := p.turns[len(p.turns)-1]
	return turn.End-turn.Begin == p.req.Text.MaxNewTokens || len(p.ids) >= p.maxTokens
}

// idle reports whether no token is generated now: all are there, or the interaction is asked.
func (p *transcript) idle() bool { return p.ended || p.ask != nil }

// appendToken adds a generated token, which is in the open event already, and ends the turn if it is the last.
func (p *transcript) appendToken(id int32, c decoding.Choice, best float32) error {
	p.ids, p.mask = append(p.ids, id), append(p.mask, 1)
	for i, v := range [...]float32{c.LogProb, c.Processed, c.Entropy, best} {
		p.values[i] = append(p.values[i], v)
	}
	turn := &p.turns[len(p.turns)-1]
	turn.End++
	return p.addText(id, turn)
}

// queueEvent adds a complete event to those of Take, and its tokens to the question for the interaction.
func (p *transcript) queueEvent(e *schemas.Tokens) {
	e.N = p.eventCount
	p.eventCount++
	if e.Generated && p.req.Text.Interaction != nil {
		p.lse = append(p.lse, e.LogSumExps...)
		p.conversing.logits.addLogits(e.Logits)
	}
	p.events = append(p.events, e)
}

// Bucket is of the samples whose models mix.
func (p *tokenEpisode) Bucket() any { return engine.MixOf(p.e.model, p.e) }

// Step has the model evaluate the tokens that each sequence got last, and draws the next token of each. Without free
// cache the youngest episodes get an error and begin again.
func (e *tokenEngine) Step(ctx context.Context, episodes []engine.Episode) error {
	var of []*tokenEpisode
	for _, ep := range episodes {
		if p := ep.(*tokenEpisode); len(p.unseen) > 0 {
			of = append(of, p)
		}
	}
	if err := e.evaluateFitting(ctx, of); err != nil {
		return err
	}
	d := e.distributions.Get().(*decoding.Distribution)
	defer e.distributions.Put(d)
	for _, ep := range episodes {
		p := ep.(*tokenEpisode)
		if p.err == nil {
			p.unseen = nil
			p.err = engine.Guarded(func() error { return p.draw(d) })
		}
	}
	return nil
}

// evaluateFitting evaluates what fits into the cache. Where it is full, each model's samples are evaluated alone: it
// has a cache of its own.
func (e *tokenEngine) evaluateFitting(ctx context.Context, of []*tokenEpisode) error {
	for len(of) > 0 {
		faults, err := e.evaluate(ctx, of)
		for i, p := range of {
			p.err = faults[i]
		}
		if !errors.Is(err, lm.ErrFull) {
			return err
		}
		own, others := of[:0:0], of[:0:0]
		for _, p := range of {
			if p.e == of[0].e {
				own = append(own, p)
			} else {
				others = append(others, p)
			}
		}
		if len(others) > 0 {
			return cmp.Or(e.evaluateFitting(ctx, own), e.evaluateFitting(ctx, others))
		}
		if of[0].e.freeCache() {
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
	return nil
}

// evaluate has the model evaluate the unseen tokens of some sequences in one call. One that is computed again begins
// anew: what a call that failed left in the cache does not count.
func (e *tokenEngine) evaluate(ctx context.Context, of []*tokenEpisode) (map[int]error, error) {
	tried := map[*tokenEpisode]bool{}
	return engine.Isolate(ctx, of, func(of []*tokenEpisode) (map[int]error, error) {
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
				faults[i] = engine.Failed("token %d: %w", len(p.ids), err)
			}
		}
		return faults, nil
	})
}

// draw draws one token from the logits of the last evaluation, unless the turn is full, which ends it.
func (p *tokenEpisode) draw(d *decoding.Distribution) error {
	x, at := p.req.Text, len(p.ids)
	if p.openEvent(); p.turnFull() {
		p.endTurn(schemas.FinishLength)
		return nil
	}
	if err := d.Reset(p.logits, p.params); err != nil {
		return engine.Failed("token %d: %w", at, err)
	}
	id := d.Draw(p.req.SampleSeed, uint32(at))
	c, best := RecordToken(p.open, x, d, id, p.logits)
	if err := KeepLogits(p.open, x, p.logits); err != nil {
		return engine.Failed("token %d: %w", at, err)
	}
	if err := p.appendToken(id, c, best); err != nil || p.idle() {
		return err
	}
	p.unseen = []int32{id}
	return nil
}

// RecordToken appends token id and the numbers that d, the distribution of logits [V], gives for it to the lists of e,
// and returns them; best is the log-prob of the likeliest token. Where the request asks for processed logits, it
// overwrites logits with those after temperature and filters, for KeepLogits.
func RecordToken(e *schemas.Tokens, x *schemas.TextRequest, d *decoding.Distribution, id int32, logits []float32,
) (c decoding.Choice, best float32) {
	c, best = d.At(id), d.At(decoding.Top(logits, 1)[0]).LogProb
	lse := c.LSE
	if x.LogitsKind() == schemas.LogitsProcessed {
		lse = c.ProcessedLSE
	}
	e.IDs = append(e.IDs, int64(id))
	e.LogProbs, e.ProcessedLogProbs = append(e.LogProbs, c.LogProb), append(e.ProcessedLogProbs, c.Processed)
	e.LogSumExps, e.Entropies, e.TopLogProbs = append(e.LogSumExps, lse), append(e.Entropies, c.Entropy),
		append(e.TopLogProbs, best)
	if x.LogitsKind() == schemas.LogitsProcessed && x.PerToken() > 0 {
		d.Process(logits)
	}
	return c, best
}

// addText adds the text of the last token to the answer, and ends the turn at a stop text, a stop token or its end.
func (p *transcript) addText(id int32, turn *schemas.Turn) error {
	x, card := p.req.Text, p.language.Card()
	before := p.text.Len()
	p.text.WriteString(p.decoder.Push(p.language.Piece(id)))
	if p.text.Len() > schemas.MaxAnswerBytes {
		return engine.Failed("the answer has more than %d bytes; ask for fewer tokens with max_new_tokens",
			schemas.MaxAnswerBytes)
	}
	switch matched, end := FindStop(p.text.String(), before, x.Stop); {
	case matched != "":
		turn.Matched, turn.Text = matched, p.text.String()[:end]
		p.endTurn(schemas.FinishStop)
	case slices.Contains(card.EOS, id) || slices.Contains(x.StopTokenIDs, int64(id)):
		p.endTurn(schemas.FinishStop)
	case p.turnFull():
		p.endTurn(schemas.FinishLength)
	case int64(len(p.open.IDs)) == x.TokensPerEvent:
		p.queueEvent(p.open)
		p.open = nil
	}
	return nil
}

// FindStop returns the first of some stop texts that an answer has, and where it begins; "" and the answer's length:
// none. stops are not empty. Bytes before fresh, at most the answer's length, were searched already. Of several at one
// place the first in the list is returned.
func FindStop(answer string, fresh int, stops []string) (matched string, end int) {
	end = len(answer)
	for _, s := range stops {
		from := max(0, fresh-len(s)+1)
		if i := strings.Index(answer[from:], s); i >= 0 && from+i < end {
			matched, end = s, from+i
		}
	}
	return matched, end
}

// endTurn ends the answer for a reason; then the interaction, if there is one, is asked.
func (p *transcript) endTurn(reason string) {
	turn := &p.turns[len(p.turns)-1]
	turn.FinishReason = reason
	if turn.Matched == "" {
		turn.Text = p.text.String() + p.decoder.Flush()
	}
	p.open.FinishReason = reason
	p.queueEvent(p.open)
	if p.open = nil; p.req.Text.Interaction == nil {
		p.ended = true
	} else {
		p.ask = p.newQuestion()
	}
}

// KeepLogits adds to an event what the request stores of the logits [V] of its last token. A value that the dtype
// cannot hold is an error.
func KeepLogits(e *schemas.Tokens, x *schemas.TextRequest, logits []float32) error {
	n := int(x.PerToken())
	if !x.StoresLogits(answerOf(e.Turn)) {
		return nil
	}
	if e.Logits == nil {
		e.Logits = &schemas.TokenLogits{
			Form:   x.Logits.Form,
			Values: schemas.Tensor{DType: x.Logits.DType, Shape: []int64{0, int64(n)}},
		}
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
		// what would be rounded to infinity
		case dtype == tensor.F16 && a >= 65520, dtype == tensor.BF16 && a >= 0x1.ffp127:
			return fmt.Errorf("logits: %g; %s cannot hold it, store them as F32", z, dtype)
		}
	}
	l.Values.Shape[0]++
	l.Values.Data = dtype.AppendFloats(l.Values.Data, values)
	return nil
}

// pick returns the logits of some tokens.
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
	return p.takeEvents(), nil
}

// takeEvents returns the complete events once.
func (p *transcript) takeEvents() []schemas.StepEvent {
	events := p.events
	p.events = nil
	return events
}

// Done reports whether the last turn has ended and its events are taken.
func (p *transcript) Done() bool { return p.ended && len(p.events) == 0 }

// Switch has another engine draw the next token. Its model evaluates the whole sequence again.
func (p *tokenEpisode) Switch(to engine.Engine) {
	_ = p.Close()
	p.e = to.(*tokenEngine)
	p.restart()
}

// restart gives the episode a new sequence that its model has not evaluated.
func (p *tokenEpisode) restart() {
	_ = p.Close()
	p.sequence, p.unseen = p.e.model.NewSequence(), slices.Clone(p.ids)
}

// Close frees the episode's part of the cache: at its end, and before it begins anew.
func (p *tokenEpisode) Close() error {
	p.e.resting.remove(p)
	if p.sequence != nil {
		p.sequence.Close()
	}
	return nil
}

// given says which of the values there are: log-probs, processed ones, entropies, log-probs of the likeliest.
func (p *transcript) given() [4]bool {
	n := p.numbers
	return [4]bool{n.LogProbs, n.ProcessedLogProbs, n.Entropies, n.TopLogProbs}
}

// Finish adds the sequence with its values to the trajectory t. It has no images and does not fail.
func (p *transcript) Finish(_ context.Context, t *schemas.Trajectory) (engine.Images, error) {
	n, x := []int64{int64(len(p.ids))}, t.Text
	x.IDs = &schemas.Tensor{DType: string(tensor.I32), Shape: n, Data: appendIDs(nil, p.ids)}
	x.Mask = &schemas.Tensor{DType: string(tensor.U8), Shape: n, Data: p.mask}
	given := p.given()
	for i, to := range []**schemas.Tensor{&x.LogProbs, &x.ProcessedLogProbs, &x.Entropies, &x.TopLogProbs} {
		if given[i] {
			*to = &schemas.Tensor{
				DType: string(tensor.F32), Shape: n, Data: tensor.F32.AppendFloats(nil, p.values[i]),
			}
		}
	}
	x.Turns, x.Conversation = p.turns, p.conversation
	return engine.Images{}, nil
}
