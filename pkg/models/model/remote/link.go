package remote

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/tensor"
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
	losses  int         // in a row: since a call that computes was answered
	why     error       // of the last loss
	next    time.Time   // before which no worker is looked for
	final   error       // why no other worker is looked for
	slowest time.Duration
	least   time.Duration // of patience
	hands   map[*conn]inHand
	blamed  map[string]blame // calls in which the worker was lost, and prompts of those that are given up
	// alone is held to write by a call in which the worker was lost before, so that no other is lost with it.
	alone sync.RWMutex
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
		blamed: map[string]blame{},
	}
	l.life, l.end = context.WithCancel(context.Background())
	return l
}

// call makes a call for work, which may be nil; result is nil or receives its result. A call without an answer is
// repeated on another worker, unless work is blamed for the loss. Errors are a *wire.Fault, the end of ctx, that no
// worker can be reached (model.ErrAway: now), or model.ErrKills.
func (l *link) call(ctx context.Context, work work, call string, args any, tensors []wire.Tensor, result any,
) ([]wire.Tensor, error) {
	for {
		release, err := l.admit(work, call)
		if err != nil {
			return nil, err
		}
		p, err := l.reach(ctx)
		if err != nil {
			release()
			return nil, err
		}
		answer, err := l.try(ctx, p, call, args, tensors, result)
		release()
		if _, lost := errors.AsType[*lostError](err); !lost {
			if err == nil && work != nil {
				l.answered(work)
			}
			return answer, err
		}
		if err = l.blame(work, call, l.lose(p, err)); err != nil {
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
		p, final, pausing := l.peer, l.final, l.pausing()
		l.beginRaise()
		raising := l.raising
		l.mu.Unlock()
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case final != nil:
			return nil, final
		case p != nil:
			return p, nil
		case pausing != nil:
			return nil, fmt.Errorf("%w: %w", model.ErrAway, pausing)
		}
		select {
		case <-raising:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// beginRaise has a worker looked for, unless there is one, or the search goes on already. The caller has the lock.
func (l *link) beginRaise() {
	if l.peer == nil && l.final == nil && l.raising == nil && l.life.Err() == nil {
		l.raising = make(chan struct{})
		go l.raise(l.raising, time.Until(l.next))
	}
}

// raise starts or joins a worker after a pause and closes done. If that fails it is tried again later, unless it was
// the first time, or the worker is now another.
func (l *link) raise(done chan struct{}, pause time.Duration) {
	find := l.start
	if l.cfg.Address != "" {
		find = l.join
	}
	select {
	case <-time.After(pause):
	case <-l.life.Done():
	}
	l.mu.Lock()
	l.next = time.Time{}
	l.mu.Unlock()
	p, err := find()
	l.mu.Lock()
	same := err
	if err == nil {
		same = l.checkSame(p)
	}
	again := false
	switch {
	case l.life.Err() != nil:
		l.final = errors.New("the model is closed")
	case same == nil:
		l.peer = p
		again = l.losses > 1
		if p.process != nil {
			go l.watch(p, p.process)
		}
	case l.first == nil:
		l.final = same
	case err == nil:
		l.final = fmt.Errorf("%w: the worker cannot be used again: %w", tensor.ErrDeviceLost, same)
	default:
		l.count(explain(err))
	}
	ended := l.peer != p
	pausing := l.pausing()
	l.raising = nil
	l.beginRaise()
	l.mu.Unlock()
	switch {
	case again:
		l.cfg.log(Event{Waiting: true})
	case pausing != nil:
		l.cfg.log(Event{Waiting: true, Text: pausing.Error()})
	}
	if p != nil && ended {
		l.discard(p)
	}
	close(done)
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

// lose gives a worker up after a call of it was lost, once, and returns why it was. A worker that was started is
// killed: it may hang.
func (l *link) lose(p *peer, err error) error {
	err = p.process.reason(err)
	l.mu.Lock()
	if p.gone || l.peer != p {
		l.mu.Unlock()
		return err
	}
	l.peer = nil
	l.count(err)
	pausing := l.pausing()
	l.beginRaise()
	l.mu.Unlock()
	l.cfg.log(Event{Text: "the worker is lost", Err: err})
	if pausing != nil {
		l.cfg.log(Event{Waiting: true, Text: pausing.Error()})
	}
	l.discard(p)
	return err
}

// watch gives a worker up that ends while nobody calls it, so that the next one is there before it is needed.
func (l *link) watch(p *peer, process *process) {
	select {
	case <-process.ended:
		_ = l.lose(p, process.why()) // it is logged
	case <-l.life.Done():
	}
}

// count notes a loss: the first one in a row is made good at once, others after a pause that grows. The caller has the
// lock.
func (l *link) count(err error) {
	l.losses++
	l.why = err
	if l.losses > 1 {
		l.next = time.Now().Add(min(retryMost, retryFirst<<min(l.losses-2, 20)))
	}
}

// worker is the worker within reach; nil: there is none.
func (l *link) worker() *peer {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peer
}

// pausing says why and until when no worker is looked for; nil: one is. The caller has the lock.
func (l *link) pausing() error {
	if l.peer != nil || l.final != nil || !time.Now().Before(l.next) {
		return nil
	}
	return fmt.Errorf("the torch worker was lost %d times in a row; the next try is at %s: %w", l.losses,
		l.next.Format(time.RFC3339), l.why)
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
	case l.pausing() != nil:
		return l.pausing()
	case l.why != nil:
		return fmt.Errorf("the worker was lost and is started again: %w", l.why)
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
