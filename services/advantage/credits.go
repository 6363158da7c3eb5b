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

// Each stage of a sample that is trained has advantages of its own. The reward of a sample of a stage is the mean of
// what its leaves, the samples of the group that it leads to, have for that stage: their reward, or the weighted sum of
// the scores that the stage names as its credit. The group's estimator compares the samples of one stage. A later round
// of a stage has the advantages of its first.

// estimateCredits returns, for each of the groups at the given indices, the advantages of its stages; nil for a group
// without stages. estimateAlike calls it for groups of the same scale. The error is the estimator's: the groups fail.
func estimateCredits(cfg estimator.Config, groups []*group, at []int) ([][]schemas.Credit, error) {
	out := make([][]schemas.Credit, len(at))
	var names []schemas.Stage
	for _, i := range at {
		for _, s := range groups[i].spec.Stages {
			if s.Trains() && !slices.Contains(names, s.Name) {
				names = append(names, s.Name)
			}
		}
	}
	for _, name := range names {
		var sets []estimator.Rewards
		var of [][]*float64 // values of the samples of a set that have a reward, in its order
		var where []*float64
		c := cfg
		for k, i := range at {
			g := groups[i]
			n := g.spec.StageIndex(name)
			if n < 0 || !g.spec.Stages[n].Trains() {
				continue
			}
			credit := schemas.Credit{Stage: name, Values: make([]*float64, g.size/g.spec.Stages[n].Every)}
			if every := g.spec.Stages[n].Every; every > 1 {
				credit.Every = every
			}
			set, columns := g.stageRewards(n, credit.Values, &where)
			c.Columns = max(columns, 1)
			sets, of = append(sets, set), append(of, where)
			out[k], where = append(out[k], credit), nil
		}
		results, err := estimator.Estimate(c, sets)
		if err != nil {
			return nil, fmt.Errorf("stage %s: %w", name, err)
		}
		for k, r := range results {
			for n, value := range of[k] {
				*value = r.Advantages[n]
			}
		}
	}
	return out, nil
}

// stageRewards returns what the estimator needs of the samples of stage n, and how many steps of them are trained. It
// sets the values of those that have a reward, and appends them to where.
func (g *group) stageRewards(n int, values []*float64, where *[]*float64) (set estimator.Rewards, columns int) {
	stage := &g.spec.Stages[n]
	members := g.members()
	needs := estimator.PropertiesOf(g.spec.Advantage.Estimator).Scores
	for i := range values {
		leaves, sum, scores, length := 0, 0.0, make([]float64, len(g.spec.Reward)), 0
		for _, s := range members {
			if !s.scored || s.index/stage.Every != int64(i) {
				continue
			}
			leaves++
			sum += s.stageReward(g.spec, stage)
			for k, score := range s.scores {
				scores[k] += score
			}
			length, columns = s.stageLength(stage.Name)
		}
		if leaves == 0 {
			continue
		}
		values[i] = new(0.0)
		*where = append(*where, values[i])
		set.Values = append(set.Values, sum/float64(leaves))
		if stage.Kind == schemas.StageText {
			set.Lengths = append(set.Lengths, max(length, 1))
		}
		if needs {
			for k := range scores {
				scores[k] /= float64(leaves)
			}
			set.Scores = append(set.Scores, scores)
		}
	}
	return set, columns
}

// stageReward returns what a scored sample has for a stage: its reward, or the sum of the stage's shares of the scores.
func (s *sample) stageReward(g *schemas.Group, stage *schemas.GroupStage) float64 {
	if len(stage.Credit) == 0 {
		return s.reward
	}
	sum := 0.0
	for _, share := range stage.Credit {
		k := slices.IndexFunc(g.Reward, func(r schemas.RewardSpec) bool { return r.Name == share.Reward })
		if k >= 0 && !math.IsNaN(s.scores[k]) {
			sum += share.Weight * s.scores[k]
		}
	}
	return sum
}

// stageLength returns how many tokens a sample generated in all rounds of a stage, and how many steps of one are
// trained.
func (s *sample) stageLength(name schemas.Stage) (tokens, steps int) {
	for i := range s.stages {
		x := &s.stages[i]
		if of, _ := x.Stage.Split(); of == name {
			tokens, steps = tokens+int(or(x.Tokens, 0)), int(x.TrainedSteps)
		}
	}
	return tokens, steps
}

// results returns the stages that ran for a sample, as its member has them.
func (s *sample) results() (list []schemas.StageResult) {
	for i := range s.stages {
		list = append(list, s.stages[i].StageResult)
	}
	return list
}

// lane is what the rules of a group say of one stage: they hold for each lane by itself.
type laneFacts struct {
	oldest, newest int64
	first          *sample
	schedule       string
}

// checkStages returns why the samples of a stage may not be compared, "" if they may: their versions are too far apart,
// or they ran under different schedules.
func (g *group) checkStages(policy *schemas.GroupPolicy) string {
	for _, stage := range g.spec.Stages {
		facts := g.laneFacts(stage.Name)
		if facts.first == nil || stage.Kind == schemas.StageInteraction {
			continue
		}
		if span := facts.newest - facts.oldest + 1; span > *policy.MaxPolicySpan {
			return fmt.Sprintf("stage %s: policy versions %d to %d are a span of %d; max_policy_span is %d", stage.Name,
				facts.oldest, facts.newest, span, *policy.MaxPolicySpan)
		}
		if facts.schedule != "" && !policy.MixedSchedules {
			return fmt.Sprintf("stage %s: %s", stage.Name, facts.schedule)
		}
	}
	return ""
}

// laneFacts returns the versions of a stage's scored samples in all rounds, and in schedule which two of them ran under
// different ones.
func (g *group) laneFacts(name schemas.Stage) (f laneFacts) {
	digest := ""
	for _, s := range g.members() {
		for i := range s.stages {
			x := &s.stages[i]
			if of, _ := x.Stage.Split(); of != name || !s.scored {
				continue
			}
			if f.first == nil {
				f.first, digest, f.oldest = s, x.ScheduleDigest, x.PolicyVersionMin
			}
			f.oldest, f.newest = min(f.oldest, x.PolicyVersionMin), max(f.newest, x.PolicyVersionMax)
			if x.ScheduleDigest != digest && f.schedule == "" {
				f.schedule = fmt.Sprintf("samples %d and %d were sampled under different schedules (%.12s and %.12s)",
					f.first.index, s.index, digest, x.ScheduleDigest)
			}
		}
	}
	return f
}

// setStaleStage sets why a stage of the group is too old for max_policy_lag: by the versions that its lane served when
// the last sample was scored, at the given time.
func (w *worker) setStaleStage(ctx context.Context, g *group, last time.Time, most int64) error {
	g.staleStage = ""
	for _, stage := range g.spec.Stages {
		facts := g.laneFacts(stage.Name)
		if stage.Kind == schemas.StageInteraction || facts.first == nil {
			continue
		}
		of := &group{lane: stage.Lane}
		if err := w.setServed(ctx, of, last, facts.oldest, most); err != nil {
			return err
		}
		if of.lag(facts.oldest) > most {
			g.staleStage = fmt.Sprintf("stage %s: %s", stage.Name, of.whyStale(facts.oldest, most))
			return nil
		}
	}
	return nil
}
