package reward

import (
	"context"
	"sync"

	"github.com/meander-rl/meander/schemas"
)

// putBackSamples records the messages of samples that wait for another event to complete them. When that has happened,
// or their group is cancelled, the messages are withdrawn: acknowledged without another delivery. Otherwise they would
// count as in flight until longestWait is over. If too many wait, it forgets them; those are delivered again.
type putBackSamples struct {
	mu     sync.Mutex
	groups map[groupKey]map[uint64]func() error // withdraws or recalls a message, by the sequence of its trajectory
	n      int
}

type groupKey struct {
	run schemas.Run
	uid schemas.UID
}

func newPutBackSamples() *putBackSamples {
	return &putBackSamples{groups: map[groupKey]map[uint64]func() error{}}
}

// add records how the message of a sample that was put back, at a sequence, is taken from where it waits. With too many
// it forgets all; those are delivered again, which only costs time.
func (a *putBackSamples) add(t *schemas.Trajectory, seq uint64, take func() error) {
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
	if a.groups[key][seq] == nil {
		a.n++
	}
	a.groups[key][seq] = take
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

// withdraw withdraws the message of a sample whose reward is stored, if the message was put back here and is of no
// other sample: of several stages that of the last one.
func (a *putBackSamples) withdraw(r *schemas.Reward) {
	key, seq := groupKey{r.Run, r.UID}, r.TrajectorySeq
	if n := len(r.Stages); n > 0 {
		last := &r.Stages[n-1]
		if seq = last.TrajectorySeq; r.Group.Stages[r.Group.StageIndex(last.Stage)].Every > 1 {
			return
		}
	}
	a.mu.Lock()
	withdraw := a.groups[key][seq]
	a.mu.Unlock()
	if withdraw != nil {
		_ = withdraw() // if that fails it is delivered again
		a.remove(key, seq)
	}
}

// takeGroups forgets the put-back samples of the groups for which rule is true, and takes their messages from where
// they wait. What fails is delivered again.
func (a *putBackSamples) takeGroups(rule func(groupKey) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, samples := range a.groups {
		if !rule(key) {
			continue
		}
		for _, take := range samples {
			_ = take()
		}
		a.n -= len(samples)
		delete(a.groups, key)
	}
}

// followControls withdraws the put-back messages of groups as they are cancelled, and recalls those of runs as they are
// resumed, until ctx ends.
func (s *service) followControls(ctx context.Context) error {
	for {
		changed := s.controls.Changed()
		s.takeControlled()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// takeControlled withdraws the samples of cancelled groups, and recalls those of runs that are not paused any more.
func (s *service) takeControlled() {
	s.putBackSamples.takeGroups(func(g groupKey) bool { return s.controls.Of(g.run, g.uid).Cancelled() != nil })
	s.pausedSamples.takeGroups(func(g groupKey) bool { return s.controls.Of(g.run, g.uid).Paused() == nil })
}
