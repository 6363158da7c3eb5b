package reward

import (
	"context"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// putBackSamples records the messages of samples that wait for another event to complete them. When that has happened,
// or their group is cancelled, the messages are withdrawn: acknowledged without another delivery. Otherwise they would
// count as in flight until longestWait is over. If too many wait, it forgets them; those are delivered again.
type putBackSamples struct {
	mu     sync.Mutex
	groups map[groupKey]map[uint64]func() error // withdraws a message, by the sequence of its trajectory
	n      int
}

type groupKey struct {
	run schemas.Run
	uid schemas.UID
}

func newPutBackSamples() *putBackSamples {
	return &putBackSamples{groups: map[groupKey]map[uint64]func() error{}}
}

// add records the message of a sample that was put back, so that it can be withdrawn if another handler completes the
// sample. With too many it forgets all; those are delivered again, which only costs time.
func (a *putBackSamples) add(t *schemas.Trajectory, m *bus.Message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.n >= maxSamplesKept {
		clear(a.groups)
		a.n = 0
	}
	key := groupKey{t.Run, t.UID}
	if a.groups[key] == nil {
		a.groups[key] = map[uint64]func() error{}
	}
	if a.groups[key][m.Seq] == nil {
		a.n++
	}
	a.groups[key][m.Seq] = m.Withdrawal()
}

// remove forgets a sample that was delivered again, or is done.
func (a *putBackSamples) remove(key groupKey, seq uint64) {
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

// withdraw withdraws the message of a sample whose reward is stored, if the message was put back here.
func (a *putBackSamples) withdraw(r *schemas.Reward) {
	key := groupKey{r.Run, r.UID}
	a.mu.Lock()
	withdraw := a.groups[key][r.TrajectorySeq]
	a.mu.Unlock()
	if withdraw != nil {
		_ = withdraw() // if that fails it is delivered again
		a.remove(key, r.TrajectorySeq)
	}
}

// removeGroups forgets the put-back samples of the groups for which rule is true, and returns the functions that
// withdraw their messages; withdrawCancelled calls it for cancelled groups.
func (a *putBackSamples) removeGroups(rule func(groupKey) bool) (withdrawals []func() error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, samples := range a.groups {
		if !rule(key) {
			continue
		}
		for _, withdraw := range samples {
			withdrawals = append(withdrawals, withdraw)
		}
		a.n -= len(samples)
		delete(a.groups, key)
	}
	return withdrawals
}

// followCancellations withdraws the put-back messages of groups as they are cancelled, until ctx ends.
func (s *service) followCancellations(ctx context.Context) error {
	for {
		changed := s.controls.Changed()
		s.withdrawCancelled()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// withdrawCancelled withdraws the samples of cancelled groups.
func (s *service) withdrawCancelled() {
	cancelled := func(g groupKey) bool { return s.controls.Of(g.run, g.uid).Cancelled() != nil }
	for _, withdraw := range s.putBackSamples.removeGroups(cancelled) {
		_ = withdraw() // if that fails it is delivered again
	}
}
