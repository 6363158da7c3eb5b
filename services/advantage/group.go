package advantage

import (
	"maps"
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
	spec         *schemas.Group
	trainedSteps int64
	schedule     string
	samples      map[int64]*sample
	// opened is when the first of its rewards was stored; the deadline counts from there.
	opened   time.Time
	deadline time.Time
	// result is the stored advantage, once there is one.
	result *schemas.Advantage
}

// sample is what the result needs of one reward, and its message to ack. A worker may
// hold a hundred thousand: see Config.MaxHeld.
type sample struct {
	index         int64
	status        string
	reward        float64 // when scored
	scores        []float64
	trajectorySeq uint64
	// schedule is the group's own where that is the same.
	schedule             string
	policyMin, policyMax int64
	scored               int64
	started, finished    int64
	scoreNS              int64
	message              *bus.Message
	stored               time.Time
}

func newGroup(r *schemas.Reward) *group {
	return &group{
		run: r.Run, uid: r.UID, size: r.GroupSize, spec: &r.Group, trainedSteps: r.TrainedSteps, schedule: r.ScheduleDigest,
		samples: make(map[int64]*sample, min(r.GroupSize, 64)),
	}
}

// add takes a reward; a redelivery only renews the message to ack.
func (g *group) add(r *schemas.Reward, m *bus.Message, timeout time.Duration) {
	if m != nil && (g.opened.IsZero() || m.Time.Before(g.opened)) {
		g.opened = m.Time
		if g.deadline = g.opened.Add(timeout); g.spec.Deadline > 0 {
			g.deadline = time.Unix(0, g.spec.Deadline)
		}
	}
	if known, ok := g.samples[r.SampleIndex]; ok {
		known.message = m
		return
	}
	s := &sample{
		index: r.SampleIndex, status: r.Status, trajectorySeq: r.TrajectorySeq, schedule: r.ScheduleDigest,
		policyMin: r.PolicyVersionMin, policyMax: r.PolicyVersionMax, scored: r.Scored,
		started: r.SampleStarted, finished: r.SampleFinished, message: m,
	}
	if s.schedule == g.schedule {
		s.schedule = g.schedule
	}
	if r.Reward != nil {
		s.reward = *r.Reward
	}
	if r.Status == schemas.StatusScored {
		s.scores = scoresOf(r, g.spec.Reward)
	}
	for i := range r.Scores {
		s.scoreNS += r.Scores[i].DurationNS
	}
	if m != nil {
		s.stored = m.Time
		m.Data, m.Header = nil, nil // a result needs neither, and a worker may hold many
	}
	g.samples[r.SampleIndex] = s
}

// scoresOf are the single scores in the order of the specification, NaN for those that
// are missing. A single one is the reward itself, up to its weight, and not kept.
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

// ripe says whether the group can close: it is settled, or its deadline has passed and
// everything stored before is here.
func (g *group) ripe(now time.Time, caughtUp bool) bool {
	return g.settled() || caughtUp && now.After(g.deadline)
}

// members are the samples that count, by index: those whose reward was stored before the
// deadline, whoever looks and when. When none was, all count, rather than none.
func (g *group) members() []*sample {
	var out []*sample
	for _, i := range slices.Sorted(maps.Keys(g.samples)) {
		if s := g.samples[i]; g.onTime(s) {
			out = append(out, s)
		}
	}
	if len(out) == 0 {
		for _, i := range slices.Sorted(maps.Keys(g.samples)) {
			out = append(out, g.samples[i])
		}
	}
	return out
}

func (g *group) onTime(s *sample) bool { return g.deadline.IsZero() || !s.stored.After(g.deadline) }

// root names the place in the batch: the uid of the group that this one stands in for,
// or its own.
func (g *group) root() string {
	if r := g.spec.Refill; r != nil {
		return r.Root
	}
	return g.uid
}
