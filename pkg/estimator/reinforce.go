package estimator

import (
	"math"

	"github.com/meander-rl/meander/schemas"
)

// whiten sets x = (x - mean) / sqrt(variance + epsilon) over all rows in place, with the variance
// in the basis of cfg; each row belongs to one of groups. It returns the standard deviation. The
// estimators that normalise a batch end with it.
func whiten(cfg Config, rows [][]float64, groups []Rewards) float64 {
	m := cfg.moments(rows, groups)
	variance := m.variance(cfg)
	scale := 1 / math.Sqrt(variance+cfg.Epsilon)
	for _, row := range rows {
		for i := range row {
			row[i] = float64(row[i]-m.mean) * scale
		}
	}
	return math.Sqrt(variance)
}

// Returns returns the returns of one sample at its trained steps; nil for estimators whose
// returns are the advantages. The advantage service reports them in
// metrics. The reward comes with the last step: step t of T has gamma^(T-1-t) * reward.
func (c Config) Returns(reward float64, steps int) []float64 {
	if !methods[c.Name].Returns {
		return nil
	}
	return c.returns(reward, steps)
}

// returns is Returns of an estimator that has them.
func (c Config) returns(reward float64, steps int) []float64 {
	row := make([]float64, steps)
	for t := steps - 1; t >= 0; t-- {
		row[t] = reward
		reward *= c.Gamma
	}
	return row
}

// reinforcePlusPlus is the estimator reinforce_plus_plus: it whitens the returns of all samples and
// ignores groups. Estimate calls it with checked arguments; it never fails.
func reinforcePlusPlus(cfg Config, groups []Rewards) ([]Group, error) {
	if cfg.Gamma != 1 {
		return reinforceDiscounted(cfg, groups)
	}
	rows := make([][]float64, len(groups))
	for g, rewards := range groups {
		rows[g] = append([]float64(nil), rewards.Values...)
	}
	std := whiten(cfg, rows, groups)
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		out[g] = Group{Advantages: rows[g], Mean: momentsOf(rewards.Values).mean, Std: std}
	}
	return out, nil
}

// reinforceDiscounted is reinforcePlusPlus with gamma below 1: every trained step has its own
// return and advantage, in StepAdvantages. It never fails.
func reinforceDiscounted(cfg Config, groups []Rewards) ([]Group, error) {
	var rows [][]float64
	for _, rewards := range groups {
		for i, r := range rewards.Values {
			rows = append(rows, cfg.returns(r, rewards.steps(cfg, i)))
		}
	}
	flat := cfg
	flat.StdBasis = schemas.BasisSample // the columns are all there
	std := whiten(flat, rows, groups)
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		n := len(rewards.Values)
		out[g] = Group{
			Advantages: make([]float64, n), StepAdvantages: rows[:n:n], Mean: momentsOf(rewards.Values).mean, Std: std,
		}
		rows = rows[n:]
	}
	return out, nil
}

// reinforceBaseline is the estimator reinforce_plus_plus_baseline: it whitens the distances r -
// mean_g of the rewards from the mean of their group over all samples. Estimate calls it with
// checked arguments; it never fails.
func reinforceBaseline(cfg Config, groups []Rewards) ([]Group, error) {
	centred := make([][]float64, len(groups))
	equal := make([]bool, len(groups))
	keepsReward := false
	for g, rewards := range groups {
		m := groupMoments(cfg, rewards.Values)
		equal[g], keepsReward = m.constant, keepsReward || m.keepsReward
		centred[g] = m.advantages(0, func(i int) float64 { return rewards.Values[i] - m.centre() }).Advantages
	}
	return whitenGroups(cfg, groups, centred, equal, keepsReward), nil
}

// gdpo is the estimator gdpo: it normalises each single score within its group, as grpo does, and
// whitens the sum, weighted by cfg.Weights, over all samples. Estimate calls it with checked
// arguments; it never fails.
func gdpo(cfg Config, groups []Rewards) ([]Group, error) {
	sums := make([][]float64, len(groups))
	equal := make([]bool, len(groups))
	keepsReward := false
	single := cfg
	single.StdBasis = schemas.BasisSample // the other basis is that of the whitening
	for g, rewards := range groups {
		sums[g], equal[g] = make([]float64, len(rewards.Values)), true
		for k, weight := range cfg.Weights {
			scores := make([]float64, len(rewards.Values))
			for i := range scores {
				scores[i] = rewards.Scores[i][k]
			}
			m := groupMoments(single, scores)
			equal[g], keepsReward = equal[g] && m.constant, keepsReward || m.keepsReward
			scale := single.scale(m.std(single))
			for i, a := range m.advantages(0, func(i int) float64 {
				return (scores[i] - m.centre()) / scale
			}).Advantages {
				sums[g][i] += float64(weight * a)
			}
		}
	}
	cfg.Epsilon = whitenEpsilon
	return whitenGroups(cfg, groups, sums, equal, keepsReward), nil
}

// whitenGroups whitens all rows, one per group, together and makes the groups of them. Rows are
// centred, so their mean is 0 up to rounding, and a group of equal rewards (equal) is set to
// exactly 0. Not if the mean of all can move: when a group of one keeps its reward (keepsReward),
// or samples count as often as they have steps.
func whitenGroups(cfg Config, groups []Rewards, rows [][]float64, equal []bool, keepsReward bool) []Group {
	std := whiten(cfg, rows, groups)
	moved := keepsReward || cfg.StdBasis == schemas.BasisExpanded && groups[0].Lengths != nil
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		if equal[g] && !moved {
			clear(rows[g])
		}
		out[g] = Group{Advantages: rows[g], Mean: momentsOf(rewards.Values).mean, Std: std}
	}
	return out
}
