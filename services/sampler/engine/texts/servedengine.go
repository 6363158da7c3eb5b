package texts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Served is a language model whose tokens servers draw; its folder gives tokenizer and chat template. It is Network and
// Engine. Its draws do not follow schemas/noise.md, and its samples say so.
type Served struct {
	language lm.Language
	pool     *remotelm.Pool // which networks with other weights share
	config   remotelm.Config
	adapters *engine.WeightsFolder
	own      saved
	digest   string // of the network's own weights; empty: it has those of the servers

	mu      sync.Mutex
	changed chan struct{} // closed, and replaced, when a server has sent something
}

var (
	_ engine.Network = (*Served)(nil)
	_ engine.Engine  = (*Served)(nil)
)

// Name returns the name of the model whose folder is read.
func (e *Served) Name() string { return e.language.Card().Name }

// Backend returns the server's name and release.
func (e *Served) Backend() string { return e.facts().String() }

// facts returns the server's name, release and kind of log-probs, as events have them.
func (e *Served) facts() *schemas.Engine {
	f := e.pool.Facts()
	return &schemas.Engine{
		Name: f.Name, Version: f.Version, Values: f.Values,
		Filters: schemas.FilterOrderOf(f.Name), Precision: f.Precision,
	}
}

// Digest names weights that were not pushed by the server: their real digest is not known here.
func (e *Served) Digest() string { return cmp.Or(e.digest, schemas.ServedBy(e.pool.Facts().Name)) }

// context returns the most tokens that a prompt and its answer may have together.
func (e *Served) context() int {
	n := e.language.Card().MaxPositions
	if most := e.pool.Facts().MaxTokens; most > 0 {
		n = min(n, most)
	}
	return n
}

// Policy returns the policy that a sampler of the server announces.
func (e *Served) Policy() *schemas.Policy {
	p := PolicyOf(e.language.Card())
	p.WeightsDigest, p.BaseDigest, p.Text.Engine, p.Text.MaxTokens = e.Digest(), e.Digest(), e.facts(),
		int64(e.context())
	return p
}

// Abilities are those of servers.
func (e *Served) Abilities() engine.Abilities {
	a := engine.Abilities{Servers: e.pool, Concurrency: e.pool.Size() * max(1, e.config.Concurrency)}
	if e.adapters != nil {
		a.Modules, a.Tensors = e.adapters.Modules, e.adapters.Tensors
	}
	return a
}

// Engine is the pool of servers itself.
func (e *Served) Engine(engine.Options) engine.Engine { return e }

// servedEpisode is one sample whose tokens a server draws.
type servedEpisode struct {
	transcript
	e *Served
	// draw asks the server for an answer and returns its parts as they come, until stop.
	draw func(r remotelm.Request) (chunks <-chan drawn, stop context.CancelFunc)
	// drawing is the goroutine that reads the server; Close waits for it.
	drawing sync.WaitGroup
	d       decoding.Distribution

	chunks  <-chan drawn       // nil until the server is asked for the answer
	cancel  context.CancelFunc // ends the request at the server
	answer  remotelm.Chunk     // the last part of the answer
	resumed int64              // how often earlier answers broke off and were resumed
	weights []schemas.WeightSpan
	err     error
}

// Bucket is one for all of an engine: servers draw samples one by one.
func (p *servedEpisode) Bucket() any { return p.e }

// drawn is one part of an answer, or the error that ends it.
type drawn struct {
	remotelm.Chunk
	err error
}

// Start checks the request against the model and the server, which gets it with the first Step.
func (e *Served) Start(ctx context.Context, req *schemas.Request, _ *schemas.SegmentStart) (engine.Episode, error) {
	if err := engine.Away(e.pool); err != nil {
		return nil, err
	}
	ids, err := promptIDs(req, e.language)
	if err != nil {
		return nil, err
	}
	if n, most := len(ids), e.context(); n > most {
		return nil, engine.Invalid("messages: %d tokens in the model's template; must be at most %d, the context of %s",
			n, most, e.pool)
	}
	numbers, err := e.facts().Gives(req.Text)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	p := &servedEpisode{transcript: newTranscript(req, e.language, ids, e.context(), numbers), e: e, cancel: func() {}}
	p.draw = func(r remotelm.Request) (<-chan drawn, context.CancelFunc) {
		ctx, stop := context.WithCancel(ctx)
		chunks := make(chan drawn, 1)
		p.drawing.Go(func() {
			defer e.notify()
			for c, err := range e.pool.Stream(ctx, r) {
				select {
				case chunks <- drawn{c, err}:
					e.notify()
				case <-ctx.Done():
					return
				}
			}
		})
		return chunks, stop
	}
	return p, nil
}

// stepWait bounds how long a Step waits for tokens, so that episodes can join and leave.
const stepWait = 20 * time.Millisecond

// Step takes what the server has drawn for the episodes; if that is nothing yet, it waits for up to stepWait.
func (e *Served) Step(ctx context.Context, episodes []engine.Episode) error {
	patience := time.NewTimer(stepWait)
	defer patience.Stop()
	for {
		e.mu.Lock()
		changed := e.changed
		e.mu.Unlock()
		any := false
		for _, ep := range episodes {
			p := ep.(*servedEpisode)
			err := engine.Guarded(func() error {
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

// notify wakes the Steps that wait for tokens.
func (e *Served) notify() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.changed)
	e.changed = make(chan struct{})
}

// poll takes the next part of the answer without waiting; true: there is something for Take, or nothing to wait for.
func (p *servedEpisode) poll() bool {
	if p.idle() || p.err != nil {
		return true
	}
	if p.chunks == nil {
		if p.openEvent(); p.turnFull() {
			p.endTurn(schemas.FinishLength)
			return true
		}
		p.requestAnswer()
	}
	select {
	case c := <-p.chunks:
		p.err = p.addChunk(c)
		return true
	default:
		return false
	}
}

// openEvent makes sure that there is an event for the next token.
func (p *servedEpisode) openEvent() {
	p.transcript.openEvent()
	p.open.Engine = p.e.Backend()
}

// answerSeed times the number of the answer is added to the seed: remotelm asks again with none of these.
const answerSeed = 0xbf58476d1ce4e5b9

// requestAnswer asks for an answer to the sequence so far, which is read no faster than events are stored.
func (p *servedEpisode) requestAnswer() {
	x, card := p.req.Text, p.language.Card()
	stop := append([]int32{}, card.EOS...)
	for _, id := range x.StopTokenIDs {
		stop = append(stop, int32(id))
	}
	r := remotelm.Request{
		ID:        fmt.Sprintf("%s.%s.%d.%x", p.req.Run, p.req.UID, p.req.SampleIndex, time.Now().UnixNano()),
		Adapter:   p.e.own.adapter,
		Weights:   p.e.own.whole,
		IDs:       slices.Clone(p.ids),
		MaxTokens: int(min(x.MaxNewTokens, int64(p.maxTokens-len(p.ids)))), Stop: stop,
		Temperature: x.Temperature, TopP: x.TopP, MinP: x.MinP, TopK: int(x.TopK),
		Seed: p.req.SampleSeed + answerSeed*uint64(answerOf(int64(len(p.turns)-1))),
	}
	p.chunks, p.cancel = p.draw(r)
}

// addChunk adds the tokens of one part of the answer. An error of the server may pass, unless it refused the request.
func (p *servedEpisode) addChunk(c drawn) error {
	if c.err != nil {
		switch err := fmt.Errorf("draw tokens: %w", c.err); {
		case errors.Is(err, remotelm.ErrAway), errors.Is(err, remotelm.ErrWeights), // the one that has them is away
			errors.Is(err, remotelm.ErrChanged), p.e.pool.Away() != nil:
			return fmt.Errorf("%w: %w", engine.ErrAway, err)
		case errors.Is(err, remotelm.ErrRefused):
			return bus.Terminal(schemas.CodeFailed, err)
		default:
			return err
		}
	}
	p.answer = c.Chunk
	for i := range c.Tokens {
		p.openEvent()
		if err := p.addToken(&c.Tokens[i]); err != nil || p.idle() {
			p.cancel() // tokens after a stop text are not needed
			return err
		}
	}
	if c.Finish != "" {
		p.openEvent()
		p.endTurn(c.Finish)
	}
	return nil
}

// addToken adds one token with the values that the server gave: its logits, or its log-prob alone.
func (p *servedEpisode) addToken(t *remotelm.Token) error {
	e, x := p.open, p.req.Text
	if t.Logits != nil { // all other values follow from the logits
		if err := p.d.Reset(t.Logits, ParamsOf(x, p.e.facts())); err != nil {
			return fmt.Errorf("token %d: %w", len(p.ids), err)
		}
		c, best := RecordToken(e, x, &p.d, t.ID, t.Logits)
		if math.IsInf(float64(c.Processed), -1) {
			return engine.Failed("token %d: %d is drawn; top_k, top_p and min_p leave it out", len(p.ids), t.ID)
		}
		if err := KeepLogits(e, x, t.Logits); err != nil {
			return engine.Failed("token %d: %w", len(p.ids), err)
		}
		return p.appendToken(t.ID, c, best)
	}
	c := decoding.Choice{LogProb: t.Value, Processed: t.Value}
	if x.Temperature == 0 {
		c.Processed = 0
	}
	e.IDs = append(e.IDs, int64(t.ID))
	given := p.given()
	for i, to := range []*[]float32{&e.LogProbs, &e.ProcessedLogProbs, nil, &e.TopLogProbs} {
		if to != nil && given[i] {
			*to = append(*to, [...]float32{c.LogProb, c.Processed, 0, t.Top}[i])
		}
	}
	return p.appendToken(t.ID, c, t.Top)
}

// Take returns the events that the last Step completed.
func (p *servedEpisode) Take() ([]schemas.StepEvent, error) {
	if p.err != nil {
		return nil, p.err
	}
	return p.takeEvents(), nil
}

// Close ends the request at the server, and waits until nothing is read any more.
func (p *servedEpisode) Close() error {
	p.cancel()
	p.drawing.Wait()
	return nil
}

// Told adds the interaction's reply. The next Step asks the server for an answer to the whole sequence.
func (p *servedEpisode) Told(ctx context.Context, reply *schemas.InteractReply) error {
	p.noteAnswer()
	p.cancel()
	p.chunks = nil
	return p.transcript.Told(ctx, reply)
}

// noteAnswer keeps how often an answer that is over was resumed, and which weights drew it.
func (p *servedEpisode) noteAnswer() {
	p.resumed += int64(p.answer.Resumed)
	turn := p.turns[len(p.turns)-1]
	for _, w := range p.answer.Weights {
		begin, end := turn.Begin+int64(w.Begin), min(turn.Begin+int64(w.End), turn.End)
		if w.Version != "" && len(w.Version) <= schemas.MaxName && len(p.weights) < schemas.MaxTurns && w.Begin >= 0 &&
			begin < end {
			p.weights = append(p.weights, schemas.WeightSpan{Version: w.Version, Begin: begin, End: end})
		}
	}
	p.answer = remotelm.Chunk{}
}

// Finish adds the sequence, the values that the server gives, and which server drew it, to the trajectory.
func (p *servedEpisode) Finish(ctx context.Context, t *schemas.Trajectory) (engine.Images, error) {
	images, err := p.transcript.Finish(ctx, t)
	p.noteAnswer()
	t.Drawn = &schemas.Drawn{Engine: *p.e.facts(), Resumed: p.resumed, Weights: p.weights}
	for i := range p.ids {
		if math.IsNaN(float64(p.values[0][i])) || math.IsNaN(float64(p.values[1][i])) {
			t.Drawn.Unscored++
		}
	}
	return images, err
}
