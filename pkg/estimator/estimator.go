// Package estimator turns the rewards of groups into advantages. It is pure float64
// arithmetic: no messages, no time, no randomness. A group is all samples of one
// prompt; groups handed over together share one global scale.
//
// Sums run in the order given, so equal input gives equal bits; callers that gather
// rewards as they arrive sort them first (groups by uid, samples by sample_index).
package estimator

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// FlowGRPO is the group-relative advantage of Flow-GRPO (J. Liu et al. 2025); with
// StdNone it is that of Dr.GRPO (Z. Liu et al. 2025, "Understanding R1-Zero-like
// training").
const FlowGRPO = "flow_grpo"

// What a reward's distance from its group's mean is divided by.
const (
	StdGroup  = "group"  // the standard deviation of its own group
	StdGlobal = "global" // the standard deviation of all groups together
	StdNone   = "none"   // nothing (Dr.GRPO)
)

// How a standard deviation is taken over B values whose squared distances from their
// mean sum to S. Trainers disagree: verl copies each reward over its T trained steps
// first, Flow-GRPO's own code divides by the count.
const (
	BasisSample     = "sample"     // sqrt(S / (B-1))
	BasisExpanded   = "expanded"   // sqrt(T*S / (B*T-1)), with T = Config.Columns
	BasisPopulation = "population" // sqrt(S / B)
)

// Config selects an estimator and its options.
type Config struct {
	// Name of the estimator, one of Names.
	Name string
	// Std is StdGroup, StdGlobal or StdNone.
	Std string
	// StdBasis is BasisSample, BasisExpanded or BasisPopulation.
	StdBasis string
	// Epsilon > 0 is added to the standard deviation before dividing by it.
	Epsilon float64
	// Columns is T >= 1, the number of trained steps a reward stands for. Only
	// BasisExpanded reads it.
	Columns int
}

// DefaultConfig is flow_grpo over each group alone, with the unbiased standard
// deviation and Flow-GRPO's epsilon.
func DefaultConfig() Config {
	return Config{Name: FlowGRPO, Std: StdGroup, StdBasis: BasisSample, Epsilon: 1e-4, Columns: 1}
}

// Names lists the estimators.
func Names() []string { return []string{FlowGRPO} }

// Validate joins all faults, each naming the field as the event contract spells it,
// its value and the rule.
func (c Config) Validate() error {
	var faults []error
	oneOf := func(field, value string, names ...string) {
		for _, n := range names {
			if value == n {
				return
			}
		}
		faults = append(faults, fmt.Errorf("%s = %q: want %s", field, value, strings.Join(names, " or ")))
	}
	oneOf("estimator", c.Name, Names()...)
	oneOf("std", c.Std, StdGroup, StdGlobal, StdNone)
	oneOf("std_basis", c.StdBasis, BasisSample, BasisExpanded, BasisPopulation)
	if !(c.Epsilon > 0) || math.IsInf(c.Epsilon, 1) {
		faults = append(faults, fmt.Errorf("epsilon = %v: want a finite number above 0", c.Epsilon))
	}
	if c.Columns < 1 {
		faults = append(faults, fmt.Errorf("columns = %d: want at least 1", c.Columns))
	}
	return errors.Join(faults...)
}

// Group is the result of one group of rewards.
type Group struct {
	// Advantages [n], one per reward in the order given. Each holds for all trained
	// steps of its sample.
	Advantages []float64
	// Mean of the group's rewards.
	Mean float64
	// Std is what the advantages were divided by, less epsilon: over all groups when
	// Scale is StdGlobal, else over this one. With StdNone it is only reported. The
	// spread of a single value is 0 in every basis.
	Std float64
	// Scale and StdBasis repeat Config.Std and Config.StdBasis.
	Scale, StdBasis string
}

// Estimate computes the advantages of groups of rewards; no group may be empty. It
// returns one Group per group, in order. Errors: a config that does not validate, an
// empty group, a reward that is NaN or infinite, rewards so large that the result is.
func Estimate(cfg Config, groups [][]float64) ([]Group, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("estimator config: %w", err)
	}
	for g, rewards := range groups {
		if len(rewards) == 0 {
			return nil, fmt.Errorf("group %d: no rewards", g)
		}
		for i, r := range rewards {
			if !finite(r) {
				return nil, fmt.Errorf("group %d: reward %d is %v", g, i, r)
			}
		}
	}
	switch cfg.Name {
	case FlowGRPO:
		return flowGRPO(cfg, groups)
	}
	return nil, fmt.Errorf("estimator %q has no implementation", cfg.Name)
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
