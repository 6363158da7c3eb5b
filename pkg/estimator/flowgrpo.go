package estimator

import (
	"fmt"
	"math"
)

// flowGRPO sets A[g][i] = (r[g][i] - mean_g) / (std + epsilon), std by cfg.Std.
//
// A group whose rewards are all the same bits has advantages of exactly 0, a group of
// one included: the test is max == min, because a rounded mean leaves differences of
// an ulp that a small scale would blow up.
func flowGRPO(cfg Config, groups [][]float64) ([]Group, error) {
	var global float64
	if cfg.Std == StdGlobal {
		global = spread(groups...).std(cfg)
	}
	out := make([]Group, len(groups))
	for g, rewards := range groups {
		m := spread(rewards)
		std := m.std(cfg)
		if cfg.Std == StdGlobal {
			std = global
		}
		scale := std + cfg.Epsilon
		if cfg.Std == StdNone {
			scale = 1
		}
		out[g] = Group{
			Advantages: make([]float64, len(rewards)), Mean: m.mean, Std: std,
			Scale: cfg.Std, StdBasis: cfg.StdBasis,
		}
		if !finite(m.mean) || !finite(std) {
			return nil, fmt.Errorf("group %d: rewards too large: mean %v, std %v", g, m.mean, std)
		}
		if m.constant {
			continue
		}
		for i, r := range rewards {
			a := (r - m.mean) / scale
			if !finite(a) {
				return nil, fmt.Errorf("group %d: rewards too large: advantage %d is %v", g, i, a)
			}
			out[g].Advantages[i] = a
		}
	}
	return out, nil
}

// moments of a set of values.
type moments struct {
	count    int
	mean     float64
	squares  float64 // sum of squared distances from mean
	constant bool    // all values are equal
}

// spread takes the moments of all values together, in two passes: the one-pass form
// loses everything when the mean is large.
func spread(groups ...[]float64) moments {
	m := moments{constant: true}
	first := groups[0][0]
	for _, values := range groups {
		for _, v := range values {
			m.mean += v
			m.constant = m.constant && v == first
		}
		m.count += len(values)
	}
	if m.constant {
		m.mean = first
		return m
	}
	m.mean /= float64(m.count)
	for _, values := range groups {
		for _, v := range values {
			d := v - m.mean
			m.squares += float64(d * d)
		}
	}
	return m
}

// std is the standard deviation in the basis of cfg; 0 for equal values, which
// guards the unbiased form of a single one.
func (m moments) std(cfg Config) float64 {
	if m.constant {
		return 0
	}
	n := float64(m.count)
	switch cfg.StdBasis {
	case BasisExpanded:
		t := float64(cfg.Columns)
		return math.Sqrt(t * m.squares / (float64(n*t) - 1))
	case BasisPopulation:
		return math.Sqrt(m.squares / n)
	default:
		return math.Sqrt(m.squares / (n - 1))
	}
}
