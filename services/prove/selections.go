package prove

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/reward"
)

// checkSelections adds the link that the rewards at steps of an update's groups are the weighted sums of their scores,
// that the rule of each group chooses by them the samples that went on, and that these and no others did. Where no
// function judged samples in the middle there is no link.
func (p *prover) checkSelections(groups []schemas.TrainedGroup, of string) {
	rewards, choices, stopped, asked := 0, 0, 0, false
	for _, g := range groups {
		for i, t := range g.Trajectories {
			if t == nil || len(t.Group.JudgedSteps()) == 0 {
				continue
			}
			if !asked && !p.asked(LinkSelections, of) {
				return
			}
			asked = true
			n, ended, verdict, why := p.checkJudged(t)
			if verdict != Holds {
				p.add(LinkSelections, of, verdict, "%s #%d: %s", g.UID, i, why)
				return
			}
			rewards += n
			if ended {
				stopped++
			}
		}
		for _, e := range p.archive.selections[g.UID] {
			if verdict, why := p.checkSelection(e, g.Trajectories); verdict != Holds {
				p.add(LinkSelections, of, verdict, "%s, step %d: %s", g.UID, e.StepIndex, why)
				return
			}
			choices++
		}
	}
	if asked {
		p.add(LinkSelections, of, Holds, "%d rewards at steps are the weighted sums of their scores; by %d choices of "+
			"rules, made again, %d samples ended and the others went on", rewards, choices, stopped)
	}
}

// checkJudged compares what was said of a sample in the middle with what became of it: n are the rewards at steps,
// ended says that a choice of its group ended it.
func (p *prover) checkJudged(t *schemas.Trajectory) (n int, ended bool, verdict, why string) {
	begin, _ := t.Segment()
	for _, k := range t.Group.JudgedSteps() {
		r, e := p.archive.stepReward(t, k), p.archive.selection(t.UID, k)
		switch {
		case r == nil && int64(len(t.Steps)) > k-begin:
			return n, ended, Unchecked, fmt.Sprintf("its reward at step %d is not in the archive", k)
		case r == nil:
			continue // it ended before
		}
		n++
		if want := combine(judgedAt(t.Group.Reward, k), r.Scores); !same(r.Reward, want) {
			return n, ended, Broken, fmt.Sprintf("its scores at step %d give %s, its reward there is %s", k,
				number(want), number(r.Reward))
		}
		if rule := p.ruleOf(t.UID); e == nil && rule.ByReward() && rule.StepIndex == k {
			return n, ended, Unchecked, fmt.Sprintf("which samples ended at step %d is not in the archive", k)
		}
		chosen := ""
		if e != nil {
			chosen = e.Stopped(t.SampleIndex)
		}
		here := t.StopReason == schemas.StopPruned && int64(len(t.Steps)) == k-begin &&
			strings.HasPrefix(t.Error, fmt.Sprintf("step %d: reward ", k))
		switch {
		case chosen != "" && (!here || t.Error != chosen):
			return n, ended, Broken, fmt.Sprintf("it was chosen to end (%s), its trajectory has %d steps and is %s: %s",
				chosen, len(t.Steps), t.StopReason, t.Error)
		case chosen == "" && here:
			return n, ended, Broken, fmt.Sprintf("it ended (%s), and was not chosen to", t.Error)
		case e != nil && !e.FollowedBy(t):
			return n, ended, Broken, fmt.Sprintf("it %s, its trajectory did not", e.Of(t.SampleIndex))
		}
		ended = ended || chosen != ""
	}
	return n, ended, Holds, ""
}

// checkSelection makes the choice of a rule again, of the stored rewards at its step.
func (p *prover) checkSelection(e *schemas.Selection, trajectories []*schemas.Trajectory) (verdict, why string) {
	again, saved := slices.Clone(e.Members), int64(0)
	e.Rule.Select(again)
	for i, m := range e.Members {
		at := slices.IndexFunc(trajectories, func(t *schemas.Trajectory) bool {
			return t != nil && t.SampleIndex == m.SampleIndex
		})
		if at < 0 {
			return Unchecked, fmt.Sprintf("the trajectory of #%d is not in the archive", m.SampleIndex)
		}
		t := trajectories[at]
		switch r := p.archive.stepReward(t, e.StepIndex); {
		case r == nil:
			return Unchecked, fmt.Sprintf("the reward of #%d is not in the archive", m.SampleIndex)
		case !same(m.Reward, r.Reward):
			return Broken, fmt.Sprintf("#%d is chosen by reward %s, it has %s", m.SampleIndex, number(m.Reward),
				number(r.Reward))
		case !reflect.DeepEqual(m, again[i]):
			return Broken, fmt.Sprintf("#%d: %s is stored, the rule gives %s", m.SampleIndex, m, again[i])
		}
		if _, end := t.Segment(); m.Stopped != "" {
			saved += sampling.Evaluations(&t.Sampling, e.StepIndex, end)
		}
	}
	if saved != e.SavedEvaluations {
		return Broken, fmt.Sprintf("%d saved evaluations are stored, those that ended save %d", e.SavedEvaluations,
			saved)
	}
	return Holds, ""
}

// judgedAt returns the functions that judge samples at a step.
func judgedAt(all []schemas.RewardSpec, step int64) []schemas.RewardSpec {
	return slices.DeleteFunc(slices.Clone(all), func(r schemas.RewardSpec) bool { return !r.JudgedAt(step) })
}

// ruleOf returns the rule of a group's prompt for samples in the middle; nil: it has none, or is not in the archive.
func (p *prover) ruleOf(uid schemas.UID) *schemas.Prune {
	record := p.archive.records[uid]
	if record == nil || p.archive.prompts[record.Group.PromptSeq].Prompt == nil {
		return nil
	}
	return p.archive.prompts[record.Group.PromptSeq].Prune
}

// checkRule compares the rule by which a group was chosen from with that of the request that was made again.
func (p *prover) checkRule(r *schemas.Request) error {
	for _, e := range p.archive.selections[r.UID] {
		if rule := r.Prune; rule == nil || !reflect.DeepEqual(e.Rule, *rule) {
			return fmt.Errorf("the rule by which samples ended at step %d is not that of its prompt", e.StepIndex)
		}
	}
	return nil
}

// stepReward returns what was said of a sample at a step; nil: it is not in the archive.
func (a *archive) stepReward(t *schemas.Trajectory, step int64) *schemas.StepReward {
	i := slices.IndexFunc(a.stepRewards[t.UID], func(r *schemas.StepReward) bool {
		return r.SampleIndex == t.SampleIndex && r.StepIndex == step
	})
	if i < 0 {
		return nil
	}
	return a.stepRewards[t.UID][i]
}

// selection returns which samples of a group ended at a step; nil: none is in the archive.
func (a *archive) selection(uid schemas.UID, step int64) *schemas.Selection {
	i := slices.IndexFunc(a.selections[uid], func(e *schemas.Selection) bool { return e.StepIndex == step })
	if i < 0 {
		return nil
	}
	return a.selections[uid][i]
}

// stepsAgain has the functions that judged the samples of groups in the middle judge the stored predictions again; n
// are their scores.
func (p *prover) stepsAgain(ctx context.Context, groups []schemas.TrainedGroup,
) (n int, verdict, why string, err error) {
	verdict = Holds
	ctx = p.options.Log.WithContext(ctx)
	for _, g := range groups {
		for i, t := range g.Trajectories {
			for _, was := range p.archive.stepRewards[g.UID] {
				if t == nil || was.SampleIndex != t.SampleIndex || was.Status != schemas.StatusScored {
					continue
				}
				if p.judge == nil { // once for a proof: functions may load networks
					if p.judge, err = reward.NewJudge(ctx, p.options.Reward, p.bus, p.options.Log); err != nil {
						return n, "", "", err
					}
				}
				now, err := p.judge.Again(ctx, t, was)
				if err != nil {
					return n, "", "", err
				}
				n += len(was.Scores)
				v, what := compareScores(&schemas.Reward{Scores: was.Scores, Reward: was.Reward},
					&schemas.Reward{Scores: now.Scores, Reward: now.Reward})
				if v == Broken || v == Unchecked && verdict == Holds {
					verdict, why = v, fmt.Sprintf("%s #%d at step %d: %s", g.UID, i, was.StepIndex, what)
				}
			}
		}
	}
	return n, verdict, why, nil
}
