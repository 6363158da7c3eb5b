package estimator

// diffusionNFT is the estimator diffusion_nft: it turns the advantage A of flowGRPO, clamped to +-c
// (AdvClipMax) and changed by the mode, into the probability p = A/(2c) + 1/2 that a sample is
// optimal (DiffusionNFT, Zheng et al. 2025). A group of equal rewards and a group of one have p =
// 1/2. A that is not finite stays, so that Estimate refuses it.
func diffusionNFT(cfg Config, groups []Rewards) ([]Group, error) {
	out, err := flowGRPO(cfg, groups)
	if err != nil {
		return nil, err
	}
	c := cfg.AdvClipMax
	for g := range out {
		for i, a := range out[g].Advantages {
			if finite(a) { // else finish refuses it
				out[g].Advantages[i] = min(max(cfg.applyMode(min(max(a, -c), c))/c/2+0.5, 0), 1)
			}
		}
	}
	return out, nil
}

// applyMode changes an advantage as the mode of DiffusionNFT says: only its positive or negative
// part, only whether it is positive, or only its sign. Without a mode it stays.
func (cfg Config) applyMode(a float64) float64 {
	switch cfg.Mode {
	case ModePositiveOnly:
		return max(a, 0)
	case ModeNegativeOnly:
		return min(a, 0)
	case ModeOneOnly:
		if a > 0 {
			return 1
		}
		return 0
	case ModeBinary:
		switch {
		case a > 0:
			return 1
		case a < 0:
			return -1
		}
		return 0
	}
	return a
}
