package client

import (
	"context"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// PathStep is one step on the path to a sample, with the trajectory that it belongs to: the sample's own, or a
// parent's.
type PathStep struct {
	Trajectory *schemas.Trajectory
	Step       *schemas.Step
}

// maxParents bounds the parents on a path, so that trajectories that name one another in a circle end.
const maxParents = 1000

// Path returns every step that led to a sample's end, in order: first those of its parents, then its own.
// Trajectories of trees and branches name their parent; the first one began with noise or with given states.
// ErrNotFound: a parent, or a step, is no longer stored. Any other mismatch of parent and child is an error too.
func (c *Client) Path(ctx context.Context, t *schemas.Trajectory) ([]PathStep, error) {
	var path []PathStep
	_, end := t.Segment()
	for range maxParents {
		steps, err := c.Steps(ctx, t)
		if err != nil {
			return nil, fmt.Errorf("sample %d of group %s of run %s: %w", t.SampleIndex, t.UID, t.Run, err)
		}
		begin, stop := t.Segment()
		if stop < end || begin > end || int64(len(steps)) < end-begin {
			return nil, fmt.Errorf("sample %d of group %s of run %s: steps %d to %d; must lead to step %d, where "+
				"another parted from it", t.SampleIndex, t.UID, t.Run, begin, stop, end)
		}
		var own []PathStep
		for _, s := range steps[:end-begin] {
			own = append(own, PathStep{t, s})
		}
		path = slices.Concat(own, path)
		if t.Start == nil || t.Start.Branch == nil {
			return path, nil
		}
		at := t.Start.Branch
		if t, err = c.Stage(ctx, at.Run, at.UID, at.SampleIndex, at.Place().Stage); err != nil {
			return nil, err
		}
		end = begin
	}
	return nil, fmt.Errorf("sample %d of group %s of run %s: more than %d parents", t.SampleIndex, t.UID, t.Run,
		maxParents)
}
