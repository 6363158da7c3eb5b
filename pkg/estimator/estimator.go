// Package estimator turns the rewards of groups into advantages. It is pure float64
// arithmetic without messages and time. A group is all samples of one prompt; the groups
// of one call share one global scale. Config names an estimator and its options, Estimate
// computes a Group of advantages for each group of Rewards. Metrics and Validation compute
// the metrics that verl's trainer reports.
//
// An estimator centres rewards (subtracts a mean), divides them by a spread (the standard
// deviation), or whitens them (both, over the whole batch). A group of one sample has no
// spread of its own: Config.Singleton says what it gets.
//
// Sums run in the given order, so equal input gives equal bits; callers that collect
// rewards as they arrive sort them first (groups by uid, samples by sample_index).
//
// Estimators of verl and verl-omni give the same results as there, also for groups of one
// and for whitening over samples and steps; testdata/verl.json holds results of their
// functions on random rewards. The differences are intended:
//
//   - FlowGRPO and DanceGRPO have StdGroup and BasisSample by default, verl-omni StdGlobal
//     and BasisExpanded: so a group has its advantages when it closes and needs no batch, and
//     they do not depend on the number of trained steps.
//   - DrGRPO gives a group of one 0, its distance from its mean, as verl-omni does; verl's
//     own form is GRPO with StdNone.
//   - GRPOPassK gives a group of one 0, where verl refuses the batch: the other samples of
//     the group may have failed.
//   - Equal rewards have a spread of exactly 0 and advantages of exactly 0; in verl they have
//     rounding errors.
//   - Steps that the model did not generate, the tokens between two answers of a text, are in no sum and are not
//     discounted: the last token of an answer has gamma times the return of the first one of the next answer. verl's
//     reinforce_plus_plus starts again after each such token, so that all answers but the last have returns of 0.
package estimator

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// Names of the estimators.
const (
	// FlowGRPO is the group-relative advantage of Flow-GRPO (J. Liu et al. 2025).
	FlowGRPO = "flow_grpo"
	// DanceGRPO (Xue et al. 2025) has the advantage of FlowGRPO, with the same options.
	DanceGRPO = "dance_grpo"
	// DrGRPO is r - mean (Z. Liu et al. 2025, "Understanding R1-Zero-like training"): FlowGRPO
	// with StdNone.
	DrGRPO = "dr_grpo"
	// GRPO is the estimator for language models (Shao et al. 2024), with epsilon 1e-6.
	GRPO = "grpo"
	// PerPrompt is the PerPromptStatTracker of DDPO and Flow-GRPO, with its modes.
	PerPrompt = "per_prompt"
	// RLOO is leave-one-out (Ahmadian et al. 2024).
	RLOO = "rloo"
	// ReinforcePlusPlus (Hu 2025) whitens discounted returns over the batch, without groups.
	ReinforcePlusPlus = "reinforce_plus_plus"
	// ReinforcePlusPlusBaseline whitens r - mean over the batch.
	ReinforcePlusPlusBaseline = "reinforce_plus_plus_baseline"
	// OPO has the length-weighted mean as its baseline (Hao et al. 2025).
	OPO = "opo"
	// GPG scales r - mean by the batch's share of rewards that are not 0 (Chu et al. 2025).
	GPG = "gpg"
	// GRPOPassK rewards only the best sample, by its lead over the second best (Walder and Karkhanis 2025).
	GRPOPassK = "grpo_passk"
	// GDPO normalises each reward by itself before it sums them.
	GDPO = "gdpo"
	// DiffusionNFT turns the group-relative advantage into a probability of being optimal
	// (Zheng et al. 2025).
	DiffusionNFT = "diffusion_nft"
)

// Modes of PerPrompt. All but ModeGRPO follow Flow-GRPO's code, also for groups of one
// sample and of equal rewards.
const (
	ModeGRPO = "grpo" // (r - mean) / std
	ModeRWR  = "rwr"  // r, also in a group of one
	ModeSFT  = "sft"  // 1 for all samples with the best reward, else 0; 1 in a group of one
	ModeDPO  = "dpo"  // 1 for the first best, -1 for the first worst, else 0; equal rewards: -1, 1, 0 ...; one: 0
)

// Modes of DiffusionNFT: how an advantage A is changed before it becomes a probability. c is Config.AdvClipMax.
const (
	ModeContinuous   = "continuous"    // A, clamped to +-c
	ModePositiveOnly = "positive_only" // A, clamped to 0..c
	ModeNegativeOnly = "negative_only" // A, clamped to -c..0
	ModeOneOnly      = "one_only"      // 1 where A > 0, else 0
	ModeBinary       = "binary"        // the sign of A
)

// Config selects an estimator and its options, as schemas.AdvantageSpec names them (see Of). An option that the
// estimator does not have must keep the value of Default.
type Config struct {
	// Name of the estimator, one of Names.
	Name string
	// Std is one of schemas.StdScales.
	Std string
	// StdBasis is one of schemas.StdBases.
	StdBasis string
	// Singleton is SingletonReward or SingletonZero, for the estimators that have this option.
	Singleton string
	// Epsilon > 0 is added to the standard deviation before the division; whitening estimators add it to the
	// variance.
	Epsilon float64
	// Columns is T >= 1, the number of trained steps of every sample. Rewards.Lengths replaces it. Only
	// BasisExpanded and Gamma read it.
	Columns int
	// Mode is a variant of PerPrompt or DiffusionNFT.
	Mode string
	// AdvClipMax > 0 clamps every advantage to +-AdvClipMax; 0: no clamp. DiffusionNFT needs it: it is the c of its
	// modes.
	AdvClipMax float64
	// Gamma in (0, 1] discounts the reward over the trained steps. Only ReinforcePlusPlus has it.
	Gamma float64
	// Weights [K] are the weights of the single rewards. Only GDPO has them.
	Weights []float64
}

// Rewards are the rewards of one group.
type Rewards struct {
	// Values [n] are the rewards of the samples.
	Values []float64
	// Scores [n][K] are the single rewards of each sample, in the order of Config.Weights;
	// only GDPO reads them.
	Scores [][]float64
	// Lengths [n] > 0 are the trained steps of each sample, if they differ: for texts, the generated tokens of all
	// turns. BasisExpanded and Gamma count them, and OPO's baseline is weighted by them. nil: all have
	// Config.Columns. Either all groups have Lengths or none.
	Lengths []int
}

// steps returns the number of trained steps of sample i.
func (r Rewards) steps(cfg Config, i int) int {
	if r.Lengths == nil {
		return cfg.Columns
	}
	return r.Lengths[i]
}

// Group is the result of one group of rewards.
type Group struct {
	// Advantages [n], one per reward in the order given. Each holds for all trained
	// steps of its sample, unless there are StepAdvantages: then it is their mean.
	Advantages []float64
	// StepAdvantages [n][T] are set if the advantages differ over the steps (Gamma below 1). T is the number of
	// steps of the sample.
	StepAdvantages [][]float64
	// Mean of the group's rewards.
	Mean float64
	// Std is what the advantages were divided by, without epsilon. It is over all groups if Scale is StdGlobal or
	// the estimator whitens, else over this group. With StdNone it is only reported. For a single value it is 0 in
	// every basis, or 1 if Singleton is SingletonReward and the advantages are divided.
	Std float64
	// Scale and StdBasis repeat Config.Std and Config.StdBasis.
	Scale, StdBasis string
}

// Properties are what is true of an estimator for those who use it.
type Properties struct {
	Name string `json:"name"`
	// Scores: it normalises each score of a sample by itself, so it needs all of them, and their weights.
	Scores bool `json:"scores,omitempty"`
	// Lengths: it weighs samples by their trained steps, whatever the basis.
	Lengths bool `json:"lengths,omitempty"`
	// Probabilities: its advantages are probabilities, with AdvClipMax at 0 and 1.
	Probabilities bool `json:"probabilities,omitempty"`
	// Returns: its rewards become returns of the trained steps, which Gamma discounts.
	Returns bool `json:"returns,omitempty"`
}

// method is one estimator: which options it has, with the defaults, and the function that computes it.
type method struct {
	Properties
	stds, bases, modes, singletons []string // the first is the default
	epsilon                        float64  // default; 0: it has none
	clip                           float64  // default of AdvClipMax, which it then needs
	// batch: the advantages of a group depend on the other groups, whatever Std is.
	batch bool
	// whitens: the result is divided by the spread over all samples.
	whitens  bool
	estimate func(cfg Config, groups []Rewards) ([]Group, error)
}

var (
	allStds     = []string{schemas.StdGroup, schemas.StdGlobal, schemas.StdNone}
	groupOrNone = []string{schemas.StdGroup, schemas.StdNone}
	noStd       = []string{schemas.StdNone}
	whitened    = []string{schemas.StdGlobal}
	allBases    = []string{schemas.BasisSample, schemas.BasisExpanded, schemas.BasisPopulation}
	unbiased    = []string{schemas.BasisSample}
	// verl whitens a tensor of samples and steps.
	whitenedBases = []string{schemas.BasisExpanded, schemas.BasisSample}
	eitherSingle  = []string{schemas.SingletonReward, schemas.SingletonZero}
)

// whitenEpsilon is what verl's whitening adds to the variance.
const whitenEpsilon = 1e-8

var methods = map[string]method{
	FlowGRPO:  {stds: allStds, bases: allBases, epsilon: 1e-4, estimate: flowGRPO},
	DanceGRPO: {stds: allStds, bases: allBases, epsilon: 1e-4, estimate: flowGRPO},
	DrGRPO:    {stds: noStd, bases: unbiased, estimate: flowGRPO},
	GRPO:      {stds: groupOrNone, bases: unbiased, singletons: eitherSingle, epsilon: 1e-6, estimate: flowGRPO},
	PerPrompt: {
		stds: allStds[:2], bases: []string{schemas.BasisPopulation}, epsilon: 1e-4,
		modes: []string{ModeGRPO, ModeRWR, ModeSFT, ModeDPO}, estimate: perPrompt,
	},
	RLOO: {stds: noStd, bases: unbiased, singletons: eitherSingle, estimate: rloo},
	ReinforcePlusPlus: {
		Properties: Properties{Returns: true}, stds: whitened, bases: whitenedBases, epsilon: whitenEpsilon,
		batch: true, whitens: true, estimate: reinforcePlusPlus,
	},
	ReinforcePlusPlusBaseline: {
		stds: whitened, bases: whitenedBases, singletons: eitherSingle, epsilon: whitenEpsilon,
		batch: true, whitens: true, estimate: reinforceBaseline,
	},
	OPO: {
		Properties: Properties{Lengths: true}, stds: noStd, bases: unbiased, singletons: eitherSingle, estimate: opo,
	},
	GPG:       {stds: noStd, bases: unbiased, singletons: eitherSingle, batch: true, estimate: gpg},
	GRPOPassK: {stds: groupOrNone, bases: unbiased, epsilon: 1e-6, estimate: grpoPassK},
	GDPO: {
		Properties: Properties{Scores: true}, stds: groupOrNone, bases: whitenedBases, singletons: eitherSingle,
		epsilon: 1e-6, batch: true, whitens: true, estimate: gdpo,
	},
	DiffusionNFT: {
		Properties: Properties{Probabilities: true}, stds: allStds, bases: allBases, epsilon: 1e-4, clip: 5,
		modes:    []string{ModeContinuous, ModePositiveOnly, ModeNegativeOnly, ModeOneOnly, ModeBinary},
		estimate: diffusionNFT,
	},
}

// foreign lists estimators of other systems that do not exist here, with the reason.
var foreign = map[string]string{
	"remax":           "it needs the reward of a greedy rollout as a baseline, which a diffusion model does not have",
	"gae":             "it needs a value network",
	"grpo_vectorized": "it is grpo, computed another way",
}

// Names lists the estimators, sorted.
func Names() []string { return slices.Sorted(maps.Keys(methods)) }

// PropertiesOf returns what is true of an estimator; of one that is unknown, nothing.
func PropertiesOf(name string) Properties {
	p := methods[name].Properties
	p.Name = name
	return p
}

// Of returns the config that a spec asks for: its options, and the defaults of the estimator for those that it leaves
// out. The error is an unknown name, or an epsilon that std none does not use; Validate checks whether the options fit
// together.
func Of(a schemas.AdvantageSpec) (Config, error) {
	schemas.SetDefaults(&a)
	c, err := Default(a.Estimator)
	if err != nil {
		return Config{Name: a.Estimator}, err
	}
	own := c.Epsilon
	c.Std, c.StdBasis, c.Mode = cmp.Or(a.Std, c.Std), cmp.Or(a.StdBasis, c.StdBasis), cmp.Or(a.Mode, c.Mode)
	c.Singleton, c.Gamma = cmp.Or(a.Singleton, c.Singleton), *a.Gamma
	if a.Epsilon != nil {
		c.Epsilon = *a.Epsilon
	}
	if a.AdvClipMax != nil {
		c.AdvClipMax = *a.AdvClipMax
	}
	// A resolved spec has the default here: only another value was asked for.
	if c.Std == schemas.StdNone && own > 0 && c.Epsilon != own {
		return c, fmt.Errorf("epsilon: %v; std none divides by no standard deviation, leave it out", c.Epsilon)
	}
	return c, nil
}

// Resolve sets the options of a spec to those of c.
func (c Config) Resolve(a *schemas.AdvantageSpec) {
	a.Estimator, a.Std, a.StdBasis, a.Epsilon = c.Name, c.Std, c.StdBasis, &c.Epsilon
	a.Mode, a.Singleton, a.AdvClipMax, a.Gamma = c.Mode, c.Singleton, nil, nil
	if c.AdvClipMax > 0 {
		a.AdvClipMax = &c.AdvClipMax
	}
	if c.Gamma != 1 {
		a.Gamma = &c.Gamma
	}
}

// Weigh sets Weights to those of the reward functions, if the estimator has them; of no function to that of the model's
// own.
func (c *Config) Weigh(rewards []schemas.RewardSpec) {
	if !PropertiesOf(c.Name).Scores {
		return
	}
	if c.Weights = nil; len(rewards) == 0 {
		c.Weights = []float64{1}
	}
	for _, r := range rewards {
		if r.Weight == nil {
			schemas.SetDefaults(&r)
		}
		c.Weights = append(c.Weights, *r.Weight)
	}
}

// CountsSteps reports whether the result depends on the number of trained steps.
func (c Config) CountsSteps() bool { return c.StdBasis == schemas.BasisExpanded || c.Gamma != 1 }

// Modes returns the modes of an estimator; nil if it has none or is unknown.
func Modes(name string) []string { return slices.Clone(methods[name].modes) }

// Default returns the config of an estimator with its own defaults and one trained step. Intake
// starts from it and sets what the prompt says. An unknown name is an error that lists the names.
func Default(name string) (Config, error) {
	m, ok := methods[name]
	if !ok {
		return Config{}, unknownName(name)
	}
	c := Config{Name: name, Std: m.stds[0], StdBasis: m.bases[0], Epsilon: m.epsilon, AdvClipMax: m.clip}
	c.Columns, c.Gamma = 1, 1
	if len(m.modes) > 0 {
		c.Mode = m.modes[0]
	}
	if len(m.singletons) > 0 {
		c.Singleton = m.singletons[0]
	}
	return c, nil
}

// BasisWithoutSteps returns the basis for rewards without trained steps, such as those of a validation: StdBasis,
// but BasisSample instead of BasisExpanded, which equals it for one step.
func (c Config) BasisWithoutSteps() string {
	if c.StdBasis == schemas.BasisExpanded {
		return schemas.BasisSample
	}
	return c.StdBasis
}

// unknownName returns the error for a name that is not in the table.
func unknownName(name string) error {
	hint := ""
	if near := schemas.Nearest(name, Names()); near != "" {
		hint = "did you mean " + near + "? "
	}
	if why, known := foreign[name]; known {
		hint = "not available: " + why + "; "
	}
	return fmt.Errorf("estimator: %q; %smust be one of %s", name, hint, strings.Join(Names(), ", "))
}

// DefaultConfig returns flow_grpo over each group alone, with the unbiased standard deviation and Flow-GRPO's
// epsilon. The package comment says why not over the batch.
func DefaultConfig() Config {
	c, err := Default(FlowGRPO)
	if err != nil {
		panic(err) // it is in the table
	}
	return c
}

// Validate joins all faults: an option out of range, and one that the estimator does not have. Each
// names the field as in the event contract, its value and the rule, for the author of a prompt.
// Estimate calls it too.
func (c Config) Validate() error {
	m, ok := methods[c.Name]
	if !ok {
		return unknownName(c.Name)
	}
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	oneOf := func(field, value string, names []string) {
		if !slices.Contains(names, value) {
			fault("%s: %q; must be %s with estimator %s", field, value, strings.Join(names, " or "), c.Name)
		}
	}
	oneOf("std", c.Std, m.stds)
	oneOf("std_basis", c.StdBasis, m.bases)
	switch {
	case m.epsilon == 0 && c.Epsilon != 0:
		fault("epsilon: %v; estimator %s divides by no standard deviation, leave it out", c.Epsilon, c.Name)
	case m.epsilon > 0 && (!(c.Epsilon > 0) || math.IsInf(c.Epsilon, 1)):
		fault("epsilon: %v; must be a finite number above 0", c.Epsilon)
	}
	if c.Columns < 1 {
		fault("columns: %d; must be at least 1 trained step", c.Columns)
	}
	switch {
	case len(m.modes) == 0 && c.Mode != "":
		fault("mode: %q; estimator %s has no modes, leave it out", c.Mode, c.Name)
	case len(m.modes) > 0:
		oneOf("mode", c.Mode, m.modes)
	}
	switch {
	case len(m.singletons) == 0 && c.Singleton != "":
		fault("singleton: %q; estimator %s gives a group of one what it always does, leave it out", c.Singleton, c.Name)
	case len(m.singletons) > 0:
		oneOf("singleton", c.Singleton, m.singletons)
	}
	switch {
	case !(c.AdvClipMax >= 0) || math.IsInf(c.AdvClipMax, 1):
		fault("adv_clip_max: %v; must be a finite number, 0 for no clamp", c.AdvClipMax)
	case c.AdvClipMax == 0 && m.clip > 0:
		fault("adv_clip_max: 0; must be above 0 with estimator %s", c.Name)
	}
	switch {
	case !m.Returns && c.Gamma != 1:
		fault("gamma: %v; estimator %s does not discount, leave it out", c.Gamma, c.Name)
	case !(c.Gamma > 0 && c.Gamma <= 1):
		fault("gamma: %v; must be above 0 and at most 1", c.Gamma)
	case c.Gamma != 1 && c.StdBasis != schemas.BasisExpanded:
		fault("gamma: %v; needs std_basis expanded: it makes the returns of the trained steps differ", c.Gamma)
	}
	return errors.Join(append(faults, c.checkWeights())...)
}

// checkWeights returns an error unless the weights are finite numbers with a total above 0, of an estimator that has
// them. Others must have none.
func (c Config) checkWeights() error {
	if !methods[c.Name].Scores {
		if len(c.Weights) > 0 {
			have := slices.DeleteFunc(Names(), func(name string) bool { return !methods[name].Scores })
			return fmt.Errorf("weights: %v; only estimator %s has them", c.Weights, strings.Join(have, ", "))
		}
		return nil
	}
	total := 0.0
	for _, w := range c.Weights {
		if !finite(w) {
			return fmt.Errorf("weights: %v; must be finite numbers", c.Weights)
		}
		total += w
	}
	if !(total > 0) {
		return fmt.Errorf("weights: %v; must be one per reward, with a total above 0", c.Weights)
	}
	return nil
}

// NeedsBatch reports whether the advantages of a group depend on other groups. Then they can be computed only when
// the whole batch is there.
func (c Config) NeedsBatch() bool { return c.Std == schemas.StdGlobal || methods[c.Name].batch }

// NeedsTwo reports whether Estimate refuses a batch of one reward, because an unbiased standard deviation needs
// two.
func (c Config) NeedsTwo() bool {
	return (c.Std == schemas.StdGlobal || methods[c.Name].whitens) &&
		(c.StdBasis == schemas.BasisSample || c.StdBasis == schemas.BasisExpanded && c.Columns == 1)
}

// Estimate computes the advantages of groups of rewards. It returns one Group per group, in order. Errors: an
// invalid config, an empty group, a reward that is NaN or infinite, a single value (B*T = 1) where an unbiased
// standard deviation over all groups is needed, and rewards so large that the result is not finite.
//
// A group of equal rewards has advantages of 0 wherever an advantage is a distance from the mean of the group. So
// has a group of one, unless Singleton is SingletonReward: then, in estimators that whiten the batch, it moves the
// mean and with it the advantages of all groups. Exceptions are ReinforcePlusPlus, which ignores groups, the modes
// of PerPrompt, and DiffusionNFT, whose 0 is the probability 1/2.
//
// A repeated sample counts again: padding a batch with repeated samples before Estimate biases it, so pad after it.
func Estimate(cfg Config, groups []Rewards) ([]Group, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("estimator config: %w", err)
	}
	count := 0
	for g, group := range groups {
		if err := group.validate(cfg); err != nil {
			return nil, fmt.Errorf("group %d: %w", g, err)
		}
		if (group.Lengths == nil) != (groups[0].Lengths == nil) {
			return nil, fmt.Errorf("group %d: lengths; must be there of all groups or of none", g)
		}
		count += len(group.Values)
	}
	if count == 1 && cfg.NeedsTwo() {
		return nil, fmt.Errorf("%s, std %s: one reward in all, and an unbiased standard deviation needs two "+
			"(std_basis %s)", cfg.Name, cfg.Std, cfg.StdBasis)
	}
	out, err := methods[cfg.Name].estimate(cfg, groups)
	if err != nil {
		return nil, err
	}
	for g := range out {
		out[g].Scale, out[g].StdBasis = cfg.Std, cfg.StdBasis
		if err := out[g].clamp(cfg); err != nil {
			return nil, fmt.Errorf("group %d: rewards too large: %w", g, err)
		}
	}
	return out, nil
}

// validate returns an error that names the sample unless the rewards of one group are fit for cfg:
// finite values, one list of scores per sample where they are normalised each, and positive lengths. Estimate calls it
// for each group.
func (r Rewards) validate(cfg Config) error {
	if len(r.Values) == 0 {
		return errors.New("no rewards")
	}
	for i, v := range r.Values {
		if !finite(v) {
			return fmt.Errorf("reward %d is %v", i, v)
		}
	}
	if methods[cfg.Name].Scores {
		if len(r.Scores) != len(r.Values) {
			return fmt.Errorf("scores of %d samples; must be those of all %d", len(r.Scores), len(r.Values))
		}
		for i, scores := range r.Scores {
			if len(scores) != len(cfg.Weights) {
				return fmt.Errorf("sample %d has %d scores; must be %d, one per weight", i, len(scores),
					len(cfg.Weights))
			}
			for k, v := range scores {
				if !finite(v) {
					return fmt.Errorf("score %d of sample %d is %v", k, i, v)
				}
			}
		}
	}
	if r.Lengths == nil {
		return nil
	}
	if len(r.Lengths) != len(r.Values) {
		return fmt.Errorf("%d lengths; must be one per sample, %d", len(r.Lengths), len(r.Values))
	}
	for i, n := range r.Lengths {
		if n < 1 {
			return fmt.Errorf("lengths[%d]: %d; must be at least 1", i, n)
		}
	}
	return nil
}

// clamp limits the advantages of a group that an estimator computed to +-AdvClipMax, if there is
// one; for probabilities it is done. With step advantages the advantage of a sample becomes their mean.
// A number that is NaN or infinite is an error: the rewards were too large.
func (g *Group) clamp(cfg Config) error {
	if !finite(g.Mean) || !finite(g.Std) {
		return fmt.Errorf("mean %v, std %v", g.Mean, g.Std)
	}
	for i := range g.Advantages {
		rows := g.Advantages[i : i+1]
		if g.StepAdvantages != nil {
			rows = g.StepAdvantages[i]
		}
		for t, a := range rows {
			if !finite(a) {
				return fmt.Errorf("advantage %d is %v", i, a)
			}
			if c := cfg.AdvClipMax; c > 0 && !methods[cfg.Name].Probabilities {
				rows[t] = min(max(a, -c), c)
			}
		}
		if g.StepAdvantages != nil {
			g.Advantages[i] = meanOf(rows)
		}
	}
	return nil
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

func meanOf(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += v
	}
	return sum / float64(len(x))
}
