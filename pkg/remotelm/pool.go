package remotelm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/remotehttp"
)

// Pool is servers of the same model, one or more. One that is well again must be what the others are, and load all
// adapters, before it is used. It is safe for concurrent use.
type Pool struct {
	*pool.Pool[*member]
	config Config
	name   string
	all    []*member

	mu       sync.Mutex
	first    *Server              // the first that could be used; nil: none yet
	adapters map[string]string    // the folders of those that each server must have loaded, by name
	weights  map[string]string    // the folders of whole weights, by name
	numbers  map[string][]float64 // those of the first server that had weights of a name
	// rechecked is when a request that waits for a paused server last had the servers checked.
	rechecked time.Time
}

// member is one server of a pool.
type member struct {
	kind string
	http *remotehttp.Client
	now  atomic.Pointer[Server] // as it was when it last joined, or got weights
	has  string                 // the name of its weights
	died int                    // how often in a row it was lost while it loaded weights
}

// String returns the kind and the address of the server.
func (m *member) String() string { return m.kind + " at " + m.http.Base }

// NewPool returns the pool of the servers in an address. It sends nothing: Check finds out which can be used. A wrong
// address is ErrRefused.
func NewPool(c Config) (*Pool, error) {
	name, bases, err := remotehttp.SplitAll(c.Server)
	if !slices.Contains(Names(), name) {
		err = fmt.Errorf("%q; must be NAME=URL[,URL ...], NAME one of %s", c.Server, strings.Join(Names(), ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	c.Patience, c.Pause = cmp.Or(c.Patience, time.Minute), cmp.Or(c.Pause, 200*time.Millisecond)
	p := &Pool{
		config: c, name: name, adapters: map[string]string{}, weights: map[string]string{},
		numbers: map[string][]float64{},
	}
	for _, base := range bases { // generate has the patience of requests, and weights load for longer
		p.all = append(p.all, &member{kind: name, http: remotehttp.New(base, c.Key, longest)})
	}
	var change func(context.Context, *member, string) error
	if c.Whole {
		change = p.switchTo
	}
	p.Pool = pool.New(remotehttp.Pooled(pool.Config[*member]{
		Switch: change,
		// No request is given up for its server's health: a stream that falls silent ends by itself.
		Members: p.all, Most: max(1, c.Concurrency), Join: p.join,
		Probe: func(ctx context.Context, m *member) error {
			err := m.http.Health(ctx)
			if routeClosed(err) {
				err = fmt.Errorf("%w%s", err, noServer())
			}
			return err
		},
	}, c.Hooks))
	return p, nil
}

// Dial returns a pool of which a server can be used. An error that wraps ErrRefused says that none ever can be; after
// any other error they may not have started yet, and a retry may help.
func Dial(ctx context.Context, c Config) (*Pool, error) {
	p, err := NewPool(c)
	if err == nil {
		err = p.Check(ctx)
	}
	return p, err
}

// join finds out what a server is, compares it with the first, and has it load the adapters. The only server of a pool
// may have new weights: its owner may have changed them. Of several one with others must not take over while the rest
// are away.
func (p *Pool) join(ctx context.Context, m *member) error {
	s, err := newServer(ctx, p.config, p.name, m.http)
	if err != nil {
		return err
	}
	p.mu.Lock()
	adapters := maps.Clone(p.adapters)
	p.mu.Unlock()
	for name, folder := range adapters {
		err := s.loadAdapter(ctx, name, folder)
		if s.facts.Adapters = !errors.Is(err, errNoAdapters); err != nil && (s.facts.Adapters || !s.facts.Whole) {
			return err
		}
	}
	p.mu.Lock()
	first := cmp.Or(p.first, s)
	p.mu.Unlock()
	if err := s.sameFacts(first); err != nil {
		return err
	}
	m.has = weightsOf(s.version)
	if m.has != asStarted && !p.config.Whole {
		return fmt.Errorf("%w: it has weights that a sampler pushed, %s: restart it", ErrRefused, m.has)
	}
	if err := p.compare(s, m.has); err != nil {
		return err
	}
	p.mu.Lock()
	if len(p.all) == 1 || p.first == nil {
		p.first = s
	}
	p.mu.Unlock()
	m.now.Store(s)
	return nil
}

// Facts returns what was found out about the first server that could be used. All others are like it, but for the name
// of the model.
func (p *Pool) Facts() Facts {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.first == nil {
		return Facts{Name: p.name}
	}
	return p.first.facts
}

// Close closes idle connections.
func (p *Pool) Close() {
	for _, m := range p.all {
		m.http.Close()
	}
}

// maxFailures is how often in a row an answer may break off without a new token before Stream gives up.
const maxFailures = 4

// Stream draws tokens until the answer ends, ctx is done, or the caller stops; a caller that stops early releases
// the request on the server. An error ends the stream; if it wraps ErrRefused it says what to change, and ErrAway that
// no server can be used. A paused server is waited for, as long as the patience. A stream that breaks off continues
// from its tokens so far, at another server if there is one, with another seed: a server cannot restore the state of
// its random numbers.
func (p *Pool) Stream(ctx context.Context, r Request) iter.Seq2[Chunk, error] {
	return func(yield func(Chunk, error) bool) {
		begin, failed := len(r.IDs), 0
		var broken *pool.Lease[*member]
		var weights []Span
		r.IDs = slices.Clone(r.IDs)
		pauses := pauses{pool: p}
		for again := uint64(0); ; again++ {
			drawn := len(r.IDs) - begin
			next := r
			next.MaxTokens, next.Seed = r.MaxTokens-drawn, seedOf(r.Seed, again)
			if again > 0 {
				next.ID = fmt.Sprintf("%s-%d", r.ID, again)
			}
			stopped, told := false, []Span(nil)
			var err error
			broken, err = p.send(ctx, broken, next, func(s *Server, e event) bool {
				c := Chunk{Resumed: int(again), Weights: append(slices.Clone(weights), shiftSpans(e.weights, drawn)...)}
				for i := range e.tokens {
					c.Tokens = append(c.Tokens, s.newToken(&e.tokens[i]))
					r.IDs = append(r.IDs, e.tokens[i].id)
				}
				if e.finish == Stop || e.finish == Length {
					c.Finish = e.finish
				}
				told = c.Weights
				stopped = (len(c.Tokens) > 0 || c.Finish != "") && !yield(c, nil)
				return !stopped
			})
			if !stopped && pauses.await(ctx, err, len(r.IDs)) {
				if len(r.IDs)-begin == drawn {
					again-- // it is asked for as before
				}
				continue
			}
			switch {
			case stopped || err == nil:
				return
			case ctx.Err() == nil && errors.Is(err, pool.ErrPaused):
				yield(Chunk{}, fmt.Errorf("%w: paused for %v: %w", ErrAway, p.config.Patience, err))
				return
			case ctx.Err() != nil, errors.Is(err, ErrAway), errors.Is(err, ErrWeights), errors.Is(err, ErrChanged),
				errors.Is(err, ErrRefused) && p.Uses(broken.Member):
				yield(Chunk{}, err)
				return
			}
			if len(told) > 0 {
				weights = told
			}
			if failed++; len(r.IDs)-begin > drawn {
				failed = 1
			}
			if r.MaxTokens == len(r.IDs)-begin { // all tokens came, only the end of the stream is missing
				yield(Chunk{Finish: Length, Weights: weights, Resumed: int(again)}, nil)
				return
			}
			if failed > maxFailures {
				yield(Chunk{}, fmt.Errorf("%w; given up after %d tries without a token", err, failed))
				return
			}
			if p.config.Resumed != nil && p.Uses(broken.Member) { // else Changed says it
				p.config.Resumed(err)
			}
			select {
			case <-time.After(p.config.Pause << (failed - 1)):
			case <-ctx.Done():
				yield(Chunk{}, ctx.Err())
				return
			}
		}
	}
}

// send sends a request to a server that is free, another than that of the broken lease if there is one, and calls each
// with its events, see Server.generate. It returns the lease, which has ended.
func (p *Pool) send(ctx context.Context, broken *pool.Lease[*member], r Request, each func(*Server, event) bool,
) (l *pool.Lease[*member], err error) {
	weights := ""
	if p.config.Whole {
		weights = r.weights()
	}
	if l, err = p.Acquire(ctx, broken, weights); err != nil {
		return nil, err
	}
	defer func() {
		switch {
		case ctx.Err() != nil:
			l.Done(ctx.Err())
		case errors.Is(err, pool.ErrPaused), errors.Is(err, ErrChanged):
			l.Out(err)
		case lost(err, r), (disconnected(err) || shutOut(err)) && p.Used() > 1:
			l.Out(err)
		default:
			l.Done(err)
		}
	}()
	s := l.Member.now.Load()
	var changed error
	err = s.generate(l.Context, r, s.topCount(), func(e event) bool {
		changed = r.drawnWith(e.weights)
		return changed == nil && each(s, e)
	})
	if err = cmp.Or(changed, err); err != nil {
		if errors.Is(err, pool.ErrOverloaded) && ctx.Err() == nil && s.dialect.paused != nil &&
			s.dialect.paused(ctx, s) {
			err = &remotehttp.StatusError{
				Status: http.StatusServiceUnavailable, Err: fmt.Errorf("it is paused: %w", err), Paused: true,
			}
		}
		err = fmt.Errorf("%s: %w", l.Member, err)
	}
	return l, err
}

// pauses waits for servers that are paused, for a request.
type pauses struct {
	pool  *Pool
	since time.Time // no server has taken the request; zero: one has
	wait  time.Duration
	ids   int // of the sequence then
}

// await waits a while after a server said that it is paused, and finds out whether it still is. It returns false where
// the request cannot go on: after another error, at the end of ctx, or when no server has taken it for the patience.
func (w *pauses) await(ctx context.Context, err error, ids int) bool {
	c := &w.pool.config
	paused := errors.Is(err, pool.ErrPaused)
	if !paused && (w.since.IsZero() || !errors.Is(err, ErrAway)) {
		w.since = time.Time{}
		return false
	}
	if w.since.IsZero() || ids > w.ids {
		w.since, w.wait, w.ids = time.Now(), c.Pause, ids
	}
	if time.Since(w.since) > c.Patience {
		return false
	}
	select {
	case <-time.After(w.wait):
	case <-ctx.Done():
		return false
	}
	w.wait = min(2*w.wait, 10*c.Pause)
	w.pool.recheck(ctx)
	return true
}

// recheck is Check, unless that was done a moment ago.
func (p *Pool) recheck(ctx context.Context) {
	p.mu.Lock()
	recent := time.Since(p.rechecked) < p.config.Pause
	if !recent {
		p.rechecked = time.Now()
	}
	p.mu.Unlock()
	if !recent {
		_ = p.Check(ctx) // why a server is not used, Acquire says
	}
}

// shutOut reports whether an error says that a server lets us in no more, or does not have the model.
func shutOut(err error) bool {
	return slices.Contains([]int{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound},
		remotehttp.Answered(err))
}

// disconnected reports whether an error is one of the connection.
func disconnected(err error) bool {
	return err != nil && remotehttp.Answered(err) == 0 && !slices.ContainsFunc(
		[]error{ErrRefused, ErrSilent, ErrGarbage, ErrAborted, errCut},
		func(class error) bool { return errors.Is(err, class) })
}

// seedOf returns the seed of attempt again: another one each time, so that no noise repeats, and below 2^53, which
// every server accepts.
func seedOf(seed, again uint64) uint64 {
	return (seed ^ seed>>53 + again*0x9e3779b97f4a7c15) & (1<<53 - 1)
}

// shiftSpans returns spans with by added to their bounds.
func shiftSpans(spans []Span, by int) []Span {
	out := slices.Clone(spans)
	for i := range out {
		out[i].Begin, out[i].End = out[i].Begin+by, out[i].End+by
	}
	return out
}
