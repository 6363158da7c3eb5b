package command

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// rewardFlags name reward functions.
type rewardFlags struct {
	reward      []string
	optional    []string
	params      []string
	groundTruth string
}

func (r *rewardFlags) register(f *pflag.FlagSet) {
	f.StringSliceVar(&r.reward, "reward", nil, "reward functions NAME[=WEIGHT], NAME being one of "+strings.Join(scorer.Kinds(), ", ")+"; default the model's")
	f.StringSliceVar(&r.optional, "optional-reward", nil, "the same, of functions that may fail: the sum goes on without them")
	f.StringArrayVar(&r.params, "reward-param", nil, "a param of one of them: NAME.KEY=VALUE, e.g. ocr.psm=7")
	f.StringVar(&r.groundTruth, "ground-truth", "", "what the picture is compared with; default the text in double quotes of the prompt")
}

// rewards are the specs of a prompt, nil where no flag names one. Misspelt names are
// refused here, before anything starts.
func (r *rewardFlags) rewards() ([]any, error) {
	var specs []any
	var errs []error
	byName := map[string]map[string]any{}
	add := func(flag string, list []string, optional bool) {
		for _, text := range list {
			name, weight, weighted := strings.Cut(text, "=")
			spec := map[string]any{"name": name}
			if weighted {
				w, err := strconv.ParseFloat(weight, 64)
				if err != nil {
					errs = append(errs, fmt.Errorf("--%s: %q; the weight must be a number", flag, text))
				}
				spec["weight"] = w
			}
			if optional {
				spec["required"] = false
			}
			kind, _, _ := strings.Cut(name, ":")
			if !slices.ContainsFunc(scorer.Kinds(), func(k string) bool { return k == kind || strings.HasPrefix(k, kind+":") }) {
				errs = append(errs, oneOf(flag, name, scorer.Kinds()))
			} else if _, _, err := scorer.SplitName(name); err != nil {
				errs = append(errs, fmt.Errorf("--%s: %w", flag, err))
			}
			specs, byName[name] = append(specs, spec), spec
		}
	}
	add("reward", r.reward, false)
	add("optional-reward", r.optional, true)
	for _, text := range r.params {
		target, value, given := strings.Cut(text, "=")
		name, key, named := strings.Cut(target, ".")
		spec := byName[name]
		switch {
		case !given || !named || key == "":
			errs = append(errs, fmt.Errorf("--reward-param: %q; must be NAME.KEY=VALUE", text))
			continue
		case spec == nil:
			errs = append(errs, fmt.Errorf("--reward-param: %q; %q must be named by --reward or --optional-reward", text, name))
			continue
		}
		params, _ := spec["params"].(map[string]any)
		if params == nil {
			params = map[string]any{}
			spec["params"] = params
		}
		params[key] = value
	}
	return specs, errors.Join(errs...)
}

// answer gives the rewards of a prompt what they compare with, unless they have it. The
// list may be shared by prompts: it is copied.
func (p *prompt) answer(truth string) {
	list, _ := p.body["reward"].([]any)
	if truth == "" || list == nil {
		return
	}
	out := make([]any, len(list))
	for i, v := range list {
		out[i] = v
		spec, ok := v.(map[string]any)
		if name, _ := spec["name"].(string); !ok || spec["ground_truth"] != nil || !compares(name) {
			continue
		}
		spec = maps.Clone(spec)
		spec["ground_truth"] = truth
		out[i] = spec
	}
	p.body["reward"] = out
}

// compares says whether a reward function may want a ground truth: all but the built-in
// ones that do without.
func compares(name string) bool {
	return !slices.Contains(scorer.Names(), name) || scorer.Check(name, "", "", nil) != nil
}

// checkAnswers finds what the rewards of the flags refuse about one prompt.
func checkAnswers(specs []any, text, truth string) error {
	var errs []error
	for _, v := range specs {
		spec := v.(map[string]any) // as rewards makes them
		name, params := spec["name"].(string), map[string]string{}
		if given, ok := spec["params"].(map[string]any); ok {
			for k, v := range given {
				params[k] = v.(string)
			}
		}
		errs = append(errs, scorer.Check(name, text, truth, params))
	}
	return errors.Join(errs...)
}

// advantageFlags select an estimator.
type advantageFlags struct {
	estimator string
	std       string
	stdBasis  string
	epsilon   float64
	mode      string
	gamma     float64
	clip      float64
	singleton string
}

func (a *advantageFlags) register(f *pflag.FlagSet) {
	f.StringVar(&a.estimator, "estimator", estimator.FlowGRPO, "advantage estimator: "+strings.Join(estimator.Names(), ", "))
	f.StringVar(&a.std, "std", "", "scale of advantages: group, global (over the batch) or none (Dr.GRPO); default the estimator's")
	f.StringVar(&a.stdBasis, "std-basis", "", "sample, expanded or population; default the estimator's")
	f.Float64Var(&a.epsilon, "epsilon", 0, "added to the scale; default the estimator's")
	f.StringVar(&a.mode, "adv-mode", "", "variant of the estimator: of per_prompt grpo, rwr, sft or dpo; of diffusion_nft continuous, positive_only, negative_only, one_only or binary")
	f.Float64Var(&a.gamma, "gamma", 1, "discount over the trained steps; only reinforce_plus_plus has one")
	f.StringVar(&a.singleton, "singleton", "", "what a group of one sample gets: reward or zero; default the estimator's, of those that have the choice")
	f.Float64Var(&a.clip, "adv-clip-max", 0, "clamp advantages to plus or minus this; default none, 5 of diffusion_nft")
}

// option is a flag of an estimator, and its field of a Prompt's advantage.
type option struct {
	flag, key string
	value     any
}

func (a *advantageFlags) options() []option {
	return []option{
		{"estimator", "estimator", a.estimator},
		{"std", "std", a.std},
		{"std-basis", "std_basis", a.stdBasis},
		{"epsilon", "epsilon", a.epsilon},
		{"adv-mode", "mode", a.mode},
		{"gamma", "gamma", a.gamma},
		{"adv-clip-max", "adv_clip_max", a.clip},
		{"singleton", "singleton", a.singleton},
	}
}

// advantage is the part of a prompt that the flags set.
func (a *advantageFlags) advantage(set func(string) bool) map[string]any {
	out := map[string]any{}
	for _, o := range a.options() {
		if set(o.flag) {
			out[o.key] = o.value
		}
	}
	return out
}

// config is the estimator that the flags select. One that is misspelt, and an option
// that it does not have, is refused here, before anything starts.
func (a *advantageFlags) config(set func(string) bool, rewards []any) (estimator.Config, error) {
	c, err := estimator.Default(a.estimator)
	switch {
	case err == nil:
	case schemas.Nearest(a.estimator, estimator.Names()) != "":
		return c, oneOf("estimator", a.estimator, estimator.Names())
	default: // it may be known elsewhere
		return c, fmt.Errorf("--%w", err)
	}
	if set("std") {
		c.Std = a.std
	}
	if set("std-basis") {
		c.StdBasis = a.stdBasis
	}
	if set("epsilon") {
		c.Epsilon = a.epsilon
	}
	if set("adv-mode") {
		c.Mode = a.mode
	}
	if set("gamma") {
		c.Gamma = a.gamma
	}
	if set("adv-clip-max") {
		c.AdvClipMax = a.clip
	}
	if set("singleton") {
		c.Singleton = a.singleton
	}
	if c.Name == estimator.GDPO {
		c.Weights = []float64{1}
		for i, v := range rewards {
			c.Weights = append(c.Weights[:i], 1)
			if w, ok := v.(map[string]any)["weight"].(float64); ok {
				c.Weights[i] = w
			}
		}
	}
	if err := c.Validate(); err != nil {
		flags := map[string]string{}
		for _, o := range a.options() {
			flags[o.key] = o.flag
		}
		return c, errors.New(blame(err.Error(), flags))
	}
	return c, nil
}

// rewardNames are the reward functions that prompts name, sorted. Names of no kind are
// left to intake, which refuses the prompt.
func rewardNames(prompts []prompt) []string {
	names := map[string]bool{}
	for _, p := range prompts {
		list, _ := p.body["reward"].([]any)
		for _, item := range list {
			spec, _ := item.(map[string]any)
			name, _ := spec["name"].(string)
			if _, _, err := scorer.SplitName(name); err == nil {
				names[name] = true
			}
		}
	}
	return sortedKeys(names)
}
