package advantage

import (
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// missing stands for a score that a sample does not have.
var missing = math.NaN()

// estimatorConfig is the estimator of a group, with T trained steps.
func estimatorConfig(spec *schemas.Group, columns int64) estimator.Config {
	a := spec.Advantage
	c := estimator.Config{
		Name: a.Estimator, Std: a.Std, StdBasis: a.StdBasis, Epsilon: or(a.Epsilon, 0), Columns: int(max(columns, 1)),
		Mode: a.Mode, AdvClipMax: or(a.AdvClipMax, 0), Gamma: or(a.Gamma, 1),
	}
	if c.Name == estimator.GDPO {
		for _, r := range spec.Reward {
			c.Weights = append(c.Weights, or(r.Weight, 1))
		}
	}
	return c
}

func or[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

// batchWide says whether the advantages of the group need the others of its batch.
func (g *group) batchWide() bool { return estimatorConfig(g.spec, g.trainedSteps).NeedsBatch() }

// outline is the advantage event without the numbers of the estimator.
func (g *group) outline() *schemas.Advantage {
	spec := g.spec.Advantage
	a := &schemas.Advantage{
		Run: g.run, UID: g.uid, Batch: g.spec.Batch, GroupSize: g.size,
		Scale: spec.Std, StdBasis: spec.StdBasis, Estimator: spec.Estimator, Epsilon: or(spec.Epsilon, 0),
		Mode: spec.Mode, AdvClipMax: spec.AdvClipMax, Gamma: spec.Gamma,
		Metadata: g.spec.Metadata, Refill: g.spec.Refill, Evaluation: g.spec.Validate, SourceRun: g.spec.SourceRun,
	}
	policy := policyOf(g.spec)
	members := g.members()
	var scored []float64
	var first *sample
	next := 0
	for i := range g.size {
		m := schemas.Member{SampleIndex: i, Status: schemas.StatusMissing}
		if next < len(members) && members[next].index == i {
			s := members[next]
			next++
			m.Status, m.TrajectorySeq = s.status, s.trajectorySeq
			if a.Opened == 0 || s.scored < a.Opened {
				a.Opened = s.scored
			}
			a.Closed = max(a.Closed, s.scored)
			if s.status == schemas.StatusScored {
				m.Reward = &s.reward
				scored = append(scored, s.reward)
				if first == nil {
					first, a.PolicyVersionMin = s, s.policyMin
				}
				a.PolicyVersionMin, a.PolicyVersionMax = min(a.PolicyVersionMin, s.policyMin), max(a.PolicyVersionMax, s.policyMax)
				if s.schedule != first.schedule && !policy.MixedSchedules {
					a.Error = fmt.Sprintf("samples %d and %d were sampled under different schedules (%.12s and %.12s)",
						first.index, s.index, first.schedule, s.schedule)
				}
			}
		}
		a.Members = append(a.Members, m)
	}
	a.TrainedSteps, a.ScheduleDigest = g.trainedSteps, g.schedule
	if first != nil {
		a.ScheduleDigest = first.schedule
	}
	span := a.PolicyVersionMax - a.PolicyVersionMin + 1
	switch {
	case a.Error != "":
		a.Status = schemas.StatusStale
	case len(scored) == 0:
		a.Status, a.Error = schemas.StatusFailed, g.whyFailed(members)
	case span > *policy.MaxPolicySpan:
		a.Status = schemas.StatusStale
		a.Error = fmt.Sprintf("policy versions %d to %d are a span of %d; max_policy_span is %d",
			a.PolicyVersionMin, a.PolicyVersionMax, span, *policy.MaxPolicySpan)
	case policy.ZeroStd != schemas.GroupKeep && g.size > 1 && slices.Min(scored) == slices.Max(scored):
		a.Status, a.Mean, a.Std = schemas.StatusFiltered, new(scored[0]), new(0.0)
	case int64(len(scored)) < g.size:
		a.Status = schemas.StatusPartial
	default:
		a.Status = schemas.StatusComplete
	}
	return a
}

func (g *group) whyFailed(members []*sample) string {
	if int64(len(members)) < g.size {
		return fmt.Sprintf("no sample was scored: %d failed, %d did not come", len(members), g.size-int64(len(members)))
	}
	return "no sample was scored"
}

// policyOf fills in the defaults of a group's policy. A pass over stored trajectories
// cannot ask for fresh ones.
func policyOf(spec *schemas.Group) schemas.GroupPolicy {
	p := schemas.GroupPolicy{ZeroStd: schemas.GroupKeep, Failed: schemas.GroupKeep, RefillRounds: new(int64(0)), MaxPolicySpan: new(int64(1))}
	if given := spec.GroupPolicy; given != nil {
		p = *given
		p.RefillRounds, p.MaxPolicySpan = new(or(given.RefillRounds, 0)), new(or(given.MaxPolicySpan, 1))
		if p.ZeroStd == "" {
			p.ZeroStd = schemas.GroupKeep
		}
	}
	return p
}

// counts says whether a group is one to train on.
func counts(a *schemas.Advantage) bool {
	return a.Status == schemas.StatusComplete || a.Status == schemas.StatusPartial
}

// estimate fills in the advantages of groups that are normalised together: one group,
// or all that count of a batch sorted by uid. What the estimator refuses is a failure
// of the groups, never tried again: equal rewards would be refused again.
func estimate(groups []*group, outlines []*schemas.Advantage) {
	var rewards []estimator.Rewards
	var at []int // rewards[k] are those of groups[at[k]]
	columns, samples := int64(0), 0
	for i, g := range groups {
		if counts(outlines[i]) {
			r := g.rewards()
			rewards, at = append(rewards, r), append(at, i)
			columns, samples = max(columns, g.trainedSteps), samples+len(r.Values)
		}
	}
	if len(at) == 0 {
		return
	}
	cfg := estimatorConfig(groups[at[0]].spec, columns)
	results, err := estimator.Estimate(cfg, rewards)
	if err != nil {
		for _, i := range at {
			outlines[i].Status, outlines[i].Error = schemas.StatusFailed, err.Error()
		}
		return
	}
	for k, r := range results {
		a := outlines[at[k]]
		a.Mean, a.Std = &r.Mean, &r.Std
		if cfg.NeedsBatch() {
			a.BatchSamples = int64(samples)
		}
		next := 0
		for i := range a.Members {
			m := &a.Members[i]
			if m.Status != schemas.StatusScored {
				continue
			}
			m.Advantage = &r.Advantages[next]
			if r.StepAdvantages != nil && int64(len(r.StepAdvantages[next])) == a.TrainedSteps {
				m.StepAdvantages = r.StepAdvantages[next]
			}
			next++
		}
	}
}

// rewards are those of the members that were scored.
func (g *group) rewards() estimator.Rewards {
	var r estimator.Rewards
	for _, s := range g.members() {
		if s.status == schemas.StatusScored {
			r.Values = append(r.Values, s.reward)
			r.Scores = append(r.Scores, s.scores)
		}
	}
	if g.spec.Advantage.Estimator != estimator.GDPO {
		r.Scores = nil
	}
	return r
}
