package schemas

import (
	"fmt"
	"slices"
	"strconv"
)

// Validate returns all faults of the request, joined. That the schedule digest fits the
// fields is the sampler's to check (ComputeScheduleDigest).
func (e *Request) Validate() error { return CheckFields(e) }

// checkRules checks that the lists of a request fit its schedule and its segment, or that a request for text has no
// fields of images.
func (e *Request) checkRules(f *faults) {
	f.checkSampleIndex(e.SampleIndex, e.GroupSize)
	e.checkStage(f, &e.Group)
	e.Group.checkRulesAcross(f.inStruct("group"), e.UID, e.GroupSize)
	if e.Text != nil {
		e.checkText(f)
		return
	}
	f.requirePositive("height", e.Height)
	f.requirePositive("width", e.Width)
	f.checkFrames(e.Frames)
	f.checkGuidance(&e.Sampling)
	f.checkConditions(e.Conditions)
	f.checkParams("arguments", e.Arguments)
	f.requireOneOf("log_prob_kind", e.LogProbKind, LogProbKinds)
	f.requireOneOf("solver", e.Solver, Solvers)
	f.requireOneOf("latents_dtype", e.LatentsDType, LatentsDTypes)
	if f.checkLength("sigmas", len(e.Sigmas), 2, max(len(e.Sigmas), 3)) {
		e.checkSchedule(f)
	}
	f.checkLength("transitions", len(e.Transitions), 1, max(len(e.Transitions), 2))
	f.requireLength("transitions", len(e.Transitions), len(e.Sigmas)-1, "one less than the sigmas")
	begin, end := e.checkSegment(f, e.GroupSize)
	f.checkSeeds(e.StepSeeds, len(e.Transitions))
	f.checkIndices("return_step_indices", e.ReturnStepIndices, begin, end, MaxSteps)
	f.checkAscending("return_step_indices", e.ReturnStepIndices)
	f.checkIndices("checkpoint_step_indices", e.CheckpointStepIndices, begin+1, end-1, MaxSteps-1)
	f.checkAscending("checkpoint_step_indices", e.CheckpointStepIndices)
}

// requirePositive refuses a side of an image that is 0.
func (f *faults) requirePositive(field string, n int64) {
	if n == 0 {
		f.checkWithin(field, 0, 1, MaxSide)
	}
}

// checkGuidance checks that a second scale of guidance has the noise level below which it holds, and that a negative
// prompt is not there and absent.
func (f *faults) checkGuidance(s *Sampling) {
	if (s.TrueCFGScale2 == 0) != (s.BoundaryRatio == 0) {
		f.add("boundary_ratio", formatFloat(s.BoundaryRatio), "must be above 0 with true_cfg_scale_2, else absent")
	}
	if s.NoNegativePrompt && s.NegativePrompt != "" {
		f.add("negative_prompt", quote(s.NegativePrompt), "must be empty with no_negative_prompt")
	}
}

// checkText checks that a request for text asks for nothing of an image.
func (e *Request) checkText(f *faults) {
	f.refuseImageFields(e, e.seesFiles(&e.Group)...)
	if e.Group.Tree != nil {
		f.add("group.tree", "given", besideText)
	}
}

const besideText = "must be absent beside text: it is for images"

// refuseImageFields refuses each field of an event with text that only images have, but for some.
func (f *faults) refuseImageFields(e any, but ...string) {
	for _, field := range imageFields(e) {
		if !slices.Contains(but, field) {
			f.add(field, "given", besideText)
		}
	}
}

// checkRulesAcross checks the rules across the fields of a group, which every event of the group carries.
func (g *Group) checkRulesAcross(f *faults, uid UID, groupSize int64) {
	if g.BatchGroups == 0 && g.Batch != string(uid) {
		f.add("batch", quote(g.Batch), fmt.Sprintf("must be the uid %s: the group has no batch", quote(string(uid))))
	}
	checkRewards(f, g.Reward)
	g.checkTree(f, groupSize)
	g.checkStages(f, groupSize)
	g.Advantage.checkRulesAcross(f.inStruct("advantage"), g.BatchGroups > 0)
}

// checkRules checks index, sigmas, timestep, log-prob and tensors of a step.
func (e *Step) checkRules(f *faults) {
	if n := e.NumInferenceSteps; n >= 1 && e.StepIndex >= n && e.StepIndex < MaxSteps {
		f.checkWithin("step_index", e.StepIndex, 0, n-1)
	}
	if s := e.SigmaNext; s < 1 && s >= e.Sigma && e.Sigma > 0 {
		f.add("sigma_next", formatFloat32(s), "must be at least 0 and below sigma")
	}
	if !e.OwnTimestep {
		f.checkTimestep("timestep", e.Timestep, 1000*e.Sigma, "1000 * sigma")
	}
	e.checkLogProb(f)
	e.checkTracks(f)
	e.checkTensors(f)
}

// checkTimestep checks that t is what the network knows a state by: trainers look up a step by it.
func (f *faults) checkTimestep(field string, t, want float32, of string) {
	if t != want && t >= 0 && t <= 1000*MaxSigma {
		f.add(field, formatFloat32(t), "must be "+formatFloat32(want)+", "+of)
	}
}

// checkSchedule checks the sigmas of a schedule, and what the network knows them by.
func (s *Sampling) checkSchedule(f *faults) {
	n := len(s.NetworkTimesteps)
	f.checkSigmas(s.Sigmas, n > 0)
	if n > 0 {
		f.requireLength("network_timesteps", n, len(s.Sigmas)-1, "one per step")
	}
	if (n > 0) != (s.InitialStd > 0) {
		f.add("initial_std", formatFloat(s.InitialStd), "must be above 0 with network_timesteps, else absent")
	}
	if n > 0 && s.ScheduledSampling != nil {
		f.add("network_timesteps", "given", "must be absent with scheduled_sampling")
	}
}

// checkLogProb checks that a stochastic step has its log-prob and an ode step has none.
func (e *Step) checkLogProb(f *faults) {
	stochastic := TransitionNamed(e.Transition).Stochastic
	f.checkPresence("log_prob", e.LogProb, stochastic)
	f.checkPresence("log_prob_sum", e.LogProbSum, stochastic)
}

// checkPresence checks that a log-prob is there exactly on a stochastic step.
func (f *faults) checkPresence(field string, value *float64, stochastic bool) {
	switch {
	case value == nil && stochastic:
		f.add(field, "null", "must be a number unless the transition is ode")
	case value != nil && !stochastic:
		f.add(field, formatFloat(*value), "must be null on an ode step")
	}
}

// checkTensors checks which latents, checkpoint and debug tensors a step has.
func (e *Step) checkTensors(f *faults) {
	if len(e.Latents) <= MaxStepLatents {
		for i := range e.Latents {
			l, g := &e.Latents[i], f.inItem("latents", i)
			if l.Index != e.StepIndex && l.Index != e.StepIndex+1 {
				g.add("index", strconv.FormatInt(l.Index, 10),
					fmt.Sprintf("must be the step %d, or %d on the last step that runs", e.StepIndex, e.StepIndex+1))
			}
			if i > 0 && l.Index == e.Latents[0].Index {
				g.add("index", strconv.FormatInt(l.Index, 10), "must come at most once")
			}
		}
	}
	if e.Checkpoint != nil && e.Latents != nil && slices.ContainsFunc(e.Latents,
		func(l IndexedTensor) bool { return l.Index == e.StepIndex }) {
		f.add("checkpoint", "present", "must be absent beside latents with the state before the step")
	}
	if len(e.Debug) > MaxDebug {
		return
	}
	for i := range e.Debug {
		d, g := &e.Debug[i], f.inItem("debug", i)
		g.checkEnum("name", d.Name, DebugTensors)
		for _, before := range e.Debug[:i] {
			if before.Name == d.Name {
				g.add("name", quote(d.Name), "must come at most once")
			}
		}
	}
}

// Validate returns all faults of the trajectory, joined. One that did not complete must name
// its sample, its attempt and its error; what it has of the rollout may be empty.
func (e *Trajectory) Validate() error { return CheckFields(e) }

// checkRules checks a trajectory. If it is completed, it must have everything to recompute it; otherwise it must have
// an error and no media. That of a text has rules of its own (checkText).
func (e *Trajectory) checkRules(f *faults) {
	f.checkSampleIndex(e.SampleIndex, e.GroupSize)
	e.checkStage(f, &e.Group)
	completed := e.StopReason == StopCompleted
	if completed && e.Error != "" {
		f.add("error", quote(e.Error), "must be empty when completed")
	}
	if e.TruncatedTokens > 0 && !e.TruncatePrompt {
		f.add("truncated_tokens", strconv.FormatInt(e.TruncatedTokens, 10), "must be 0 without truncate_prompt")
	}
	if e.Text != nil {
		e.checkText(f, completed)
		return
	}
	begin, end := e.checkSegment(f, e.GroupSize)
	e.checkScheduled(f, completed)
	if len(e.Conditioning) <= MaxConditioning {
		for i, c := range e.Conditioning {
			if slices.ContainsFunc(e.Conditioning[:i], func(o NamedTensor) bool { return o.Name == c.Name }) {
				f.inItem("conditioning", i).add("name", quote(c.Name), "must come at most once")
			}
		}
	}
	f.checkSeeds(e.StepSeeds, len(e.Transitions))
	if completed {
		e.checkCompleted(f, begin, end)
	} else {
		f.requireText("error", e.Error)
		e.checkSchedule(f)
		if len(e.Media) > 0 {
			f.add("media", "present", "must be absent unless completed")
		}
	}
	f.checkPolicySpan(e.PolicyVersionMin, e.PolicyVersionMax)
	e.Group.checkRulesAcross(f.inStruct("group"), e.UID, e.GroupSize)
}

// checkText checks a sample of text.
func (e *Trajectory) checkText(f *faults, completed bool) {
	f.refuseImageFields(e, e.seesFiles(&e.Group)...)
	if by := e.Drawn; by != nil {
		f.requireOneOf("drawn.engine.values", by.Engine.Values, EngineValues)
	}
	if completed && e.Text.SaidBy != "" {
		e.Text.checkSaid(f.inStruct("text"))
	} else if completed {
		e.Text.checkCompleted(f.inStruct("text"), e.Drawn)
		f.checkLength("steps", len(e.Steps), 1, max(len(e.Steps), 2))
		f.requireDigest("content_digest", e.ContentDigest, FormDigest)
		f.requireDigest("schedule_digest", e.ScheduleDigest, FormDigest)
	} else {
		f.requireText("error", e.Error)
	}
	f.checkPolicySpan(e.PolicyVersionMin, e.PolicyVersionMax)
	e.Group.checkRulesAcross(f.inStruct("group"), e.UID, e.GroupSize)
}

// checkCompleted checks that a completed trajectory has everything with which a trainer recomputes the log-probs of the
// steps [begin, end).
func (e *Trajectory) checkCompleted(f *faults, begin, end int64) {
	f.requirePositive("height", e.Height)
	f.requirePositive("width", e.Width)
	f.requireOneOf("cfg_rule", e.CFGRule, CFGRules)
	if f.checkLength("sigmas", len(e.Sigmas), 2, max(len(e.Sigmas), 2)) {
		e.checkSchedule(f)
	}
	steps := len(e.Sigmas) - 1
	if f.requireLength("timesteps", len(e.Timesteps), len(e.Sigmas), "one per sigma") {
		of := "1000 * sigma"
		if len(e.NetworkTimesteps) > 0 {
			of = "of network_timesteps"
		}
		for i, t := range e.Timesteps {
			f.checkTimestep("timesteps["+strconv.Itoa(i)+"]", t, e.Timestep(int64(i)), of)
		}
	}
	f.requireLength("transitions", len(e.Transitions), steps, "one per step")
	if f.requireLength("log_probs", len(e.LogProbs), steps, "one per step") && len(e.Transitions) == steps {
		for i, p := range e.LogProbs {
			switch ran := begin <= int64(i) && int64(i) < end; {
			case !ran && p != nil:
				f.add("log_probs["+strconv.Itoa(i)+"]", nullOr(p), "must be null on a step that did not run")
			case ran && (p == nil) == TransitionNamed(e.Transitions[i]).Stochastic:
				f.add("log_probs["+strconv.Itoa(i)+"]", nullOr(p), "must be null exactly on ode steps; this one is "+
					quote(e.Transitions[i]))
			}
		}
	}
	f.requireOneOf("log_prob_kind", e.LogProbKind, LogProbKinds)
	f.requireOneOf("solver", e.Solver, Solvers)
	f.checkIndices("latent_step_indices", e.LatentStepIndices, begin, end, MaxSteps)
	f.checkAscending("latent_step_indices", e.LatentStepIndices)
	f.requireOneOf("latents_dtype", e.LatentsDType, LatentsDTypes)
	latents := Tensor{DType: e.LatentsDType, Shape: e.LatentsShape}
	if _, ok := latents.ByteSize(); len(e.LatentsShape) == 0 || !ok && latents.DType != "" {
		f.add("latents_shape", fmt.Sprint(e.LatentsShape[:min(len(e.LatentsShape), MaxTensorDims+1)]),
			"must be the shape of a tensor, [S, C]")
	}
	elements, _ := latents.ElementCount()
	f.checkTracks(len(e.Tracks), func(i int) *Track { return &e.Tracks[i] }, elements)
	f.requireLength("steps", len(e.Steps), int(end-begin), "one per step that runs")
	f.requireDigest("content_digest", e.ContentDigest, FormDigest)
	f.requireDigest("schedule_digest", e.ScheduleDigest, FormDigest)
	f.checkFrames(e.Frames)
	f.checkGuidance(&e.Sampling)
	f.checkConditions(e.Conditions)
	e.checkMedia(f, end)
}

// checkFrames refuses 1 frame, which says the same as no frames at all, and would give another digest.
func (f *faults) checkFrames(n int64) {
	if n == 1 {
		f.add("frames", "1", "must be absent for an image, or more than 1")
	}
}

func nullOr(p *float64) string {
	if p == nil {
		return "null"
	}
	return formatFloat(*p)
}
