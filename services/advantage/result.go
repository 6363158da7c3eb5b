package advantage

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

var missing = math.NaN()

// config returns the settings of the group's estimator. Its Columns is T, the number of trained steps. Where the
// estimator does not read it, and in validation groups, which are not trained on, it is at least 1.
func (g *group) config() estimator.Config {
	c, _ := estimator.Of(g.spec.Advantage) // of an unknown one the estimator returns an error
	c.Columns = int(max(g.representative().trainedSteps, 1))
	if !g.spec.Validation && c.CountsSteps() {
		c.Columns = int(g.representative().trainedSteps) // with 0 the estimator returns an error
	}
	c.Weigh(g.spec.Reward)
	return c
}

func or[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

func (g *group) batchWide() bool { return g.spec.BatchGroups > 0 && g.config().NeedsBatch() }

// outline returns the Advantage event of a group without the numbers of the estimator: its status, and the status and
// reward of each sample.
func (g *group) outline() *schemas.Advantage {
	spec := g.spec.Advantage
	a := &schemas.Advantage{
		Run: g.run, UID: g.uid, Batch: g.spec.Batch, GroupSize: g.size,
		Scale: spec.Std, StdBasis: spec.StdBasis, Estimator: spec.Estimator, Epsilon: or(spec.Epsilon, 0),
		Mode: spec.Mode, AdvClipMax: spec.AdvClipMax, Gamma: spec.Gamma, Singleton: spec.Singleton,
		BranchScope: spec.BranchScope,
		Metadata:    g.spec.Metadata, Refill: g.spec.Refill, Validation: g.spec.Validation, SourceRun: g.spec.SourceRun,
		FreeReadSteps: g.spec.FreeReadSteps,
	}
	members := g.members()
	a.Members = make([]schemas.Member, 0, g.size)
	scored := make([]float64, 0, len(members))
	var first *sample
	next := 0
	for i := range g.size {
		m := schemas.Member{SampleIndex: i, Status: schemas.StatusMissing}
		if g.cancelled != nil {
			m.Status = schemas.StatusCancelled
		}
		if next < len(members) && members[next].index == i {
			s := members[next]
			next++
			m.Status, m.TrajectorySeq, m.Error = schemas.StatusFailed, s.trajectorySeq, s.pruned
			if s.pruned != "" {
				m.Status = schemas.StatusPruned
			}
			if a.Opened == 0 || s.at < a.Opened {
				a.Opened = s.at
			}
			a.Closed = max(a.Closed, s.at)
			m.Tokens, m.Stages = s.tokens, s.results()
			if s.scored {
				m.Status, m.Reward = schemas.StatusScored, new(s.reward)
				scored = append(scored, s.reward)
				if first == nil {
					first, a.PolicyVersionMin = s, s.policyMin
				}
				a.PolicyVersionMin = min(a.PolicyVersionMin, s.policyMin)
				a.PolicyVersionMax = max(a.PolicyVersionMax, s.policyMax)
			}
		}
		a.Members = append(a.Members, m)
	}
	if len(members) == 0 {
		a.Opened = g.spec.Created
		if !g.deadline.IsZero() {
			a.Closed = g.deadline.UnixNano()
		}
	}
	a.Error = g.checkLanes()
	model := g.representative()
	a.TrainedSteps, a.ScheduleDigest = model.trainedSteps, model.schedule
	g.setStatus(a, members, scored)
	return a
}

// setStatus sets the status of the result, given the members of the group and the rewards of those that were scored. A
// group whose rewards are all equal is filtered if its rules say so, but not a group of one sample, whose reward has
// nothing to differ from, nor one of a validation, as that would bias it.
func (g *group) setStatus(a *schemas.Advantage, members []*sample, scored []float64) {
	policy := policyOf(g.spec)
	switch {
	case g.cancelled != nil:
		a.Status, a.Error = schemas.StatusCancelled, g.cancelled.Error()
	case g.refused != "":
		a.Status, a.Error = schemas.StatusRefused, g.refused
	case a.Error != "":
		a.Status = schemas.StatusMixed
	case len(scored) == 0:
		a.Status, a.Error = schemas.StatusFailed, g.whyFailed(members)
	case g.stale != "":
		a.Status, a.Error = schemas.StatusStale, g.stale
	case policy.ZeroStd != schemas.GroupKeep && g.size > 1 && !g.spec.Validation &&
		slices.Min(scored) == slices.Max(scored):
		a.Status, a.Mean, a.Std = schemas.StatusFiltered, new(scored[0]), new(0.0)
	case int64(len(scored)) < g.size:
		a.Status = schemas.StatusPartial
	default:
		a.Status = schemas.StatusComplete
	}
}

// whyFailed says how many samples failed, how many never came, and why the first one failed.
func (g *group) whyFailed(members []*sample) string {
	why := "no sample was scored"
	if int64(len(members)) < g.size {
		why = fmt.Sprintf("%s: %d failed, %d did not come", why, len(members), g.size-int64(len(members)))
	}
	for _, s := range members {
		if s.failed != "" {
			return fmt.Sprintf("%s; sample %d: %s", why, s.index, s.failed)
		}
	}
	return why
}

func policyOf(spec *schemas.Group) schemas.GroupPolicy {
	var p schemas.GroupPolicy
	if spec.GroupPolicy != nil {
		p = *spec.GroupPolicy
	}
	schemas.SetDefaults(&p)
	return p
}

func counts(a *schemas.Advantage) bool {
	return a.Status == schemas.StatusComplete || a.Status == schemas.StatusPartial
}

// scaleOf returns what groups must have in common to be normalised together: the settings of their estimator, and
// whether the samples are texts.
func scaleOf(c estimator.Config, text bool) string {
	if !c.CountsSteps() {
		c.Columns = 0
	}
	return fmt.Sprintf("%+v %t", c, text)
}

// estimate fills in the advantages of one group, or of all groups of a batch, which the caller has sorted by uid.
// Groups of a batch with the same scale are normalised together. outlines[i] is the result of groups[i]; one that does
// not count is left as it is, and one that the estimator has an error for gets the status failed.
func estimate(groups []*group, outlines []*schemas.Advantage) {
	var order []string
	alike := map[string][]int{}
	for i, g := range groups {
		if counts(outlines[i]) {
			s := scaleOf(g.config(), g.representative().tokens != nil)
			if alike[s] == nil {
				order = append(order, s)
			}
			alike[s] = append(alike[s], i)
		}
	}
	for _, s := range order {
		estimateAlike(groups, outlines, alike[s])
	}
}

// estimateAlike is estimate for the groups at the given indices, which have the same scale. If the estimator returns
// an error, the groups that cause it get the status failed, and the others are estimated without them. If no single
// group causes it, all fail: another try with the same rewards would fail too.
func estimateAlike(groups []*group, outlines []*schemas.Advantage, at []int) {
	fail := func(at []int, err error) {
		for _, i := range at {
			outlines[i].Status, outlines[i].Error = schemas.StatusFailed, err.Error()
		}
	}
	rewards := make([]estimator.Rewards, len(at))
	samples := 0
	for k, i := range at {
		rewards[k] = groups[i].rewards()
		samples += len(rewards[k].Values)
	}
	cfg := groups[at[0]].config()
	results, err := estimator.Estimate(cfg, rewards)
	if err != nil {
		rest := slices.Clone(at)
		for k, i := range at { // each group alone, but twice, as some estimators need more than one reward
			if _, alone := estimator.Estimate(cfg, []estimator.Rewards{rewards[k], rewards[k]}); alone != nil &&
				len(at) > 1 {
				fail([]int{i}, alone)
				rest = slices.DeleteFunc(rest, func(j int) bool { return j == i })
			}
		}
		if len(rest) < len(at) && len(rest) > 0 {
			estimateAlike(groups, outlines, rest)
			return
		}
		fail(rest, err)
		return
	}
	branches, err := estimateBranches(cfg, groups, at, results)
	if err != nil {
		fail(at, err)
		return
	}
	credits, err := estimateCredits(cfg, groups, at)
	if err != nil {
		fail(at, err)
		return
	}
	for k, r := range results {
		a := outlines[at[k]]
		a.Branches, a.Credits = branches[k], credits[k]
		a.Mean, a.Std = new(r.Mean), new(r.Std)
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
			if r.StepAdvantages != nil && or(m.Tokens, 1) > 0 && len(m.Stages) == 0 { // those of stages are credits
				m.StepAdvantages = r.StepAdvantages[next]
			}
			next++
		}
	}
}

// rewards returns what the estimator needs of the members that were scored, by index: reward, scores and length.
func (g *group) rewards() estimator.Rewards {
	var r estimator.Rewards
	for _, s := range g.members() {
		if s.scored {
			r.Values = append(r.Values, s.reward)
			r.Scores = append(r.Scores, s.scores)
			r.Lengths = append(r.Lengths, s.steps())
		}
	}
	needs := estimator.PropertiesOf(g.spec.Advantage.Estimator)
	if !needs.Scores {
		r.Scores = nil
	}
	if !needs.Lengths && g.representative().tokens == nil {
		r.Lengths = nil
	}
	return r
}

// steps returns the number of steps that the sample is trained on, at least 1; for a text, the tokens it generated.
func (s *sample) steps() int {
	if s.tokens != nil {
		return int(max(*s.tokens, 1))
	}
	return int(max(s.trainedSteps, 1))
}

// setStale sets why samples of the group are too old for max_policy_lag: by the versions that their lane served when
// the last sample was scored. Versions that samplers refused were never served. A pass that scores stored trajectories
// again has no such limit.
func (w *worker) setStale(ctx context.Context, g *group) error {
	g.stale = ""
	most := policyOf(g.spec).MaxPolicyLag
	if most == nil || g.spec.SourceRun != "" || len(g.samples) == 0 {
		return nil
	}
	last := int64(0)
	for i := range g.samples {
		last = max(last, g.samples[i].stored)
	}
	for _, f := range g.lanes() {
		lag, served, err := w.lag(ctx, f.stage.Lineage(), f.oldest, time.Unix(0, last), *most)
		if err != nil {
			return err
		}
		if lag > *most {
			g.stale = f.says("policy version %d is %d behind version %d, which lane %q served by then; max_policy_lag "+
				"is %d", f.oldest, lag, served, f.stage.Lineage(), *most)
			return nil
		}
	}
	return nil
}

// lag returns by how many versions a version is behind the one that a tenant of a lane had at a time. A version that
// was left out counts: versions say how far weights have moved. One that samplers refused does not; they are asked for
// where that may make a difference to most.
func (w *worker) lag(ctx context.Context, of schemas.Lineage, version int64, at time.Time, most int64) (
	lag, served int64, err error,
) {
	served, err = w.bus.PolicyVersionAt(ctx, of, at, nil)
	if err != nil || served-version <= most {
		return served - version, served, err
	}
	refused, err := w.bus.PolicyRefusals(ctx, of)
	if err == nil {
		served, err = w.bus.PolicyVersionAt(ctx, of, at, refused)
	}
	lag = served - version
	for r := range refused {
		if version < r && r < served {
			lag--
		}
	}
	return lag, served, err
}
