package advantage

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// group collects the rewards of one uid. Its result depends on its record and its rewards
// alone, not on their order or on how often each was delivered.
type group struct {
	run  schemas.Run
	uid  schemas.UID
	size int64
	// ended says which control cancelled the group; nil: none did.
	ended error
	// refused says why intake refused the prompt; empty: it did not.
	refused string
	// spec is that of its record, which counts, whatever a reward says.
	spec    *schemas.Group
	samples []sample // by index
	// proven says that what opened the group was compared with the record that intake has stored,
	// foreign that a reward names another group.
	proven, foreign bool
	// lane is where its samples are made, served the version that it had when the last was scored, where
	// the prompt asks for that.
	lane   schemas.Lane
	served int64
	// opening is the message of its record; nil while only rewards of it were delivered.
	opening *bus.Message
	// opened is when its record was stored, deadline when it closes, and due the moment that
	// decided on the deadline: opened, or when the first of its rewards was stored, where the
	// prompt has no deadline. Until then both are zero.
	opened, due, deadline time.Time
	// paused says that the run waits, resumed when it last went on.
	paused  bool
	resumed time.Time
	// verdict is the result once there is one for the batch to count with, result what is
	// stored: in between it is on its way, or waits for the rest of the batch.
	verdict, result *schemas.Advantage
	// sent says that the verdict is on its way, decided that its batch has counted it.
	sent, decided bool
}

// sample is what the result needs of one reward, and its message to ack. A worker may
// hold a hundred thousand: see Config.MaxHeld.
type sample struct {
	index                int64
	trajectorySeq        uint64
	scored               bool
	pruned               string // why it was ended in the middle; empty: it was not
	reward               float64
	scores               []float64
	reads, exact         uint64 // of scores, by bit: of a reader; it read the target exactly
	trainedSteps         int64
	tokens               *int64 // that a text generated; nil of an image
	schedule             string
	policyMin, policyMax int64
	at                   int64 // when it was scored
	started, finished    int64
	scoreNS              int64
	stored               int64
	message              *bus.Message
}

// newGroup is the group of a record that was stored at the given time.
func newGroup(r *schemas.Opening, opened time.Time) *group {
	spec := r.Group
	g := &group{
		run: r.Run, uid: r.UID, size: r.GroupSize, refused: r.Error, spec: &spec, lane: r.Lane, opened: opened,
		samples: make([]sample, 0, min(r.GroupSize, 32)),
	}
	if r.Cancelled {
		g.ended = errors.New(r.Error)
	}
	if spec.Deadline > 0 {
		g.due, g.deadline = opened, time.Unix(0, spec.Deadline)
		if g.deadline.Before(opened) {
			g.deadline = opened
		}
	}
	return g
}

// vouched says whether what opened the group can be taken for the record that intake has stored,
// without a look at that: all of its rewards say the same.
func (g *group) vouched() bool {
	return g.proven || !g.foreign && g.ended == nil && g.refused == "" && int64(len(g.samples)) >= g.size
}

// of says what is wrong with a reward that names the group.
func (g *group) of(r *schemas.Reward) error {
	if r.GroupSize != g.size || r.Group.Batch != g.spec.Batch {
		return fmt.Errorf("group_size and batch: %d and %s; the group has %d and %s", r.GroupSize, r.Group.Batch, g.size, g.spec.Batch)
	}
	return nil
}

// add takes a reward; a redelivery only renews the message to ack, and of two for one
// sample the one stored last is what the stream has. timeout is the time that
// a group whose prompt has no deadline is open for, from its first reward on, or from when its
// run was resumed.
func (g *group) add(r *schemas.Reward, m *bus.Message, timeout time.Duration) {
	if m != nil && g.spec.Deadline == 0 && (g.due.IsZero() || m.Time.Before(g.due)) {
		g.due = m.Time
		g.reckon(timeout)
	}
	at, ok := slices.BinarySearchFunc(g.samples, r.SampleIndex, func(s sample, i int64) int { return cmp.Compare(s.index, i) })
	if ok && (m == nil || g.samples[at].message.Seq == m.Seq) {
		g.samples[at].message = m
		return
	}
	s := sample{
		index: r.SampleIndex, trajectorySeq: r.TrajectorySeq, scored: r.Reward != nil, trainedSteps: r.TrainedSteps, schedule: r.ScheduleDigest,
		policyMin: r.PolicyVersionMin, policyMax: r.PolicyVersionMax, at: r.Scored,
		started: r.SampleStarted, finished: r.SampleFinished, message: m, tokens: r.Tokens,
	}
	if len(g.samples) > 0 && s.schedule == g.samples[0].schedule {
		s.schedule = g.samples[0].schedule // one string for all
	}
	if r.Status == schemas.StatusPruned {
		s.pruned = r.Error
	}
	if s.scored {
		s.reward, s.scores = *r.Reward, scoresOf(r, g.spec.Reward)
		s.reads, s.exact = readingsOf(r, g.spec.Reward)
	}
	for i := range r.Scores {
		s.scoreNS += r.Scores[i].DurationNS
	}
	if m != nil {
		s.stored = m.Time.UnixNano()
		slim(m)
	}
	switch {
	case !ok:
		g.samples = slices.Insert(g.samples, at, s)
	case g.samples[at].message.Seq < m.Seq: // it was displaced, and this is the true one
		g.samples[at] = s
	}
}

// slim lets go of what a result does not need of a message: a worker may hold many.
func slim(m *bus.Message) { m.Subject, m.Data, m.Header = "", nil, nil }

// scoresOf are the single scores in the order of the specification, NaN for those that
// are missing.
func scoresOf(r *schemas.Reward, specs []schemas.RewardSpec) []float64 {
	out := make([]float64, len(specs))
	for i := range specs {
		out[i] = missing
		for k := range r.Scores {
			if s := &r.Scores[k]; s.Name == specs[i].Name && s.Value != nil {
				out[i] = *s.Value
			}
		}
	}
	return out
}

// readingsOf says which scores are of readers, and which of those read the target exactly, as bits in the order
// of the specification.
func readingsOf(r *schemas.Reward, specs []schemas.RewardSpec) (reads, exact uint64) {
	for i := range specs {
		for k := range r.Scores {
			if s := &r.Scores[k]; s.Name == specs[i].Name && s.Exact != nil {
				reads |= 1 << i
				if *s.Exact {
					exact |= 1 << i
				}
			}
		}
	}
	return reads, exact
}

// readings are what the readers among the scores made of the sample, as metrics have them.
func (s *sample) readings(specs []schemas.RewardSpec) (list []estimator.Metric) {
	for k := range specs {
		if s.reads>>k&1 == 1 {
			list = append(list, estimator.ExactMetric(specs[k].Name, s.exact>>k&1 == 1))
		}
	}
	return list
}

// settled says whether every sample is scored or failed, or none will be.
func (g *group) settled() bool {
	return g.ended != nil || g.refused != "" || int64(len(g.samples)) >= g.size
}

// ripe says whether the group can close: it is settled, or everything that was stored
// before its deadline is here. caughtUp is the time up to which that is so.
func (g *group) ripe(caughtUp time.Time) bool {
	return g.settled() || !g.deadline.IsZero() && caughtUp.After(g.deadline)
}

// members are the samples that count, by index: those whose reward was stored before the
// deadline, whoever looks and when.
func (g *group) members() []*sample {
	out := make([]*sample, 0, len(g.samples))
	for i := range g.samples {
		if s := &g.samples[i]; g.deadline.IsZero() || s.stored <= g.deadline.UnixNano() {
			out = append(out, s)
		}
	}
	return out
}

// model returns the sample that says how the group was sampled: the first that was
// scored, or else the first; an empty one when there is none.
func (g *group) model() *sample {
	members := g.members()
	for _, s := range members {
		if s.scored {
			return s
		}
	}
	if len(members) == 0 {
		return &sample{}
	}
	return members[0]
}

// find returns the sample of an index, nil without one.
func (g *group) find(index int64) *sample {
	for i := range g.samples {
		if g.samples[i].index == index {
			return &g.samples[i]
		}
	}
	return nil
}

// root names the place in the batch: the uid of the group that this one stands in for,
// or its own.
func (g *group) root() schemas.UID {
	if r := g.spec.Refill; r != nil {
		return r.Root
	}
	return g.uid
}
