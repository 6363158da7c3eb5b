package remote

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/tensor"
)

// link keeps one worker within reach: it starts or joins it, and does so again when it was lost.
type link struct {
	cfg Config
	dir string // of the model
	// early says that calls need not wait until the model is loaded.
	early bool
	life  context.Context // ends with close
	end   context.CancelFunc

	mu sync.Mutex
	// peer is the worker within reach; nil: there is none. raising is closed when the search for one ends; nil: none
	// is made.
	peer    *peer
	raising chan struct{}
	first   *wire.Hello // of the first worker: another one must have the same model
	losses  []time.Time
	why     error // of the last loss
	final   error // why no other worker is looked for
	slowest time.Duration
	least   time.Duration // of patience
	hands   map[*conn]inHand
}

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

func newLink(dir string, cfg Config, early bool) *link {
	l := &link{
		cfg: cfg, dir: dir, early: early, least: max(MinPatience, cfg.Patience), hands: map[*conn]inHand{},
	}
	l.life, l.end = context.WithCancel(context.Background())
	return l
}

// call makes a call; result is nil or receives its result. A call without an answer is repeated on another worker.
// Errors are a *wire.Fault, the end of ctx, or that no worker can be reached.
func (l *link) call(ctx context.Context, call string, args any, tensors []wire.Tensor, result any,
) ([]wire.Tensor, error) {
	for {
		p, err := l.reach(ctx)
		if err != nil {
			return nil, err
		}
		answer, err := l.try(ctx, p, call, args, tensors, result)
		if _, lost := errors.AsType[*lostError](err); !lost {
			return answer, err
		}
		l.lose(p, err)
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

// greet connects and says hello, which is answered within a time. Errors are the end of ctx, a *lostError, or a
// *wire.Fault.
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

// reach returns a worker that can be called, and waits for it.
func (l *link) reach(ctx context.Context) (*peer, error) {
	for {
		l.mu.Lock()
		p, final := l.peer, l.final
		if p == nil && final == nil && l.raising == nil {
			l.raising = make(chan struct{})
			go l.raise(l.raising)
		}
		raising := l.raising
		l.mu.Unlock()
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case final != nil:
			return nil, final
		case p != nil:
			return p, nil
		}
		select {
		case <-raising:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// raise starts or joins a worker and closes done.
func (l *link) raise(done chan struct{}) {
	find := l.start
	if l.cfg.Address != "" {
		find = l.join
	}
	p, err := find()
	l.mu.Lock()
	if err == nil {
		err = l.checkSame(p)
	}
	switch {
	case l.life.Err() != nil:
		l.final = errors.New("the model is closed")
	case err == nil:
		l.peer = p
	case l.first == nil:
		l.final = err
	case isFinal(err):
		l.final = fmt.Errorf("%w: the worker cannot be used again: %w", tensor.ErrDeviceLost, err)
	default:
		l.count(err)
	}
	ended := l.peer != p
	l.raising = nil
	l.mu.Unlock()
	if p != nil && ended {
		l.discard(p)
	}
	close(done)
}

// isFinal reports whether trying again does not help.
func isFinal(err error) bool {
	if f, ok := errors.AsType[*wire.Fault](err); ok {
		return f.Class == wire.ClassConfig
	}
	return false
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

// lose gives a worker up after a call of it was lost, once. A worker that was started is killed: it may hang.
func (l *link) lose(p *peer, err error) {
	l.mu.Lock()
	if p.gone || l.peer != p {
		l.mu.Unlock()
		return
	}
	l.peer = nil
	l.count(err)
	l.mu.Unlock()
	if said := p.process.lastWords(); said != "" {
		err = fmt.Errorf("%w; the worker said: %s", err, said)
	}
	l.cfg.log(Event{Text: "the worker is lost", Err: err})
	l.discard(p)
}

// count notes a loss; too many are final. The caller has the lock.
func (l *link) count(err error) {
	now := time.Now()
	recent := l.losses[:0]
	for _, t := range l.losses {
		if now.Sub(t) < lossWindow {
			recent = append(recent, t)
		}
	}
	l.losses, l.why = append(recent, now), err
	if len(l.losses) > maxLosses {
		l.final = fmt.Errorf("%w: the worker was lost %d times within %v: %w", tensor.ErrDeviceLost, len(l.losses),
			lossWindow, err)
	}
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
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.final != nil:
		return l.final
	case l.peer != nil:
		return l.slowCall()
	case l.why != nil:
		return fmt.Errorf("the worker was lost and is not back yet: %w", l.why)
	}
	return errors.New("the worker is not reached yet")
}

// slowCall returns an error that names a call which the worker has not answered for a long part of
// its patience; nil if there is none. Health checks show it before the worker counts as lost. The
// caller has locked the link.
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
	l.mu.Lock()
	raising, p := l.raising, l.peer
	l.final, l.peer = errors.New("the model is closed"), nil
	l.mu.Unlock()
	if raising != nil {
		<-raising
	}
	if p == nil {
		return
	}
	switch {
	case p.process != nil && !now:
		p.process.finish()
	case l.early && l.cfg.Spare.put(p.process, l.dir, l.cfg):
		p.process = nil // it goes on
	}
	l.discard(p)
}
