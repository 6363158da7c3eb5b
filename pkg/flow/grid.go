package flow

import (
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// Grid names the T sigmas of a schedule before they are shifted.
type Grid string

// Grids of pipelines of diffusers.
const (
	// GridLinspace is T points from 1 to 1/T, which FluxPipeline and most others pass to their scheduler.
	GridLinspace Grid = "linspace"
	// GridTorch is GridLinspace as torch computes it in float32, from both ends, for ZImagePipeline. The grids of numpy
	// are another rounding.
	GridTorch Grid = "linspace_torch"
	// GridScheduler is that of FlowMatchEulerDiscreteScheduler for pipelines that pass none, such as
	// StableDiffusion3Pipeline: T points from sigma_max to sigma_min, the first and the last sigma of the training
	// schedule. With a static shift these two are shifted already, so the grid is shifted twice at its end.
	GridScheduler Grid = "scheduler"
	// GridUniFlow is that of UniPCMultistepScheduler with use_flow_sigmas: the first T of T+1 points from 1 to 1/1000.
	// diffusers then lowers a first sigma of 1 by 1e-6 for its logarithms; here it stays 1.
	GridUniFlow Grid = "uni_flow"
	// GridDiffusion is that of a Schedule with a Diffusion, GridPipeline of one with an Own.
	GridDiffusion Grid = "diffusion"
	GridPipeline  Grid = "pipeline"
)

func (g Grid) valid() bool {
	known := []Grid{"", GridLinspace, GridTorch, GridScheduler, GridUniFlow, GridDiffusion, GridPipeline}
	return slices.Contains(known, g)
}

// MuRule names how dynamic shifting finds mu: the logarithm of the shift, or the shift itself if time_shift_type is
// linear.
type MuRule string

// Rules of pipelines of diffusers.
const (
	// MuLinear is calculate_shift of FluxPipeline and most others: a line over the number of latent tokens.
	MuLinear MuRule = "linear"
	// MuNone is for pipelines that compute none: dynamic shifting is an error.
	MuNone MuRule = "none"
	// MuFlux2 is compute_empirical_mu of Flux2Pipeline, which depends on the number of steps too.
	MuFlux2 MuRule = "flux2"
	// MuConstant is Schedule.ConstantMu for all images.
	MuConstant MuRule = "constant"
)

func (r MuRule) valid() bool {
	return r == "" || r == MuLinear || r == MuNone || r == MuFlux2 || r == MuConstant
}

// grid returns the sigmas of a rollout of T = steps steps before they are shifted: T values,
// falling from about 1, without the final 0. The points are those of the diffusers pipeline or
// scheduler that s.Grid names. Sigmas calls it on a valid schedule.
func (s Schedule) grid(steps int) []float64 {
	switch s.Grid {
	case GridScheduler:
		// FlowMatchEulerDiscreteScheduler: __init__ computes sigma_max and sigma_min in float32, set_timesteps the
		// points between their timesteps in float64.
		ends := []float32{1, float32(1) / trainTimesteps} // sigma_max and sigma_min
		if !s.UseDynamicShifting {
			shiftBy(ends, s.Shift)
		}
		timestep := func(sigma float32) float64 { return float64(float64(sigma) * trainTimesteps) }
		grid := linspace(timestep(ends[0]), timestep(ends[1]), steps)
		for i := range grid {
			grid[i] /= trainTimesteps
		}
		return grid
	case GridUniFlow:
		return linspace(1, 1.0/trainTimesteps, steps+1)[:steps]
	}
	if s.Grid == GridTorch {
		return torchLinspace(1, 1/float32(steps), steps)
	}
	return linspace(1, 1/float64(steps), steps)
}

// torchLinspace returns n points from first to last, both included, with the bits of torch.linspace in float32 on
// processors that fuse multiply-adds: the first half counts from first, the other from last.
func torchLinspace(first, last float32, n int) []float64 {
	grid := make([]float64, n)
	var step float32
	if n > 1 {
		step = (last - first) / float32(n-1)
	}
	for i := range grid {
		x := float64(last) - float64(float64(step)*float64(n-1-i)) // both factors are exact in float64
		if i < n/2 {
			x = float64(first) + float64(float64(step)*float64(i))
		}
		grid[i] = float64(float32(x))
	}
	return grid
}

// shiftBy applies the static shift s to sigmas in place: s*sigma/(1+(s-1)*sigma), in the type of sigmas.
func shiftBy[F float32 | float64](sigmas []F, s float64) {
	factor, less := F(s), F(s-1)
	for i, sigma := range sigmas {
		sigmas[i] = F(factor*sigma) / (1 + F(less*sigma)) //nolint:unconvert // keeps products from being fused
	}
}

// Mu returns the parameter mu of the dynamic shift of numInferenceSteps = T steps, for an image of
// imageSeqLen latent tokens: larger images need more noise. s.MuRule chooses the formula.
// MuConstant gives ConstantMu; MuFlux2 is compute_empirical_mu of diffusers' Flux2Pipeline;
// MuLinear is the line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift).
func (s Schedule) Mu(numInferenceSteps, imageSeqLen int) float64 {
	tokens := float64(imageSeqLen)
	atTokens := func(slope, intercept float64) float64 { return float64(tokens*slope) + intercept }
	switch s.MuRule {
	case MuConstant:
		return s.ConstantMu
	case MuFlux2:
		at200 := atTokens(0.00016927, 0.45666666)
		if imageSeqLen > 4300 {
			return at200
		}
		slope := (at200 - atTokens(8.73809524e-05, 1.89833333)) / 190
		intercept := at200 - float64(200*slope)
		return float64(slope*float64(numInferenceSteps)) + intercept
	}
	slope := (s.MaxShift - s.BaseShift) / float64(s.MaxImageSeqLen-s.BaseImageSeqLen)
	return atTokens(slope, s.BaseShift-float64(slope*float64(s.BaseImageSeqLen)))
}

// dynamicShift returns the factor by which applyShift shifts sigmas for an image of imageSeqLen
// latent tokens: e^mu, or mu itself if the time shift is linear. It is an error if imageSeqLen is
// not positive or if mu is so large that the sigmas would not be distinct.
func (s Schedule) dynamicShift(steps, imageSeqLen int) (float64, error) {
	if imageSeqLen <= 0 {
		return 0, fmt.Errorf("image_seq_len: %d; must be a number above 0 with use_dynamic_shifting", imageSeqLen)
	}
	mu := s.Mu(steps, imageSeqLen)
	if math.Abs(mu) > 50 || s.TimeShiftType == "linear" && mu <= 0 {
		return 0, fmt.Errorf("image_seq_len: %d; must have a shift mu in range: its %s one is %v", imageSeqLen,
			s.TimeShiftType, mu)
	}
	if s.TimeShiftType == "linear" {
		return mu, nil
	}
	return portable.Exp(mu), nil
}
