package schemas

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Prune ends samples in the middle: one whose log-probs so far are out of bounds, or those that the rewards of their
// group at the step leave out, unless these branch off. The group closes without those that end, as without samples
// that failed.
type Prune struct {
	// StepIndex is the boundary at which samples are judged: the steps before it have run.
	StepIndex int64 `msgpack:"step_index" range:"1..MaxSteps-1" flag:"prune-step"`
	// LogProbBelow prunes samples whose stochastic steps so far have a mean log-prob below this.
	LogProbBelow *float64 `msgpack:"log_prob_below,omitempty" flag:"prune-log-prob-below"`
	// LogProbAbove prunes those with one above this.
	LogProbAbove *float64 `msgpack:"log_prob_above,omitempty" flag:"prune-log-prob-above"`
	// RewardBelow prunes samples whose reward at the step is below this. A function has the step among its at_steps.
	RewardBelow *float64 `msgpack:"reward_below,omitempty" range:"-MaxScore..MaxScore" flag:"prune-reward-below"`
	// Keep is how many samples of the group go on, chosen by their rewards at the step.
	Keep *int64 `msgpack:"keep,omitempty" range:"1..MaxGroupSize" absent:"all, or what evaluations allows" flag:"prune-keep"`
	// Evaluations bounds those of the network that a group takes, in place of Keep: so many samples go on.
	Evaluations *int64 `msgpack:"evaluations,omitempty" range:"1.." absent:"any number" flag:"prune-evaluations"`
	// KeepBy chooses them: those of the highest rewards, or those whose rewards have the largest variance, of which
	// some are the highest and some the lowest, as in arXiv 2504.13818.
	KeepBy string `msgpack:"keep_by,omitempty" enum:"KeepRules" absent:"highest, with keep or evaluations" flag:"prune-keep-by"`
	// UnlessStdAbove has all of a group go on whose rewards at the step have a standard deviation above this: there
	// more samples tell more. So a group is large where that informs, and small where not.
	UnlessStdAbove *float64 `msgpack:"unless_std_above,omitempty" range:"0..MaxScore" absent:"whatever it is" flag:"prune-unless-std-above"`
	// Then has samples that the rewards leave out end, or branch off: each goes on from the state at the step of one
	// that was chosen, with its own noise, as in particle filters: from that of the best first, then of the next, in
	// turn. If none is chosen, all go on for themselves.
	Then string `msgpack:"then,omitempty" enum:"PruneEnds" absent:"end" flag:"prune-then"`
}

// What becomes of samples that Prune leaves out.
const (
	ThenEnd    = "end"
	ThenBranch = "branch"
)

// Rules by which Prune chooses the samples that go on.
const (
	KeepHighest = "highest"
	KeepSpread  = "spread"
)

// ByReward reports whether rewards at the step decide.
func (p *Prune) ByReward() bool {
	return p != nil && (p.RewardBelow != nil || p.Keep != nil || p.Evaluations != nil)
}

// BranchesOff reports whether samples that rewards leave out go on from others of their group.
func (p *Prune) BranchesOff() bool { return p != nil && p.Then == ThenBranch }

// ByLogProb reports whether log-probs decide.
func (p *Prune) ByLogProb() bool { return p.LogProbBelow != nil || p.LogProbAbove != nil }

// checkRules checks that there is a rule, and that its parts are of use.
func (p *Prune) checkRules(f *faults) {
	if !p.ByLogProb() && !p.ByReward() {
		f.add("log_prob_below", "null", "must be there, or log_prob_above, reward_below, keep or evaluations: "+
			"no sample would be pruned")
	}
	chooses := p.Keep != nil || p.Evaluations != nil
	if p.KeepBy != "" && !chooses {
		f.add("keep_by", quote(p.KeepBy), "must be absent without keep or evaluations")
	}
	if p.UnlessStdAbove != nil && !chooses {
		f.add("unless_std_above", formatFloat(*p.UnlessStdAbove), "must be absent without keep or evaluations")
	}
	switch {
	case !p.BranchesOff():
	case p.Evaluations != nil:
		f.add("then", quote(p.Then), "must be end beside evaluations: samples that branch off save none; give keep")
	case p.ByLogProb() || !p.ByReward():
		f.add("then", quote(p.Then), "must be end unless rewards alone decide: give keep or reward_below, and no "+
			"log_prob_below or log_prob_above")
	}
}

// Judge returns why a sample must end before step StepIndex, or "" if it goes on. logProbs [T] are the log-probs of its
// steps, nil for a step that did not run or is ode.
func (p *Prune) Judge(logProbs []*float64) string {
	sum, n := 0.0, 0
	for _, l := range logProbs[:min(int(p.StepIndex), len(logProbs))] {
		if l != nil {
			sum, n = sum+*l, n+1
		}
	}
	mean := sum / float64(n)
	switch {
	case n == 0:
	case p.LogProbBelow != nil && mean < *p.LogProbBelow:
		return fmt.Sprintf("step %d: mean log-prob %.6g of %d steps; must not be below %.6g", p.StepIndex, mean, n,
			*p.LogProbBelow)
	case p.LogProbAbove != nil && mean > *p.LogProbAbove:
		return fmt.Sprintf("step %d: mean log-prob %.6g of %d steps; must not be above %.6g", p.StepIndex, mean, n,
			*p.LogProbAbove)
	}
	return ""
}

// Select sets which members end at StepIndex, or go on from which others, by their rewards there. It depends on the
// members alone; of equal rewards the first go on.
func (p *Prune) Select(members []SelectedMember) {
	chosen := p.choose(members)
	if !p.BranchesOff() {
		return
	}
	turn := 0
	for i := range members {
		m := &members[i]
		if m.Stopped != "" && len(chosen) > 0 {
			m.Parent = new(members[chosen[turn%len(chosen)]].SampleIndex)
			turn++
		}
		m.Stopped = ""
	}
}

// choose sets which members do not go on for themselves, and returns those that were chosen to, the best first.
func (p *Prune) choose(members []SelectedMember) (left []int) {
	for i := range members {
		m := &members[i]
		switch m.Stopped, m.Parent = "", nil; {
		case m.Reward == nil:
		case p.RewardBelow != nil && *m.Reward < *p.RewardBelow:
			m.Stopped = fmt.Sprintf("step %d: reward %.6g; must not be below %.6g", p.StepIndex, *m.Reward,
				*p.RewardBelow)
		default:
			left = append(left, i)
		}
	}
	slices.SortStableFunc(left, func(a, b int) int { return cmp.Compare(*members[b].Reward, *members[a].Reward) })
	if p.Keep == nil || int64(len(left)) <= *p.Keep {
		return left
	}
	rewards := make([]float64, len(left)) // falling
	for i, of := range left {
		rewards[i] = *members[of].Reward
	}
	if _, std := meanStd(rewards); p.UnlessStdAbove != nil && std > *p.UnlessStdAbove {
		return left
	}
	keep := int(*p.Keep)
	high := keep
	if p.KeepBy == KeepSpread {
		high = widest(rewards, keep)
	}
	for _, of := range left[high : len(left)-(keep-high)] {
		members[of].Stopped = fmt.Sprintf("step %d: reward %.6g; %d of %d go on, by %s", p.StepIndex,
			*members[of].Reward, keep, len(left), cmp.Or(p.KeepBy, KeepHighest))
	}
	return slices.Delete(left, high, len(left)-(keep-high))
}

// widest returns how many of the highest rewards, which fall, have the largest variance together with the lowest, keep
// in all; of equal ones the most.
func widest(rewards []float64, keep int) (high int) {
	best := -1.0
	for n := keep; n >= 0; n-- {
		_, std := meanStd(slices.Concat(rewards[:n], rewards[len(rewards)-(keep-n):]))
		if std > best {
			best, high = std, n
		}
	}
	return high
}

// meanStd returns the mean and the standard deviation of a population.
func meanStd(of []float64) (mean, std float64) {
	for _, x := range of {
		mean += x / float64(len(of))
	}
	for _, x := range of {
		std += (x - mean) * (x - mean) / float64(len(of))
	}
	return mean, math.Sqrt(std)
}
