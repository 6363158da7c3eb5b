package estimator

import "github.com/meander-rl/meander/schemas"

// perPrompt is the estimator per_prompt: the PerPromptStatTracker of DDPO's and Flow-GRPO's code
// for one epoch (it is cleared after each), in one of its modes. In the modes grpo and dpo a group
// of one has advantage 0. But if every group has one sample and the scale is global, mode grpo uses
// no tracker: the mean is over all rewards. Estimate calls it with checked arguments; it never
// fails.
func perPrompt(cfg Config, groups []Rewards) ([]Group, error) {
	if cfg.Mode == ModeGRPO {
		singles := len(groups) > 1 && cfg.Std == schemas.StdGlobal
		for _, rewards := range groups {
			singles = singles && len(rewards.Values) == 1
		}
		if singles {
			return withoutTracker(cfg, groups)
		}
		return flowGRPO(cfg, groups)
	}
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		m := momentsOf(rewards.Values)
		out[g] = Group{Advantages: make([]float64, m.count), Mean: m.mean, Std: m.std(cfg)}
		best, worst := 0, 0
		for i, v := range rewards.Values {
			if v > rewards.Values[best] {
				best = i
			}
			if v < rewards.Values[worst] {
				worst = i
			}
		}
		a := out[g].Advantages
		switch cfg.Mode {
		case ModeRWR:
			copy(a, rewards.Values)
		case ModeSFT:
			for i, v := range rewards.Values {
				if v == rewards.Values[best] {
					a[i] = 1
				}
			}
		case ModeDPO:
			switch {
			case m.count == 1:
			case best == worst: // all are equal: the source takes the first two
				a[0], a[1] = -1, 1
			default:
				a[best], a[worst] = 1, -1
			}
		}
	}
	return out, nil
}

// withoutTracker sets A = (r - mean) / (std + epsilon) over all rewards, for perPrompt where each
// group has one sample. Equal rewards get 0. It never fails.
func withoutTracker(cfg Config, groups []Rewards) ([]Group, error) {
	all := momentsOf(values(groups)...)
	std := all.std(cfg)
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		r := rewards.Values[0]
		out[g] = Group{Advantages: []float64{0}, Mean: r, Std: std}
		if !all.constant {
			out[g].Advantages[0] = (r - all.mean) / (std + cfg.Epsilon)
		}
	}
	return out, nil
}
