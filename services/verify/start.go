package verify

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// checkStart computes the state that the sample began with: noise that is drawn again, by the generator of what drew
// it, or a state that the prompt or another sample gave. It compares that with the stored state, or uses it in its
// place if the first state was not kept.
func (s *sample) checkStart(ctx context.Context) error {
	t := s.t
	begin, _ := t.Segment()
	x := make([]float32, t.LatentsShape[0]*t.LatentsShape[1])
	if by := s.inexactServer(); by != nil {
		again, noise := images.ServerDraws(by, &t.Sampling, t.LatentsShape)
		s.noise = noise
		if stored, kept := s.latents[begin]; kept && again != nil {
			s.compareMade(by, begin, stored, again)
		} else if again != nil {
			s.latents[begin] = again
		}
		return nil
	}
	if t.Start == nil {
		sampling.InitialNoise(x, &t.Sampling)
	} else {
		states, err := s.loadStart(ctx, t.Start)
		switch {
		case errors.Is(err, bus.ErrNotFound):
			s.report.StartsGone++
			return nil
		case err == nil:
			err = images.StartFrom(x, t.Start, states, t.SampleIndex, t.LatentsShape, t.Sigmas[begin], t.NoiseSeed)
		case !errors.Is(err, bus.ErrCorrupt) && !errors.Is(err, bus.ErrFailed):
			return fmt.Errorf("load the states it started with: %w", err)
		}
		if err != nil {
			s.fault(begin, "%v", err)
			return nil
		}
	}
	tensor.DType(t.LatentsDType).Round(x)
	if stored, kept := s.latents[begin]; !kept {
		s.latents[begin] = x
	} else if !slices.Equal(stored, x) {
		s.fault(begin, "latents %d: not those that the sample starts with", begin)
	}
	return nil
}

// loadStart loads what a sample started with: latents that the prompt gave, the state that another sample stored
// (branch), or data. Latents of a group are loaded once. bus.ErrNotFound: it is no longer stored.
func (s *sample) loadStart(ctx context.Context, start *schemas.SegmentStart) (*schemas.Tensor, error) {
	t := start.Latents
	switch {
	case start.Branch != nil:
		parent, err := s.bus.BranchTrajectory(ctx, *start.Branch)
		if err != nil {
			return nil, err
		}
		return s.bus.LoadBranch(ctx, *start.Branch, parent)
	case start.Data != nil:
		return images.LoadData(ctx, s.bus, s.image, start.Data, sampling.SizeOf(&s.t.Sampling))
	case t.Ref == nil:
		return t, nil
	}
	if s.states == nil || *s.states.Ref != *t.Ref {
		data, err := s.bus.GetBlob(ctx, *t.Ref)
		if err != nil {
			return nil, err
		}
		s.verifier.states = &schemas.Tensor{Ref: t.Ref, Data: data}
	}
	return &schemas.Tensor{DType: t.DType, Shape: t.Shape, Data: s.states.Data}, nil
}

// makeAgain runs a sample without a stochastic step again, as no log-prob proves its states: from the state that it
// began with to its end, or to a step whose event or weights are gone. It compares each state that is stored.
func (s *sample) makeAgain(ctx context.Context, plan flow.Plan) error {
	x := s.latents[int64(plan.Begin)]
	if x == nil || !slices.ContainsFunc(s.t.LatentStepIndices, func(k int64) bool { return k > int64(plan.Begin) }) {
		return nil
	}
	return s.takeSteps(ctx, plan, x, func(k int) (digest string) {
		switch of := s.steps[k-plan.Begin]; {
		case of == nil:
			return ""
		case s.drawnBy() != nil:
			return s.version.digest
		default:
			return of.WeightsDigest
		}
	}, func(step *flow.Step) { s.compareState(int64(step.Index)+1, slices.Clone(step.Next)) })
}

// takeSteps takes the steps of a plan again from a state, and calls made after each. weights gives the digest of those
// that it is taken with; "": it cannot be.
func (s *sample) takeSteps(ctx context.Context, plan flow.Plan, x []float32, weights func(k int) string,
	made func(step *flow.Step),
) error {
	r, err := flow.NewRollout(plan, x)
	for err == nil && !r.Done() {
		k := int64(r.Index())
		digest := weights(r.Index())
		if digest == "" {
			return nil
		}
		with, unable := s.versionWith(ctx, digest)
		if unable != nil || !s.isAvailable(with, k) {
			return unable
		}
		var velocity []float32
		x, sigma := r.Point()
		velocity, err = s.guidedVelocity(ctx, with, images.Point{Step: k, X: x, Sigma: sigma})
		if end := s.endsRun(ctx, with, err); err != nil && end != nil {
			return end
		}
		var step *flow.Step
		if err == nil {
			step, err = r.Advance(velocity)
		}
		if step != nil {
			made(step)
		}
	}
	if err != nil {
		s.fault(-1, "made again: %v", err)
	}
	return nil
}

func sameNumber(a, b *float64) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// number formats an optional number for a fault; "-" is none.
func number(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v)
}
