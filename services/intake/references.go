package intake

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// states puts those that a group starts with where each request can refer to them, and
// refuses what is not where the prompt says: every sample would fail by itself.
func (s *service) states(ctx context.Context, start *schemas.Start) error {
	if start == nil || start.Latents == nil {
		return nil
	}
	t := start.Latents
	if t.Ref == nil {
		ref, err := s.bus.PutBlob(ctx, t.Data)
		if err != nil {
			return fmt.Errorf("store the states to start with: %w", err)
		}
		t.Ref, t.Data = &ref, nil
		return nil
	}
	switch err := s.bus.HasBlob(ctx, *t.Ref); {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf("start.latents.ref: %w; must be a blob that was stored before the prompt", err))
	case err != nil:
		return fmt.Errorf("look up the states to start with: %w", err)
	}
	return nil
}

// branch refuses a branch that its sampler could not follow: every sample would fail by itself.
// A state is one of the model that made it, and of its place in a schedule of sigmas.
func (s *service) branch(ctx context.Context, r *schemas.Request, policy *schemas.Policy) error {
	if r.Start == nil || r.Start.Branch == nil {
		return nil
	}
	at := *r.Start.Branch
	const otherwise = "; to begin with it all the same give its latents (start.latents)"
	refuse := func(field, format string, args ...any) error {
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf("start.branch"+field+": "+format, args...))
	}
	t, err := s.bus.Made(ctx, at)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return refuse("", "%w; must be a sample that was completed and is still stored", err)
	case err != nil:
		return fmt.Errorf("look up the sample to branch from: %w", err)
	case t.WeightsDigest != policy.WeightsDigest:
		return refuse("", "a state of model %q, weights %.12s; must be of those that lane %q serves, %.12s%s", t.Lane, t.WeightsDigest, policy.Lane, policy.WeightsDigest, otherwise)
	case t.Height != r.Height || t.Width != r.Width:
		return refuse("", "a state of %d x %d pixels; must be of the prompt's size, %d x %d", t.Width, t.Height, r.Width, r.Height)
	case !slices.Equal(t.Sigmas, r.Sigmas):
		return refuse(".step_index", "%d; must be of the same schedule: the sample has %d steps, its step %d at sigma %v, and the prompt %d, at sigma %v%s",
			at.StepIndex, len(t.Transitions), at.StepIndex, sigmaAt(t.Sigmas, at.StepIndex), len(r.Transitions), sigmaAt(r.Sigmas, at.StepIndex), otherwise)
	}
	switch _, err := s.bus.LoadState(ctx, t, at.StepIndex); {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return refuse(".step_index", "%d; must be of a state that is stored: %w", at.StepIndex, err)
	case err != nil:
		return fmt.Errorf("look up the state to branch from: %w", err)
	}
	return nil
}

// sigmaAt is that of a step, 0 behind the last.
func sigmaAt(sigmas []float32, step int64) float32 {
	if step < int64(len(sigmas)) {
		return sigmas[step]
	}
	return 0
}
