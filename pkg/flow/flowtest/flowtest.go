// Package flowtest runs whole rollouts of package flow, for tests.
package flowtest

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/flow"
)

// Velocity evaluates a model: it sets dst to v(x, sigma), both [S*C], sigma in [0, 1]. It must not keep or change x.
type Velocity func(ctx context.Context, dst, x []float32, sigma float32) error

// Sample runs a rollout of p from x [S*C] to its end and returns the final latents [S*C]. each, unless nil, sees every
// step.
func Sample(ctx context.Context, p flow.Plan, x []float32, v Velocity, each func(*flow.Step)) ([]float32, error) {
	r, err := flow.NewRollout(p, x)
	if err != nil {
		return nil, err
	}
	velocity := make([]float32, len(x))
	for !r.Done() {
		point, sigma := r.Point()
		if err := v(ctx, velocity, point, sigma); err != nil {
			return nil, fmt.Errorf("step %d: velocity at sigma %v: %w", r.Index(), sigma, err)
		}
		step, err := r.Advance(velocity)
		if err != nil {
			return nil, err
		}
		if step != nil && each != nil {
			each(step)
		}
	}
	return r.Latents(), nil
}
