package schemas

import (
	"fmt"
	"strconv"
)

// ScheduledSampling makes the samples of a prompt latents to train on: with some probability a sample begins a few of
// the model's training timesteps noisier than the one it is trained at, and the model itself steps it down to that.
// start.data has the images to make noisy.
type ScheduledSampling struct {
	// MaxStepOffset is M: offsets are 0 to M timesteps. With 0 nothing rolls.
	MaxStepOffset *int64 `msgpack:"max_step_offset,omitempty" range:"0..MaxSteps-1" default:"0" flag:"max-step-offset"`
	// Strategy says how offsets are drawn: uniform, biased_early (mostly small) or biased_late.
	Strategy string `msgpack:"strategy,omitempty" enum:"OffsetStrategies" default:"uniform" flag:"offset-strategy"`
	// Probability is how likely a sample is eligible, where there is no ramp.
	Probability *float64 `msgpack:"probability,omitempty" range:"0..1" default:"0" flag:"probability"`
	// Ramp moves the probability with the training step.
	Ramp *ProbabilityRamp `msgpack:"ramp,omitempty" absent:"the probability stays"`
	// TrainStep is where the trainer is: the ramp and the draws depend on it.
	TrainStep *int64 `msgpack:"train_step,omitempty" range:"0..4294967295" default:"0" flag:"train-step"`
	// Timesteps is N: training timesteps are 0 to N-1, noise rising.
	Timesteps *int64 `msgpack:"timesteps,omitempty" range:"2..MaxSteps" absent:"the model's num_train_timesteps" flag:"timesteps"`
	// BaseTimesteps are what the samples are trained at, one per sample or one for all, from 0 to
	// below N. Of fractions, which only flow models have, a rollout ends at the integer part.
	BaseTimesteps []float64 `msgpack:"base_timesteps" size:"1..MaxGroupSize" range:"0.." absent:"drawn, each from 0 to N-1 alike" flag:"base-timesteps"`
	// Sampler steps a sample down: euler, dpm, unipc, unip (unipc without its corrector) or rk4, which asks the model
	// four times a step.
	Sampler string `msgpack:"sampler,omitempty" enum:"RolloutSamplers" default:"unipc" flag:"rollout-sampler"`
	// Order of the sampler: up to 9 of unipc and unip, up to 3 of dpm.
	Order *int64 `msgpack:"order,omitempty" range:"1..9" absent:"2 of unipc, unip and dpm, 1 of euler, 4 of rk4" flag:"rollout-order"`
	// Compat is exact, which does what these fields say, or simpletuner, which does what the
	// trainer of that name does: flow models step with euler, a prob_start or prob_end of 0 is
	// not set, and models that predict epsilon or v step the wrong way.
	Compat string `msgpack:"compat,omitempty" enum:"RolloutCompats" default:"exact" flag:"compat"`
	// ReflexFlow says what the loss of flow models will need besides.
	ReflexFlow *ReflexFlow `msgpack:"reflexflow,omitempty" absent:"auto, with alpha 1, beta1 10 and beta2 1"`
	// Decode asks for images of each sample: noised, rolled and teacher-forced.
	Decode bool `msgpack:"decode,omitempty" default:"false" flag:"rollout-decode"`
	// Seed makes the draws independent of the run id. Each uid has draws of its own.
	Seed *int64 `msgpack:"seed,omitempty" range:"0.." absent:"the prompt's, else the run id seeds" flag:"rollout-seed"`
}

// ProbabilityRamp leads from ProbStart to ProbEnd over RampSteps training steps. Its ends may be 0.
type ProbabilityRamp struct {
	// StartStep is the last training step with prob_start.
	StartStep *int64 `msgpack:"start_step,omitempty" range:"0.." default:"0" flag:"ramp-start"`
	// RampSteps is how many training steps lie between the ends; 0 is no ramp.
	RampSteps *int64 `msgpack:"ramp_steps,omitempty" range:"0.." default:"0" flag:"ramp-steps"`
	// Shape is linear or cosine.
	Shape string `msgpack:"shape,omitempty" enum:"RampShapes" default:"linear" flag:"ramp-shape"`
	// ProbStart is the probability up to start_step.
	ProbStart *float64 `msgpack:"prob_start,omitempty" range:"0..1" absent:"the probability" flag:"prob-start"`
	// ProbEnd is the probability from start_step + ramp_steps on.
	ProbEnd *float64 `msgpack:"prob_end,omitempty" range:"0..1" absent:"the probability; with compat simpletuner 0.5" flag:"prob-end"`
}

// ReflexFlow is the loss of arXiv 2512.04904 for flow models: for it the model is asked at the
// teacher-forced latent (clean) and at the rolled one (biased). Other models have none of it.
type ReflexFlow struct {
	// Mode is auto (on where anything may roll), on or off.
	Mode string `msgpack:"mode,omitempty" enum:"ReflexModes" default:"auto" flag:"reflexflow"`
	// Alpha is the strength of the weight; beyond 1 weights can be negative.
	Alpha *float64 `msgpack:"alpha,omitempty" range:"-MaxWeight..MaxWeight" default:"1" flag:"reflexflow-alpha"`
	// Beta1 is the factor of the anti-drift term.
	Beta1 *float64 `msgpack:"beta1,omitempty" range:"0..MaxWeight" default:"10" flag:"reflexflow-beta1"`
	// Beta2 is the factor of the weighted loss.
	Beta2 *float64 `msgpack:"beta2,omitempty" range:"0..MaxWeight" default:"1" flag:"reflexflow-beta2"`
	// Keep chooses how the clean and the biased prediction are stored: as digests, or as tensors too.
	Keep string `msgpack:"keep,omitempty" enum:"PredictionKeeps" default:"digests" flag:"reflexflow-keep"`
}

// RollSettings are a ScheduledSampling that is resolved, as every sample of the group has them.
type RollSettings struct {
	Timesteps int64 `msgpack:"timesteps" range:"2..MaxSteps"`
	// Prediction is what the model's output is.
	Prediction string `msgpack:"prediction" enum:"Predictions"`
	// Sampler and Order are the ones that run: compat may have changed them.
	Sampler string `msgpack:"sampler" enum:"RolloutSamplers"`
	Order   int64  `msgpack:"order" range:"1..9"`
	Compat  string `msgpack:"compat" enum:"RolloutCompats"`
	// ReflexFlow is there where it is on, with Mode on.
	ReflexFlow *ReflexFlow `msgpack:"reflexflow,omitempty"`
	Decode     bool        `msgpack:"decode,omitempty"`
}

// Roll is what a plan has for one sample.
type Roll struct {
	// Timestep is what the sample is trained at unless it rolls.
	Timestep float64 `msgpack:"timestep" range:"0..MaxSteps"`
	// Base is its integer part, Source where the sample begins: equal unless it rolls.
	Base   int64 `msgpack:"base" range:"0..MaxSteps-1"`
	Source int64 `msgpack:"source" range:"0..MaxSteps-1"`
	// Offset is the drawn number; it may exceed source - base, which is how far the sample rolls.
	Offset int64 `msgpack:"offset" range:"0..MaxSteps-1"`
	// Reason is why the sample does not roll; empty: it does.
	Reason string `msgpack:"reason,omitempty" enum:"RollReasons?"`
}

// IsRolled reports whether the model makes the sample's latent.
func (e *Roll) IsRolled() bool { return e.Reason == "" }

// ScheduledSample is the scheduled sampling of one sample. Its steps are on the schedule of all training timesteps:
// step N-1-t leads from timestep t to t-1.
type ScheduledSample struct {
	RollSettings RollSettings `msgpack:"settings" digest:"-"`
	// Roll is the sample's place in the plan.
	Roll Roll `msgpack:"roll"`
	// PlanDigest names the group's plan (Plan.Digest).
	PlanDigest string `msgpack:"plan_digest" form:"digest"`
}

// segment returns the steps [begin, end) that the sample runs; none if it does not roll.
func (e *ScheduledSample) segment() (begin, end int64) {
	top := e.RollSettings.Timesteps - 1
	return top - e.Roll.Source, top - e.Roll.Base
}

// Plan is who rolls in a group, and from where: one event per prompt with ScheduledSampling, a
// function of the prompt and its seed.
type Plan struct {
	V    int64 `msgpack:"v"`
	Run  Run   `msgpack:"run" form:"token"`
	UID  UID   `msgpack:"uid" form:"token"`
	Lane Lane  `msgpack:"lane" form:"token"`
	// Seed keys the draws, with TrainStep and the index of the sample.
	Seed          uint64 `msgpack:"seed"`
	TrainStep     int64  `msgpack:"train_step" range:"0..4294967295"`
	MaxStepOffset int64  `msgpack:"max_step_offset" range:"0..MaxSteps-1"`
	Strategy      string `msgpack:"strategy" enum:"OffsetStrategies"`
	// Probability is that at TrainStep.
	Probability  float64      `msgpack:"probability" range:"0..1"`
	RollSettings RollSettings `msgpack:"settings"`
	// Samples are by their index.
	Samples []Roll `msgpack:"samples" size:"1..MaxGroupSize"`
	// Metrics are scheduled_sampling/probability, rolled_fraction, offset_mean, offset_max and
	// extra_forwards.
	Metrics []Metric `msgpack:"metrics" size:"0..MaxMetrics"`
}

func (e *Plan) checkRules(f *faults) {
	for i := range e.Samples {
		e.Samples[i].checkWithin(f.inItem("samples", i), e.RollSettings.Timesteps)
	}
}

// Digest returns the BLAKE3 of the encoded plan.
func (e *Plan) Digest() (string, error) {
	data, err := Encode(e)
	if err != nil {
		return "", fmt.Errorf("digest of the plan of %s: %w", e.UID, err)
	}
	return BLAKE3.Text(BLAKE3.Sum(data)), nil
}

// SamePlan returns an error if another plan of the group differs, by its digest; nil if not.
func (e *Plan) SamePlan(other *Plan) error {
	a, err1 := e.Digest()
	b, err2 := other.Digest()
	if err1 != nil || err2 != nil || a != b {
		return fmt.Errorf("plan: %.16s; must be %.16s, that of the prompt which has the uid", b, a)
	}
	return nil
}

// RolledStep is what a Step of scheduled sampling has besides. Step.Sigma and SigmaNext are the
// noise levels of the two timesteps; with compat simpletuner the latents of models that predict
// epsilon or v have others, which are here.
type RolledStep struct {
	Base   int64 `msgpack:"base" range:"0..MaxSteps-1"`
	Source int64 `msgpack:"source" range:"0..MaxSteps-1"`
	// From and To are timesteps: To is From - 1.
	From int64 `msgpack:"from" range:"0..MaxSteps-1"`
	To   int64 `msgpack:"to" range:"0..MaxSteps-1"`
	// Before the step the latent is a x0 + u noise, after it a_next x0 + u_next noise.
	U     float64 `msgpack:"u" range:"0..1"`
	A     float64 `msgpack:"a" range:"0..1"`
	UNext float64 `msgpack:"u_next" range:"0..1"`
	ANext float64 `msgpack:"a_next" range:"0..1"`
	// Sampler and Order are what made the step; the first ones have lower orders.
	Sampler string `msgpack:"sampler" enum:"RolloutSamplers"`
	Order   int64  `msgpack:"order" range:"1..9"`
	Compat  string `msgpack:"compat" enum:"RolloutCompats"`
}

func (e *RolledStep) checkRules(f *faults) {
	if e.To != e.From-1 {
		f.add("to", strconv.FormatInt(e.To, 10), fmt.Sprintf("must be %d, one below from", e.From-1))
	}
	if e.Compat == CompatExact && !(e.UNext < e.U) {
		f.add("u_next", formatFloat(e.UNext), "must be below u: noise falls")
	}
}

// Rolled is what a sample of scheduled sampling came to.
type Rolled struct {
	// Timestep is what the latents are of: the base where the sample rolled, else the timestep
	// that it was given. U and A are its noise level: the latent is a x0 + u noise.
	Timestep float64 `msgpack:"timestep" range:"0..MaxSteps"`
	U        float64 `msgpack:"u" range:"0..1"`
	A        float64 `msgpack:"a" range:"0..1"`
	// Latents are what to train on, [S, C] in latents_dtype.
	Latents Tensor `msgpack:"latents"`
	// TeacherDigest is the sha-256 of the bytes of the teacher-forced latent, a x0 + u noise, in
	// latents_dtype. Where the sample does not roll the latents are the same.
	TeacherDigest string `msgpack:"teacher_digest" form:"sha256"`
	// Drift is |latents - teacher| / |teacher|; null where that is no number.
	Drift *float64 `msgpack:"drift" range:"0.."`
	// Forwards is how often the model was asked.
	Forwards int64 `msgpack:"forwards" range:"0.." digest:"-"`
	// Clean and Biased are the predictions of ReflexFlow, the same where the sample does not roll.
	Clean  *Prediction `msgpack:"clean,omitempty"`
	Biased *Prediction `msgpack:"biased,omitempty"`
	// ReflexFlow are the terms of its loss, with the biased prediction in place of the training's.
	ReflexFlow *ReflexTerms `msgpack:"reflexflow,omitempty" digest:"-"`
	// Noised and Teacher are images of the latent that the sample began with, and of the teacher-forced one; the image
	// of the rolled one is the trajectory's.
	Noised  *Medium `msgpack:"noised,omitempty" digest:"-"`
	Teacher *Medium `msgpack:"teacher,omitempty" digest:"-"`
}

// Prediction is a model's output [S, C], F32.
type Prediction struct {
	// Digest is the sha-256 of its bytes, in lower-case hex.
	Digest string `msgpack:"digest" form:"sha256"`
	// Tensor is there where the prompt asked for it.
	Tensor *Tensor `msgpack:"tensor,omitempty" digest:"-"`
}

// ReflexTerms are the parts of one sample's ReflexFlow loss.
type ReflexTerms struct {
	// ExposureL1 is sum |clean - biased|.
	ExposureL1 float64 `msgpack:"exposure_l1" range:"0.."`
	// WeightMin and WeightMax are the least and the greatest weight of an element.
	WeightMin float64 `msgpack:"weight_min"`
	WeightMax float64 `msgpack:"weight_max"`
	// FCLoss is the weighted loss with beta2, ADRLoss the anti-drift term without beta1.
	FCLoss  float64 `msgpack:"fc_loss"`
	ADRLoss float64 `msgpack:"adr_loss" range:"0.."`
}

// checkWithin checks a roll over timesteps 0 to n-1.
func (e *Roll) checkWithin(f *faults, n int64) {
	if n < 2 || n > MaxSteps {
		return // its tag says so
	}
	if !(e.Timestep < float64(n)) && e.Timestep <= MaxSteps {
		f.add("timestep", formatFloat(e.Timestep), fmt.Sprintf("must be below %d, the timesteps", n))
	}
	if e.Base != int64(e.Timestep) {
		f.add("base", strconv.FormatInt(e.Base, 10), "must be the integer part of timestep")
	}
	switch {
	case !e.IsRolled():
		f.checkWithin("source", e.Source, e.Base, e.Base)
	case e.Base < n-1:
		f.checkWithin("source", e.Source, e.Base+1, n-1)
	default:
		f.add("reason", quote(e.Reason),
			"must say why the sample does not roll: there is nothing noisier than its base")
	}
}

// checkRules checks the roll against the number of timesteps.
func (e *ScheduledSample) checkRules(f *faults) {
	e.Roll.checkWithin(f.inStruct("roll"), e.RollSettings.Timesteps)
}

// checkScheduled checks what ScheduledSampling says of the other fields of the prompt. What is
// ordinary sampling's must be absent.
func (p *Prompt) checkScheduled(f *faults) {
	s := p.ScheduledSampling
	if s == nil {
		return
	}
	absent := func(field string, given bool, value string) {
		if given {
			f.add(field, value, "must be absent beside scheduled_sampling, which rolls over the training timesteps")
		}
	}
	absent("stop", p.Stop != nil, "given")
	absent("num_inference_steps", p.NumInferenceSteps != nil, "given")
	absent("sigmas", p.Sigmas != nil, "given")
	kind := p.Rollout.SDEType
	absent("rollout.sde_type", kind != "" && TransitionNamed(kind).Stochastic, quote(kind))
	absent("rollout.sde_step_indices", p.Rollout.SDEStepIndices != nil, "given")
	absent("rollout.sde_window", p.Rollout.SDEWindow != nil, "given")
	absent("rollout.checkpoint_every", p.Rollout.CheckpointEvery != nil, "given")
	absent("rollout.solver", p.Rollout.Solver != "", quote(p.Rollout.Solver))
	absent("rollout.debug", len(p.Rollout.Debug) > 0, "given")
	if p.Start == nil || p.Start.Data == nil {
		f.add("start.data", "null", "must be there: the images or latents that are rolled")
	} else {
		absent("start.step_index", p.Start.StepIndex != nil, "given")
		absent("start.sigma", p.Start.Sigma != nil, "given")
	}
	g := f.inStruct("scheduled_sampling")
	n, size := int64(len(s.BaseTimesteps)), p.groupSize()
	if n > 1 && size > 0 && n != size {
		g.add("base_timesteps", strconv.FormatInt(n, 10)+" items",
			fmt.Sprintf("must be %d, the group_size, or 1 for all", size))
	}
}

// checkScheduled reports whether there is a result exactly where one is due.
func (e *Trajectory) checkScheduled(f *faults, completed bool) {
	switch due := completed && e.ScheduledSampling != nil; {
	case due && e.Rolled == nil:
		f.add("rolled", "null", "must be there: the sample is one of scheduled_sampling")
	case !due && e.Rolled != nil:
		f.add("rolled", "present", "must be absent unless a sample of scheduled_sampling is completed")
	case !due || e.ScheduledSampling.RollSettings.ReflexFlow == nil:
	case e.Rolled.Clean == nil || e.Rolled.Biased == nil || e.Rolled.ReflexFlow == nil:
		f.inStruct("rolled").add("clean", "null", "must be there, and biased and reflexflow: it is on")
	}
}
