package advantage

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// group collects the rewards of one uid. Its result depends on the rewards alone,
// not on their order or on how often each was delivered.
type group struct {
	run, uid, batchID string
	size, batchGroups int64
	deadline          time.Time
	rewards           map[int64]*schemas.Reward
	held              map[int64]*bus.Message
	// result is the stored advantage, once there is one.
	result *schemas.Advantage
}

func newGroup(r *schemas.Reward, opened time.Time, timeout time.Duration) *group {
	return &group{
		run: r.Run, uid: r.UID, batchID: r.Group.Batch, size: r.GroupSize, batchGroups: r.Group.BatchGroups,
		deadline: deadline(r, opened, timeout),
		rewards:  map[int64]*schemas.Reward{}, held: map[int64]*bus.Message{},
	}
}

func deadline(r *schemas.Reward, opened time.Time, timeout time.Duration) time.Time {
	if r.Group.Deadline > 0 {
		return time.Unix(0, r.Group.Deadline)
	}
	return opened.Add(timeout)
}

// add takes a reward; a redelivery only renews the message to ack.
func (g *group) add(r *schemas.Reward, m *bus.Message) {
	g.rewards[r.SampleIndex] = r
	g.held[r.SampleIndex] = m
}

// settled says whether every sample is scored or failed.
func (g *group) settled() bool { return int64(len(g.rewards)) >= g.size }

// sorted returns the rewards by sample index.
func (g *group) sorted() []*schemas.Reward {
	out := make([]*schemas.Reward, 0, len(g.rewards))
	for _, r := range g.rewards {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b *schemas.Reward) int { return int(a.SampleIndex - b.SampleIndex) })
	return out
}

// results computes the advantages of groups that are normalised together: one
// group, or all groups of a batch sorted by uid.
func results(groups []*group) ([]*schemas.Advantage, error) {
	out := make([]*schemas.Advantage, len(groups))
	var scored []estimator.Rewards
	var at []int // scored[k] belongs to groups[at[k]]
	var spec schemas.AdvantageSpec
	columns := int64(1)
	for i, g := range groups {
		out[i] = g.outline()
		if out[i].Status == schemas.StatusStale {
			continue
		}
		if values := g.values(); len(values) > 0 {
			scored, at = append(scored, estimator.Rewards{Values: values}), append(at, i)
		}
		spec = g.sorted()[0].Group.Advantage
		columns = max(columns, out[i].TrainedSteps)
	}
	if len(scored) == 0 {
		return out, nil
	}
	estimates, err := estimator.Estimate(estimator.Config{
		Name: spec.Estimator, Std: spec.Std, StdBasis: spec.StdBasis, Epsilon: *spec.Epsilon, Columns: int(columns), Gamma: 1,
	}, scored)
	if err != nil {
		return nil, fmt.Errorf("estimate advantages: %w", err)
	}
	for k, e := range estimates {
		a := out[at[k]]
		a.Mean, a.Std = &e.Mean, finite(e.Std)
		next := 0
		for i := range a.Members {
			if a.Members[i].Status == schemas.StatusScored {
				a.Members[i].Advantage = &e.Advantages[next]
				next++
			}
		}
	}
	return out, nil
}

func (g *group) values() []float64 {
	var values []float64
	for _, r := range g.sorted() {
		if r.Reward != nil {
			values = append(values, *r.Reward)
		}
	}
	return values
}

// outline is the advantage event without the numbers of the estimator.
func (g *group) outline() *schemas.Advantage {
	rewards := g.sorted()
	first := rewards[0]
	spec := first.Group.Advantage
	a := &schemas.Advantage{
		Run: g.run, UID: g.uid, Batch: g.batchID, GroupSize: g.size,
		Scale: spec.Std, StdBasis: spec.StdBasis, Estimator: spec.Estimator, Epsilon: *spec.Epsilon,
		TrainedSteps: first.TrainedSteps, ScheduleDigest: first.ScheduleDigest, Metadata: first.Group.Metadata,
		PolicyVersionMin: math.MaxInt64, Opened: math.MaxInt64,
	}
	scored := 0
	next := 0
	for i := range g.size {
		m := schemas.Member{SampleIndex: i, Status: schemas.StatusMissing}
		if next < len(rewards) && rewards[next].SampleIndex == i {
			r := rewards[next]
			next++
			m.Status, m.TrajectorySeq, m.Reward = r.Status, r.TrajectorySeq, r.Reward
			if r.Reward != nil {
				scored++
			}
			a.PolicyVersionMin = min(a.PolicyVersionMin, r.PolicyVersionMin)
			a.PolicyVersionMax = max(a.PolicyVersionMax, r.PolicyVersionMax)
			a.Opened, a.Closed = min(a.Opened, r.Scored), max(a.Closed, r.Scored)
			if r.ScheduleDigest != first.ScheduleDigest {
				a.Error = fmt.Sprintf("samples %d and %d were sampled under different schedules (%.12s and %.12s)",
					first.SampleIndex, r.SampleIndex, first.ScheduleDigest, r.ScheduleDigest)
			}
		}
		a.Members = append(a.Members, m)
	}
	switch {
	case a.Error != "":
		a.Status = schemas.StatusStale
	case scored == 0:
		a.Status, a.Error = schemas.StatusFailed, "no sample was scored"
	case int64(scored) < g.size:
		a.Status = schemas.StatusPartial
	default:
		a.Status = schemas.StatusComplete
	}
	return a
}

func finite(x float64) *float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return nil
	}
	return &x
}
