package sampler

import (
	"context"
	"errors"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// prunedError ends an episode in the middle, by the prompt's rule or a control.
type prunedError struct{ why string }

func (e *prunedError) Error() string { return e.why }

// judge says, as a *prunedError, that the sample is not to take step next, which is not its
// last boundary.
func (r *recorder) judge(next int64) error {
	if _, end := r.req.Segment(); next >= end && r.req.Text == nil {
		return nil
	}
	if p := r.req.Prune; p != nil && next >= p.StepIndex {
		if why := p.Judge(r.logProbs); why != "" {
			return &prunedError{why}
		}
	}
	if c := r.s.reins.controls.Pruned(r.req.Run, r.req.UID, r.req.SampleIndex); c != nil && next >= c.StepIndex {
		return &prunedError{c.Says()}
	}
	return nil
}

// next is the step that comes after those that the attempt has.
func (r *recorder) next() int64 {
	begin, _ := r.req.Segment()
	return begin + int64(len(r.steps))
}

// pruned is the trajectory of a sample that was ended in the middle: the steps it has, and no
// image. It returns err where that is not of a *prunedError.
func (r *recorder) pruned(ctx context.Context, a *attempt, err error) (*schemas.Trajectory, error) {
	p, ok := errors.AsType[*prunedError](err)
	if !ok {
		return nil, err
	}
	t := r.trajectory()
	t.StopReason, t.Error = schemas.StopPruned, p.why
	if t.Steps, err = r.Stored(ctx); err != nil {
		return nil, err
	}
	now := time.Now().UnixNano()
	t.Timings = schemas.SampleTimings{
		Received: r.received.UnixNano(), Started: now, Finished: now, EncodeNS: r.encode.Nanoseconds(), DenoiseNS: a.denoise.Nanoseconds(),
	}
	if !a.started.IsZero() {
		t.Timings.Started = a.started.UnixNano()
	}
	return t, nil
}
