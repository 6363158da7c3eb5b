package remoteimage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/remotehttp"
)

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
	// answers of two servers are of the same weights, in that precision of theirs.
	Probe Request
	Same  func(a, b *Answer, precision string) error
	// Changes has the weights of the servers change, by Pool.AddWeights. A server that joins is set back to those that
	// it was started with: another client may have changed them.
	Changes bool
	// Spoiled is called when the weights of a server were changed by another client, see ErrChanged; nil: no call.
	Spoiled func(err error)
	remotehttp.Hooks
}

// Pool is servers of the same weights. One that is well again must be what the others are, and make the probe, before
// it is used. It is safe for concurrent use.
type Pool struct {
	*pool.Pool[*server]
	config Config
	all    []*server

	mu      sync.Mutex
	weights map[string]Weights // by name
	facts   Facts
	probe   *Answer // of the first server that could be used; nil: none yet
}

// NewPool returns the pool of the servers in an address. It sends nothing: Check finds out which can be used.
func NewPool(c Config) (*Pool, error) {
	name, bases, err := remotehttp.SplitAll(c.Server)
	if err != nil {
		return nil, err
	}
	if name != SGLangDiffusion {
		return nil, fmt.Errorf("%q; must be %s=URL[,URL ...]", c.Server, SGLangDiffusion)
	}
	c.Patience = cmp.Or(c.Patience, time.Minute)
	p := &Pool{config: c, weights: map[string]Weights{}}
	for _, base := range bases {
		p.all = append(p.all, &server{http: remotehttp.New(base, c.Key, longest)})
	}
	p.Pool = pool.New(remotehttp.Pooled(pool.Config[*server]{
		Members: p.all, Most: 1, Patience: c.Patience, Join: p.join, Switch: p.switchTo,
		Probe: func(ctx context.Context, s *server) error { return classify(s.http.Health(ctx)) },
	}, c.Hooks))
	return p, nil
}

// Close closes idle connections.
func (p *Pool) Close() {
	for _, s := range p.all {
		s.http.Close()
	}
}

// Facts returns what the first server that could be used says of itself.
func (p *Pool) Facts() Facts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.facts
}

// join has a server make the probe, and compares it with the first server.
func (p *Pool) join(ctx context.Context, s *server) error {
	facts, err := s.discover(ctx, p.config.Pipeline)
	if err == nil {
		err = s.setBack(ctx, p.config.Changes)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, p.config.Patience,
		fmt.Errorf("%w of a small request for %v", remotehttp.ErrSilent, p.config.Patience))
	defer cancel()
	probe, err := s.generate(ctx, &p.config.Probe)
	switch {
	case errors.Is(err, ErrSchedule), errors.Is(err, ErrNotFinite):
		return fmt.Errorf("%w: %w", remotehttp.ErrRefused, err)
	case err != nil:
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch was := p.facts; {
	case p.probe == nil:
		p.facts, p.probe = facts, probe
		return nil
	case facts.Version != was.Version || facts.Precision != was.Precision:
		return fmt.Errorf("it is release %s in %s, and the first server was release %s in %s; restart it, or the "+
			"sampler", facts.Version, facts.Precision, was.Version, was.Precision)
	}
	return p.config.Same(p.probe, probe, p.facts.Precision)
}

// Generate has a server make an image. If the server goes away, another one makes it. pool.ErrAway says that none is
// left, pool.ErrWeights that none of those takes the request's weights. ErrRefused, ErrSchedule and ErrNotFinite are
// terminal; against other errors a retry may help.
func (p *Pool) Generate(ctx context.Context, q *Request) (*Answer, error) {
	weights, err := p.weightsOf(q.Weights)
	if err != nil {
		return nil, err
	}
	for {
		l, err := p.Acquire(ctx, nil, q.Weights)
		if err != nil {
			return nil, err
		}
		a, err := l.Member.generate(l.Context, q)
		if err == nil && p.config.Changes {
			err = l.Member.checkWeights(l.Context, weights)
			if errors.Is(err, ErrChanged) && p.config.Spoiled != nil {
				p.config.Spoiled(fmt.Errorf("%s: %w", l.Member, err))
			}
		}
		gone := err != nil && ctx.Err() == nil && away(err)
		if gone {
			l.Out(err)
		} else {
			l.Done(err)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !gone {
			return a, err
		}
	}
}
