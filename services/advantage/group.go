package advantage

import (
	"cmp"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// group collects the rewards of one uid. Its result depends on the rewards alone,
// not on their order or on how often each was delivered.
type group struct {
	run, uid string
	size     int64
	// spec is that of all its rewards, kept once.
	spec    *schemas.Group
	samples []sample // by index
	// opened is when the first of its rewards was stored, deadline when it closes.
	opened, deadline time.Time
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
	reward               float64
	scores               []float64
	trainedSteps         int64
	schedule             string
	policyMin, policyMax int64
	at                   int64 // when it was scored
	started, finished    int64
	scoreNS              int64
	stored               int64
	message              *bus.Message
}

func newGroup(r *schemas.Reward) *group {
	spec := r.Group
	return &group{
		run: r.Run, uid: r.UID, size: r.GroupSize, spec: &spec,
		samples: make([]sample, 0, min(r.GroupSize, 32)),
	}
}

// lateOpening is how long a group stays open whose first reward came after its deadline.
// It closes with the failures that made it late, not with the first of them.
const lateOpening = time.Second

// add takes a reward; a redelivery only renews the message to ack.
func (g *group) add(r *schemas.Reward, m *bus.Message, timeout time.Duration) {
	if m != nil && (g.opened.IsZero() || m.Time.Before(g.opened)) {
		g.opened = m.Time
		g.deadline = g.opened.Add(timeout)
		if g.spec.Deadline > 0 {
			g.deadline = time.Unix(0, g.spec.Deadline)
			if late := g.opened.Add(lateOpening); g.deadline.Before(g.opened) {
				g.deadline = late
			}
		}
	}
	at, ok := slices.BinarySearchFunc(g.samples, r.SampleIndex, func(s sample, i int64) int { return cmp.Compare(s.index, i) })
	if ok {
		g.samples[at].message = m
		return
	}
	s := sample{
		index: r.SampleIndex, trajectorySeq: r.TrajectorySeq, scored: r.Reward != nil, trainedSteps: r.TrainedSteps, schedule: r.ScheduleDigest,
		policyMin: r.PolicyVersionMin, policyMax: r.PolicyVersionMax, at: r.Scored,
		started: r.SampleStarted, finished: r.SampleFinished, message: m,
	}
	if len(g.samples) > 0 && s.schedule == g.samples[0].schedule {
		s.schedule = g.samples[0].schedule // one string for all
	}
	if s.scored {
		s.reward, s.scores = *r.Reward, scoresOf(r, g.spec.Reward)
	}
	for i := range r.Scores {
		s.scoreNS += r.Scores[i].DurationNS
	}
	if m != nil {
		s.stored = m.Time.UnixNano()
		m.Subject, m.Data, m.Header = "", nil, nil // the result needs none of them, and a worker may hold many
	}
	g.samples = slices.Insert(g.samples, at, s)
}

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

// settled says whether every sample is scored or failed.
func (g *group) settled() bool { return int64(len(g.samples)) >= g.size }

// ripe says whether the group can close: it is settled, or everything that was stored
// before its deadline is here. caughtUp is the time up to which that is so.
func (g *group) ripe(caughtUp time.Time) bool { return g.settled() || caughtUp.After(g.deadline) }

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
// scored, or else the first.
func (g *group) model() *sample {
	members := g.members()
	for _, s := range members {
		if s.scored {
			return s
		}
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
func (g *group) root() string {
	if r := g.spec.Refill; r != nil {
		return r.Root
	}
	return g.uid
}
