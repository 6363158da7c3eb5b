package command

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
)

// rewardFlags name reward functions.
type rewardFlags struct {
	reward      []string
	optional    []string
	params      []string
	groupMin    []string
	atSteps     []string
	groundTruth string
	by          rewardBy
}

// addFlags adds the flags of rewards to f.
func (r *rewardFlags) addFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&r.reward, "reward", nil,
		"reward functions NAME[=WEIGHT], such as ocr or ocr,clipscore=0.5; NAME is one of "+strings.Join(scorer.Kinds(),
			", ")+"; default those of the model")
	f.StringSliceVar(&r.optional, "optional-reward", nil,
		"the same for functions that may fail: the sum then leaves them out")
	f.StringArrayVar(&r.params, "reward-param", nil, "parameter of a reward function: NAME.KEY=VALUE, e.g. ocr.psm=7")
	f.StringSliceVar(&r.groupMin, "group-min", nil,
		"NAME=MIN has a function of --reward, http:NAME or nats:NAME, rate the whole group in one call, e.g. "+
			"nats:rank=2; MIN is the fewest samples that it is asked about")
	f.StringArrayVar(&r.atSteps, "at-steps", nil,
		"NAME=STEP,... has a function of --reward judge samples before these steps, too, by what they would end with; "+
			"--prune-keep and --prune-reward-below end samples by it")
	f.StringVar(&r.groundTruth, "ground-truth", "",
		"expected text or answer, for reward functions and interactions; default the text in double quotes in the "+
			"prompt, or the result of the sum in it")
}

// rewardSpecs returns the reward functions that the flags name for all prompts, as the field reward of a prompt; nil if
// no flag names one. Those of some are in r.by. Misspelt names are refused here, before anything starts.
func (r *rewardFlags) rewardSpecs() ([]any, error) {
	var specs []any
	var errs []error
	byName := map[string][]map[string]any{}
	r.by.specs = map[string][]any{}
	add := func(flag string, list []string, optional bool) {
		for _, text := range list {
			value, function := r.by.cut(text)
			name, weight, weighted := strings.Cut(function, "=")
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
			if err := intake.CheckRewardName(name); err != nil {
				errs = append(errs, fmt.Errorf("--%s: %s", flag, strings.TrimPrefix(err.Error(), "name: ")))
			}
			byName[name] = append(byName[name], spec)
			if value == "" {
				specs = append(specs, spec)
			} else {
				r.by.specs[value] = append(r.by.specs[value], spec)
			}
		}
	}
	add("reward", r.reward, false)
	add("optional-reward", r.optional, true)
	for _, text := range r.params {
		target, value, given := strings.Cut(text, "=")
		name, key, named := strings.Cut(target, ".")
		switch {
		case !given || !named || key == "":
			errs = append(errs, fmt.Errorf("--reward-param: %q; must be NAME.KEY=VALUE", text))
			continue
		case byName[name] == nil:
			errs = append(errs, fmt.Errorf("--reward-param: %q; %q must be named by --reward or --optional-reward",
				text, name))
			continue
		}
		for _, spec := range byName[name] {
			params, _ := spec["params"].(map[string]any)
			if params == nil {
				params = map[string]any{}
				spec["params"] = params
			}
			params[key] = value
		}
	}
	for _, text := range r.groupMin {
		name, value, _ := strings.Cut(text, "=")
		least, err := strconv.ParseInt(value, 10, 64)
		switch {
		case err != nil || least < 1:
			errs = append(errs, fmt.Errorf("--group-min: %q; must be NAME=MIN, a whole number above 0", text))
		case byName[name] == nil:
			errs = append(errs, fmt.Errorf("--group-min: %q; %q must be named by --reward or --optional-reward", text,
				name))
		}
		for _, spec := range byName[name] {
			spec["group_min"] = least
		}
	}
	for _, text := range r.atSteps {
		name, list, _ := strings.Cut(text, "=")
		steps, err := fields.Indices(list)
		if err != nil || list == "" || byName[name] == nil {
			errs = append(errs, fmt.Errorf("--at-steps: %q; must be NAME=STEP,... of a function of --reward", text))
		}
		for _, spec := range byName[name] {
			spec["at_steps"] = steps
		}
	}
	return specs, errors.Join(errs...)
}

// setGroundTruth gives the ground truth to the reward functions that compare with one, unless they have one already.
// If none compares, the first gets it: an interaction reads it there. Prompts may share the list, so it is copied.
func (p *prompt) setGroundTruth(truth any) {
	list, _ := p.body["reward"].([]any)
	if truth == nil || len(list) == 0 {
		return
	}
	out, told := slices.Clone(list), false
	tell := func(i int) {
		spec := maps.Clone(out[i].(map[string]any))
		spec["ground_truth"] = truth
		out[i], told = spec, true
	}
	for i, v := range list {
		spec, ok := v.(map[string]any)
		switch name, _ := spec["name"].(string); {
		case ok && spec["ground_truth"] != nil:
			told = true
		case ok && scorer.WantsTruth(name):
			tell(i)
		}
	}
	if text, _ := p.body["text"].(map[string]any); text["interaction"] != nil && !told {
		if _, ok := list[0].(map[string]any); ok {
			tell(0)
		}
	}
	p.body["reward"] = out
}

// checkTruthUsed refuses --ground-truth if no reward function of the flags uses it. specs are those functions.
func (p *promptFlags) checkTruthUsed(specs []any, defaults map[string]any) error {
	text, _ := defaults["text"].(map[string]any)
	if p.groundTruth == "" || specs == nil || p.File != "" || text["interaction"] != nil {
		return nil
	}
	var names []string
	for _, v := range specs {
		name, _ := v.(map[string]any)["name"].(string)
		if scorer.WantsTruth(name) {
			return nil
		}
		names = append(names, name)
	}
	return fmt.Errorf("--ground-truth: %q; must be absent: %s does not use it", p.groundTruth,
		strings.Join(names, ", "))
}

// estimatorModes lists the modes of the estimators that have some, for the help of a flag.
func estimatorModes() string {
	var parts []string
	for _, name := range estimator.Names() {
		if list := estimator.Modes(name); len(list) > 0 {
			parts = append(parts, "of "+name+" "+strings.Join(list, ", "))
		}
	}
	return strings.Join(parts, "; ")
}

// estimatorConfig returns the settings of the estimator that the flags of an AdvantageSpec select.
func estimatorConfig(flags *fields.Set) (estimator.Config, error) {
	var spec schemas.AdvantageSpec
	flags.Fill(&spec)
	return estimator.Of(spec)
}

// rewardNames returns the reward functions that prompts name, sorted, to check them before a run. It leaves out
// malformed names: intake refuses their prompts.
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

// rewardBy chooses the reward functions of a record by the value of one of its fields, as verl does by data_source.
type rewardBy struct {
	field string
	// specs are the functions of each value.
	specs map[string][]any
}

func (b *rewardBy) addFlag(f *pflag.FlagSet) {
	f.StringVar(&b.field, "reward-by", "",
		"field of the records, such as data_source or extra_info.kind, whose value chooses the reward functions: then "+
			"--reward takes VALUE=NAME[=WEIGHT], and functions without a VALUE are for all")
}

// cut takes VALUE= from the text of a function, VALUE=NAME[=WEIGHT]; "": the function is for all. A weight is a
// number, which no name is.
func (b *rewardBy) cut(text string) (value, function string) {
	name := text
	if at := strings.LastIndexByte(text, '='); at >= 0 {
		if _, err := strconv.ParseFloat(text[at+1:], 64); err == nil {
			name = text[:at]
		}
	}
	if at := strings.LastIndexByte(name, '='); b.field != "" && at >= 0 {
		return text[:at], text[at+1:]
	}
	return "", text
}

// checkRewardBy returns an error if there is nothing to choose from or by.
func (p *promptFlags) checkRewardBy() error {
	switch by := &p.by; {
	case by.field == "":
		return nil
	case p.File == "":
		return fmt.Errorf("--reward-by: %q; must be with --prompts: a prompt of the command line has no record",
			by.field)
	case len(by.specs) == 0:
		return fmt.Errorf("--reward-by: %q; must be with functions of values, such as --reward gsm8k=numeric_match",
			by.field)
	case p.refillFresh:
		return errors.New("--refill-fresh: given; must be absent with --reward-by: another prompt may want another " +
			"function")
	}
	return nil
}

// of returns the functions of a record, those for all first. A value that no flag names is an error.
func (b *rewardBy) of(r *dataset.Record, all []any) ([]any, error) {
	if b.field == "" || r.Fields["reward"] != nil {
		return all, nil
	}
	metadata, _ := r.Fields["metadata"].(map[string]any)
	field := b.field
	v, there := metadata[field]
	for _, outer := range []string{"extra_info.", "metadata."} { // what is in these is metadata itself
		if inner, inside := strings.CutPrefix(field, outer); inside && !there {
			field = inner
			v, there = metadata[field]
		}
	}
	for rest, in := field, metadata; !there; {
		outer, inner, nested := strings.Cut(rest, ".")
		if in, _ = in[outer].(map[string]any); !nested || in == nil {
			break
		}
		v, there = in[inner]
		rest = inner
	}
	value := fmt.Sprint(v)
	switch v.(type) {
	case nil:
		value = "absent"
	case []any, map[string]any:
		value = "a list or an object"
	default:
		if specs := b.specs[value]; specs != nil {
			return slices.Concat(all, specs), nil
		}
		value = strconv.Quote(value)
	}
	return nil, fmt.Errorf("%s: %s; must be one of %s, which --reward names, or name its own with --reward VALUE=NAME",
		b.field, value, strings.Join(sortedKeys(b.specs), ", "))
}

// spareCount returns how many other prompts each prompt gets for its refills, for --refill-fresh; 0 without the flag.
// It is an error if no group would be refilled.
func (p *promptFlags) spareCount() (int, error) {
	if !p.refillFresh {
		return 0, nil
	}
	policy := p.policy.GivenValues()
	if policy["zero_std"] != schemas.GroupRefill && policy["failed"] != schemas.GroupRefill {
		return 0, errors.New("--refill-fresh: given; must be with --zero-std refill or --failed-groups refill, else " +
			"no group is refilled")
	}
	var defaults schemas.GroupPolicy
	schemas.SetDefaults(&defaults)
	rounds, set := policy["refill_rounds"].(int64)
	if !set {
		rounds = *defaults.RefillRounds
	}
	return int(rounds), nil
}

// setSubstitutes puts the spare prompts of a record into its prompt, for --refill-fresh. A spare without a text, or
// with a ground truth that no reward function uses, is an error.
func (p *promptFlags) setSubstitutes(q *prompt, r *dataset.Record) error {
	var list []any
	for _, spare := range r.Spares {
		text, ok := spare.Prompt()
		if !ok {
			return fmt.Errorf("prompt %d: no text; must have one, so that it can replace another prompt "+
				"(--refill-fresh)", spare.Index+1)
		}
		s := map[string]any{"prompt": text}
		for _, field := range []string{"negative_prompt", "metadata"} {
			if v, ok := spare.Fields[field]; ok {
				s[field] = v
			}
		}
		if truth := p.truthOf(&spare); truth != nil {
			if q.body["reward"] == nil {
				return fmt.Errorf("prompt %d: has a ground truth; name the reward function that uses it with "+
					"--reward (--refill-fresh)", spare.Index+1)
			}
			s["ground_truth"] = truth
		}
		list = append(list, s)
	}
	if list != nil {
		q.body["substitutes"] = list
	}
	return nil
}
