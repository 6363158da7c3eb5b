package pool_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meander-rl/meander/pkg/models/pool"
)

// server is the name of a server in a test.
type server string

func (s server) String() string { return string(s) }

// fleet is the servers of a pool whose faults a test chooses.
type fleet struct {
	mu         sync.Mutex
	down       map[server]error // of their health checks
	refused    map[server]error // when they join
	joins      map[server]int
	said       []string // by Changed and Overloaded
	overloaded int      // the last limit that Overloaded said
}

func (f *fleet) set(of map[server]error, s server, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	of[s] = err
}

// newPool returns the pool of a fleet, which no check has been made of.
func (f *fleet) newPool(most int, names ...server) *pool.Pool[server] {
	f.down, f.refused, f.joins = map[server]error{}, map[server]error{}, map[server]int{}
	return pool.New(pool.Config[server]{
		Members: names, Most: most, Patience: time.Hour,
		Probe: func(_ context.Context, s server) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.down[s]
		},
		Join: func(_ context.Context, s server) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.joins[s]++
			return f.refused[s]
		},
		Changed: func(s string, err error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.said = append(f.said, fmt.Sprint(s, ": ", err))
		},
		Overloaded: func(_ string, most int, _ error) { f.overloaded = most },
	})
}

// acquire returns a lease of a server that is free now.
func acquire(t *testing.T, p *pool.Pool[server], failed *pool.Lease[server]) *pool.Lease[server] {
	t.Helper()
	l, err := p.Acquire(t.Context(), failed, "")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// full reports whether no server is free.
func full(p *pool.Pool[server]) bool {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	l, err := p.Acquire(ctx, nil, "")
	if err == nil {
		l.Done(context.Canceled)
	}
	return err != nil
}

// The server with the fewest requests gets the next one; after a failure another one does, if there is one.
func TestPool_Shares(t *testing.T) {
	t.Parallel()
	f := &fleet{}
	p := f.newPool(2, "a", "b")
	if _, err := p.Acquire(t.Context(), nil, ""); !errors.Is(err, pool.ErrAway) ||
		!strings.Contains(err.Error(), "a: not asked yet; b: not asked yet") {
		t.Errorf("before a check: %v", err)
	}
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	one := acquire(t, p, nil)
	two := acquire(t, p, nil)
	if one.Member != "a" || two.Member != "b" {
		t.Errorf("%s, then %s; want a, then b", one.Member, two.Member)
	}
	one.Done(nil)
	if again := acquire(t, p, one); again.Member != "b" {
		t.Errorf("after a failure of a: %s", again.Member)
	}
	two.Out(errors.New("reset"))
	if l := acquire(t, p, one); l.Member != "a" {
		t.Errorf("after a failure of a, b away: %s", l.Member)
	}
	if n := len(p.Members()); n != 1 {
		t.Errorf("%d servers can be used, want one", n)
	}
	if err := p.Check(t.Context()); err != nil || f.joins["b"] != 2 || f.joins["a"] != 1 {
		t.Errorf("%v, joins %v; want b to have joined again", err, f.joins)
	}
	if want := "b: reset, b: <nil>"; strings.Join(f.said, ", ") != want {
		t.Errorf("said %v; want %s", f.said, want)
	}
}

// Who waits gets the server that is free first, or ErrAway once none is left.
func TestPool_Waits(t *testing.T) {
	t.Parallel()
	f := &fleet{}
	p := f.newPool(1, "a")
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, end := range []func(l *pool.Lease[server]){
		func(l *pool.Lease[server]) { l.Done(nil) },
		func(l *pool.Lease[server]) { l.Out(errors.New("gone")) },
	} {
		l, got := acquire(t, p, nil), make(chan error, 1)
		if !full(p) {
			t.Fatal("two requests at once")
		}
		go func() {
			next, err := p.Acquire(t.Context(), nil, "")
			if err == nil {
				next.Done(nil)
			}
			got <- err
		}()
		end(l)
		if err := <-got; (err == nil) == (len(p.Members()) == 0) || err != nil && !errors.Is(err, pool.ErrAway) {
			t.Errorf("%v with %d servers", err, len(p.Members()))
		}
	}
}

// An overloaded server gets half as many requests at once, once for all that it refused together, and more again as
// requests end well. Other errors change nothing.
func TestPool_Overloaded(t *testing.T) {
	t.Parallel()
	f := &fleet{}
	p := f.newPool(16, "a")
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	// count returns how many requests the server gets at once.
	count := func() (n int) {
		var all []*pool.Lease[server]
		for !full(p) {
			all = append(all, acquire(t, p, nil))
		}
		for _, l := range all {
			l.Done(context.Canceled)
		}
		return len(all)
	}
	var all []*pool.Lease[server]
	for range 16 {
		all = append(all, acquire(t, p, nil))
	}
	if !full(p) {
		t.Error("more than 16")
	}
	all[0].Done(errors.New("garbage"))
	all[0] = acquire(t, p, nil)
	busy := fmt.Errorf("%w: busy", pool.ErrOverloaded)
	for _, l := range all {
		l.Done(busy)
	}
	if n := count(); n != 8 || f.overloaded != 8 {
		t.Errorf("after a refusal of all: %d, said %d; want 8", n, f.overloaded)
	}
	for range 8 {
		acquire(t, p, nil).Done(nil)
	}
	if n := count(); n != 9 {
		t.Errorf("after 8 that ended well: %d; want 9", n)
	}
	for range 200 {
		acquire(t, p, nil).Done(nil)
	}
	if n := count(); n != 16 {
		t.Errorf("grown to %d; want 16", n)
	}
}

// A server that fails its health check keeps its requests for the patience of the pool; then they are given up.
func TestPool_Patience(t *testing.T) {
	t.Parallel()
	f := &fleet{}
	p := f.newPool(1, "a", "b")
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := acquire(t, p, nil)
	f.set(f.down, "a", errors.New("no answer"))
	if err := p.Check(t.Context()); err != nil || l.Context.Err() != nil {
		t.Fatalf("%v; given up at the first failure: %v", err, l.Context.Err())
	}
	p.SetPatience(1)
	if err := p.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-l.Context.Done()
	if cause := context.Cause(l.Context); !errors.Is(cause, pool.ErrSilent) ||
		!strings.Contains(cause.Error(), "no answer") {
		t.Errorf("given up for %v", cause)
	}
	l.Done(context.Cause(l.Context))
}

// Why no server can be used is said of each. It is final only if it is of all.
func TestPool_Check(t *testing.T) {
	t.Parallel()
	f := &fleet{}
	p := f.newPool(1, "a", "b")
	f.set(f.refused, "a", fmt.Errorf("%w: another model", pool.ErrRefused))
	f.set(f.down, "b", errors.New("starting"))
	err := p.Check(t.Context())
	if err == nil || errors.Is(err, pool.ErrRefused) ||
		err.Error() != "a: refused by the server: another model; b: starting" {
		t.Errorf("%v; want both faults, and to wait", err)
	}
	f.set(f.down, "b", nil)
	f.set(f.refused, "b", fmt.Errorf("%w: another model", pool.ErrRefused))
	if err = p.Check(t.Context()); !errors.Is(err, pool.ErrRefused) {
		t.Errorf("%v; want it to be final", err)
	}
	f.set(f.refused, "b", nil)
	before := maps.Clone(f.joins)
	if err = p.Check(t.Context()); err != nil || f.joins["b"] != before["b"]+1 {
		t.Errorf("%v, joins %v after %v", err, f.joins, before)
	}
	if l := acquire(t, p, nil); l.Member != "b" {
		t.Errorf("%s is used", l.Member)
	}
}

// switching is a pool of servers whose weights can be switched, with the switches so far.
type switching struct {
	*pool.Pool[server]
	mu    sync.Mutex
	did   []string
	joins int
	fail  []error // of the next switches
}

func newSwitching(t *testing.T, most int, names ...server) *switching {
	t.Helper()
	s := &switching{}
	well := func(context.Context, server) error { return nil }
	join := func(context.Context, server) error {
		s.joins++
		return nil
	}
	s.Pool = pool.New(pool.Config[server]{
		Members: names, Most: most, Probe: well, Join: join,
		Switch: func(_ context.Context, of server, weights string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.did = append(s.did, fmt.Sprintf("%s %q", of, weights))
			if len(s.fail) == 0 {
				return nil
			}
			err := s.fail[0]
			s.fail = s.fail[1:]
			return err
		},
	})
	if err := s.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// acquired is what an Acquire in the background returned.
type acquired struct {
	lease *pool.Lease[server]
	err   error
}

// ask acquires in the background.
func (s *switching) ask(ctx context.Context, weights string) <-chan acquired {
	c := make(chan acquired, 1)
	go func() {
		l, err := s.Acquire(ctx, nil, weights)
		c <- acquired{l, err}
	}()
	return c
}

// A server that is left while it works does not join beside its request: it may change its weights then.
func TestPool_SwitchNoJoinBesideRequest(t *testing.T) {
	t.Parallel()
	s := newSwitching(t, 1, "a")
	l, err := s.Acquire(t.Context(), nil, "w")
	if err != nil {
		t.Fatal(err)
	}
	s.Pool.Out("a", errors.New("one check failed"))
	if err := s.Check(t.Context()); err == nil || s.joins != 1 {
		t.Errorf("%v, joined %d times; want it to be left while it works", err, s.joins)
	}
	l.Done(nil)
	if err := s.Check(t.Context()); err != nil || s.joins != 2 {
		t.Errorf("%v, joined %d times", err, s.joins)
	}
}

// A server gets other weights when it works on nothing. While a request waits for that, it gets no other requests; if
// the request gives up it does.
func TestPool_Switch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSwitching(t, 2, "a")
		first := <-s.ask(t.Context(), "")
		ctx, giveUp := context.WithCancel(t.Context())
		other := s.ask(ctx, "w")
		synctest.Wait()
		same := s.ask(t.Context(), "")
		synctest.Wait()
		if len(other)+len(same) != 0 || len(s.did) != 0 {
			t.Fatalf("%d and %d have a lease, switched %v; want both to wait", len(other), len(same), s.did)
		}
		giveUp()
		if got := <-other; !errors.Is(got.err, context.Canceled) {
			t.Errorf("gave up: %v", got.err)
		}
		second := <-same
		if second.err != nil {
			t.Fatal(second.err)
		}
		other = s.ask(t.Context(), "w")
		synctest.Wait()
		first.lease.Done(nil)
		synctest.Wait()
		if len(other) != 0 {
			t.Fatal("switched beside a request")
		}
		second.lease.Done(nil)
		w := <-other
		if want := []string{`a "w"`}; w.err != nil || !slices.Equal(s.did, want) {
			t.Fatalf("%v; switched %v, want %v", w.err, s.did, want)
		}
		w.lease.Done(nil)
		(<-s.ask(t.Context(), "w")).lease.Done(nil)
		(<-s.ask(t.Context(), "")).lease.Done(nil)
		if want := []string{`a "w"`, `a ""`}; !slices.Equal(s.did, want) {
			t.Errorf("switched %v, want %v", s.did, want)
		}
	})
}

// Of two servers one is switched, and requests go to that which has their weights. A switch that is refused is the
// request's fault; another fault is the server's, and the other server is switched. A server that joins again has
// its own weights.
func TestPool_SwitchFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSwitching(t, 2, "a", "b")
		held := <-s.ask(t.Context(), "")
		w := <-s.ask(t.Context(), "w")
		if w.lease.Member == held.lease.Member {
			t.Fatalf("both at %s", w.lease.Member)
		}
		if again := <-s.ask(t.Context(), "w"); again.lease.Member != w.lease.Member || len(s.did) != 1 {
			t.Errorf("at %s, switched %v", again.lease.Member, s.did)
		} else {
			again.lease.Done(nil)
		}
		w.lease.Done(nil)
		held.lease.Done(nil)
		refused := fmt.Errorf("%w: no such weights", pool.ErrRefused)
		s.fail = append(s.fail, refused, nil)
		(<-s.ask(t.Context(), "half")).lease.Done(nil) // one refuses them, the other takes them
		s.fail = append(s.fail, refused, refused)
		if got := <-s.ask(t.Context(), "bad"); !errors.Is(got.err, pool.ErrRefused) ||
			!errors.Is(got.err, pool.ErrWeights) || len(s.Members()) != 2 {
			t.Errorf("refused: %v, %v", got.err, s.Members())
		}
		for _, weights := range []string{"", "w"} { // the server of the refusal has neither for sure
			(<-s.ask(t.Context(), weights)).lease.Done(nil)
		}
		s.fail = append(s.fail, errors.New("it went away"))
		got := <-s.ask(t.Context(), "v")
		if got.err != nil || len(s.Members()) != 1 || s.Members()[0] != got.lease.Member {
			t.Fatalf("%+v; used %v", got, s.Members())
		}
		if err := s.Check(t.Context()); err != nil {
			t.Fatal(err)
		}
		n := len(s.did)
		if own := <-s.ask(t.Context(), ""); own.lease.Member == got.lease.Member || len(s.did) != n {
			t.Errorf("at %s, switched %v", own.lease.Member, s.did[n:])
		}
	})
}
