package prove

import (
	"fmt"
	"iter"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// rewardsOf yields the stored rewards of an update's batches.
func (p *prover) rewardsOf(u *schemas.Update) iter.Seq[*schemas.Reward] {
	return func(yield func(*schemas.Reward) bool) {
		for _, id := range u.Batches {
			if p.archive.batches[id] == nil {
				continue // checkBatch says so
			}
			for _, uid := range p.archive.batches[id].UIDs {
				for _, r := range p.archive.rewards[uid] {
					if !yield(r) {
						return
					}
				}
			}
		}
	}
}

// checkSums adds the link that the rewards of an update's batches are the weighted sums of their scores, and those
// that the results of the groups have.
func (p *prover) checkSums(u *schemas.Update, of string) {
	if !p.asked(LinkSums, of) {
		return
	}
	sums := 0
	for r := range p.rewardsOf(u) {
		want, at := combine(r.Group.Reward, r.Scores), fmt.Sprintf("%s #%d", r.UID, r.SampleIndex)
		if !same(r.Reward, want) {
			p.add(LinkSums, of, Broken, "%s: its scores give %s, its reward is %s", at, number(want), number(r.Reward))
			return
		}
		a := p.archive.advantages[r.UID]
		if a == nil || r.SampleIndex >= int64(len(a.Members)) || a.Members[r.SampleIndex].TrajectorySeq == 0 {
			continue // it came when the group had closed
		}
		if m := &a.Members[r.SampleIndex]; !same(m.Reward, r.Reward) {
			p.add(LinkSums, of, Broken, "%s: its reward is %s, the result of its group has %s", at, number(r.Reward),
				number(m.Reward))
			return
		}
		sums++
	}
	if sums == 0 {
		p.add(LinkSums, of, Unchecked, "no reward of its batches is in the archive")
		return
	}
	p.add(LinkSums, of, Holds, "%d rewards are the weighted sums of their scores, and those of the groups' results",
		sums)
}

// combine returns the weighted sum of the scores of functions; nil: a required one is missing.
func combine(functions []schemas.RewardSpec, scores []schemas.Score) *float64 {
	if len(scores) != len(functions) {
		return nil // of a sample that failed
	}
	parts := make([]scorer.Part, len(scores))
	for i, spec := range functions {
		parts[i] = scorer.Part{Name: spec.Name, Weight: *spec.Weight, Required: *spec.Required}
		if s := &scores[i]; s.Value == nil || s.Name != spec.Name || s.Weight != *spec.Weight {
			parts[i].Err = fmt.Errorf("no score: %s", s.Error)
		} else {
			parts[i].Value = *s.Value
		}
	}
	if len(parts) == 0 { // without functions the reward is 0
		return new(0.0)
	}
	sum, err := scorer.Combine(parts)
	if err != nil || math.Abs(sum) > schemas.MaxScore {
		return nil
	}
	return &sum
}

// checkRatings adds the link that what functions said of whole groups is what the rewards of an update's batches were
// made of: each score is that of the stored answer, for the trajectory that it names, and no other. Where no function
// of these groups rates whole ones, there is no link.
func (p *prover) checkRatings(u *schemas.Update, of string) {
	scores, answers := 0, map[string]bool{}
	for r := range p.rewardsOf(u) {
		for i, spec := range r.Group.Reward {
			if spec.GroupMin == 0 || i >= len(r.Scores) {
				continue // a sample that failed has no scores
			}
			if scores == 0 && !p.asked(LinkRatings, of) {
				return
			}
			scores, answers[fmt.Sprint(r.UID, i)] = scores+1, true
			if verdict, why := p.checkRating(r, i); verdict != Holds {
				p.add(LinkRatings, of, verdict, "%s #%d: %s: %s", r.UID, r.SampleIndex, spec.Name, why)
				return
			}
		}
	}
	if scores > 0 {
		p.add(LinkRatings, of, Holds, "%d scores are those of %d stored answers about whole groups", scores,
			len(answers))
	}
}

// checkRating compares score i of a reward with the stored answer of its function.
func (p *prover) checkRating(r *schemas.Reward, i int) (verdict, why string) {
	s, spec := &r.Scores[i], r.Group.Reward[i]
	all := p.archive.ratings[r.UID]
	at := slices.IndexFunc(all, func(e *schemas.Rating) bool { return e.Function == int64(i) })
	if at < 0 {
		if s.Value == nil {
			return Holds, "" // it had no sample to see
		}
		return Unchecked, "what it said of the group is not in the archive"
	}
	e := all[at]
	if e.Name != spec.Name || e.Name != s.Name || e.GroupSize != r.GroupSize {
		return Broken, fmt.Sprintf("the stored answer is of %s about %d samples", e.Name, e.GroupSize)
	}
	seq := r.TrajectorySeq
	for _, stage := range r.Stages {
		if stage.Stage == s.Stage {
			seq = stage.TrajectorySeq
		}
	}
	k := slices.IndexFunc(e.Members, func(m schemas.RatedMember) bool {
		return m.TrajectorySeq == seq && m.Stage == s.Stage
	})
	named := slices.ContainsFunc(e.Members, func(m schemas.RatedMember) bool { return m.SampleIndex == r.SampleIndex })
	switch {
	case k < 0 && named && s.Value != nil:
		return Broken, fmt.Sprintf("the stored answer is about another trajectory than %d", seq)
	case k < 0 && s.Value != nil:
		return Broken, fmt.Sprintf("%s is scored, and the stored answer is not about it", number(s.Value))
	case k < 0:
		return Holds, "" // it came too late, or has nothing to see
	case !same(e.Members[k].Value, s.Value):
		return Broken, fmt.Sprintf("%s is scored, and %s is the stored answer", number(s.Value),
			number(e.Members[k].Value))
	case len(e.Preferences) > 0 && !same(e.Members[k].Value, winRate(e, k)):
		return Broken, fmt.Sprintf("%s is the stored answer, and its comparisons of members give %s",
			number(e.Members[k].Value), number(winRate(e, k)))
	case s.Value != nil && (s.Members != int64(len(e.Members)) || s.Version != e.Version):
		return Broken, fmt.Sprintf("version %q among %d samples is scored, and the stored answer is of %q among %d",
			s.Version, s.Members, e.Version, len(e.Members))
	}
	if t := p.archive.trajectories[e.Members[k].TrajectorySeq]; t == nil || t.UID != r.UID || s.Stage != "" &&
		t.Stage != s.Stage {
		return Broken, fmt.Sprintf("trajectory %d of the stored answer is none of the group", seq)
	}
	return Holds, ""
}

// winRate returns the score of member k by what an answer compared; nil: it compared it with none.
func winRate(e *schemas.Rating, k int) *float64 {
	place := func(sample int64) int {
		return slices.IndexFunc(e.Members, func(m schemas.RatedMember) bool { return m.SampleIndex == sample })
	}
	var list []scorer.Preference
	for _, x := range e.Preferences {
		list = append(list, scorer.Preference{A: place(x.A), B: place(x.B), P: x.P})
	}
	if r := scorer.WinRates(len(e.Members), list)[k]; r.Err == nil {
		return &r.Value
	}
	return nil
}
