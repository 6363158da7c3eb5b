package schemas

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Validate joins every fault that can be seen without the model's defaults. Where
// NumInferenceSteps and Sigmas are both absent, intake checks the steps again with
// the model's T (Rollout.ValidateSteps).
func (p *Prompt) Validate() error {
	var f faults
	f.version(p.V)
	if p.UID != "" {
		f.token("uid", p.UID)
	}
	f.text("prompt", p.Prompt, 0, MaxPromptBytes)
	if p.NegativePrompt != nil {
		f.text("negative_prompt", *p.NegativePrompt, 0, MaxPromptBytes)
	}
	if p.Model != "" {
		f.token("model", p.Model)
	}
	optional(p.GroupSize, func(n int64) { f.within("group_size", n, 1, MaxGroupSize) })
	optional(p.Seed, func(n int64) { f.notNegative("seed", n) })
	optional(p.Height, func(n int64) { f.within("height", n, 1, MaxSide) })
	optional(p.Width, func(n int64) { f.within("width", n, 1, MaxSide) })
	optional(p.NumInferenceSteps, func(n int64) { f.within("num_inference_steps", n, 1, MaxSteps) })
	optional(p.TrueCFGScale, func(x float64) { f.number("true_cfg_scale", x, 0, MaxCFGScale) })
	p.sigmas(&f)
	p.Rollout.validate(f.in("rollout"), p.steps(), p.Evaluation)
	f.optionalEnum("initial_noise", p.InitialNoise, InitialNoises)
	f.initialLatents(p.InitialLatents, p.groupSize())
	rewards(&f, p.Reward)
	p.Advantage.validate(f.in("advantage"), p.Batch != nil)
	f.metadata(p.Metadata)
	if p.Batch != nil {
		b := f.in("batch")
		b.token("id", p.Batch.ID)
		b.within("groups", p.Batch.Groups, 1, MaxBatchGroups)
		optional(p.Batch.Step, func(n int64) { b.notNegative("step", n) })
		optional(p.Batch.Epoch, func(n int64) { b.notNegative("epoch", n) })
	}
	optional(p.Deadline, func(n int64) { f.positive("deadline", n) })
	f.optionalEnum("unknown_fields", p.UnknownFields, UnknownPolicies)
	optional(p.Priority, func(n int64) { f.within("priority", n, -MaxPriority, MaxPriority) })
	optional(p.MinPolicyVersion, func(n int64) { f.notNegative("min_policy_version", n) })
	p.GroupPolicy.validate(f.in("group_policy"))
	p.Refill.validate(f.in("refill"))
	return f.err()
}

func optional[T any](v *T, check func(T)) {
	if v != nil {
		check(*v)
	}
}

// groupSize is n where the prompt says it, else 0.
func (p *Prompt) groupSize() int64 {
	if p.GroupSize == nil {
		return 0
	}
	return *p.GroupSize
}

// steps is T where the prompt says it, else 0.
func (p *Prompt) steps() int64 {
	switch {
	case p.NumInferenceSteps != nil && *p.NumInferenceSteps >= 1 && *p.NumInferenceSteps <= MaxSteps:
		return *p.NumInferenceSteps
	case p.NumInferenceSteps == nil && len(p.Sigmas) <= MaxSteps:
		return int64(len(p.Sigmas))
	}
	return 0
}

// sigmas checks the caller's pre-shift sigmas [T].
func (p *Prompt) sigmas(f *faults) {
	if p.Sigmas == nil || !f.length("sigmas", len(p.Sigmas), 1, MaxSteps) {
		return
	}
	if p.NumInferenceSteps != nil && *p.NumInferenceSteps != int64(len(p.Sigmas)) {
		f.add("sigmas", strconv.Itoa(len(p.Sigmas))+" items", fmt.Sprintf("must be %d, one per step of num_inference_steps", *p.NumInferenceSteps))
	}
	for i, s := range p.Sigmas {
		field := "sigmas[" + strconv.Itoa(i) + "]"
		switch {
		case !(s > 0 && s <= 1):
			f.add(field, formatFloat(s), "must be above 0 and at most 1")
		case i > 0 && !(s < p.Sigmas[i-1]):
			f.add(field, formatFloat(s), "must be below the one before it")
		default:
			continue
		}
		return
	}
}

// Validate joins every fault of the rollout that can be seen without knowing T.
func (r *Rollout) Validate() error {
	var f faults
	r.validate(&f, 0, false)
	return f.err()
}

// ValidateSteps joins every fault of the rollout when it has numInferenceSteps steps.
func (r *Rollout) ValidateSteps(numInferenceSteps int64) error {
	var f faults
	f.within("num_inference_steps", numInferenceSteps, 1, MaxSteps)
	if len(f.errs) > 0 {
		return f.err()
	}
	r.validate(f.in("rollout"), numInferenceSteps, false)
	return f.err()
}

// validate takes steps = 0 for not known. In an evaluation every step is ode, so
// what only concerns stochastic steps is let be.
func (r *Rollout) validate(f *faults, steps int64, evaluation bool) {
	f.optionalEnum("sde_type", r.SDEType, SDETypes)
	f.optionalEnum("log_prob_kind", r.LogProbKind, LogProbKinds)
	f.optionalEnum("solver", r.Solver, Solvers)
	f.optionalEnum("latents_dtype", r.LatentsDType, LatentsDTypes)
	f.names("debug", r.Debug, DebugTensors)
	high := float64(MaxNoiseLevel)
	if r.SDEType == TransitionCPS {
		high = 1 // beyond, sin(a pi/2) folds back
	}
	optional(r.NoiseLevel, func(x float64) { f.number("noise_level", x, 0, high) })

	last := int64(MaxSteps) // T, or the largest that it can be
	if steps > 0 {
		last = steps
	}
	if r.SDEStepIndices != nil {
		f.indices("sde_step_indices", r.SDEStepIndices, last-1)
	}
	if r.ReturnStepIndices != nil {
		f.indices("return_step_indices", r.ReturnStepIndices, last)
	}
	if r.SDEWindow != nil {
		if r.SDEStepIndices != nil {
			f.add("sde_window", "set beside sde_step_indices", "must be the only one of the two")
		}
		r.SDEWindow.validate(f.in("sde_window"), steps)
	}
	if !evaluation {
		r.density(f, steps)
	}
}

// density refuses log-probs of transitions that have no width: their density does
// not exist. That is the case without noise, and in the last step of cps, where
// sigma_next is 0.
func (r *Rollout) density(f *faults, steps int64) {
	none := r.SDEStepIndices != nil && len(r.SDEStepIndices) == 0
	if r.SDEType == TransitionODE || none || r.LogProbKind == LogProbSquared {
		return
	}
	kind := r.LogProbKind
	if kind == "" {
		kind = LogProbDensity
	}
	if r.NoiseLevel != nil && *r.NoiseLevel == 0 {
		f.add("noise_level", "0", "must be above 0 for log_prob_kind "+kind+": without noise there is no density")
	}
	if r.SDEType != TransitionCPS {
		return
	}
	rule := "must leave out the last step for log_prob_kind " + kind + ": the last cps step has no noise (use squared, or choose the steps)"
	switch {
	case r.SDEWindow != nil: // draws below T-1 unless its range says otherwise
		if steps > 0 && len(r.SDEWindow.Range) == 2 && r.SDEWindow.Range[1] == steps {
			f.add("sde_window.range", fmt.Sprint(r.SDEWindow.Range), rule)
		}
	case r.SDEStepIndices == nil:
		f.add("sde_step_indices", "null, all steps", rule)
	case steps > 0 && slices.Contains(r.SDEStepIndices, steps-1):
		f.add("sde_step_indices", strconv.FormatInt(steps-1, 10), rule)
	}
}

// validate takes steps = 0 for not known.
func (w *SDEWindow) validate(f *faults, steps int64) {
	f.optionalEnum("strategy", w.Strategy, WindowStrategies)
	f.within("iteration", w.Iteration, 0, 1<<32-1)
	f.within("iters_per_group", w.ItersPerGroup, 0, 1<<32-1)
	optional(w.Seed, func(n int64) { f.notNegative("seed", n) })
	limit := int64(MaxSteps)
	if steps > 0 {
		limit = steps
	}
	low, high := int64(0), max(limit-1, 1)
	if w.Range != nil {
		if len(w.Range) != 2 {
			f.add("range", strconv.Itoa(len(w.Range))+" items", "must be 2, low and high")
			return
		}
		low, high = w.Range[0], w.Range[1]
		if low < 0 || high > limit || low >= high {
			f.add("range", fmt.Sprint(w.Range), fmt.Sprintf("must be a part of [0, %d) that is not empty", limit))
			return
		}
	}
	if w.Size < 1 || w.Size > high-low {
		f.add("size", strconv.FormatInt(w.Size, 10), fmt.Sprintf("must be between 1 and %d, the length of the range", high-low))
	}
}

// rewards checks the reward list of a prompt or a group.
func rewards(f *faults, list []RewardSpec) {
	if !f.length("reward", len(list), 0, MaxRewards) {
		return
	}
	total := 0.0
	for i := range list {
		r, g := &list[i], f.item("reward", i)
		g.rewardName("name", r.Name)
		for _, before := range list[:i] {
			if before.Name == r.Name {
				g.add("name", quote(r.Name), "must come once")
				break
			}
		}
		weight := 1.0
		if r.Weight != nil {
			weight = *r.Weight
			g.number("weight", weight, -MaxWeight, MaxWeight)
		}
		total += weight
		g.text("ground_truth", r.GroundTruth, 0, MaxPromptBytes)
		if !g.length("params", len(r.Params), 0, MaxParams) {
			continue
		}
		for _, name := range sortedKeys(r.Params) {
			if len(name) == 0 || len(name) > MaxParamName {
				g.add("params", quote(name), fmt.Sprintf("names must have 1 to %d bytes", MaxParamName))
				continue
			}
			g.in("params").text(name, r.Params[name], 0, MaxParamBytes)
		}
	}
	if len(list) > 0 && !(total > 0) {
		f.add("reward", "weights sum to "+formatFloat(total), "must be above 0")
	}
}

func sortedKeys(m map[string]string) []string {
	if len(m) == 0 {
		return nil
	}
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (a *AdvantageSpec) validate(f *faults, batch bool) {
	if a.Estimator != "" {
		f.token("estimator", a.Estimator)
	}
	f.optionalEnum("std", a.Std, StdScales)
	f.optionalEnum("std_basis", a.StdBasis, StdBases)
	optional(a.Epsilon, func(x float64) { f.number("epsilon", x, 0, MaxEpsilon) })
	if a.Mode != "" {
		f.token("mode", a.Mode)
	}
	optional(a.AdvClipMax, func(x float64) { f.number("adv_clip_max", x, 0, MaxAdvClip) })
	optional(a.Gamma, func(x float64) { f.number("gamma", x, 0, 1) })
	f.optionalEnum("singleton", a.Singleton, Singletons)
	if a.Std == StdGlobal && !batch {
		f.add("std", quote(a.Std), "needs a batch: without one there is nothing beyond the group")
	}
}

// rewardName checks a name of the form KIND or KIND:INSTANCE.
func (f *faults) rewardName(field, s string) {
	kind, instance, split := strings.Cut(s, ":")
	if len(s) > MaxToken || kind == "" || !isToken(kind) || !isToken(instance) || split && instance == "" {
		f.add(field, quote(s), fmt.Sprintf("must be KIND or KIND:INSTANCE, together at most %d characters of A-Z a-z 0-9 _ -", MaxToken))
	}
}

func (p *GroupPolicy) validate(f *faults) {
	if p == nil {
		return
	}
	f.optionalEnum("zero_std", p.ZeroStd, ZeroStdPolicies)
	f.optionalEnum("failed", p.Failed, FailedPolicies)
	optional(p.RefillRounds, func(n int64) { f.within("refill_rounds", n, 0, MaxRefillRounds) })
	optional(p.MaxPolicySpan, func(n int64) { f.within("max_policy_span", n, 1, MaxPolicySpan) })
}

func (r *Refill) validate(f *faults) {
	if r == nil {
		return
	}
	f.token("root", r.Root)
	f.within("round", r.Round, 1, MaxRefillRounds)
}
