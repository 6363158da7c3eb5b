package remotehttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"
)

// ErrAway says that no server of a pool can be used now; ErrWeights, that those that can be have all refused the
// weights of a request. With the latter come their reasons, which wrap ErrRefused.
var (
	ErrAway    = errors.New("no server can be used")
	ErrWeights = errors.New("no server that can be used takes the weights")
)

// Server is one server of a Pool.
type Server interface {
	comparable
	fmt.Stringer
}

// PoolConfig says what the servers of a Pool are and how they are used.
type PoolConfig[S Server] struct {
	// Servers are all servers, at least one.
	Servers []S
	// Most is the most requests that a server gets at once. It gets fewer while it says that it is overloaded.
	Most int
	// Patience is how long a server may fail its health check before the requests that it works on are given up: it may
	// be busy rather than gone. 0: they never are.
	Patience time.Duration
	// Health returns nil if a server accepts requests.
	Health func(ctx context.Context, s S) error
	// Join returns nil if a server that accepts requests, and was not used, may be: it must be what the others are. It
	// is called for one server after the other while none is used, else for several at once.
	Join func(ctx context.Context, s S) error
	// Switch has a server that works on nothing use other weights, those of a name. The empty name is that of the
	// weights that it has after Join. An error that wraps ErrRefused says that the server can never use them. nil: all
	// requests are for the empty name.
	Switch func(ctx context.Context, s S, weights string) error
	// Changed is called when a server cannot be used, at first or any more, with the reason, and when it can be again,
	// with nil. Overloaded is called when a server gets fewer requests at once from now on, with the reason. Neither
	// may call the pool; nil: no call.
	Changed    func(server string, err error)
	Overloaded func(server string, most int, err error)
}

// Pool shares requests out among servers that give the same answers, and keeps track of which can be used. It is safe
// for concurrent use.
type Pool[S Server] struct {
	config PoolConfig[S]
	check  sync.Mutex // held by Check

	mu      sync.Mutex
	members []*member[S]
	changed chan struct{} // closed, and replaced, when a member is free or can be used
}

// member is one server of a pool.
type member[S Server] struct {
	server   S
	out      error     // why it cannot be used; nil: it can
	outSince time.Time // when its health check first failed
	asked    bool      // its check goes on
	leases   map[*Lease[S]]context.CancelCauseFunc
	limit    int              // the most requests at once now
	ended    int              // requests that ended well since the limit last changed
	lowered  int              // how often the limit has been lowered
	weights  string           // those that it has; unknownWeights after a Switch that failed
	next     string           // the weights that it gets, if drains or switches
	drains   bool             // it works off what it has, and gets no requests before that
	switches bool             // its Switch goes on
	refused  map[string]error // why it takes weights never, by name
}

// unknownWeights is the name of weights that no request asks for.
const unknownWeights = "\x00"

// Lease is the right to send one request to a server of a pool. It ends with Done or Out.
type Lease[S Server] struct {
	Server S
	// Context ends with that of Acquire, or when the server is given up, with the reason as its cause.
	Context context.Context
	member  *member[S]
	pool    *Pool[S]
	lowered int // that of the member when it began
}

var errUnknown = errors.New("not asked yet")

// NewPool returns a pool. It sends nothing: Check finds out which servers can be used.
func NewPool[S Server](c PoolConfig[S]) *Pool[S] {
	p := &Pool[S]{config: c, changed: make(chan struct{})}
	for _, s := range c.Servers {
		p.members = append(p.members,
			&member[S]{server: s, out: errUnknown, leases: map[*Lease[S]]context.CancelCauseFunc{}, limit: c.Most})
	}
	return p
}

// Servers returns the servers that can be used.
func (p *Pool[S]) Servers() (list []S) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		if m.out == nil {
			list = append(list, m.server)
		}
	}
	return list
}

// checkWait is how long Check waits for servers that join beside one that is used.
const checkWait = 2 * time.Second

// Check asks each server whether it is well; one that is well again must join before it is used. The error says why
// none can be used; it wraps ErrRefused if waiting does not help any of them. A server that joins slowly keeps no other
// from being checked again.
func (p *Pool[S]) Check(ctx context.Context) error {
	p.check.Lock()
	defer p.check.Unlock()
	var wait sync.WaitGroup
	for _, m := range p.members {
		p.mu.Lock()
		again := m.asked
		m.asked = true
		p.mu.Unlock()
		if again {
			continue
		}
		if len(p.Servers()) == 0 { // which one is the first must not depend on chance
			p.checkMember(ctx, m)
			continue
		}
		wait.Go(func() { p.checkMember(ctx, m) })
	}
	checked := make(chan struct{})
	go func() {
		defer close(checked)
		wait.Wait()
	}()
	select {
	case <-checked:
	case <-time.After(checkWait):
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	all := faults{refused: true}
	for _, m := range p.members {
		if m.out == nil {
			return nil
		}
		all.refused = all.refused && errors.Is(m.out, ErrRefused)
		all.of = append(all.of, fmt.Errorf("%s: %w", m.server, m.out))
	}
	return all
}

// faults are why each server of a pool cannot be used.
type faults struct {
	of      []error
	refused bool // all of them wrap ErrRefused
}

// Error returns all faults in one line.
func (f faults) Error() string {
	var says []string
	for _, err := range f.of {
		says = append(says, err.Error())
	}
	return strings.Join(says, "; ")
}

// Unwrap returns the faults, unless waiting helps some and not others: then they have no class in common.
func (f faults) Unwrap() []error {
	if f.refused || len(f.of) == 1 {
		return f.of
	}
	return nil
}

// checkMember is Check for one server.
func (p *Pool[S]) checkMember(ctx context.Context, m *member[S]) {
	p.mu.Lock()
	out := m.out
	p.mu.Unlock()
	err := p.config.Health(ctx, m.server)
	p.mu.Lock()
	working := len(m.leases) > 0
	p.mu.Unlock()
	if err == nil && out != nil {
		if working && p.config.Switch != nil { // it may change its weights when it joins: not beside a request
			err = out
		} else {
			err = p.config.Join(ctx, m.server)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m.asked = false
	leftMeanwhile := out == nil && m.out != nil // it has to join
	if ctx.Err() == nil && (err != nil || !leftMeanwhile) {
		if out != nil && err == nil {
			m.weights, m.drains, m.refused = "", false, nil
		}
		p.set(m, err)
	}
}

// set says that a server cannot be used, for a reason, or that it can. p.mu is held.
func (p *Pool[S]) set(m *member[S], err error) {
	was := m.out
	m.out = err
	switch {
	case err == nil:
		m.outSince = time.Time{}
	case m.outSince.IsZero():
		m.outSince = time.Now()
	case p.config.Patience > 0 && time.Since(m.outSince) >= p.config.Patience:
		for _, giveUp := range m.leases {
			//nolint:errorlint // its class is of the server, not of the request
			giveUp(fmt.Errorf("%w: %v", ErrSilent, err))
		}
	}
	changed := (was == nil) != (err == nil)
	if p.config.Changed != nil && changed != errors.Is(was, errUnknown) { // of a first check the faults alone are said
		p.config.Changed(m.server.String(), err)
	}
	p.wake()
}

// wake has those look again who wait for a server.
func (p *Pool[S]) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Acquire waits for a server that can be used and has few enough requests, and takes the one with the fewest. It takes
// that of a lease that has failed only if no other is free; nil: no lease has. The server has the weights of a name:
// one that has others is switched when it works on nothing. The error is ErrAway, which is Paused if a server is,
// ErrWeights, or that of ctx.
func (p *Pool[S]) Acquire(ctx context.Context, failed *Lease[S], weights string) (*Lease[S], error) {
	for {
		p.mu.Lock()
		m := p.choose(failed, weights)
		if m != nil {
			asking, giveUp := context.WithCancelCause(ctx)
			l := &Lease[S]{Server: m.server, Context: asking, member: m, pool: p, lowered: m.lowered}
			m.leases[l] = giveUp
			switches := m.weights != weights
			m.switches, m.next = switches, weights
			p.endDrain(weights)
			p.mu.Unlock()
			if !switches || l.switchTo(weights) {
				return l, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			continue
		}
		p.drain(weights)
		changed, outs, refusals, paused := p.changed, []string(nil), []error(nil), false
		for _, m := range p.members {
			paused = paused || Paused(m.out)
			switch {
			case m.out != nil:
				outs = append(outs, fmt.Sprintf("%s: %v", m.server, m.out))
			case m.refused[weights] != nil:
				refusals = append(refusals, fmt.Errorf("%s: %w", m.server, m.refused[weights]))
			}
		}
		p.mu.Unlock()
		if len(refusals) > 0 && len(outs)+len(refusals) == len(p.members) {
			return nil, fmt.Errorf("%w: %w", ErrWeights, errors.Join(refusals...))
		}
		if len(outs) == len(p.members) {
			why := errors.New(strings.Join(outs, "; "))
			if paused {
				why = &StatusError{Status: http.StatusServiceUnavailable, Err: why, Paused: true}
			}
			return nil, fmt.Errorf("%w: %w", ErrAway, why)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			p.mu.Lock()
			defer p.mu.Unlock()
			p.endDrain(weights)
			return nil, ctx.Err()
		}
	}
}

// switchTo has the server of a new lease use weights: it has others. If it does not, the lease has ended; unless that
// was ctx or a refusal, the server is out.
func (l *Lease[S]) switchTo(weights string) bool {
	m, p := l.member, l.pool
	err := p.config.Switch(l.Context, m.server, weights)
	p.mu.Lock()
	defer p.mu.Unlock()
	m.switches, m.weights = false, weights
	if err == nil {
		p.wake()
		return true
	}
	m.weights = unknownWeights
	givenUp := l.Context.Err() != nil
	switch l.end(err); {
	case givenUp:
	case errors.Is(err, ErrRefused):
		if m.refused == nil {
			m.refused = map[string]error{}
		}
		m.refused[weights] = err
	case m.out == nil:
		p.set(m, err)
	}
	return false
}

// drain has the server with the fewest requests work off what it has, and then get weights, unless there is one with
// them, or that gets them. p.mu is held.
func (p *Pool[S]) drain(weights string) {
	var least *member[S]
	for _, m := range p.members {
		switch {
		case m.out != nil, m.refused[weights] != nil:
		case m.weights == weights && !m.drains && !m.switches, (m.drains || m.switches) && m.next == weights:
			return
		case !m.drains && !m.switches && (least == nil || len(m.leases) < len(least.leases)):
			least = m
		}
	}
	if least != nil {
		least.next, least.drains = weights, true
	}
}

// endDrain has servers that would get weights take requests again: the request that waited for that has a server, or
// has given up. Another one that waits for these weights drains one again. p.mu is held.
func (p *Pool[S]) endDrain(weights string) {
	for _, m := range p.members {
		if m.drains && m.next == weights {
			m.drains = false
			defer p.wake()
		}
	}
}

// choose returns the server for a request; nil: none is free. One that has its weights comes before one that must be
// switched. p.mu is held.
func (p *Pool[S]) choose(failed *Lease[S], weights string) (best *member[S]) {
	var again *member[S]
	for _, m := range p.members {
		has := m.weights == weights
		switch {
		case m.out != nil || len(m.leases) >= m.limit || m.switches || m.refused[weights] != nil:
		case !has && len(m.leases) > 0, m.drains && m.next != weights:
		case failed != nil && failed.member == m:
			again = m
		case best == nil || has != (best.weights == weights) && has ||
			has == (best.weights == weights) && len(m.leases) < len(best.leases):
			best = m
		}
	}
	if best == nil {
		return again
	}
	return best
}

// Done ends a lease. err is why the request failed; nil: it did not. A server that says that it is overloaded gets half
// as many requests at once, and one more each time that as many have ended well.
func (l *Lease[S]) Done(err error) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.end(err)
}

// Out ends a lease and says that its server cannot be used, until Check has had it join again.
func (l *Lease[S]) Out(err error) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.end(err); l.member.out == nil {
		l.pool.set(l.member, err)
	}
}

// Out says that a server cannot be used, until Check has had it join again.
func (p *Pool[S]) Out(s S, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		if m.out == nil && m.server == s {
			p.set(m, err)
		}
	}
}

// end is Done. The pool's mu is held.
func (l *Lease[S]) end(err error) {
	p, m := l.pool, l.member
	busy := len(m.leases)
	m.leases[l](nil)
	delete(m.leases, l)
	switch {
	// one that began before the limit fell says nothing new
	case Overloaded(err) && l.lowered == m.lowered && m.limit > 1:
		m.limit, m.ended, m.lowered = max(1, min(m.limit, busy)/2), 0, m.lowered+1
		if p.config.Overloaded != nil {
			p.config.Overloaded(m.server.String(), m.limit, err)
		}
	case err == nil:
		if m.ended++; m.ended >= m.limit && m.limit < p.config.Most {
			m.limit, m.ended = m.limit+1, 0
		}
	}
	p.wake()
}
