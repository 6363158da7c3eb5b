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

// A part is what of the samples has advantages of its own: a stage that is trained, in all its rounds. The reward of a
// sample of a stage is the mean of what its leaves, the samples of the group that it leads to, have for that stage:
// their reward, or the weighted sum of the scores that the stage names as its credit. The group's estimator compares
// the samples of a part with each other. A leaf that ended before a stage ran has nothing for it, and is compared with
// none there.
type part struct {
	stage  schemas.Stage
	kind   string
	every  int64                 // how many samples each sample of the stage leads to
	shares []schemas.CreditShare // what of the scores it is trained for; nil: the reward
}

// parts returns the parts of the group's samples that have advantages.
func (g *group) parts() (list []part) {
	for i := range g.spec.Stages {
		if s := &g.spec.Stages[i]; s.Trains() {
			list = append(list, part{s.Name, s.Kind, s.Every, s.Credit})
		}
	}
	return list
}

// estimateCredits returns, for each of the groups at the given indices, the advantages of its parts; nil for a group
// without stages. estimateAlike calls it for groups of the same scale. The error is the estimator's: the groups fail.
func estimateCredits(cfg estimator.Config, groups []*group, at []int) ([][]schemas.Credit, error) {
	type compared struct {
		part    part
		sets    []estimator.Rewards // of each group
		credits []*schemas.Credit   // of each set
	}
	out := make([][]schemas.Credit, len(at))
	var list []*compared
	of := map[string]*compared{} // by what their samples have in common
	for k, i := range at {
		parts := groups[i].parts()
		if len(parts) > 0 { // absent, not empty
			out[k] = make([]schemas.Credit, len(parts))
		}
		for n, p := range parts {
			credit := &out[k][n]
			set := groups[i].rewardsOf(p, credit)
			if len(set.Values) == 0 {
				continue // no sample ran the stage
			}
			key := string(p.stage) + " " + p.kind
			if of[key] == nil {
				of[key] = &compared{part: p}
				list = append(list, of[key])
			}
			of[key].sets, of[key].credits = append(of[key].sets, set), append(of[key].credits, credit)
		}
	}
	for _, c := range list {
		results, err := estimatePart(cfg, c.sets)
		if err != nil {
			return nil, fmt.Errorf("stage %s: %w", c.part.stage, err)
		}
		for k, credit := range c.credits {
			setAdvantages(credit, results[k])
		}
	}
	return out, nil
}

// estimatePart computes the advantages of a part. A single sample in all has nothing to be compared with, also where
// the estimator compares over a batch: its advantage is 0.
func estimatePart(cfg estimator.Config, sets []estimator.Rewards) ([]estimator.Group, error) {
	cfg.Columns = 1 // sets have lengths
	if len(sets) == 1 && len(sets[0].Values) == 1 && cfg.NeedsTwo() {
		return []estimator.Group{{Advantages: []float64{0}}}, nil
	}
	return estimator.Estimate(cfg, sets)
}

// setAdvantages puts advantages in the place of the rewards that they are of.
func setAdvantages(credit *schemas.Credit, result estimator.Group) {
	next := 0
	for i := range credit.Values {
		if credit.Values[i] != nil {
			credit.Values[i] = &result.Advantages[next]
			next++
		}
	}
}

// rewardsOf returns what the estimator needs of the samples of a part, and sets the credit: its values are the rewards
// of these samples, nil where there is none.
func (g *group) rewardsOf(p part, credit *schemas.Credit) (set estimator.Rewards) {
	means, lengths := make([]segment, g.size/p.every), make([]int, g.size/p.every)
	for _, s := range g.members() {
		steps, ran := s.stageSteps(p.stage)
		if !s.scored || !ran {
			continue
		}
		means[s.index/p.every].add(s.credited(g.spec.Reward, p.shares))
		lengths[s.index/p.every] = max(steps, 1)
	}
	*credit = schemas.Credit{Stage: p.stage, Values: make([]*float64, len(means))}
	if p.every > 1 {
		credit.Every = p.every
	}
	for i := range means {
		x := &means[i]
		if x.leaves == 0 {
			continue
		}
		x.divide()
		credit.Values[i] = &x.reward
		set.Values, set.Scores = append(set.Values, x.reward), append(set.Scores, x.scores)
		set.Lengths = append(set.Lengths, lengths[i])
	}
	return set
}

// credited returns what a scored sample has for a part, and the scores that go into it: its reward, or the sum of the
// part's shares of the scores.
func (s *sample) credited(specs []schemas.RewardSpec, shares []schemas.CreditShare) (sum float64, scores []float64) {
	if len(shares) == 0 {
		return s.reward, s.scores
	}
	for _, share := range shares {
		k := slices.IndexFunc(specs, func(r schemas.RewardSpec) bool { return r.Name == share.Reward })
		if k >= 0 && !math.IsNaN(s.scores[k]) {
			sum += float64(share.Weight * s.scores[k])
		}
	}
	return sum, s.scores
}

// stageSteps returns how many steps of a sample are trained in all rounds of a stage, of a text the tokens that it
// generated, and whether the stage ran for it.
func (s *sample) stageSteps(name schemas.Stage) (steps int, ran bool) {
	for i := range s.stages {
		x := &s.stages[i]
		if of, _ := x.Stage.Split(); of == name {
			steps, ran = steps+int(or(x.Tokens, x.TrainedSteps)), true
		}
	}
	return steps, ran
}

// results returns the stages that ran for a sample, as its member has them.
func (s *sample) results() (list []schemas.StageResult) {
	for i := range s.stages {
		list = append(list, s.stages[i].StageResult)
	}
	return list
}

// laneFacts are what the rules of a group ask of one stage. They hold for each lane by itself, and for the samples that
// ran there.
type laneFacts struct {
	stage          *schemas.GroupStage
	oldest, newest int64 // versions of its weights
	first          *sample
	digest         string // of the schedule of the first sample
	schedule       string // says which two samples ran under different schedules; empty: none did
}

// lanes returns the facts of the stages that a lane made of scored samples, in all rounds.
func (g *group) lanes() (list []laneFacts) {
	for i := range g.spec.Stages {
		f := laneFacts{stage: &g.spec.Stages[i]}
		if f.stage.Kind == schemas.StageInteraction {
			continue
		}
		for _, s := range g.members() {
			f.add(s)
		}
		if f.first != nil {
			list = append(list, f)
		}
	}
	return list
}

// add adds the rounds of a sample, if it is scored.
func (f *laneFacts) add(s *sample) {
	for i := range s.stages {
		x := &s.stages[i]
		if of, _ := x.Stage.Split(); of != f.stage.Name || !s.scored {
			continue
		}
		if f.first == nil {
			f.first, f.digest, f.oldest = s, x.ScheduleDigest, x.PolicyVersionMin
		}
		f.oldest, f.newest = min(f.oldest, x.PolicyVersionMin), max(f.newest, x.PolicyVersionMax)
		if x.ScheduleDigest != f.digest && f.schedule == "" {
			f.schedule = fmt.Sprintf("samples %d and %d were sampled under different schedules (%.12s and %.12s)",
				f.first.index, s.index, f.digest, x.ScheduleDigest)
		}
	}
}

// checkStages returns why the samples of a stage may not be compared, "" if they may: their versions are too far apart,
// or they ran under different schedules.
func (g *group) checkStages(policy *schemas.GroupPolicy) string {
	for _, f := range g.lanes() {
		if span := f.newest - f.oldest + 1; span > *policy.MaxPolicySpan {
			return fmt.Sprintf("stage %s: policy versions %d to %d are a span of %d; max_policy_span is %d",
				f.stage.Name, f.oldest, f.newest, span, *policy.MaxPolicySpan)
		}
		if f.schedule != "" && !policy.MixedSchedules {
			return fmt.Sprintf("stage %s: %s", f.stage.Name, f.schedule)
		}
	}
	return ""
}

// setStaleStage sets why a stage of the group is too old for max_policy_lag: by the versions that its lane served when
// the last sample was scored, at the given time.
func (w *worker) setStaleStage(ctx context.Context, g *group, last time.Time, most int64) error {
	g.staleStage = ""
	for _, f := range g.lanes() {
		of := &group{lane: f.stage.Lane}
		if err := w.setServed(ctx, of, last, f.oldest, most); err != nil {
			return err
		}
		if of.lag(f.oldest) > most {
			g.staleStage = fmt.Sprintf("stage %s: %s", f.stage.Name, of.whyStale(f.oldest, most))
			return nil
		}
	}
	return nil
}
