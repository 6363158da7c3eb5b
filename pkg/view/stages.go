package view

import (
	"context"
	"fmt"
	"iter"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
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

// Of returns the trajectories that led to a sample, in the order of its stages; one without stages. ended: no other
// stage comes after them.
func (m Made) Of(uid schemas.UID, sample int64) (made []*schemas.Trajectory, ended bool) {
	of := m[uid]
	for _, one := range of {
		if len(one.Group.Stages) > 0 {
			at := func(at schemas.Place) *schemas.Trajectory { return of[at] }
			_, made, open := stages.Open(&one.Group, sample, at)
			return made, !open
		}
		break // all have the same group
	}
	if t := of[schemas.Place{Stage: schemas.StageMain, SampleIndex: sample}]; t != nil {
		return []*schemas.Trajectory{t}, true
	}
	return nil, false
}

// Samples yields the samples of the groups of which something is made.
func (m Made) Samples() iter.Seq2[schemas.UID, int64] {
	return func(yield func(schemas.UID, int64) bool) {
		for uid, of := range m {
			size := int64(0)
			for _, t := range of {
				size = max(size, t.GroupSize)
			}
			for i := range size {
				if !yield(uid, i) {
					return
				}
			}
		}
	}
}

// Standing returns which of the trajectories that led to a sample stands for it (stages.Standing); nil: none.
func Standing(made []*schemas.Trajectory) *schemas.Trajectory {
	if k := stages.Standing(made); k >= 0 {
		return made[k]
	}
	return nil
}

// Ended returns the trajectory that stands for a sample, or ErrNotFound while the sample is being made.
func Ended(
	ctx context.Context, b *bus.Bus, run schemas.Run, uid schemas.UID, sample int64,
) (*schemas.Trajectory, error) {
	g, err := b.Group(ctx, run, uid)
	if err != nil || len(g.Group.Stages) == 0 {
		return client.New(b).Trajectory(ctx, run, uid, sample)
	}
	made, err := b.Made(ctx, run, uid, stages.Path(&g.Group, sample, "")...)
	if err != nil {
		return nil, err
	}
	at := func(at schemas.Place) *schemas.Trajectory { return made[at].Trajectory }
	_, of, open := stages.Open(&g.Group, sample, at)
	if open {
		return nil, fmt.Errorf("sample %d of group %s of run %s: %w", sample, uid, run, bus.ErrNotFound)
	}
	return Standing(of), nil
}

// StageLine is one stage of a sample, or of the samples that share it: what it was asked for, and what it made.
type StageLine struct {
	*Line
	Stage schemas.Stage `json:"stage"`
	// Kind is text, image or interaction. Lane made it; of an interaction it is the interaction's name.
	Kind string       `json:"kind"`
	Lane schemas.Lane `json:"lane"`
	// Samples is how many samples it leads to: those from SampleIndex on.
	Samples int64 `json:"samples"`
	// Prompt is that of its request, with all templates filled.
	Prompt  string `json:"prompt"`
	Version int64  `json:"policy_version"`
	Trained bool   `json:"trained"`
	// Advantages are those that the result of the group gives it: one, or one for each track; none while there is none.
	Advantages []StageAdvantage `json:"advantages,omitempty"`
	// Judgement is the score that an interaction gave; Ends says that it ended its samples.
	Judgement *float64 `json:"judgement,omitempty"`
	Ends      bool     `json:"ends,omitempty"`

	trajectory *schemas.Trajectory
}

// StageAdvantage is the advantage of a stage of a sample, or of a track of it.
type StageAdvantage struct {
	Track string  `json:"track,omitempty"`
	Value float64 `json:"value"`
	// Steps are those of its trained steps, or tokens, where these differ.
	Steps []float64 `json:"steps,omitempty"`
}

// Trajectory returns what is stored of the stage.
func (l *StageLine) Trajectory() *schemas.Trajectory { return l.trajectory }

// StageOf returns a stage in short; a is the result of its group, nil while there is none.
func StageOf(t *schemas.Trajectory, a *schemas.Advantage) *StageLine {
	s := &t.Group.Stages[t.Group.StageIndex(t.Stage)]
	l := &StageLine{
		Line: (&stored{trajectory: t}).line(t.SampleIndex), Stage: t.Stage, Kind: s.Kind, Lane: s.Lane,
		Samples: s.Every, Prompt: t.Prompt, Version: t.PolicyVersionMax, Trained: s.Trains(), trajectory: t,
	}
	if t.Text != nil && t.Text.SaidBy != "" && len(t.Text.Turns) > 0 { // none: it gave no answer
		l.Judgement, l.Ends = t.Text.Turns[0].Score, t.Text.Conversation == schemas.ConversationTerminated
	}
	for i := 0; a != nil && i < len(a.Credits); i++ {
		c := &a.Credits[i]
		k := t.SampleIndex / max(c.Every, 1)
		if c.Stage == s.Name && k < int64(len(c.Values)) && c.Values[k] != nil {
			x := StageAdvantage{Track: c.Track, Value: *c.Values[k]}
			for _, s := range c.Steps {
				if s.Stage == t.Stage && s.SampleIndex == t.SampleIndex {
					x.Steps = s.Advantages
				}
			}
			l.Advantages = append(l.Advantages, x)
		}
	}
	return l
}
