package advantage

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// group collects the rewards of one uid. Its result depends on its record and its rewards alone, not on the order in
// which they come, nor on how often each is delivered.
type group struct {
	run  schemas.Run
	uid  schemas.UID
	size int64
	// cancelled names the control that cancelled the group; nil: none did.
	cancelled error
	// refused is why intake refused the prompt; empty: it did not.
	refused string
	// trace is the trace context of its prompt.
	trace tracing.Context
	// spec is the group as its record describes it.
	spec    *schemas.Group
	samples []sample // by index
	// confirmed: the group was compared with intake's record. contradicted: a reward describes the group differently.
	confirmed, contradicted bool
	// of has the weights that made its samples, those of the first stage where there are several.
	of schemas.Lineage
	// stale says why its samples are too old (see setStale); empty: they are not.
	stale string
	// opening is the message of its record; nil while only rewards were delivered.
	opening *bus.Message
	// opened is when its record was stored, deadline when it closes at the latest. due is when the deadline was set: at
	// opened if the prompt has a deadline, otherwise when the first reward was stored. Until then both are zero.
	opened, due, deadline time.Time
	// paused: the run is paused. resumed is when it was last resumed.
	paused  bool
	resumed time.Time
	// outcome is the result that was computed, result the one that is stored. In between it is being published, or
	// waits for the rest of the batch.
	outcome, result *schemas.Advantage
	// sent: the outcome is being published. decided: it is counted in batch.decided.
	sent, decided bool
}

const maxReason = 200

// sample is what the result needs of one reward, and the message to acknowledge. A worker may hold a hundred thousand
// of them, see Config.MaxHeld.
type sample struct {
	index                int64
	trajectorySeq        uint64
	scored               bool
	pruned               string // why it ended early; empty: it did not
	failed               string // why it has no score, shortened
	reward               float64
	scores               []float64
	reads, exact         uint64 // see textMatches
	trainedSteps         int64
	tokens               *int64 // that a text generated; nil of an image
	schedule             string
	policyMin, policyMax int64
	at                   int64 // when it was scored, in ns as all times here
	started, finished    int64 // of sampling
	scoreNS              int64 // spent in reward functions
	stored               int64 // when the server stored the reward
	message              *bus.Message
	stages               []schemas.StageScored // that ran for it
}

// newGroup returns an open group without rewards, for a record that was stored at the given time. A deadline in the
// record's past is moved to that time.
func newGroup(r *schemas.Opening, opened time.Time) *group {
	spec := r.Group
	g := &group{
		run: r.Run, uid: r.UID, size: r.GroupSize, refused: r.Error, spec: &spec,
		of: (*schemas.GroupRecord)(r).Lineage(), opened: opened, samples: make([]sample, 0, min(r.GroupSize, 32)),
	}
	if r.Cancelled {
		g.cancelled = errors.New(r.Error)
	}
	if spec.Deadline > 0 {
		g.due, g.deadline = opened, time.Unix(0, spec.Deadline)
		if g.deadline.Before(opened) {
			g.deadline = opened
		}
	}
	return g
}

// needsConfirmation reports whether the group must be compared with intake's record before it closes. That is not
// needed if all of its rewards came and none contradicts the record that opened it.
func (g *group) needsConfirmation() bool {
	return !g.confirmed &&
		(g.contradicted || g.cancelled != nil || g.refused != "" || int64(len(g.samples)) < g.size)
}

func (g *group) checkReward(r *schemas.Reward) error {
	if r.GroupSize != g.size || r.Group.Batch != g.spec.Batch {
		return fmt.Errorf("group_size and batch: %d and %s; the group has %d and %s", r.GroupSize, r.Group.Batch,
			g.size, g.spec.Batch)
	}
	return nil
}

// addReward adds a reward and its message to an open group. If the reward was delivered before, only the message is
// new. Of two rewards for one sample the one that was stored last counts. timeout is how long a group without a
// deadline stays open after its first reward, or after its run was resumed.
func (g *group) addReward(r *schemas.Reward, m *bus.Message, timeout time.Duration) {
	if m != nil && g.spec.Deadline == 0 && (g.due.IsZero() || m.Time.Before(g.due)) {
		g.due = m.Time
		g.setDeadline(timeout)
	}
	at, ok := slices.BinarySearchFunc(g.samples, r.SampleIndex,
		func(s sample, i int64) int { return cmp.Compare(s.index, i) })
	if ok && (m == nil || g.samples[at].message.Seq == m.Seq) {
		g.samples[at].message = m
		return
	}
	s := sample{
		index: r.SampleIndex, trajectorySeq: r.TrajectorySeq, scored: r.Reward != nil, trainedSteps: r.TrainedSteps,
		schedule:  r.ScheduleDigest,
		policyMin: r.PolicyVersionMin, policyMax: r.PolicyVersionMax, at: r.Scored,
		started: r.SampleStarted, finished: r.SampleFinished, message: m, tokens: r.Tokens,
		stages: r.Stages,
	}
	if len(g.samples) > 0 && s.schedule == g.samples[0].schedule {
		s.schedule = g.samples[0].schedule // one string for all
	}
	if r.Status == schemas.StatusFailed {
		s.failed = strings.ToValidUTF8(strings.Clone(r.Error[:min(len(r.Error), maxReason)]), "")
	}
	if r.Status == schemas.StatusPruned {
		s.pruned = r.Error
	}
	if s.scored {
		s.reward, s.scores = *r.Reward, scoresOf(r, g.spec.Reward)
		s.reads, s.exact = textMatches(r, g.spec.Reward)
	}
	for i := range r.Scores {
		s.scoreNS += r.Scores[i].DurationNS
	}
	if m != nil {
		s.stored = m.Time.UnixNano()
		dropBytes(m)
	}
	switch {
	case !ok:
		g.samples = slices.Insert(g.samples, at, s)
	case g.samples[at].message.Seq < m.Seq: // it was displaced, and this is the true one
		g.samples[at] = s
	}
}

// dropBytes frees what is not needed to acknowledge a message: a worker may hold many.
func dropBytes(m *bus.Message) { m.Data, m.Header = nil, nil }

// scoresOf returns the scores of a reward in the order of specs, NaN for those that are missing.
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

// textMatches returns two sets of bits, bit i for specs[i], at most schemas.MaxRewards of them: which reward functions
// recognize the text drawn in the image (their scores have Exact set), and which of these found exactly the target.
func textMatches(r *schemas.Reward, specs []schemas.RewardSpec) (reads, exact uint64) {
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

// exactMetrics returns a metric for each reward function that recognizes text: whether it found exactly the target.
func (s *sample) exactMetrics(specs []schemas.RewardSpec) (list []estimator.Metric) {
	for k := range specs {
		if s.reads>>k&1 == 1 {
			list = append(list, estimator.ExactMetric(specs[k].Name, s.exact>>k&1 == 1))
		}
	}
	return list
}

// complete reports whether no more rewards can come: every sample has one, or the group was cancelled or refused.
func (g *group) complete() bool {
	return g.cancelled != nil || g.refused != "" || int64(len(g.samples)) >= g.size
}

// readyToClose reports whether the group can close: it is complete, or everything that was stored before its deadline
// has been received. Everything stored before caughtUp has been.
func (g *group) readyToClose(caughtUp time.Time) bool {
	return g.complete() || !g.deadline.IsZero() && caughtUp.After(g.deadline)
}

// members returns the samples that the group has received a reward event of (scored or failed), in the order of their
// index, without those whose event was stored after the deadline.
func (g *group) members() []*sample {
	out := make([]*sample, 0, len(g.samples))
	for i := range g.samples {
		if s := &g.samples[i]; g.deadline.IsZero() || s.stored <= g.deadline.UnixNano() {
			out = append(out, s)
		}
	}
	return out
}

// representative returns the sample whose settings stand for the group: the first that was scored, or else the
// first; an empty one when there is none.
func (g *group) representative() *sample {
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

func (g *group) find(index int64) *sample {
	if i := slices.IndexFunc(g.samples, func(s sample) bool { return s.index == index }); i >= 0 {
		return &g.samples[i]
	}
	return nil
}

// root returns the uid that names the group's place in its batch: that of the first group which this one replaces, or
// its own.
func (g *group) root() schemas.UID {
	if r := g.spec.Refill; r != nil {
		return r.Root
	}
	return g.uid
}
