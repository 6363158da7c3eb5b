package prove

import (
	"fmt"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// checkRatings adds the link that what functions said of whole groups is what the rewards of an update's batches were
// made of: each score is that of the stored answer, for the trajectory that it names, and no other. Where no function
// of these groups rates whole ones, there is no link.
func (p *prover) checkRatings(u *schemas.Update, of string) {
	ratings, scores := 0, 0
	for _, id := range u.Batches {
		if p.archive.batches[id] == nil {
			continue // checkBatch says so
		}
		for _, uid := range p.archive.batches[id].UIDs {
			for _, r := range p.archive.rewards[uid] {
				for i, spec := range r.Group.Reward {
					if spec.GroupMin == 0 || i >= len(r.Scores) {
						continue // a sample that failed has no scores
					}
					if scores == 0 && !p.asked(LinkRatings, of) {
						return
					}
					scores++
					if verdict, why := p.checkRating(r, i); verdict != Holds {
						p.add(LinkRatings, of, verdict, "%s #%d: %s: %s", uid, r.SampleIndex, spec.Name, why)
						return
					}
				}
			}
			ratings += len(p.archive.ratings[uid])
		}
	}
	if scores > 0 {
		p.add(LinkRatings, of, Holds, "%d scores are those of %d stored answers about whole groups", scores, ratings)
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
