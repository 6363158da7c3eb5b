package remote

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// link keeps one worker within reach: its pool starts or joins it, and does so again when it was lost.
type link struct {
	cfg Config
	dir string // of the model
	// early says that calls need not wait until the model is loaded.
	early bool
	life  context.Context // ends with close
	end   context.CancelFunc
	pool  *pool.Pool[oneWorker]
	stop  func() // ends the search for other workers

	mu      sync.Mutex
	peer    *peer       // the worker that was reached last; nil: none was
	first   *wire.Hello // of the first worker: another one must have the same model
	failed  error       // why the last search for a worker failed
	slowest time.Duration
	least   time.Duration // of patience
	hands   map[*conn]inHand
	blamed  map[string]blame // calls in which the worker was lost, and prompts of those that are given up
	// alone is held to write by a call in which the worker was lost before, so that no other is lost with it.
	alone sync.RWMutex
}

// oneWorker is the one member of a link's pool.
type oneWorker string

func (o oneWorker) String() string { return string(o) }

const theWorker = oneWorker("the torch worker")

// inHand is a call that has no answer yet.
type inHand struct {
	call  string
	since time.Time
}

// peer is one life of a worker.
type peer struct {
	hello   wire.Hello
	network string
	address string
	secure  bool
	process *process // nil: others started it
	idle    []*conn  // guarded by link.mu
	gone    bool     // guarded by link.mu
}

// newLink returns a link that asks nothing yet: open does.
func newLink(dir string, cfg Config, early bool) *link {
	l := &link{
		cfg: cfg, dir: dir, early: early, least: max(MinPatience, cfg.Patience), hands: map[*conn]inHand{},
		blamed: map[string]blame{}, stop: func() {},
	}
	l.life, l.end = context.WithCancel(context.Background())
	l.pool = pool.New(pool.Config[oneWorker]{
		Members: []oneWorker{theWorker}, Most: math.MaxInt, Retry: retryFirst, RetryMost: retryMost,
		Every: probeEvery, Probe: l.probe, Join: l.raise,
		Changed: func(_ string, err error) {
			if err != nil && l.worker() != nil {
				cfg.log(Event{Text: "the worker is lost", Err: err})
			}
		},
		Waiting: func(why error) {
			e := Event{Waiting: true}
			if why != nil {
				e.Text = why.Error()
			}
			cfg.log(e)
		},
	})
	return l
}

// open waits for the first worker, and from then on keeps one within reach.
func (l *link) open(ctx context.Context) (*peer, error) {
	if l.pool.Check(ctx) != nil {
		return nil, cmp.Or(ctx.Err(), l.failed)
	}
	l.stop = l.pool.Watch(l.life)
	return l.worker(), nil
}

// errNothingDone ends the lease of a call that computed nothing: it does not say that the worker is well.
var errNothingDone = errors.New("nothing was computed")

// call makes a call for work; work and result may be nil. Without an answer it is repeated on another worker, unless
// work is blamed. Errors are a *wire.Fault, the end of ctx, that no worker can be reached (model.ErrAway: now), or
// model.ErrKills.
func (l *link) call(ctx context.Context, work work, call string, args any, tensors []wire.Tensor, result any,
) ([]wire.Tensor, error) {
	for {
		release, err := l.admit(work, call)
		if err != nil {
			return nil, err
		}
		lease, err := l.pool.Acquire(ctx, nil, "")
		if err != nil {
			release()
			if errors.Is(err, pool.ErrAway) {
				err = fmt.Errorf("%w: %w", model.ErrAway, cmp.Or(l.pool.Away(), err))
			}
			return nil, err
		}
		p := l.worker()
		answer, err := l.try(ctx, p, call, args, tensors, result)
		release()
		_, lost := errors.AsType[*lostError](err)
		switch {
		case lost: // one that was started is killed: it may hang
			err = p.process.reason(err)
			l.discard(p) // first, or a probe meanwhile says that it was lost once more
			lease.Out(err)
		case err == nil && work != nil:
			lease.Done(nil)
			l.answered(work)
			return answer, nil
		default:
			lease.Done(errNothingDone)
			return answer, err
		}
		if err = l.blame(work, call, err); err != nil {
			return nil, err
		}
	}
}

// try makes a call of a worker.
func (l *link) try(ctx context.Context, p *peer, call string, args any, tensors []wire.Tensor, result any,
) ([]wire.Tensor, error) {
	c, err := l.idleConn(ctx, p)
	if err != nil {
		return nil, err
	}
	begun := time.Now()
	l.mu.Lock()
	patience := l.patience()
	l.hands[c] = inHand{call, begun}
	l.mu.Unlock()
	answer, err := c.exchange(ctx, patience, call, args, tensors, result)
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.hands, c)
	if _, isFault := errors.AsType[*wire.Fault](err); err != nil && !isFault {
		return nil, err // the connection is closed
	}
	l.slowest = max(l.slowest, time.Since(begun))
	if p.gone {
		_ = c.Close()
	} else {
		p.idle = append(p.idle, c)
	}
	return answer, err
}

// patience is how long a call may take. The caller has the lock.
func (l *link) patience() time.Duration {
	return max(l.least, patienceFactor*l.slowest)
}

// idleConn returns a connection to a worker that no call uses.
func (l *link) idleConn(ctx context.Context, p *peer) (*conn, error) {
	l.mu.Lock()
	if n := len(p.idle); n > 0 {
		c := p.idle[n-1]
		p.idle = p.idle[:n-1]
		l.mu.Unlock()
		return c, nil
	}
	l.mu.Unlock()
	c, _, err := l.greet(ctx, p, helloPatience)
	if fault, ok := errors.AsType[*wire.Fault](err); ok {
		return nil, &lostError{fault} // it had answered hello before
	}
	return c, err
}

// greet connects and says hello. Errors are the end of ctx, a *lostError, or a *wire.Fault.
func (l *link) greet(ctx context.Context, p *peer, within time.Duration) (*conn, *wire.Hello, error) {
	c, err := dial(ctx, p.network, p.address, p.secure)
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	if _, isFault := errors.AsType[*wire.Fault](err); err != nil && !isFault {
		err = &lostError{err}
	}
	if err != nil {
		return nil, nil, err
	}
	h, err := l.hello(ctx, c, within)
	if _, isLost := errors.AsType[*lostError](err); isLost && p.network == "tcp" && !p.secure {
		err = &lostError{fmt.Errorf("%w; a worker with --tls-cert wants torch=tls:%s", err, p.address)}
	}
	if err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c, h, nil
}

// hello asks what the worker is, and takes over its bound of bodies.
func (l *link) hello(ctx context.Context, c *conn, within time.Duration) (*wire.Hello, error) {
	token := l.cfg.Token
	if network, _, _, _ := l.cfg.parseAddress(); network == "unix" || l.cfg.Address == "" {
		token = ""
	}
	h := &wire.Hello{}
	args := wire.HelloArgs{Protocol: wire.Protocol, Token: token}
	if _, err := c.exchange(ctx, within, wire.CallHello, args, nil, h); err != nil {
		return nil, err
	}
	if h.Protocol != wire.Protocol {
		return nil, &wire.Fault{Class: wire.ClassConfig, Message: fmt.Sprintf(
			"protocol: the worker speaks %d; must be %d: install worker and meander of one version", h.Protocol,
			wire.Protocol)}
	}
	if h.Limits.BodyBytes < 1<<16 || h.Limits.Rows < 1 {
		return nil, &wire.Fault{Class: wire.ClassConfig, Message: fmt.Sprintf(
			"hello: limits: %d bytes, %d rows; must be at least %d and 1", h.Limits.BodyBytes, h.Limits.Rows, 1<<16)}
	}
	c.bodies = h.Limits.BodyBytes
	return h, nil
}

// raise starts or joins a worker for the pool.
func (l *link) raise(ctx context.Context, _ oneWorker) error {
	find := l.start
	if l.cfg.Address != "" {
		find = l.join
	}
	p, err := find(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	again := l.first != nil
	if l.failed = err; err != nil {
		return explain(err)
	}
	if l.failed = l.checkSame(p); l.failed == nil {
		l.peer = p
		return nil
	}
	go l.discard(p)
	if again {
		return pool.Final(fmt.Errorf("%w: the worker cannot be used again: %w", tensor.ErrDeviceLost, l.failed))
	}
	return l.failed
}

// checkSame says in what a worker differs from the first one; nil: in nothing. The caller has the lock.
func (l *link) checkSame(p *peer) error {
	h := &p.hello
	if l.first == nil {
		l.first = h
		if strings.Contains(h.Backend, "/compiled/") {
			l.least = max(l.least, compilePatience)
		}
		return nil
	}
	if was := l.first; was.Class != h.Class || was.Backend != h.Backend || was.Card.Latent != h.Card.Latent {
		return &wire.Fault{Class: wire.ClassConfig, Message: fmt.Sprintf(
			"the worker is now %s on %s, and was %s on %s; restart the sampler", h.Class, h.Backend, was.Class,
			was.Backend)}
	}
	if l.first.Fingerprint != h.Fingerprint {
		return &wire.Fault{Class: wire.ClassConfig, Message: "the worker has other weights now; restart the sampler"}
	}
	return nil
}

// probeEvery is the pause between two looks at a worker that was started.
const probeEvery = 500 * time.Millisecond

// probe gives up a worker that ended between calls, so that the next one is there before it is needed.
func (l *link) probe(context.Context, oneWorker) error {
	l.mu.Lock()
	p := l.peer
	none := p == nil || p.process == nil || p.gone
	l.mu.Unlock()
	if none {
		return nil
	}
	select {
	case <-p.process.ended:
		l.discard(p)
		return p.process.why()
	default:
		return nil
	}
}

// worker is the worker that was reached last; nil: none was.
func (l *link) worker() *peer {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peer
}

// discard ends a worker: its idle connections, and its process at once.
func (l *link) discard(p *peer) {
	l.mu.Lock()
	p.gone = true
	idle := p.idle
	p.idle = nil
	l.mu.Unlock()
	for _, c := range idle {
		_ = c.Close()
	}
	if p.process != nil {
		p.process.kill()
	}
}

// away returns why the worker cannot be called now; nil: it can.
func (l *link) away() error {
	if err := l.pool.Away(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.slowCall()
}

// slowCall names a call without an answer for a long part of its patience; nil: none. Lock held.
func (l *link) slowCall() error {
	for _, h := range l.hands {
		if time.Since(h.since) > l.patience()/hangingShare {
			return fmt.Errorf("waiting for the torch worker since %s: no answer to %s yet; it counts as lost after %v",
				h.since.Format(time.RFC3339), h.call, l.patience())
		}
	}
	return nil
}

// close ends the worker, if it was started here, and all calls. now says that it need not finish what it does.
func (l *link) close(now bool) {
	l.end()
	l.stop()
	l.pool.Close(errors.New("the model is closed"))
	p := l.worker()
	switch {
	case p == nil:
		return
	case p.process != nil && !now:
		p.process.finish()
	case l.early && l.cfg.Spare.put(p.process, l.dir, l.cfg):
		p.process = nil // it goes on
	}
	l.discard(p)
}
