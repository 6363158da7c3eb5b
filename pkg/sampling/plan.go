// Package sampling says what the settings of a sample mean for its mathematics. Intake checks a prompt with it, the
// sampler denoises with it and verify recomputes with it, so that the three cannot differ.
package sampling

import (
	"encoding/json"
	"fmt"
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

// Schedule returns the schedule of a lane of images: its scheduler_config.json with its grid and its rule for mu, or
// the sigmas that its pipeline lists. Intake makes a prompt's sigmas by it; a sampler tries it when its model is open.
// An error names what is not supported.
func Schedule(p *schemas.Policy) (flow.Schedule, error) {
	if p.Grid == schemas.GridPipeline {
		var says struct {
			flow.Own
			Order string `json:"random_access"`
		}
		if err := json.Unmarshal(p.Pipeline, &says); err != nil {
			return flow.Schedule{}, fmt.Errorf("pipeline: %w", err)
		}
		if says.Order == "" { // an estimate, before the pipeline is loaded
			return flow.ParseSchedule([]byte("{}"))
		}
		s := flow.Schedule{Grid: flow.GridPipeline, Own: &says.Own}
		return s, s.Validate()
	}
	s, err := flow.ParseSchedule(p.SchedulerConfig)
	if err != nil {
		return s, err
	}
	s.Grid, s.MuRule, s.ConstantMu = flow.Grid(p.Grid), flow.MuRule(p.Mu), p.MuConstant
	return s, s.Validate()
}

// MediumSize returns how large the media of a file are: of a sound a media.SoundSize, else a media.Size.
func MediumSize(m *schemas.Medium) fmt.Stringer {
	if m.Kind == schemas.KindAudio {
		return media.SoundSize{Samples: int(m.Samples), Channels: int(m.Channels), Rate: int(m.Rate)}
	}
	return media.Size{Frames: int(max(1, m.Frames)), Height: int(m.Height), Width: int(m.Width)}
}

// DecodeMedium reads the bytes of a file of a sample. An error: they are not of its format and size.
func DecodeMedium(m *schemas.Medium, file []byte) (made media.Media, err error) {
	switch size := MediumSize(m).(type) {
	case media.SoundSize:
		made.Sound, err = media.DecodeWAV(file, size)
	case media.Size:
		made, err = media.Decode(file, size)
	}
	return made, err
}
