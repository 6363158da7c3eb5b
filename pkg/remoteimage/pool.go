package remoteimage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

// ErrAway says that no server of the pool makes images now.
var ErrAway = errors.New("no server makes images")

// Config says where servers are.
type Config struct {
	// Server is NAME=URL[,URL ...].
	Server string
	// Key is sent as a bearer token; empty: none is sent.
	Key string
	// Patience is how long a server that works on a request may fail its health check before the request is given up;
	// 0: a minute.
	Patience time.Duration
	// Pipeline is the class of the model in diffusers, which each server must run as its own.
	Pipeline string
	// Probe is a small request that each server must be able to make before it is used; Same reports whether the
	// answers of two servers are of the same weights.
	Probe Request
	Same  func(a, b *Answer) error
	// Changed is called when a server cannot be used, at first or any more, with the reason, and when it can be again,
	// with nil. It must not call the pool.
	Changed func(server string, err error)
}

// Pool is servers of the same weights. It is safe for concurrent use.
type Pool struct {
	config Config
	check  sync.Mutex // held by Check

	mu      sync.Mutex
	members []*member
	changed chan struct{} // closed, and replaced, when a member is free or can be used
	facts   Facts
	probe   *Answer // of the first server that could be used; nil: none yet
}

// member is one server of a pool.
type member struct {
	server
	out      error                   // why it cannot be used; nil: it can
	outSince time.Time               // when its health check first failed
	giveUp   context.CancelCauseFunc // ends its request; nil: it is free
}

var errUnknown = errors.New("not asked yet")

// NewPool returns the pool of the servers in an address. It sends nothing: Check finds out which can be used.
func NewPool(c Config) (*Pool, error) {
	name, bases, err := remotehttp.SplitAll(c.Server)
	if err != nil {
		return nil, err
	}
	if name != SGLangDiffusion {
		return nil, fmt.Errorf("%q; must be %s=URL[,URL ...]", c.Server, SGLangDiffusion)
	}
	if c.Patience <= 0 {
		c.Patience = time.Minute
	}
	p := &Pool{config: c, changed: make(chan struct{})}
	for _, base := range bases {
		p.members = append(p.members, &member{server: server{remotehttp.New(base, c.Key, longest)}, out: errUnknown})
	}
	return p, nil
}

// Close closes idle connections.
func (p *Pool) Close() {
	for _, m := range p.members {
		m.http.Close()
	}
}

// String names the servers.
func (p *Pool) String() string {
	var bases []string
	for _, m := range p.members {
		bases = append(bases, m.http.Base)
	}
	return SGLangDiffusion + " at " + strings.Join(bases, ",")
}

// Facts returns what the first server that could be used says of itself.
func (p *Pool) Facts() Facts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.facts
}

// Probed returns the answer of the first server that could be used to the probe; nil: none could be.
func (p *Pool) Probed() *Answer {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.probe
}

// Check asks each server whether it is well. One that is well again must be what the others are, and make the probe,
// before it is used. The error says why none can be used; it wraps ErrRefused if waiting does not help any of them.
func (p *Pool) Check(ctx context.Context) error {
	p.check.Lock()
	defer p.check.Unlock()
	var wait sync.WaitGroup
	errs := make([]error, len(p.members))
	for i, m := range p.members {
		if p.Probed() == nil { // which one is the first must not depend on chance
			errs[i] = p.checkMember(ctx, m)
			continue
		}
		wait.Go(func() { errs[i] = p.checkMember(ctx, m) })
	}
	wait.Wait()
	refused := 0
	for i, err := range errs {
		if err == nil {
			return nil
		}
		if errors.Is(err, remotehttp.ErrRefused) || errors.Is(err, ErrSchedule) || errors.Is(err, ErrNotFinite) {
			refused++
		}
		errs[i] = fmt.Errorf("%s: %w", p.members[i], err)
	}
	err := errors.Join(errs...)
	if refused == len(errs) {
		return fmt.Errorf("%w: %w", remotehttp.ErrRefused, err)
	}
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}

// checkMember is Check for one server.
func (p *Pool) checkMember(ctx context.Context, m *member) error {
	p.mu.Lock()
	out := m.out
	p.mu.Unlock()
	err := classify(m.http.Health(ctx))
	if err == nil && out != nil {
		err = p.join(ctx, m)
	}
	if ctx.Err() == nil {
		p.mu.Lock()
		p.set(m, err)
		p.mu.Unlock()
	}
	return err
}

// join has a server make the probe, and compares it with the first server.
func (p *Pool) join(ctx context.Context, m *member) error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.config.Patience,
		fmt.Errorf("%w of a small request for %v", remotehttp.ErrSilent, p.config.Patience))
	defer cancel()
	facts, err := m.discover(ctx, p.config.Pipeline)
	if err != nil {
		return err
	}
	probe, err := m.generate(ctx, &p.config.Probe)
	if err != nil {
		return err
	}
	p.mu.Lock()
	first := p.probe
	if first == nil {
		p.facts, p.probe = facts, probe
	}
	p.mu.Unlock()
	switch {
	case first == nil: // Check is the only one that sets facts and probe, and held by one goroutine at a time
	case facts.Version != p.facts.Version || facts.Precision != p.facts.Precision:
		return fmt.Errorf("it is release %s in %s, and the first server was release %s in %s; restart it, or the sampler",
			facts.Version, facts.Precision, p.facts.Version, p.facts.Precision)
	default:
		return p.config.Same(first, probe)
	}
	return nil
}

// set says that a server cannot be used, for a reason, or that it can. p.mu is held. A request that the server works on
// is given up once the server has been out for the patience of the pool: it may be busy rather than gone.
func (p *Pool) set(m *member, err error) {
	was := m.out
	m.out = err
	switch {
	case err == nil:
		m.outSince = time.Time{}
	case m.outSince.IsZero():
		m.outSince = time.Now()
	case m.giveUp != nil && time.Since(m.outSince) >= p.config.Patience:
		m.giveUp(fmt.Errorf("%w: %w", remotehttp.ErrSilent, err))
	}
	changed := (was == nil) != (err == nil)
	if p.config.Changed != nil && changed != errors.Is(was, errUnknown) { // of a first check the faults alone are said
		p.config.Changed(m.String(), err)
	}
	p.wake()
}

// wake has those look again who wait for a server.
func (p *Pool) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Generate has a server make an image. If the server goes away, another one makes it. ErrAway says that none is left;
// errors that wrap ErrRefused, ErrSchedule or ErrNotFinite are terminal; against others a retry may help.
func (p *Pool) Generate(ctx context.Context, q *Request) (*Answer, error) {
	for {
		m, asking, err := p.acquire(ctx)
		if err != nil {
			return nil, err
		}
		a, err := m.generate(asking, q)
		gone := err != nil && ctx.Err() == nil && away(err)
		p.mu.Lock()
		m.giveUp(nil)
		if m.giveUp = nil; gone && m.out == nil {
			p.set(m, err)
		}
		p.wake()
		p.mu.Unlock()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !gone {
			return a, err
		}
	}
}

// acquire waits for a server that is free and can be used. asking ends with ctx, or when the server is given up.
func (p *Pool) acquire(ctx context.Context) (m *member, asking context.Context, err error) {
	for {
		p.mu.Lock()
		i := slices.IndexFunc(p.members, func(m *member) bool { return m.out == nil && m.giveUp == nil })
		if i >= 0 {
			m = p.members[i]
			asking, m.giveUp = context.WithCancelCause(ctx)
			p.mu.Unlock()
			return m, asking, nil
		}
		changed, outs := p.changed, []string(nil)
		for _, m := range p.members {
			if m.out != nil {
				outs = append(outs, fmt.Sprintf("%s: %v", m, m.out))
			}
		}
		p.mu.Unlock()
		if len(outs) == len(p.members) {
			return nil, nil, fmt.Errorf("%w: %s", ErrAway, strings.Join(outs, "; "))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}
