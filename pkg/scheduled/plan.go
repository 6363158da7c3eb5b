// Package scheduled is the mathematics of scheduled sampling: a diffusion model is trained on latents that it made
// itself. With some probability a sample starts at a source, a few levels noisier than the level t that it is trained
// at (its target). The model denoises it step by step from the source to t, without gradients. The result replaces the
// usual latent at t, which mixes data and noise (teacher forcing). ReflexFlow (arXiv 2512.04904) adds two terms to the
// loss of these samples.
//
//	Settings.Draw     returns a Plan: which samples are rolled out, and from which source; a function of a seed
//	Ramp.At           the probability at a training step
//	Roller            rolls out one sample; the caller evaluates the model, so many samples can share one batch
//	Roll              the same as one loop that calls the model
//	ReflexFlow.Terms  the terms of the loss, in float64, without gradients
//	Plan.Metrics      the numbers to log
//
// There are two modes (Compat). Exact does what the options say. SimpleTuner does what the code of that name does, step
// by step, also where it differs from its options.
//
// A latent at a level is x = a*x0 + u*noise. A flow model has u = t/(N-1) and a = 1-u. A variance-preserving model,
// which predicts epsilon or v, has a = sqrt(abar_t) and u = sqrt(1-abar_t). Products that go into sums are converted
// explicitly, and logarithms are those of pkg/flow, so that plans and latents have the same bits on every machine.
package scheduled

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// Reason says why a sample does not roll.
type Reason string

// The reasons, in the order in which they are looked for. A sample that rolls has none.
const (
	Disabled   Reason = "disabled"    // max_step_offset is 0
	Masked     Reason = "masked"      // the probability left it out
	ZeroOffset Reason = "zero_offset" // its offset was drawn 0
	AtTop      Reason = "clipped"     // its base is N-1, and there is nothing noisier
)

// Sample is what a plan has for one sample.
type Sample struct {
	Index    int
	Timestep float64 // as it was given: what the sample is trained at unless it rolls
	Base     int     // its integer part, the target of a rollout
	Source   int     // where the rollout starts, min(Base + Offset, N-1)
	// Offset is what was drawn, 0 where masked. It may exceed Source - Base, which is how
	// far the rollout goes.
	Offset int
	Reason Reason // empty if it rolls
}

// Rolls says whether the model makes the sample's latent.
func (s Sample) Rolls() bool { return s.Reason == "" }

// Steps is how many steps the rollout takes, 0 if there is none.
func (s Sample) Steps() int { return s.Source - s.Base }

// Plan is who rolls in one batch.
type Plan struct {
	Settings    Settings
	Seed        uint64
	Step        int     // training step
	Probability float64 // at that step
	Samples     []Sample
}

// Draw makes the plan of a batch at a training step: which samples roll, and from where. Intake
// calls it when it plans, verify when it checks a stored plan. timesteps [B] are those that the
// samples are trained at, each in [0, N). Sample i's draws depend on (seed, step, i) alone, by
// schemas/noise.md, so a batch that is planned again is planned the same. Invalid settings, a step
// or a timestep out of range are errors, all joined.
func (s Settings) Draw(seed uint64, step int, timesteps []float64) (Plan, error) {
	err := s.Validate()
	if step < 0 || int64(step) > math.MaxUint32 {
		err = errors.Join(err, fmt.Errorf("step: %d; must be 0 to %d", step, uint32(math.MaxUint32)))
	}
	for i, t := range timesteps {
		if !(t >= 0 && t < float64(s.Timesteps)) {
			err = errors.Join(err, fmt.Errorf("timesteps[%d]: %v; must be at least 0 and below %d", i, t, s.Timesteps))
		}
	}
	if err != nil {
		return Plan{}, err
	}
	p := Plan{
		Settings: s, Seed: seed, Step: step, Probability: s.Ramp.At(step, s.Compat),
		Samples: make([]Sample, len(timesteps)),
	}
	for i, t := range timesteps {
		p.Samples[i] = s.planSample(p, i, t)
	}
	return p, nil
}

// planSample decides for Draw whether the sample with this index rolls, and from where (Source);
// Reason says why it does not. timestep is the one that it is trained at.
func (s Settings) planSample(p Plan, index int, timestep float64) Sample {
	base := int(timestep)
	out := Sample{Index: index, Timestep: timestep, Base: base, Source: base}
	if s.MaxStepOffset == 0 {
		out.Reason = Disabled
		return out
	}
	mask, offset := randomWords(p.Seed, p.Step, index, 0)
	if unit(mask) < p.Probability {
		out.Offset = s.drawOffset(offset)
		out.Source = min(base+out.Offset, s.Timesteps-1)
	} else {
		out.Reason = Masked
	}
	switch {
	case out.Reason != "":
	case out.Offset == 0:
		out.Reason = ZeroOffset
	case out.Source == base:
		out.Reason = AtTop
	}
	return out
}

// drawOffset maps 64 random bits to an offset 0 .. MaxStepOffset, the number of steps that a sample
// rolls, distributed as Strategy says. Offsets has the probabilities.
func (s Settings) drawOffset(draw uint64) int {
	m := float64(s.MaxStepOffset)
	u := unit(draw)
	switch s.Strategy {
	case BiasedEarly:
		return int(math.RoundToEven(float64(u * u * m)))
	case BiasedLate:
		return int(math.RoundToEven(float64((1 - float64(u*u)) * m)))
	}
	return choose(draw, s.MaxStepOffset+1)
}

// DrawTimestep returns a uniform timestep 0 .. n-1, for a sample that was given none.
func DrawTimestep(seed uint64, step, index, n int) int {
	draw, _ := randomWords(seed, step, index, 1)
	return choose(draw, n)
}

// streamScheduled keeps these draws apart from pkg/flow's: the third word of the counter.
const streamScheduled = 2

// randomWords returns 128 random bits, a function of its arguments alone.
func randomWords(seed uint64, step, index int, kind uint32) (first, second uint64) {
	w := portable.Philox4x32([4]uint32{uint32(index), uint32(step), streamScheduled, kind},
		[2]uint32{uint32(seed), uint32(seed >> 32)})
	return uint64(w[1])<<32 | uint64(w[0]), uint64(w[3])<<32 | uint64(w[2])
}

// unit is a draw's upper 53 bits as a number in [0, 1).
func unit(draw uint64) float64 { return float64(float64(draw>>11) * 0x1p-53) }

// choose returns the integer part of draw*n/2^64: a uniform number 0 .. n-1.
func choose(draw uint64, n int) int {
	hi, _ := bits.Mul64(draw, uint64(n))
	return int(hi)
}

// Forwards is how many evaluations of the model a plan costs beyond those of training: those of the
// rollouts and, with ReflexFlow, a clean prediction of every sample and a biased one of each that
// rolls. The metrics of a plan have it.
func (p Plan) Forwards() int {
	sampler, _ := p.Settings.Steps()
	n := 0
	if p.Settings.ReflexOn() {
		n = len(p.Samples)
	}
	for _, sample := range p.Samples {
		n += sample.Steps() * sampler.Evaluations()
		if sample.Rolls() && p.Settings.ReflexOn() {
			n++
		}
	}
	return n
}

// Metrics returns the numbers to log of a plan, by name, and of the drifts (see Drift) of its
// rolled samples, as far as they are known; with none there is no drift_l2. offset_mean and
// offset_max are of what was drawn, before an offset is cut at the noisiest level.
func (p Plan) Metrics(drifts []float64) map[string]float64 {
	var rolled, offsets, largest int
	for _, s := range p.Samples {
		if s.Rolls() {
			rolled++
		}
		offsets += s.Offset
		largest = max(largest, s.Offset)
	}
	n := float64(max(len(p.Samples), 1))
	m := map[string]float64{
		"scheduled_sampling/probability":     p.Probability,
		"scheduled_sampling/rolled_fraction": float64(rolled) / n,
		"scheduled_sampling/offset_mean":     float64(offsets) / n,
		"scheduled_sampling/offset_max":      float64(largest),
		"scheduled_sampling/extra_forwards":  float64(p.Forwards()),
	}
	for _, drift := range drifts {
		m["scheduled_sampling/drift_l2"] += drift / float64(len(drifts))
	}
	return m
}
