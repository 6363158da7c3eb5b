package estimator

import "math"

// whiten sets x = (x - mean) / sqrt(variance + epsilon) over all rows, the variance in
// the basis of cfg, and returns the standard deviation.
func whiten(cfg Config, rows [][]float64) float64 {
	m := spread(rows...)
	variance := m.variance(cfg)
	scale := 1 / math.Sqrt(variance+cfg.Epsilon)
	for _, row := range rows {
		for i := range row {
			row[i] = float64(row[i]-m.mean) * scale
		}
	}
	return math.Sqrt(variance)
}

// reinforce whitens the returns of all samples, without regard to groups. The reward
// comes with the last of the T trained steps: step t has the return gamma^(T-1-t) * r.
func reinforce(cfg Config, groups []Rewards) ([]Group, error) {
	if cfg.Gamma != 1 {
		return reinforceDiscounted(cfg, groups)
	}
	rows := make([][]float64, len(groups))
	for g, rewards := range groups {
		rows[g] = append([]float64(nil), rewards.Values...)
	}
	std := whiten(cfg, rows)
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		out[g] = Group{Advantages: rows[g], Mean: spread(rewards.Values).mean, Std: std}
	}
	return out, nil
}

func reinforceDiscounted(cfg Config, groups []Rewards) ([]Group, error) {
	var rows [][]float64
	for _, rewards := range groups {
		for _, r := range rewards.Values {
			row := make([]float64, cfg.Columns)
			for t := cfg.Columns - 1; t >= 0; t-- {
				row[t] = r
				r *= cfg.Gamma
			}
			rows = append(rows, row)
		}
	}
	flat := cfg
	flat.StdBasis = BasisSample // the columns are all there
	std := whiten(flat, rows)
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		n := len(rewards.Values)
		out[g] = Group{Advantages: make([]float64, n), StepAdvantages: rows[:n:n], Mean: spread(rewards.Values).mean, Std: std}
		rows = rows[n:]
	}
	return out, nil
}

// reinforceBaseline whitens r - mean_g over all samples.
func reinforceBaseline(cfg Config, groups []Rewards) ([]Group, error) {
	centred := make([][]float64, len(groups))
	all := make([]moments, len(groups))
	for g, rewards := range groups {
		m := spread(rewards.Values)
		all[g] = m
		centred[g] = m.group(0, func(i int) float64 { return rewards.Values[i] - m.mean }).Advantages
	}
	std := whiten(cfg, centred)
	out := make([]Group, len(groups))
	for g := range groups {
		// The mean of the centred values is 0 but for rounding: equal rewards stay exactly 0.
		out[g] = all[g].group(std, func(i int) float64 { return centred[g][i] })
	}
	return out, nil
}

// gdpo normalises each reward within its group, as grpo does, and whitens the weighted
// sum over all samples. A group in which no reward varies has exactly 0.
func gdpo(cfg Config, groups []Rewards) ([]Group, error) {
	sums := make([][]float64, len(groups))
	constant := make([]bool, len(groups))
	for g, rewards := range groups {
		sums[g], constant[g] = make([]float64, len(rewards.Values)), true
		for k, weight := range cfg.Weights {
			single := make([]float64, len(rewards.Values))
			for i := range single {
				single[i] = rewards.Scores[i][k]
			}
			m := spread(single)
			constant[g] = constant[g] && m.constant
			scale := m.std(cfg) + cfg.Epsilon
			for i, a := range m.group(0, func(i int) float64 { return (single[i] - m.mean) / scale }).Advantages {
				sums[g][i] += float64(weight * a)
			}
		}
	}
	flat := cfg
	flat.Epsilon = whitenEpsilon
	std := whiten(flat, sums)
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		if constant[g] { // else it has the rounding of the batch's mean
			clear(sums[g])
		}
		out[g] = Group{Advantages: sums[g], Mean: spread(rewards.Values).mean, Std: std}
	}
	return out, nil
}
