package sampler

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/decoding"
	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
)

// Served is a language model whose tokens a server draws: its folder says how conversations become ids, and ids text. It is
// an Engine. Its tokens are not those that noise.md gives, and its samples say so.
type Served struct {
	language lm.Language
	server   *remotelm.Server
	config   remotelm.Config
	// why it takes no requests; nil: it does.
	why atomic.Pointer[error]

	mu      sync.Mutex
	changed chan struct{} // closed when there is something of an episode to take
}

var _ Engine = (*Served)(nil)

// Backend is the server with its release.
func (e *Served) Backend() string { return e.facts().String() }

// facts are those of the server as events have them.
func (e *Served) facts() *schemas.TextEngine {
	f := e.server.Facts()
	return &schemas.TextEngine{Name: f.Name, Version: f.Version, Values: f.Values, Filters: schemas.FilterOrderOf(f.Name)}
}

// weightsDigest names weights that nobody here has seen.
func (e *Served) weightsDigest() string { return "served by " + e.server.Facts().Name }

// context is the most tokens of a prompt with its answer.
func (e *Served) context() int {
	n := e.language.Card().MaxPositions
	if most := e.server.Facts().MaxTokens; most > 0 {
		n = min(n, most)
	}
	return n
}

// policy is what a sampler of it announces.
func (e *Served) policy() *schemas.Policy {
	p := TextPolicyOf(e.language.Card())
	p.WeightsDigest, p.Text.Engine, p.Text.MaxTokens = e.weightsDigest(), e.facts(), int64(e.context())
	return p
}

// servedEpisode is one sequence, whose tokens come when the server has drawn them.
type servedEpisode struct {
	transcript
	e   *Served
	ctx context.Context // of all answers
	d   decoding.Distribution

	chunks  chan drawn         // nil until the server is asked for the answer
	cancel  context.CancelFunc // has the server let go of it
	answer  remotelm.Chunk     // the last that was heard of it
	resumed int64              // of the answers before
	weights []schemas.WeightSpan
	err     error
}

// drawn is what the server says at once.
type drawn struct {
	remotelm.Chunk
	err error
}

// Start checks what only the model and its server can. The server is asked with the first Step.
func (e *Served) Start(ctx context.Context, req *schemas.Request, _ *schemas.SegmentStart) (Episode, error) {
	if err := e.away(); err != nil {
		return nil, fmt.Errorf("%w: %w", errAway, err)
	}
	ids, err := promptIDs(req, e.language)
	if err != nil {
		return nil, err
	}
	if n, most := len(ids), e.context(); n > most {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("messages: %d tokens in the model's template; must be at most %d, the context of %s", n, most, e.server))
	}
	numbers, err := e.facts().Gives(req.Text)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	return &servedEpisode{transcript: newTranscript(req, e.language, ids, e.context(), numbers), e: e, ctx: ctx, cancel: func() {}}, nil
}

// stepWait bounds how long a Step waits for tokens: others may join after it, or leave.
const stepWait = 20 * time.Millisecond

// Step takes what the server has drawn for any of the episodes, or waits for it a while.
func (e *Served) Step(ctx context.Context, episodes []Episode) error {
	patience := time.NewTimer(stepWait)
	defer patience.Stop()
	for {
		e.mu.Lock()
		changed := e.changed
		e.mu.Unlock()
		any := false
		for _, ep := range episodes {
			p := ep.(*servedEpisode)
			err := guarded(func() error {
				any = p.poll() || any
				return nil
			})
			if err != nil {
				p.err, any = err, true
			}
		}
		if any {
			return nil
		}
		select {
		case <-changed:
		case <-patience.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tell wakes who waits for tokens.
func (e *Served) tell() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.changed)
	e.changed = make(chan struct{})
}

// poll takes what there is; false where there is nothing new.
func (p *servedEpisode) poll() bool {
	if p.rests() || p.err != nil {
		return true
	}
	if p.chunks == nil {
		if p.begin(); p.full() {
			p.end(schemas.FinishLength)
			return true
		}
		p.stream()
	}
	select {
	case c := <-p.chunks:
		p.err = p.hear(c)
		return true
	default:
		return false
	}
}

// begin has the next token go to an event.
func (p *servedEpisode) begin() {
	p.transcript.begin()
	p.open.Engine = p.e.Backend()
}

// answerSeed makes the seed of each answer one of its own, and none that the server is asked for an answer again with.
const answerSeed = 0xbf58476d1ce4e5b9

// stream has the server draw an answer. It is not read faster than events are stored: one chunk waits, and one is in hand.
func (p *servedEpisode) stream() {
	x, card := p.req.Text, p.language.Card()
	stop := append([]int32{}, card.EOS...)
	for _, id := range x.StopTokenIDs {
		stop = append(stop, int32(id))
	}
	r := remotelm.Request{
		ID: fmt.Sprintf("%s.%s.%d.%x", p.req.Run, p.req.UID, p.req.SampleIndex, time.Now().UnixNano()), IDs: slices.Clone(p.ids),
		MaxTokens: int(min(x.MaxNewTokens, int64(p.most-len(p.ids)))), Stop: stop,
		Temperature: x.Temperature, TopP: x.TopP, MinP: x.MinP, TopK: int(x.TopK), Seed: p.req.SampleSeed + answerSeed*uint64(answerOf(int64(len(p.turns)-1))),
	}
	chunks := make(chan drawn, 1)
	ctx, cancel := context.WithCancel(p.ctx)
	p.chunks, p.cancel = chunks, cancel
	go func() {
		for c, err := range p.e.server.Stream(ctx, r) {
			select {
			case chunks <- drawn{c, err}:
				p.e.tell()
			case <-ctx.Done():
				return
			}
		}
	}()
}

// hear adds what the server said.
func (p *servedEpisode) hear(c drawn) error {
	if c.err != nil {
		switch err := fmt.Errorf("draw tokens: %w", c.err); {
		case errors.Is(err, remotelm.ErrRefused):
			return bus.Terminal(schemas.CodeFailed, err)
		case p.e.away() != nil:
			return fmt.Errorf("%w: %w", errAway, err)
		default:
			return err
		}
	}
	p.answer = c.Chunk
	for i := range c.Tokens {
		p.begin()
		if err := p.add(&c.Tokens[i]); err != nil || p.rests() {
			p.cancel() // what it draws behind a stop text nobody wants
			return err
		}
	}
	if c.Finish != "" {
		p.begin()
		p.end(c.Finish)
	}
	return nil
}

// add adds one token with its numbers.
func (p *servedEpisode) add(t *remotelm.Token) error {
	e, x := p.open, p.req.Text
	if t.Logits != nil { // of which all follows, as of those of a model here
		if err := p.d.Reset(t.Logits, ParamsOf(x, p.e.facts())); err != nil {
			return fmt.Errorf("token %d: %w", len(p.ids), err)
		}
		c, best := RecordToken(e, x, &p.d, t.ID, t.Logits)
		if math.IsInf(float64(c.Processed), -1) {
			return bus.Terminal(schemas.CodeFailed, fmt.Errorf("token %d: %d is drawn; top_k, top_p and min_p leave it out", len(p.ids), t.ID))
		}
		if err := KeepLogits(e, x, t.Logits); err != nil {
			return bus.Terminal(schemas.CodeFailed, fmt.Errorf("token %d: %w", len(p.ids), err))
		}
		return p.keep(t.ID, c, best)
	}
	c := decoding.Choice{LogProb: t.Value, Processed: t.Value}
	if x.Temperature == 0 {
		c.Processed = 0
	}
	e.IDs = append(e.IDs, int64(t.ID))
	for _, list := range []struct {
		given bool
		to    *[]float32
		value float32
	}{{p.numbers.LogProbs, &e.LogProbs, c.LogProb}, {p.numbers.ProcessedLogProbs, &e.ProcessedLogProbs, c.Processed}, {p.numbers.TopLogProbs, &e.TopLogProbs, t.Top}} {
		if list.given {
			*list.to = append(*list.to, list.value)
		}
	}
	return p.keep(t.ID, c, t.Top)
}

// Take returns the events that the last Step completed.
func (p *servedEpisode) Take() ([]schemas.StepEvent, error) {
	if p.err != nil {
		return nil, p.err
	}
	return p.take(), nil
}

// Close has the server let go of it.
func (p *servedEpisode) Close() error {
	p.cancel()
	return nil
}

// Told takes what the interaction says to the last answer; the server is asked for the next one with the whole sequence.
func (p *servedEpisode) Told(ctx context.Context, reply *schemas.InteractReply) error {
	p.settle()
	p.cancel()
	p.chunks = nil
	return p.transcript.Told(ctx, reply)
}

// settle notes what the server said of the last answer as a whole.
func (p *servedEpisode) settle() {
	p.resumed += int64(p.answer.Resumed)
	turn := p.turns[len(p.turns)-1]
	for _, w := range p.answer.Weights {
		begin, end := turn.Begin+int64(w.Begin), min(turn.Begin+int64(w.End), turn.End)
		if w.Version != "" && len(w.Version) <= schemas.MaxName && len(p.weights) < schemas.MaxTurns && w.Begin >= 0 && begin < end {
			p.weights = append(p.weights, schemas.WeightSpan{Version: w.Version, Begin: begin, End: end})
		}
	}
	p.answer = remotelm.Chunk{}
}

// Finish adds the sequence, with the numbers that there are, and who drew it.
func (p *servedEpisode) Finish(ctx context.Context, t *schemas.Trajectory) (Images, error) {
	images, err := p.transcript.Finish(ctx, t)
	x := t.Text
	for _, list := range []struct {
		given bool
		of    **schemas.Tensor
	}{{p.numbers.LogProbs, &x.LogProbs}, {p.numbers.ProcessedLogProbs, &x.ProcessedLogProbs}, {p.numbers.Entropies, &x.Entropies}, {p.numbers.TopLogProbs, &x.TopLogProbs}} {
		if !list.given {
			*list.of = nil
		}
	}
	p.settle()
	x.Drawn = &schemas.DrawnText{Engine: *p.e.facts(), Resumed: p.resumed, Weights: p.weights}
	return images, err
}
