// Package pool keeps members in use that give the same answers, workers in other processes or servers, and shares
// calls out among them. It knows nothing of what they are: Config says how a member is probed, brought into use, and
// given other weights.
//
// A member is out until it has joined. Check looks at all of them at once; Watch does so again and again: at those in
// use every Config.Every, at one that was lost at once, and then after pauses that grow. Acquire gives a call the
// member that has the fewest. Where none can be used the pool says why (Away, Config.Waiting).
package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Classes of errors. ErrAway: no member can be used now; ErrWeights: those that can be refuse the weights of a call,
// for the reasons with it. Of members: ErrRefused is terminal; after ErrSilent and ErrOverloaded a member gets fewer
// calls at once; ErrPaused: it takes none until its owner lets it go on.
var (
	ErrAway       = errors.New("no server can be used")
	ErrWeights    = errors.New("no server that can be used takes the weights")
	ErrRefused    = errors.New("refused by the server")
	ErrSilent     = errors.New("the server says nothing")
	ErrOverloaded = errors.New("the server is overloaded")
	ErrPaused     = errors.New("the server is paused")
	errFinal      = errors.New("it is looked for no more")
)

// classed is an error of a class, which its text does not say.
type classed struct {
	error
	class error
}

func (e classed) Unwrap() []error { return []error{e.error, e.class} }

// Final returns an error of Join after which the member is looked for no more.
func Final(err error) error { return classed{err, errFinal} }

// Member is one member of a Pool; its name is for people.
type Member interface {
	comparable
	fmt.Stringer
}

// Config says what the members of a Pool are and how they are used. All functions but Join may be nil.
type Config[M Member] struct {
	Members []M
	// Most is the most calls that a member gets at once, fewer while it is overloaded.
	Most int
	// Patience is how long a member may fail its probe before the calls that it works on are given up: it may be busy
	// rather than gone. 0: they never are.
	Patience time.Duration
	// Every is the pause between two probes. A member that was lost is looked for at once, one that is lost again after
	// Retry, then after twice that, and so on up to RetryMost.
	Every, Retry, RetryMost time.Duration
	// Probe returns nil if a member accepts calls; nil: until it is Out.
	Probe func(ctx context.Context, m M) error
	// Join brings a member into use, which must be what the others are: one after the other while none is used.
	Join func(ctx context.Context, m M) error
	// Switch has a member that works on nothing use the weights of a name; the empty one is that after Join.
	// ErrRefused: it never can. nil: all calls are for the empty name.
	Switch func(ctx context.Context, m M, weights string) error
	// Changed is called when a member cannot be used, with the reason, and when it can be again; Overloaded, when it
	// gets fewer calls at once. Neither may call the pool.
	Changed    func(member string, err error)
	Overloaded func(member string, most int, err error)
	// Waiting is told, at times, why no member can be used, and nil once one can.
	Waiting func(why error)
}

// Pool shares calls out among members. It is safe for concurrent use.
type Pool[M Member] struct {
	config Config[M]
	check  sync.Mutex    // held by a look at the members
	news   chan struct{} // signals that a member is due at another time; buffered, 1
	told   time.Time     // when Waiting was told; zero: nothing is waited for

	mu      sync.Mutex
	members []*member[M]
	watched bool
	changed chan struct{} // closed, and replaced, when a member is free, or can be used
}

// member is one member of a pool.
type member[M Member] struct {
	of       M
	out      error     // why it cannot be used; nil: it can
	outSince time.Time // when its probe first failed
	losses   int       // in a row: since a call ended well
	joins    int       // how often it has joined
	due      time.Time // when Watch looks at it
	asked    bool      // a look at it goes on
	leases   map[*Lease[M]]context.CancelCauseFunc
	limit    int              // the most calls at once now
	ended    int              // calls that ended well since the limit last changed
	lowered  int              // how often the limit has been lowered
	weights  string           // those that it has; unknownWeights after a Switch that failed
	next     string           // the weights that it gets, if drains or switches
	drains   bool             // it works off what it has, and gets no calls before that
	switches bool             // its Switch goes on
	refused  map[string]error // why it takes weights never, by name
}

// unknownWeights is the name of weights that no call asks for.
const unknownWeights = "\x00"

// never is when a member that is final is due.
var never = time.Unix(1<<40, 0)

// Lease is the right to make one call of a member. It ends with Done or Out.
type Lease[M Member] struct {
	Member M
	// Context ends with that of Acquire, or when the member is given up, with the reason as its cause.
	Context context.Context
	member  *member[M]
	pool    *Pool[M]
	lowered int // those of the member when it began
	joins   int
}

var errUnknown = errors.New("not asked yet")

// New returns a pool. It asks nothing: Check, Reach or Watch find out which members can be used.
func New[M Member](c Config[M]) *Pool[M] {
	p := &Pool[M]{config: c, changed: make(chan struct{}), news: make(chan struct{}, 1)}
	for _, of := range c.Members {
		p.members = append(p.members,
			&member[M]{of: of, out: errUnknown, leases: map[*Lease[M]]context.CancelCauseFunc{}, limit: c.Most})
	}
	return p
}

// String names all members.
func (p *Pool[M]) String() string {
	var names []string
	for _, m := range p.members {
		names = append(names, m.of.String())
	}
	return strings.Join(names, ", ")
}

// Members returns the members that can be used.
func (p *Pool[M]) Members() (list []M) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		if m.out == nil {
			list = append(list, m.of)
		}
	}
	return list
}

// Uses reports whether a member can be used.
func (p *Pool[M]) Uses(of M) bool { return slices.Contains(p.Members(), of) }

// Used returns how many members can be used now.
func (p *Pool[M]) Used() int { return len(p.Members()) }

// Size returns how many members there are.
func (p *Pool[M]) Size() int { return len(p.members) }

// Away returns why each member cannot be used; nil: one can. It wraps ErrRefused if waiting does not help any of them.
func (p *Pool[M]) Away() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := faults{refused: true}
	for _, m := range p.members {
		if m.out == nil {
			return nil
		}
		all.refused = all.refused && errors.Is(m.out, ErrRefused)
		all.of = append(all.of, fmt.Errorf("%s: %w", m.of, m.why(p.config.Retry != p.config.Every)))
	}
	return all
}

// why returns why a member is out; where its pauses grow, with the next try. The pool's mu is held.
func (m *member[M]) why(grows bool) error {
	switch {
	case !grows || m.losses == 0 || m.due.Equal(never):
		return m.out
	case m.losses == 1:
		return fmt.Errorf("lost, and looked for again: %w", m.out)
	}
	return fmt.Errorf("lost %d times in a row; the next try is at %s: %w", m.losses, m.due.Format(time.RFC3339), m.out)
}

// faults are why each member of a pool cannot be used.
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

// Acquire waits for a member with few enough calls, and takes the one with the fewest; that of a lease that has failed
// (nil: none) only if no other is free. One with other weights is switched when it works on nothing. The error is
// ErrAway, with ErrPaused if a member is, ErrWeights, or that of ctx.
func (p *Pool[M]) Acquire(ctx context.Context, failed *Lease[M], weights string) (*Lease[M], error) {
	for {
		p.mu.Lock()
		m := p.choose(failed, weights)
		if m != nil {
			asking, giveUp := context.WithCancelCause(ctx)
			l := &Lease[M]{Member: m.of, Context: asking, member: m, pool: p, lowered: m.lowered, joins: m.joins}
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
		changed, err := p.changed, p.hopeless(weights)
		p.mu.Unlock()
		if err != nil {
			return nil, err
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

// hopeless returns why a call need not wait; nil: it may be worth it, as a member is looked for now. p.mu is held.
func (p *Pool[M]) hopeless(weights string) error {
	var refusals []error
	var outs faults
	paused := false
	for _, m := range p.members {
		paused = paused || errors.Is(m.out, ErrPaused)
		switch {
		case m.out != nil && p.watched && (m.asked || !time.Now().Before(m.due)):
			return nil
		case m.out != nil && errors.Is(m.out, errFinal) && len(p.members) == 1:
			return m.out
		case m.out != nil:
			why := m.why(p.config.Retry != p.config.Every)
			outs.of = append(outs.of, fmt.Errorf("%s: %w", m.of, why))
		case m.refused[weights] != nil:
			refusals = append(refusals, fmt.Errorf("%s: %w", m.of, m.refused[weights]))
		default:
			return nil
		}
	}
	if len(refusals) > 0 {
		return fmt.Errorf("%w: %w", ErrWeights, errors.Join(refusals...))
	}
	//nolint:errorlint // the class of what keeps a member out is not that of the call, but for a pause
	err := fmt.Errorf("%w: %v", ErrAway, outs)
	if paused {
		err = classed{err, ErrPaused}
	}
	return err
}

// switchTo has the member of a new lease use weights. If it does not, the lease has ended; unless that was ctx or a
// refusal, the member is out.
func (l *Lease[M]) switchTo(weights string) bool {
	m, p := l.member, l.pool
	err := p.config.Switch(l.Context, m.of, weights)
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

// drain has the member with the fewest calls work off what it has, unless there is one with the weights, or that gets
// them. p.mu is held.
func (p *Pool[M]) drain(weights string) {
	var least *member[M]
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

// endDrain has members that would get weights take calls again: the call that waited has a member, or has given up.
// p.mu is held.
func (p *Pool[M]) endDrain(weights string) {
	for _, m := range p.members {
		if m.drains && m.next == weights {
			m.drains = false
			defer p.wake()
		}
	}
}

// choose returns the member for a call, those with its weights first; nil: none is free. p.mu is held.
func (p *Pool[M]) choose(failed *Lease[M], weights string) (best *member[M]) {
	var again *member[M]
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

// Done ends a lease; err is why the call failed, nil: it did not. A member that is overloaded gets half as many calls
// at once, and one more each time that as many have ended well.
func (l *Lease[M]) Done(err error) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.end(err)
}

// Out ends a lease and says that its member cannot be used until it has joined again, unless it has since.
func (l *Lease[M]) Out(err error) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	if l.end(err); l.member.out == nil && l.member.joins == l.joins {
		l.pool.set(l.member, err)
	}
}

// Out says that a member cannot be used, until it has joined again.
func (p *Pool[M]) Out(of M, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		if m.out == nil && m.of == of {
			p.set(m, err)
		}
	}
}

// Close says that no member can be used any more.
func (p *Pool[M]) Close(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		m.out, m.due = Final(why), never
	}
	p.wake()
}

// end is Done. The pool's mu is held.
func (l *Lease[M]) end(err error) {
	p, m := l.pool, l.member
	busy := len(m.leases)
	m.leases[l](nil)
	delete(m.leases, l)
	overloaded := (errors.Is(err, ErrOverloaded) || errors.Is(err, ErrSilent)) && !errors.Is(err, ErrPaused)
	switch {
	// one that began before the limit fell says nothing new
	case overloaded && l.lowered == m.lowered && m.limit > 1:
		m.limit, m.ended, m.lowered = max(1, min(m.limit, busy)/2), 0, m.lowered+1
		if p.config.Overloaded != nil {
			p.config.Overloaded(m.of.String(), m.limit, err)
		}
	case err == nil:
		m.losses = 0
		if m.ended++; m.ended >= m.limit && m.limit < p.config.Most {
			m.limit, m.ended = m.limit+1, 0
		}
	}
	p.wake()
}

// wake has those look again who wait for a member.
func (p *Pool[M]) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}
