package results

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Waiting is a verdict that a finished sample waits for.
type Waiting struct {
	UID         schemas.UID `json:"uid"`
	SampleIndex int64       `json:"sample_index"`
	Name        string      `json:"name"`
	Prompt      string      `json:"prompt"`
	// Deadline is when the group closes without the verdict, Unix nanoseconds; 0: the service decides.
	Deadline int64 `json:"deadline"`
	// Image is the name of the file that a command wrote.
	Image string `json:"image,omitempty"`

	Trajectory *schemas.Trajectory `json:"-"`
}

// VerdictNames returns the names of the verdicts, rewards from outside, that the samples of a group need.
func VerdictNames(g *schemas.Group) []string {
	var names []string
	for _, r := range g.Reward {
		if name := scorer.VerdictName(r.Name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// WaitingForVerdicts returns the verdicts that finished samples of a group (uid "*": of all groups) of a run still wait
// for, sorted by uid, sample and name. It fails if the server cannot be read.
func WaitingForVerdicts(ctx context.Context, b *bus.Bus, run schemas.Run, uid schemas.UID) ([]Waiting, error) {
	rewards, err := Rewards(ctx, b, run, uid)
	if err != nil {
		return nil, err
	}
	var waiting []Waiting
	for t, err := range Trajectories(ctx, b, run, uid) {
		if err != nil {
			return nil, err
		}
		if rewards[Sample{UID: t.UID, Index: t.SampleIndex}] != nil || t.StopReason != schemas.StopCompleted {
			continue
		}
		for _, name := range VerdictNames(&t.Group) {
			m, err := b.Last(ctx, schemas.StreamVerdicts, schemas.VerdictSubject(run, t.UID, t.SampleIndex, name))
			if err != nil && !errors.Is(err, bus.ErrNotFound) {
				return nil, fmt.Errorf("look up verdict: %w", err)
			}
			if err == nil && bus.Fits(m, &schemas.Verdict{}) == nil {
				continue
			}
			waiting = append(waiting, Waiting{
				UID: t.UID, SampleIndex: t.SampleIndex, Name: name, Prompt: t.Prompt, Deadline: t.Group.Deadline,
				Trajectory: t.Trajectory,
			})
		}
	}
	slices.SortFunc(waiting, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.SampleIndex, b.SampleIndex), cmp.Compare(a.Name, b.Name))
	})
	return waiting, nil
}
