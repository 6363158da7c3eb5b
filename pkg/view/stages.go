package view

import (
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// Made are stored trajectories of groups, by stage and sample.
type Made map[schemas.UID]map[schemas.Place]*schemas.Trajectory

// Add adds a trajectory.
func (m Made) Add(t *schemas.Trajectory) {
	if m[t.UID] == nil {
		m[t.UID] = map[schemas.Place]*schemas.Trajectory{}
	}
	m[t.UID][t.Place()] = t
}

// Of returns the trajectories that led to a sample, in the order of its stages; one without stages.
func (m Made) Of(uid schemas.UID, sample int64) []*schemas.Trajectory {
	of := m[uid]
	for _, one := range of {
		if len(one.Group.Stages) > 0 {
			_, made, _ := stages.Open(&one.Group, sample, func(at schemas.Place) *schemas.Trajectory { return of[at] })
			return made
		}
		break // all have the same group
	}
	if t := of[schemas.Place{Stage: schemas.StageMain, SampleIndex: sample}]; t != nil {
		return []*schemas.Trajectory{t}
	}
	return nil
}

// Standing returns which of the trajectories that led to a sample stands for it (stages.Standing); nil: none.
func Standing(made []*schemas.Trajectory) *schemas.Trajectory {
	if k := stages.Standing(made); k >= 0 {
		return made[k]
	}
	return nil
}
