package advantage

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// A part is what of the samples has advantages of its own: a stage that is trained, in all its rounds, or one track of
// its states. The reward of a sample of a stage is the mean of what its leaves, the samples of the group that it leads
// to, have for the part: their reward, or the weighted sum of the scores that are its credit. The group's estimator
// compares the samples of a part with each other. A leaf that ended before a stage ran has nothing for it, and is
// compared with none there.
type part struct {
	schemas.GroupStage
	track  string                // "": all
	shares []schemas.CreditShare // what of the scores it is trained for; nil: the reward
}

// parts returns the parts of the group's samples that have advantages. Samples without stages are one, the stage main.
func (g *group) parts() (list []part) {
	for _, s := range g.spec.Stages {
		if s.Trains() {
			list = append(list, partsOf(s)...)
		}
	}
	if len(g.spec.Credit) > 0 {
		list = partsOf(schemas.GroupStage{Name: schemas.StageMain, Every: 1, Credit: g.spec.Credit})
	}
	return list
}

// partsOf returns the tracks that shares of a stage are for, or all of it.
func partsOf(s schemas.GroupStage) (list []part) {
	for _, share := range s.Credit {
		at := slices.IndexFunc(list, func(p part) bool { return p.track == share.Track })
		if at < 0 {
			at, list = len(list), append(list, part{GroupStage: s, track: share.Track})
		}
		list[at].shares = append(list[at].shares, share)
	}
	if len(list) == 0 {
		list = []part{{GroupStage: s}}
	}
	return list
}

// compared is what is compared with each other: the samples of a part, or the segments of a depth, of all groups of a
// scale.
type compared struct {
	stage  schemas.Stage
	config estimator.Config
	sets   []comparedSet
}

// comparedSet is what the estimator sees as a group: the samples of a group, or the children of a branch point.
type comparedSet struct {
	estimator.Rewards
	slots  []**float64             // for the advantages of its values
	points []*schemas.BranchGroup  // whose children it has
	credit *schemas.Credit         // of its values; nil: they are no samples
	rounds [][]schemas.StageScored // of each value
}

// add adds the samples of a credit, as sets of so many values, in whose place the advantages come.
func (c *compared) add(set estimator.Rewards, credit *schemas.Credit, rounds [][]schemas.StageScored, width int) {
	for values := range slices.Chunk(credit.Values, width) {
		x := comparedSet{credit: credit}
		for i := range values {
			if values[i] != nil {
				x.slots = append(x.slots, &values[i])
			}
		}
		n := len(x.slots)
		x.Values, x.Scores, x.Lengths, x.rounds = set.Values[:n], set.Scores[:n], set.Lengths[:n], rounds[:n]
		if n > 0 {
			c.sets = append(c.sets, x)
		}
		set.Values, set.Scores, set.Lengths, rounds = set.Values[n:], set.Scores[n:], set.Lengths[n:], rounds[n:]
	}
}

// branched are the samples of a part that are the leaves of trees. The segments of each depth, before the first branch
// point and after each, are compared as those of a tree without stages (see estimateBranches): the ones before the
// first with those of the other trees.
type branched struct {
	part
	credit   *schemas.Credit
	rounds   [][]schemas.StageScored // of each value
	segments []schemas.Credit        // of each depth; none: they have the means of their leaves
}

// setSteps gives the trained steps of each sample the advantages of the segments that they are of.
func (b *branched) setSteps() {
	next := 0
	for i, v := range b.credit.Values {
		if v == nil {
			continue
		}
		x, all := &b.rounds[next][0], []float64(nil)
		next++
		for depth, n := range x.Segments[:min(len(x.Segments), len(b.Tree.Branches)+1)] {
			behind := int(b.Tree.LeavesBelow(depth))
			var of float64
			if at := i / behind; b.segments != nil {
				of = *b.segments[depth].Values[at]
			} else {
				of = meanOf(b.credit.Values[at*behind:][:behind])
			}
			all = append(all, slices.Repeat([]float64{of}, int(n))...)
		}
		if len(all) > 0 {
			b.credit.Steps = append(b.credit.Steps, schemas.CreditSteps{
				Stage: x.Stage, SampleIndex: x.SampleIndex, Advantages: all,
			})
		}
	}
}

// estimateCredits returns, for each of the groups at the given indices, the advantages of its parts; nil for a group
// without. estimateAlike calls it for groups of the same scale. The error is the estimator's: the groups fail.
func estimateCredits(cfg estimator.Config, groups []*group, at []int) ([][]schemas.Credit, error) {
	out := make([][]schemas.Credit, len(at))
	var list []*compared
	of := map[string]*compared{} // by what they must have in common
	compare := func(g *group, p part, credit *schemas.Credit, depth, width int) [][]schemas.StageScored {
		set, rounds := g.rewardsOf(p, credit)
		if len(set.Values) == 0 {
			return nil // no sample ran the stage
		}
		c := p.config(cfg)
		key := fmt.Sprint(p.Name, " ", p.Kind, " ", p.track, " ", depth, " ", c.Weights)
		if of[key] == nil {
			of[key] = &compared{stage: p.Name, config: c}
			list = append(list, of[key])
		}
		of[key].add(set, credit, rounds, cmp.Or(width, len(credit.Values)))
		return rounds
	}
	var trees []*branched
	for k, i := range at {
		parts := groups[i].parts()
		if len(parts) > 0 { // absent, not empty
			out[k] = make([]schemas.Credit, len(parts))
		}
		for n, p := range parts {
			credit := &out[k][n]
			rounds := compare(groups[i], p, credit, -1, 0)
			if p.Tree == nil || rounds == nil {
				continue
			}
			b := &branched{part: p, credit: credit, rounds: rounds}
			trees = append(trees, b)
			scope := groups[i].spec.Advantage.BranchScope
			if scope == schemas.BranchLeaves {
				continue
			}
			b.segments = make([]schemas.Credit, len(p.Tree.Branches)+1)
			for depth := range b.segments {
				width := 0
				if depth > 0 && scope == schemas.BranchSiblings {
					width = int(p.Tree.Branches[depth-1].Width)
				}
				p.Every = b.Every * p.Tree.LeavesBelow(depth)
				compare(groups[i], p, &b.segments[depth], depth, width)
			}
		}
	}
	for _, c := range list {
		if err := c.estimate(); err != nil {
			return nil, fmt.Errorf("stage %s: %w", c.stage, err)
		}
	}
	for _, b := range trees {
		b.setSteps()
	}
	return out, nil
}

// config returns how samples of the part are compared, given how those of the group are: an estimator that weighs each
// score by itself has the weights of the part.
func (p part) config(cfg estimator.Config) estimator.Config {
	cfg.Columns = 1 // rewardsOf counts the steps of each sample
	if len(cfg.Weights) > 0 && len(p.shares) > 0 {
		cfg.Weights = nil
		for _, share := range p.shares {
			cfg.Weights = append(cfg.Weights, share.Weight)
		}
	}
	return cfg
}

// estimate puts advantages into the slots. A single sample in all has nothing to be compared with, also where the
// estimator compares over a batch: its advantage is 0.
func (c *compared) estimate() error {
	results := []estimator.Group{{Advantages: []float64{0}}}
	if len(c.sets) > 1 || len(c.sets[0].Values) > 1 || !c.config.NeedsTwo() {
		rewards := make([]estimator.Rewards, len(c.sets))
		for k := range c.sets {
			rewards[k] = c.sets[k].Rewards
		}
		var err error
		if results, err = estimator.Estimate(c.config, rewards); err != nil {
			return err
		}
	}
	for k, set := range c.sets {
		for i, slot := range set.slots {
			*slot = &results[k].Advantages[i]
			if all := results[k].StepAdvantages; all != nil && set.credit != nil {
				addSteps(set.credit, set.rounds[i], all[i])
			}
		}
		for _, p := range set.points {
			p.Std = new(results[k].Std)
		}
	}
	return nil
}

// addSteps adds the advantages of the trained steps of all rounds of a sample, one after the other.
func addSteps(credit *schemas.Credit, rounds []schemas.StageScored, all []float64) {
	for i := range rounds {
		if n := stepsOf(&rounds[i]); n > 0 {
			credit.Steps = append(credit.Steps, schemas.CreditSteps{
				Stage: rounds[i].Stage, SampleIndex: rounds[i].SampleIndex, Advantages: all[:n:n],
			})
			all = all[n:]
		}
	}
}

// rewardsOf returns what the estimator needs of the samples of a part that have a reward, and the rounds that ran for
// each. It sets the credit: its values are these rewards, nil for the other samples.
func (g *group) rewardsOf(p part, credit *schemas.Credit) (set estimator.Rewards, rounds [][]schemas.StageScored) {
	means, ran := make([]segment, g.size/p.Every), make([][]schemas.StageScored, g.size/p.Every)
	for _, s := range g.members() {
		if of := s.rounds(p.Name); s.scored && len(of) > 0 {
			means[s.index/p.Every].add(s.credited(g.spec.Reward, p.shares))
			ran[s.index/p.Every] = of
		}
	}
	*credit = schemas.Credit{Stage: p.Name, Track: p.track, Values: make([]*float64, len(means))}
	if p.Every > 1 {
		credit.Every = p.Every
	}
	for i := range means {
		x := &means[i]
		if x.leaves == 0 {
			continue
		}
		x.divide()
		credit.Values[i] = &x.reward
		steps := 0
		for k := range ran[i] {
			steps += stepsOf(&ran[i][k])
		}
		set.Values, set.Scores = append(set.Values, x.reward), append(set.Scores, x.scores)
		set.Lengths, rounds = append(set.Lengths, max(steps, 1)), append(rounds, ran[i])
	}
	return set, rounds
}

// credited returns what a scored sample has for a part, and the scores that go into it: its reward, or the sum of the
// part's shares of the scores. As in the reward, a score that is not required and failed is left out.
func (s *sample) credited(specs []schemas.RewardSpec, shares []schemas.CreditShare) (sum float64, scores []float64) {
	if len(shares) == 0 {
		return s.reward, s.scores
	}
	for _, share := range shares {
		score := missing
		if k := slices.IndexFunc(specs, func(r schemas.RewardSpec) bool { return r.Name == share.Reward }); k >= 0 {
			score = s.scores[k]
		}
		if scores = append(scores, score); !math.IsNaN(score) {
			sum += float64(share.Weight * score)
		}
	}
	return sum, scores
}

// rounds returns what ran of a stage for a sample, in order. A sample without stages is all of one, main.
func (s *sample) rounds(name schemas.Stage) (list []schemas.StageScored) {
	if len(s.stages) == 0 {
		return []schemas.StageScored{{
			StageResult: schemas.StageResult{Stage: schemas.StageMain, SampleIndex: s.index},
			Trained: schemas.Trained{
				TrainedSteps: s.trainedSteps, Tokens: s.tokens, ScheduleDigest: s.schedule,
				PolicyVersionMin: s.policyMin, PolicyVersionMax: s.policyMax,
			},
		}}
	}
	for i := range s.stages {
		if s.stages[i].Stage.Name() == name {
			list = append(list, s.stages[i])
		}
	}
	return list
}

// stepsOf returns how many steps of a stage are trained, of a text the tokens that it generated.
func stepsOf(x *schemas.StageScored) int { return int(or(x.Tokens, x.TrainedSteps)) }

// results returns the stages that ran for a sample, as its member has them.
func (s *sample) results() (list []schemas.StageResult) {
	for i := range s.stages {
		list = append(list, s.stages[i].StageResult)
	}
	return list
}

// laneFacts are what the rules of a group ask of one stage, or of samples without stages. They hold for each lane by
// itself, and for the samples that ran there.
type laneFacts struct {
	stage          *schemas.GroupStage
	oldest, newest int64 // versions of its weights
	first          *sample
	digest         string // of the schedule of the first sample
	schedule       string // says which two samples ran under different schedules; empty: none did
}

// says returns a sentence with the stage that it is about.
func (f *laneFacts) says(format string, args ...any) string {
	if f.stage.Name != schemas.StageMain {
		format = "stage " + string(f.stage.Name) + ": " + format
	}
	return fmt.Sprintf(format, args...)
}

// lanes returns the facts of what lanes made of scored samples, of each stage in all rounds.
func (g *group) lanes() (list []laneFacts) {
	all := g.spec.Stages
	if len(all) == 0 {
		all = []schemas.GroupStage{{Name: schemas.StageMain, Lane: g.of.Lane, Tenant: g.of.Tenant}}
	}
	for i := range all {
		f := laneFacts{stage: &all[i]}
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
	if !s.scored {
		return
	}
	for _, x := range s.rounds(f.stage.Name) {
		if f.first == nil {
			f.first, f.digest, f.oldest = s, x.ScheduleDigest, x.PolicyVersionMin
		}
		f.oldest, f.newest = min(f.oldest, x.PolicyVersionMin), max(f.newest, x.PolicyVersionMax)
		if x.ScheduleDigest != f.digest && f.schedule == "" {
			f.schedule = f.says("samples %d and %d were sampled under different schedules (%.12s and %.12s)",
				f.first.index, s.index, f.digest, x.ScheduleDigest)
		}
	}
}

// checkLanes returns why the samples of a lane may not be compared, "" if they may: they ran under different schedules,
// or their versions are too far apart.
func (g *group) checkLanes() string {
	policy := policyOf(g.spec)
	for _, f := range g.lanes() {
		if f.schedule != "" && !policy.MixedSchedules {
			return f.schedule
		}
		if span := f.newest - f.oldest + 1; span > *policy.MaxPolicySpan {
			return f.says("policy versions %d to %d are a span of %d; max_policy_span is %d", f.oldest, f.newest, span,
				*policy.MaxPolicySpan)
		}
	}
	return ""
}
