package schemas

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Validate returns all faults that can be found without the model's defaults, joined. If
// NumInferenceSteps and Sigmas are both absent, intake checks the steps again with the
// model's T (Rollout.ValidateSteps).
func (p *Prompt) Validate() error { return CheckFields(p) }

// checkRules checks the rules across the fields of a prompt, part by part.
func (p *Prompt) checkRules(f *faults) {
	p.checkText(f)
	p.checkSigmas(f)
	p.Rollout.checkRulesAcross(f.inStruct("rollout"), p.steps(), p.Validation)
	for i, c := range p.Conditions {
		if c.Stage == "" && (c.Data == nil) == (c.Ref == nil) {
			f.inItem("conditions", i).add("data", "beside ref or without it", "must be the only one of the two")
		}
	}
	f.checkParams("arguments", p.Arguments)
	given := func(c Condition) bool { return c.Stage == "" }
	if len(p.Substitutes) > 0 && (slices.ContainsFunc(p.Conditions, given) ||
		slices.ContainsFunc(p.Stages, func(s StageSpec) bool { return slices.ContainsFunc(s.Conditions, given) })) {
		f.add("substitutes", strconv.Itoa(len(p.Substitutes)),
			"must be absent beside conditions, which are of one prompt")
	}
	if exact, least := p.PolicyVersion, p.MinPolicyVersion; exact != nil && least != nil && *exact < *least {
		f.add("policy_version", strconv.FormatInt(*exact, 10),
			fmt.Sprintf("must be at least min_policy_version, %d", *least))
	}
	p.checkSegment(f)
	p.checkScheduled(f)
	p.checkTree(f)
	p.checkStages(f)
	checkRewards(f, p.Reward)
	p.checkJudgedSteps(f)
	p.Advantage.checkRulesAcross(f.inStruct("advantage"), p.Batch != nil)
	if g := p.GroupPolicy; len(p.Substitutes) > 0 && (g == nil || g.ZeroStd != GroupRefill && g.Failed != GroupRefill) {
		f.add("substitutes", strconv.Itoa(len(p.Substitutes)),
			"must be absent unless zero_std or failed of group_policy is refill")
	}
	for i, r := range p.Rules {
		if slices.ContainsFunc(p.Rules[:i], func(x RuleSpec) bool { return x.Name == r.Name }) {
			f.inItem("rules", i).add("name", quote(r.Name), "must come at most once")
		}
	}
	for i, s := range p.Substitutes {
		if s.NegativePrompt != nil && len(p.Stages) > 0 {
			f.inItem("substitutes", i).add("negative_prompt", "given", "must be absent beside stages")
		}
		truths := slices.ContainsFunc(p.Reward, func(r RewardSpec) bool { return r.GroundTruth != "" })
		if s.GroundTruth != "" && !truths {
			f.inItem("substitutes", i).add("ground_truth", quote(s.GroundTruth.Text()),
				"must be absent unless a reward function of the prompt has one")
		}
	}
}

// groupSize returns n if the prompt says it, otherwise 0.
func (p *Prompt) groupSize() int64 {
	if p.GroupSize == nil {
		return 0
	}
	return *p.GroupSize
}

// steps returns T if the prompt says it, otherwise 0.
func (p *Prompt) steps() int64 {
	switch {
	case p.NumInferenceSteps != nil && *p.NumInferenceSteps >= 1 && *p.NumInferenceSteps <= MaxSteps:
		return *p.NumInferenceSteps
	case p.NumInferenceSteps == nil && len(p.Sigmas) <= MaxSteps:
		return int64(len(p.Sigmas))
	}
	return 0
}

// checkSigmas checks that the caller's pre-shift sigmas [T] are one per step, and fall.
func (p *Prompt) checkSigmas(f *faults) {
	if len(p.Sigmas) == 0 || len(p.Sigmas) > MaxSteps {
		return
	}
	if p.NumInferenceSteps != nil && *p.NumInferenceSteps != int64(len(p.Sigmas)) {
		f.add("sigmas", strconv.Itoa(len(p.Sigmas))+" items",
			fmt.Sprintf("must be %d, one per step of num_inference_steps", *p.NumInferenceSteps))
	}
	for i, s := range p.Sigmas {
		if !(s > 0 && s <= 1) {
			return // its tag says so
		}
		if i > 0 && !(s < p.Sigmas[i-1]) {
			f.add("sigmas["+strconv.Itoa(i)+"]", formatFloat(s), "must be below the one before it")
			return
		}
	}
}

// Validate returns all faults of the rollout that can be seen without knowing T.
func (r *Rollout) Validate() error {
	var f faults
	f.checkFields(reflect.ValueOf(r).Elem())
	r.checkRulesAcross(&f, 0, false)
	return f.joined()
}

// ValidateSteps joins every fault of the rollout when it has numInferenceSteps steps.
func (r *Rollout) ValidateSteps(numInferenceSteps int64) error {
	var f faults
	f.checkWithin("num_inference_steps", numInferenceSteps, 1, MaxSteps)
	if len(f.errs) > 0 {
		return f.joined()
	}
	g := f.inStruct("rollout")
	g.checkFields(reflect.ValueOf(r).Elem())
	r.checkRulesAcross(g, numInferenceSteps, false)
	return f.joined()
}

// checkRulesAcross checks the rules across the fields; steps is T, 0: not known. In a validation
// (evaluation) every step is ode, so rules about log-probs do not apply.
func (r *Rollout) checkRulesAcross(f *faults, steps int64, evaluation bool) {
	if a := r.NoiseLevel; TransitionNamed(r.SDEType).LevelIsShare && a != nil && *a > 1 && *a <= MaxNoiseLevel {
		f.add("noise_level", formatFloat(*a), "must be between 0 and 1") // beyond, sin(a pi/2) folds back
	}
	if steps > 0 {
		f.checkIndices("sde_step_indices", r.SDEStepIndices, 0, steps-1, MaxSteps-1)
		f.checkIndices("return_step_indices", r.ReturnStepIndices, 0, steps, MaxSteps)
	}
	if r.SDEWindow != nil {
		if r.SDEStepIndices != nil {
			f.add("sde_window", "set beside sde_step_indices", "must be the only one of the two")
		}
		r.SDEWindow.checkRulesAcross(f.inStruct("sde_window"), steps)
	}
	if !evaluation {
		r.checkDensity(f, steps)
	}
}

// checkDensity refuses log-probs of transitions without noise, as they have no density. That is the
// case at noise level 0, and of some in the last step, where sigma_next is 0.
func (r *Rollout) checkDensity(f *faults, steps int64) {
	none := r.SDEStepIndices != nil && len(r.SDEStepIndices) == 0
	if !TransitionNamed(r.SDEType).Stochastic || none || r.LogProbKind == LogProbSquared {
		return
	}
	kind := r.LogProbKind
	if kind == "" {
		kind = LogProbDensity
	}
	if r.NoiseLevel != nil && *r.NoiseLevel == 0 {
		f.add("noise_level", "0", "must be above 0 for log_prob_kind "+kind+": without noise there is no density")
	}
	if !TransitionNamed(r.SDEType).EndsWithoutNoise {
		return
	}
	rule := "must leave out the last step for log_prob_kind " + kind +
		": the last " + r.SDEType + " step has no noise (use squared, or choose the steps)"
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

// checkRulesAcross checks range and size of the window; steps is T, 0: not known.
func (w *SDEWindow) checkRulesAcross(f *faults, steps int64) {
	limit := int64(MaxSteps)
	if steps > 0 {
		limit = steps
	}
	low, high := int64(0), max(limit-1, 1)
	if len(w.Range) == 2 {
		low, high = w.Range[0], w.Range[1]
		if low < 0 || high > MaxSteps {
			return // its tag says so
		}
		if high > limit || low >= high {
			f.add("range", fmt.Sprint(w.Range), fmt.Sprintf("must be a part of [0, %d) that is not empty", limit))
			return
		}
	}
	if w.Size > high-low && w.Size <= MaxSteps {
		f.add("size", strconv.FormatInt(w.Size, 10), fmt.Sprintf("must be between 1 and %d, the length of the range",
			high-low))
	}
}

// checkRewards checks that reward functions have different names and that their weights sum to more than 0.
func checkRewards(f *faults, list []RewardSpec) {
	if len(list) > MaxRewards {
		return
	}
	total := 0.0
	for i := range list {
		for _, before := range list[:i] {
			if before.Name == list[i].Name {
				f.inItem("reward", i).add("name", quote(list[i].Name), "must come at most once")
				break
			}
		}
		weight := 1.0
		if w := list[i].Weight; w != nil {
			weight = *w
		}
		total += weight
	}
	if len(list) > 0 && !(total > 0) {
		f.add("reward", "weights sum to "+formatFloat(total), "must be above 0")
	}
}

// checkRules checks the options of a function, and that it can judge in the middle where it is asked to.
func (r *RewardSpec) checkRules(f *faults) {
	f.checkParams("params", r.Params)
	outside := "must be absent: verdicts, and functions of whole groups, judge finished samples"
	switch {
	case len(r.AtSteps) > 0 && (r.IsVerdict() || r.GroupMin > 0):
		f.add("at_steps", fmt.Sprint(r.AtSteps), outside)
	case r.Latent && len(r.AtSteps) == 0:
		f.add("latent", "true", "must be absent without at_steps: finished samples are judged decoded")
	case r.Latent && !strings.HasPrefix(r.Name, "nats:"):
		f.add("latent", "true", "must be absent of "+r.Name+": workers of nats:NAME alone see latents")
	}
}

// checkJudgedSteps checks that samples which are judged in the middle have a middle.
func (p *Prompt) checkJudgedSteps(f *faults) {
	beside := ""
	switch {
	case len(p.Stages) > 0:
		beside = "stages"
	case p.Tree != nil:
		beside = "tree, whose samples share steps"
	case p.ScheduledSampling != nil:
		beside = "scheduled_sampling"
	case p.Text != nil || len(p.Messages) > 0:
		beside = "text, which has no denoising steps"
	}
	if p.Prune.BranchesOff() && p.Start != nil {
		f.inStruct("prune").add("then", quote(p.Prune.Then), "must be end beside start: its samples begin with noise")
	}
	for i := range p.Reward {
		if at := p.Reward[i].AtSteps; len(at) > 0 && beside != "" {
			f.inItem("reward", i).add("at_steps", fmt.Sprint(at), "must be absent beside "+beside)
		}
	}
}

func (e *Interaction) checkRules(f *faults) { f.checkParams("params", e.Params) }

// checkParams checks names and values of the options of a field.
func (f *faults) checkParams(field string, params map[string]string) {
	if len(params) > MaxParams {
		return
	}
	for _, name := range sortedKeys(params) {
		value := params[name]
		switch {
		case len(name) == 0 || len(name) > MaxParamName:
			f.add(field, quote(name), fmt.Sprintf("must be a name of 1 to %d bytes", MaxParamName))
		case len(value) > MaxParamBytes:
			f.add(field+"."+name, strconv.Itoa(len(value))+" bytes", fmt.Sprintf("must be at most %d", MaxParamBytes))
		case !utf8.ValidString(value):
			f.add(field+"."+name, quote(value), "must be UTF-8")
		}
	}
}

func sortedKeys(m map[string]string) []string {
	if len(m) == 0 {
		return nil
	}
	return slices.Sorted(maps.Keys(m))
}

// checkRulesAcross refuses a scale that needs a batch where there is none.
func (a *AdvantageSpec) checkRulesAcross(f *faults, batch bool) {
	if a.Std == StdGlobal && !batch {
		f.add("std", quote(a.Std), "must be group or none without a batch: there is nothing beyond the group")
	}
}

// checkRewardName checks a name of the form KIND or KIND:INSTANCE.
func (f *faults) checkRewardName(field, s string) {
	if !isRewardName(s) {
		f.add(field, quote(s),
			fmt.Sprintf("must be KIND or KIND:INSTANCE, together at most %d characters of A-Z a-z 0-9 _ -", MaxToken))
	}
}

func isRewardName(s string) bool {
	kind, instance, split := strings.Cut(s, ":")
	return len(s) <= MaxToken && kind != "" && isToken(kind) && isToken(instance) && (instance != "" || !split)
}
