package reward

import (
	"context"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// away is the samples that this process has handed back for longestWait, since something else
// completes them. Once it has, or their group is cancelled, they are done with at once: until
// they came again they would count as in hand. It is a convenience: what it does not know comes by itself.
type away struct {
	mu     sync.Mutex
	groups map[group]map[uint64]func() error // by the sequence of the trajectory
	n      int
}

type group struct {
	run schemas.Run
	uid schemas.UID
}

func newAway() *away { return &away{groups: map[group]map[uint64]func() error{}} }

// add notes a sample that has been handed back.
func (a *away) add(t *schemas.Trajectory, m *bus.Message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.n >= maxSamplesKept {
		clear(a.groups)
		a.n = 0
	}
	key := group{t.Run, t.UID}
	if a.groups[key] == nil {
		a.groups[key] = map[uint64]func() error{}
	}
	if a.groups[key][m.Seq] == nil {
		a.n++
	}
	a.groups[key][m.Seq] = m.Withdrawal()
}

// here notes that a sample is in hand again, or done with.
func (a *away) here(key group, seq uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.groups[key][seq] == nil {
		return
	}
	a.n--
	if delete(a.groups[key], seq); len(a.groups[key]) == 0 {
		delete(a.groups, key)
	}
}

// done withdraws a sample whose reward is stored.
func (a *away) done(r *schemas.Reward) {
	key := group{r.Run, r.UID}
	a.mu.Lock()
	withdraw := a.groups[key][r.TrajectorySeq]
	a.mu.Unlock()
	if withdraw != nil {
		_ = withdraw() // else it comes by itself
		a.here(key, r.TrajectorySeq)
	}
}

// of takes the samples of the groups that a rule is for.
func (a *away) of(rule func(group) bool) (taken []func() error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, samples := range a.groups {
		if !rule(key) {
			continue
		}
		for _, withdraw := range samples {
			taken = append(taken, withdraw)
		}
		a.n -= len(samples)
		delete(a.groups, key)
	}
	return taken
}

// recalls withdraws, until ctx ends, the samples whose groups are cancelled.
func (s *service) recalls(ctx context.Context) error {
	for {
		changed := s.controls.Changed()
		s.recall()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// recall withdraws the samples of cancelled groups that wait.
func (s *service) recall() {
	for _, withdraw := range s.away.of(func(g group) bool { return s.controls.Of(g.run, g.uid).Cancelled() != nil }) {
		_ = withdraw() // else it comes by itself
	}
}
