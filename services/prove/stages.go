package prove

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/rescore"
	"github.com/meander-rl/meander/services/reward"
)

// digestsOf returns what an update that learned from these groups may name: that of their batch; of samples of several
// stages that of each stage that is trained, as its trainer has it, and that of all of them. lacks says what is not in
// the archive.
func (p *prover) digestsOf(groups []schemas.TrainedGroup) (digests map[string]string, lacks string) {
	of, trained := map[schemas.Stage][]schemas.TrainedGroup{}, []schemas.Stage{}
	for i, g := range groups {
		staged := slices.ContainsFunc(g.Members, func(m schemas.Member) bool { return len(m.Stages) > 0 })
		for _, c := range g.Credits {
			if staged && i == 0 && !slices.Contains(trained, c.Stage) {
				trained = append(trained, c.Stage)
			}
		}
		missing := ""
		if !staged {
			groups[i].Trajectories, missing = p.trajectoriesOf(g.Advantage)
			lacks = cmp.Or(lacks, missing)
		}
		for _, name := range trained {
			s := schemas.TrainedGroup{Advantage: ofStage(g.Advantage, name)}
			s.Trajectories, missing = p.trajectoriesOf(s.Advantage)
			lacks, of[name] = cmp.Or(lacks, missing), append(of[name], s)
		}
	}
	switch {
	case lacks != "":
		return nil, lacks
	case len(trained) == 0:
		return map[string]string{"": schemas.BatchDigest(groups)}, ""
	}
	digests = map[string]string{}
	var all []string // as Python shows a list of pairs
	for _, name := range slices.Sorted(slices.Values(trained)) {
		digest := schemas.BatchDigest(of[name])
		digests[" for stage "+string(name)] = digest
		all = append(all, fmt.Sprintf("('%s', '%s')", name, digest))
	}
	sum := sha256.Sum256([]byte("[" + strings.Join(all, ", ") + "]"))
	digests[" for all stages"] = hex.EncodeToString(sum[:])
	return digests, ""
}

// trajectoriesOf returns the trajectories of the members of a result; lacks: one is not in the archive.
func (p *prover) trajectoriesOf(a *schemas.Advantage) (list []*schemas.Trajectory, lacks string) {
	for _, m := range a.Members {
		t := p.archive.trajectories[m.TrajectorySeq]
		if t == nil && m.TrajectorySeq > 0 {
			return nil, fmt.Sprintf("the trajectory of %s #%d is not in the archive", a.UID, m.SampleIndex)
		}
		list = append(list, t)
	}
	return list, ""
}

// ofStage returns the result of a group as that of one stage, as a trainer of the stage learns from it: its members are
// the trajectories of the stage, of all rounds, with the advantages of the stage, or the mean of those of its tracks,
// and the mean reward of the samples that they lead to.
func ofStage(a *schemas.Advantage, name schemas.Stage) *schemas.Advantage {
	out := &schemas.Advantage{UID: a.UID, Estimator: a.Estimator}
	var mine []schemas.Credit
	for _, c := range a.Credits {
		if c.Stage != name {
			continue
		}
		if mine = append(mine, c); c.Track != "" {
			out.Credits = append(out.Credits, c)
		}
	}
	type place struct{ index, round int64 }
	leaves, places := map[place][]*schemas.Member{}, []place{}
	ran := map[place]schemas.StageResult{}
	for i := range a.Members {
		for _, s := range a.Members[i].Stages {
			of, round := s.Stage.Split()
			if at := (place{s.SampleIndex, round}); of == name {
				if len(leaves[at]) == 0 {
					ran[at], places = s, append(places, at)
				}
				leaves[at] = append(leaves[at], &a.Members[i])
			}
		}
	}
	slices.SortFunc(places, func(a, b place) int {
		return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(a.round, b.round))
	})
	for _, at := range places {
		m := schemas.Member{
			SampleIndex: at.index, Status: leaves[at][0].Status, TrajectorySeq: ran[at].TrajectorySeq,
		}
		var values, rewards []*float64
		for _, c := range mine {
			if k := at.index / max(c.Every, 1); k < int64(len(c.Values)) {
				values = append(values, c.Values[k])
			}
			for _, s := range c.Steps {
				if c.Track == "" && s.Stage == ran[at].Stage && s.SampleIndex == at.index {
					m.StepAdvantages = s.Advantages
				}
			}
		}
		for _, leaf := range leaves[at] {
			rewards = append(rewards, leaf.Reward)
		}
		if m.Advantage, m.Reward = mean(values), mean(rewards); m.Advantage != nil {
			m.Status = schemas.StatusScored
		}
		out.Members = append(out.Members, m)
	}
	return out
}

// mean returns the mean of the numbers that are there; nil: none is.
func mean(values []*float64) *float64 {
	sum, n := 0.0, 0
	for _, v := range values {
		if v != nil {
			sum, n = sum+*v, n+1
		}
	}
	if n == 0 {
		return nil
	}
	return new(sum / float64(n))
}

// copyStages stores the trajectories of groups with several stages in the run of a pass, where what scores a sample
// looks for its stages, and returns the last one of each sample.
func (p *prover) copyStages(ctx context.Context, s *rescore.Source, pass schemas.Run, groups []schemas.TrainedGroup,
) (list []reward.PassSample, err error) {
	for _, g := range groups {
		made, seqs := view.Made{}, map[*schemas.Trajectory]uint64{}
		for _, t := range p.archive.trajectories {
			if t.UID != g.UID || len(t.Group.Stages) == 0 {
				continue
			}
			own := new(*t)
			s.Join(own, pass)
			ack, err := p.bus.Publish(ctx, own)
			if err != nil {
				return nil, err
			}
			made.Add(own)
			seqs[own] = ack.Seq
		}
		for uid, i := range made.Samples() {
			of, ended := made.Of(uid, i)
			if !ended {
				continue
			}
			last := of[len(of)-1]
			x := reward.PassSample{Seq: seqs[last], Index: last.SampleIndex}
			if !slices.Contains(list, x) {
				list = append(list, x)
			}
		}
	}
	return list, nil
}
