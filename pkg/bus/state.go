package bus

import (
	"context"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// LoadState returns a state that a completed trajectory kept, [S, C]: index k is the state
// before step k, the number of steps the final one. The step that holds it is the one that
// the trajectory names, by its digest (ErrCorrupt), and says so itself. ErrNotFound: the state
// was not kept, or its step is stored no more.
func (b *Bus) LoadState(ctx context.Context, t *schemas.Trajectory, index int64) (*schemas.Tensor, error) {
	begin, end := t.Segment()
	if at := max(min(index, end-1), begin); index >= begin && index <= end && at-begin < int64(len(t.Steps)) {
		step, err := b.LoadStepRef(ctx, t.Steps[at-begin])
		if err != nil {
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w", index, t.SampleIndex, t.UID, err)
		}
		state := step.State(index)
		switch subject := t.StepSubject(int(at - begin)); {
		case step.Subject() != subject || step.ScheduleDigest != t.ScheduleDigest:
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w: its step is %q, the trajectory names %q", index, t.SampleIndex, t.UID, ErrCorrupt, step.Subject(), subject)
		case state == nil:
		case state.DType != t.LatentsDType || !slices.Equal(state.Shape, t.LatentsShape):
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w: %s of shape %v, the trajectory has %s of %v",
				index, t.SampleIndex, t.UID, ErrCorrupt, state.DType, state.Shape, t.LatentsDType, t.LatentsShape)
		default:
			return state, nil
		}
	}
	return nil, fmt.Errorf("state %d of sample %d of group %s: %w: kept are %v", index, t.SampleIndex, t.UID, ErrNotFound, t.LatentStepIndices)
}
