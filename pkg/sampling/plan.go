// Package sampling says what the settings of a sample mean for its mathematics. Intake checks a prompt with it, the
// sampler denoises with it and verify recomputes with it, so that the three cannot differ.
package sampling

import (
	"slices"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// SizeOf returns the size of the media that a sample is decoded to.
func SizeOf(s *schemas.Sampling) media.Size {
	return media.Size{Frames: int(max(1, s.Frames)), Height: int(s.Height), Width: int(s.Width)}
}

// Plan returns the plan of a sample's rollout, as its resolved settings say. The settings may be
// faulty: flow.Plan.Validate says in what; intake calls it, so stored settings are valid.
func Plan(s *schemas.Sampling) flow.Plan {
	p := flow.Plan{
		Sigmas: s.Sigmas, OpenEnd: len(s.NetworkTimesteps) > 0, NoiseLevel: s.NoiseLevel,
		LogProb: flow.LogProbKind(s.LogProbKind),
		Solver:  flow.Solver(s.Solver),
		Storage: tensor.DType(s.LatentsDType), Seed: s.SampleSeed,
	}
	for _, t := range s.Transitions {
		p.Transitions = append(p.Transitions, flow.Transition(t))
	}
	for _, x := range s.StepSeeds {
		p.Seeds = append(p.Seeds, flow.StepSeed{Step: int(x.StepIndex), Seed: x.Seed})
	}
	begin, end := s.Segment()
	p.Begin, p.End = int(begin), int(end)
	return p
}

// InitialNoise fills x [S*C] with the state that a sample without a start begins with.
func InitialNoise(x []float32, s *schemas.Sampling) {
	flow.InitialNoise(x, s.NoiseSeed)
	if std := float32(s.InitialStd); std > 0 {
		for i := range x {
			x[i] *= std
		}
	}
}

// Evaluations returns how many evaluations of the network the steps [begin, end) of a sample take; those with guidance
// take two.
func Evaluations(s *schemas.Sampling, begin, end int64) int64 {
	transitions := slices.Clone(s.Transitions[begin:end])
	for i, scale := range s.StepScales()[begin:end] {
		if scale > 1 {
			transitions = append(transitions, transitions[i])
		}
	}
	return flow.Evaluations(flow.Solver(s.Solver), transitions)
}
