package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// BranchTrajectory returns the completed trajectory of the sample that a branch starts from. It returns ErrNotFound
// when there is none, and ErrFailed when the sample failed.
func (b *Bus) BranchTrajectory(ctx context.Context, at schemas.Branch) (*schemas.Trajectory, error) {
	t := &schemas.Trajectory{}
	m, err := b.Last(ctx, schemas.StreamTrajectories,
		schemas.TrajectorySubject(at.Run, at.UID, at.SampleIndex, at.Place().Stage))
	switch {
	case errors.Is(err, ErrNotFound):
		err = ErrNotFound // the text below says what was not found
	case err == nil:
		fault := Fits(m, t)
		switch {
		case fault != nil:
			err = fmt.Errorf("%w: %w", ErrNotFound, fault)
		case t.StopReason != schemas.StopCompleted:
			err = fmt.Errorf("%w: %s", ErrFailed, t.Error)
		default:
			return t, nil
		}
	}
	return nil, fmt.Errorf("sample %v of group %s of run %s: %w", at.Place(), at.UID, at.Run, err)
}

// LoadBranch returns the state that a branch starts from, with the shape of a group's state, [1, S, C]. made is the
// trajectory that the branch names. Errors are those of LoadState.
func (b *Bus) LoadBranch(ctx context.Context, at schemas.Branch, made *schemas.Trajectory) (*schemas.Tensor, error) {
	state, err := b.LoadState(ctx, made, at.StepIndex)
	if err != nil {
		return nil, err
	}
	return &schemas.Tensor{DType: state.DType, Shape: append([]int64{1}, state.Shape...), Data: state.Data}, nil
}

// LoadState returns a stored state of a completed trajectory, [S, C]: index k is the state before step k, the number
// of steps is the final state. The step that holds the state must be the one that the trajectory names (ErrCorrupt).
// It returns ErrNotFound when the state was not stored, or its step is gone.
func (b *Bus) LoadState(ctx context.Context, t *schemas.Trajectory, index int64) (*schemas.Tensor, error) {
	begin, end := t.Segment()
	if at := max(min(index, end-1), begin); index >= begin && index <= end && at-begin < int64(len(t.Steps)) {
		step, err := b.LoadStepRef(ctx, t.Steps[at-begin])
		if err = whyGone(t, err); err != nil {
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w", index, t.SampleIndex, t.UID, err)
		}
		state := step.State(index)
		switch subject := t.StepSubject(int(at - begin)); {
		case step.Subject() != subject || step.ScheduleDigest != t.ScheduleDigest:
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w: its step is %q, the trajectory names %q",
				index, t.SampleIndex, t.UID, ErrCorrupt, step.Subject(), subject)
		case state == nil:
		case state.DType != t.LatentsDType || !slices.Equal(state.Shape, t.LatentsShape):
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w: %s of shape %v, the trajectory has %s of %v",
				index, t.SampleIndex, t.UID, ErrCorrupt, state.DType, state.Shape, t.LatentsDType, t.LatentsShape)
		default:
			return state, nil
		}
	}
	return nil, fmt.Errorf("state %d of sample %d of group %s: %w: kept are %v", index, t.SampleIndex, t.UID,
		ErrNotFound, t.LatentStepIndices)
}
