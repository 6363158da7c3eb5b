package estimator

import "github.com/meander-rl/meander/schemas"

// flowGRPO is the estimator flow_grpo, and grpo, dance_grpo and dr_grpo with other options: it sets
// A[g][i] = (r[g][i] - mean_g) / (std + epsilon), with std by cfg.Std. Estimate calls it with
// checked arguments; it never fails.
//
// A group of equal rewards has advantages of exactly 0. The test is max == min, because a rounded
// mean leaves differences in the last bit, which a small scale would enlarge. For a group of one
// see cfg.Singleton, which of these only grpo has.
func flowGRPO(cfg Config, groups []Rewards) ([]Group, error) {
	var global float64
	if cfg.Std == schemas.StdGlobal {
		global = cfg.moments(values(groups), groups).std(cfg)
	}
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		m := groupMoments(cfg, rewards.Values)
		std := global
		if cfg.Std != schemas.StdGlobal {
			counted := cfg.moments([][]float64{rewards.Values}, groups[g:g+1])
			counted.keepsReward = m.keepsReward
			std = counted.std(cfg)
		}
		scale := cfg.scale(std)
		out[g] = m.advantages(std, func(i int) float64 { return (rewards.Values[i] - m.centre()) / scale })
	}
	return out, nil
}

// rloo is the estimator rloo (leave one out): A = r - the mean of the others = n/(n-1) * (r -
// mean). For a group of one it is r or 0, as cfg.Singleton says. Estimate calls it with checked
// arguments; it never fails.
func rloo(cfg Config, groups []Rewards) ([]Group, error) {
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		m := groupMoments(cfg, rewards.Values)
		n := float64(m.count)
		out[g] = m.advantages(m.std(cfg), func(i int) float64 {
			if m.keepsReward {
				return rewards.Values[i]
			}
			return n / (n - 1) * (rewards.Values[i] - m.mean)
		})
	}
	return out, nil
}

// opo is the estimator opo: A = r - sum(length*r)/sum(length), with the lengths of the samples in
// trained steps. With equal lengths that is Dr.GRPO. Estimate calls it with checked arguments; it
// never fails.
func opo(cfg Config, groups []Rewards) ([]Group, error) {
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		m := groupMoments(cfg, rewards.Values)
		baseline := m.centre()
		if rewards.Lengths != nil && !m.keepsReward {
			var sum, total float64
			for i, n := range rewards.Lengths {
				sum += float64(float64(n) * rewards.Values[i])
				total += float64(n)
			}
			baseline = sum / total
		}
		out[g] = m.advantages(m.std(cfg), func(i int) float64 { return rewards.Values[i] - baseline })
	}
	return out, nil
}

// gpg is the estimator gpg: A = alpha * (r - mean). alpha is the number of all rewards divided by
// the number of rewards that are not 0. Estimate calls it with checked arguments; it never fails.
func gpg(cfg Config, groups []Rewards) ([]Group, error) {
	count, nonzero := 0, 0
	for _, rewards := range groups {
		for _, v := range rewards.Values {
			count++
			if v != 0 {
				nonzero++
			}
		}
	}
	alpha := float64(count) / float64(max(nonzero, 1))
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		m := groupMoments(cfg, rewards.Values)
		out[g] = m.advantages(m.std(cfg), func(i int) float64 { return alpha * (rewards.Values[i] - m.centre()) })
	}
	return out, nil
}

// grpoPassK is the estimator grpo_passk: the best sample (the first, if there are several) gets its
// lead over the second best, divided by std + epsilon unless cfg.Std is StdNone; all others, and a
// group of one, get 0. Estimate calls it with checked arguments; it never fails.
func grpoPassK(cfg Config, groups []Rewards) ([]Group, error) {
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		m := momentsOf(rewards.Values)
		std := m.std(cfg)
		scale := cfg.scale(std)
		best, second := 0, -1
		for i, v := range rewards.Values {
			switch {
			case i == 0:
			case v > rewards.Values[best]:
				best, second = i, best
			case second < 0 || v > rewards.Values[second]:
				second = i
			}
		}
		out[g] = m.advantages(std, func(i int) float64 {
			if i != best {
				return 0
			}
			return (rewards.Values[best] - rewards.Values[second]) / scale
		})
	}
	return out, nil
}
