package schemas

import (
	"fmt"
	"math"
	"strconv"
)

// Validate joins every fault of the request. That the schedule digest fits the
// fields is the sampler's to check (ComputeScheduleDigest).
func (e *Request) Validate() error {
	var f faults
	f.version(e.V)
	f.sample(e.Run, e.UID, e.SampleIndex, e.GroupSize)
	f.token("lane", e.Lane)
	f.text("prompt", e.Prompt, 0, MaxPromptBytes)
	f.text("negative_prompt", e.NegativePrompt, 0, MaxPromptBytes)
	f.within("height", e.Height, 1, MaxSide)
	f.within("width", e.Width, 1, MaxSide)
	f.number("true_cfg_scale", e.TrueCFGScale, 0, MaxCFGScale)
	f.initialLatents(e.InitialLatents, e.GroupSize)
	f.sigmas(e.Sigmas)
	f.exactly("transitions", len(e.Transitions), len(e.Sigmas)-1, "one less than the sigmas")
	f.transitions(e.Transitions)
	f.number("noise_level", e.NoiseLevel, 0, MaxNoiseLevel)
	f.enum("log_prob_kind", e.LogProbKind, LogProbKinds)
	f.enum("solver", e.Solver, Solvers)
	f.indices("return_step_indices", e.ReturnStepIndices, int64(len(e.Sigmas)-1))
	f.ascending("return_step_indices", e.ReturnStepIndices)
	f.names("debug", e.Debug, DebugTensors)
	f.enum("latents_dtype", e.LatentsDType, LatentsDTypes)
	f.digest("schedule_digest", e.ScheduleDigest)
	f.within("priority", e.Priority, -MaxPriority, MaxPriority)
	f.notNegative("min_policy_version", e.MinPolicyVersion)
	e.Group.validate(f.in("group"), e.UID)
	return f.err()
}

// validate checks what every event of a group carries of it.
func (g *Group) validate(f *faults, uid string) {
	f.token("batch", g.Batch)
	f.within("batch_groups", g.BatchGroups, 0, MaxBatchGroups)
	if g.BatchGroups == 0 && g.Batch != uid {
		f.add("batch", quote(g.Batch), fmt.Sprintf("must be the uid %s: the group has no batch", quote(uid)))
	}
	rewards(f, g.Reward)
	g.Advantage.validate(f.in("advantage"), g.BatchGroups > 0)
	f.notNegative("deadline", g.Deadline)
	f.metadata(g.Metadata)
	f.notNegative("created", g.Created)
	g.GroupPolicy.validate(f.in("group_policy"))
	g.Refill.validate(f.in("refill"))
	optional(g.BatchStep, func(n int64) { f.notNegative("batch_step", n) })
	optional(g.BatchEpoch, func(n int64) { f.notNegative("batch_epoch", n) })
	if g.SourceRun != "" {
		f.token("source_run", g.SourceRun)
	}
}

// Validate joins every fault of the step.
func (e *Step) Validate() error {
	var f faults
	f.version(e.V)
	f.sample(e.Run, e.UID, e.SampleIndex, MaxGroupSize)
	f.token("attempt", e.Attempt)
	f.within("num_inference_steps", e.NumInferenceSteps, 1, MaxSteps)
	steps := e.NumInferenceSteps
	if steps < 1 || steps > MaxSteps {
		steps = MaxSteps
	}
	f.within("step_index", e.StepIndex, 0, steps-1)
	f.enum("transition", e.Transition, SDETypes)
	f.number("noise_level", e.NoiseLevel, 0, MaxNoiseLevel)
	if s := e.Sigma; !(s > 0 && s <= MaxSigma) {
		f.add("sigma", formatFloat32(s), "must be above 0 and at most 1")
	}
	if s := e.SigmaNext; !(s >= 0 && s < e.Sigma) && e.Sigma > 0 && e.Sigma <= MaxSigma {
		f.add("sigma_next", formatFloat32(s), "must be at least 0 and below sigma")
	}
	f.timestep("timestep", e.Timestep, e.Sigma)
	f.number("std_dev_t", e.StdDevT, 0, math.MaxFloat64)
	f.number("noise_std", e.NoiseStd, 0, math.MaxFloat64)
	e.logProb(&f)
	f.within("element_count", e.ElementCount, 1, MaxTensorBytes)
	e.tensors(&f)
	f.notNegative("policy_version", e.PolicyVersion)
	f.text("weights_digest", e.WeightsDigest, 0, MaxName)
	f.digest("schedule_digest", e.ScheduleDigest)
	f.text("sampler", e.Sampler, 0, MaxName)
	f.text("backend", e.Backend, 0, MaxName)
	f.notNegative("device_ns", e.DeviceNS)
	return f.err()
}

// timestep is the float32 nearest to 1000 * sigma, as diffusers has it: trainers look a
// step up by it.
func (f *faults) timestep(field string, t, sigma float32) {
	if want := float32(1000 * sigma); t != want {
		f.add(field, formatFloat32(t), "must be "+formatFloat32(want)+", 1000 * sigma")
	}
}

// logProb checks that a stochastic step has its log-prob and an ode step has none.
func (e *Step) logProb(f *faults) {
	f.enum("log_prob_kind", e.LogProbKind, LogProbKinds)
	for _, p := range []struct {
		field string
		value *float64
	}{{"log_prob", e.LogProb}, {"log_prob_sum", e.LogProbSum}} {
		switch {
		case p.value == nil && e.Transition != TransitionODE:
			f.add(p.field, "null", "must be a number unless the transition is ode")
		case p.value != nil && e.Transition == TransitionODE:
			f.add(p.field, formatFloat(*p.value), "must be null on an ode step")
		}
		f.finiteOrNull(p.field, p.value)
	}
}

func (e *Step) tensors(f *faults) {
	if f.length("latents", len(e.Latents), 0, MaxStepLatents) {
		for i := range e.Latents {
			l, g := &e.Latents[i], f.item("latents", i)
			final := e.StepIndex == e.NumInferenceSteps-1 && l.Index == e.NumInferenceSteps
			if l.Index != e.StepIndex && !final {
				g.add("index", strconv.FormatInt(l.Index, 10), fmt.Sprintf("must be the step %d, or %d on the last step", e.StepIndex, e.NumInferenceSteps))
			}
			if i > 0 && l.Index == e.Latents[0].Index {
				g.add("index", strconv.FormatInt(l.Index, 10), "must come once")
			}
			l.Tensor.validate(g.in("tensor"))
		}
	}
	if !f.length("debug", len(e.Debug), 0, MaxDebug) {
		return
	}
	for i := range e.Debug {
		d, g := &e.Debug[i], f.item("debug", i)
		g.enum("name", d.Name, DebugTensors)
		for _, before := range e.Debug[:i] {
			if before.Name == d.Name {
				g.add("name", quote(d.Name), "must come once")
			}
		}
		d.Tensor.validate(g.in("tensor"))
	}
}

// Validate joins every fault of the trajectory. One that did not complete must name
// its sample, its attempt and its error; what it has of the rollout may be empty.
func (e *Trajectory) Validate() error {
	var f faults
	f.version(e.V)
	f.sample(e.Run, e.UID, e.SampleIndex, e.GroupSize)
	f.token("lane", e.Lane)
	f.token("attempt", e.Attempt)
	f.enum("stop_reason", e.StopReason, StopReasons)
	completed := e.StopReason == StopCompleted
	if completed && e.Error != "" {
		f.add("error", quote(e.Error), "must be empty when completed")
	}
	if !completed {
		f.text("error", e.Error, 1, MaxText)
	}
	f.text("prompt", e.Prompt, 0, MaxPromptBytes)
	f.text("negative_prompt", e.NegativePrompt, 0, MaxPromptBytes)
	f.notNegative("truncated_tokens", e.TruncatedTokens)
	if e.TruncatedTokens > 0 && !e.TruncatePrompt {
		f.add("truncated_tokens", strconv.FormatInt(e.TruncatedTokens, 10), "must be 0 without truncate_prompt")
	}
	if completed {
		e.completed(&f)
	} else {
		e.notCompleted(&f)
	}
	f.number("true_cfg_scale", e.TrueCFGScale, 0, MaxCFGScale)
	f.initialLatents(e.InitialLatents, e.GroupSize)
	f.transitions(e.Transitions)
	f.number("noise_level", e.NoiseLevel, 0, MaxNoiseLevel)
	for i, p := range e.LogProbs {
		f.finiteOrNull("log_probs["+strconv.Itoa(i)+"]", p)
	}
	if f.length("conditioning", len(e.Conditioning), 0, MaxConditioning) {
		for i := range e.Conditioning {
			g := f.item("conditioning", i)
			g.text("name", e.Conditioning[i].Name, 1, MaxName)
			e.Conditioning[i].Tensor.validate(g.in("tensor"))
		}
	}
	f.text("weights_digest", e.WeightsDigest, 0, MaxName)
	f.policies(e.PolicyVersionMin, e.PolicyVersionMax)
	f.text("sampler", e.Sampler, 0, MaxName)
	f.text("backend", e.Backend, 0, MaxName)
	e.Group.validate(f.in("group"), e.UID)
	e.Timings.validate(f.in("timings"))
	return f.err()
}

// completed checks that a trainer could recompute every log-prob.
func (e *Trajectory) completed(f *faults) {
	f.within("height", e.Height, 1, MaxSide)
	f.within("width", e.Width, 1, MaxSide)
	f.enum("cfg_rule", e.CFGRule, CFGRules)
	f.sigmas(e.Sigmas)
	steps := len(e.Sigmas) - 1
	if f.exactly("timesteps", len(e.Timesteps), len(e.Sigmas), "one per sigma") {
		for i, t := range e.Timesteps {
			f.timestep("timesteps["+strconv.Itoa(i)+"]", t, e.Sigmas[i])
		}
	}
	f.exactly("transitions", len(e.Transitions), steps, "one per step")
	if f.exactly("log_probs", len(e.LogProbs), steps, "one per step") && len(e.Transitions) == steps {
		for i, p := range e.LogProbs {
			if (p == nil) != (e.Transitions[i] == TransitionODE) {
				f.add("log_probs["+strconv.Itoa(i)+"]", nullOr(p), "must be null exactly on ode steps; this one is "+quote(e.Transitions[i]))
			}
		}
	}
	f.enum("log_prob_kind", e.LogProbKind, LogProbKinds)
	f.enum("solver", e.Solver, Solvers)
	f.indices("latent_step_indices", e.LatentStepIndices, int64(steps))
	f.ascending("latent_step_indices", e.LatentStepIndices)
	f.enum("latents_dtype", e.LatentsDType, LatentsDTypes)
	latents := Tensor{DType: e.LatentsDType, Shape: e.LatentsShape}
	if _, ok := latents.ByteSize(); len(e.LatentsShape) == 0 || !ok && latents.DType != "" {
		f.add("latents_shape", fmt.Sprint(e.LatentsShape[:min(len(e.LatentsShape), MaxTensorDims+1)]), "must be the shape of a tensor, [S, C]")
	}
	if f.exactly("steps", len(e.Steps), steps, "one per step") {
		e.stepRefs(f)
	}
	f.digest("content_digest", e.ContentDigest)
	f.digest("schedule_digest", e.ScheduleDigest)
	if e.Image == nil {
		f.add("image", "null", "must be present when completed")
		return
	}
	e.Image.validate(f.in("image"))
}

// notCompleted bounds what may be there.
func (e *Trajectory) notCompleted(f *faults) {
	f.within("height", e.Height, 0, MaxSide)
	f.within("width", e.Width, 0, MaxSide)
	f.optionalEnum("cfg_rule", e.CFGRule, CFGRules)
	if len(e.Sigmas) > 0 {
		f.sigmas(e.Sigmas)
	}
	f.length("timesteps", len(e.Timesteps), 0, MaxSteps+1)
	for i, t := range e.Timesteps {
		f.number("timesteps["+strconv.Itoa(i)+"]", float64(t), 0, 1000*MaxSigma)
	}
	f.length("transitions", len(e.Transitions), 0, MaxSteps)
	f.length("log_probs", len(e.LogProbs), 0, MaxSteps)
	f.optionalEnum("log_prob_kind", e.LogProbKind, LogProbKinds)
	f.optionalEnum("solver", e.Solver, Solvers)
	f.indices("latent_step_indices", e.LatentStepIndices, MaxSteps)
	f.length("latents_shape", len(e.LatentsShape), 0, MaxTensorDims)
	f.optionalEnum("latents_dtype", e.LatentsDType, LatentsDTypes)
	if f.length("steps", len(e.Steps), 0, MaxSteps) {
		e.stepRefs(f)
	}
	f.optionalDigest("content_digest", e.ContentDigest)
	f.optionalDigest("schedule_digest", e.ScheduleDigest)
	if e.Image != nil {
		f.add("image", "present", "must be absent unless completed")
	}
}

func (e *Trajectory) stepRefs(f *faults) {
	for i := range e.Steps {
		g := f.item("steps", i)
		if e.Steps[i].Seq == 0 {
			g.add("seq", "0", "must be positive")
		}
		g.digest("digest", e.Steps[i].Digest)
	}
}

func (t *SampleTimings) validate(f *faults) {
	f.notNegative("received", t.Received)
	f.notNegative("started", t.Started)
	f.notNegative("finished", t.Finished)
	f.notNegative("encode_ns", t.EncodeNS)
	f.notNegative("denoise_ns", t.DenoiseNS)
	f.notNegative("decode_ns", t.DecodeNS)
}

func nullOr(p *float64) string {
	if p == nil {
		return "null"
	}
	return formatFloat(*p)
}
