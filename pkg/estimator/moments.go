package estimator

import (
	"math"

	"github.com/meander-rl/meander/schemas"
)

// moments are the statistics of a set of values.
type moments struct {
	count       int
	elements    float64 // trained steps of all values together, if samples differ in them; 0: Config.Columns each
	mean        float64
	squares     float64 // sum of squared distances from mean; over all elements, if they are counted
	constant    bool    // all values are equal
	keepsReward bool    // a group of one with SingletonReward
}

// groupMoments returns the moments of the rewards of one group.
func groupMoments(cfg Config, rewards []float64) moments {
	m := momentsOf(rewards)
	m.keepsReward = m.count == 1 && cfg.Singleton == schemas.SingletonReward
	return m
}

// centre returns the number that is subtracted from the rewards of the group.
func (m moments) centre() float64 {
	if m.keepsReward {
		return 0
	}
	return m.mean
}

// momentsOf returns the count, mean and spread of all values together. It needs at least one value
// and panics without. It takes two passes: the one-pass formula loses all precision when the mean
// is large.
func momentsOf(groups ...[]float64) moments {
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

// moments returns the moments of rows of values, one row for each group of rewards: those that an
// estimator divides by. In the expanded basis each value counts as often as its sample has steps,
// if samples differ in them.
func (cfg Config) moments(rows [][]float64, groups []Rewards) moments {
	m := momentsOf(rows...)
	if cfg.StdBasis != schemas.BasisExpanded || groups[0].Lengths == nil {
		return m
	}
	sum := 0.0
	for g, row := range rows {
		for i, v := range row {
			n := float64(groups[g].Lengths[i])
			sum += float64(n * v)
			m.elements += n
		}
	}
	if m.constant {
		return m
	}
	m.mean, m.squares = sum/m.elements, 0
	for g, row := range rows {
		for i, v := range row {
			d := v - m.mean
			m.squares += float64(groups[g].Lengths[i]) * float64(d*d)
		}
	}
	return m
}

// variance returns the variance of the values in the basis of cfg: over samples, over steps, or of
// a population. It is 0 for equal values, also for a single value, whose unbiased variance is not
// defined.
func (m moments) variance(cfg Config) float64 {
	if m.constant {
		return 0
	}
	n := float64(m.count)
	if m.elements > 0 {
		return m.squares / (m.elements - 1)
	}
	switch cfg.StdBasis {
	case schemas.BasisExpanded:
		t := float64(cfg.Columns)
		return t * m.squares / (float64(n*t) - 1)
	case schemas.BasisPopulation:
		return m.squares / n
	default:
		return m.squares / (n - 1)
	}
}

// std returns the standard deviation in the basis of cfg; 1 for a group of one with SingletonReward that is divided
// by its own.
func (m moments) std(cfg Config) float64 {
	if m.keepsReward && cfg.Std == schemas.StdGroup {
		return 1
	}
	return math.Sqrt(m.variance(cfg))
}

// scale returns the divisor of the advantages for a spread of std: 1 with StdNone.
func (cfg Config) scale(std float64) float64 {
	if cfg.Std == schemas.StdNone {
		return 1
	}
	return std + cfg.Epsilon
}

// advantages makes the Group with moments m that an estimator returns. Equal rewards get exactly 0;
// else advantage(i) is called for each sample. std is the spread to report.
func (m moments) advantages(std float64, advantage func(i int) float64) Group {
	g := Group{Advantages: make([]float64, m.count), Mean: m.mean, Std: std}
	if m.constant && !m.keepsReward {
		return g
	}
	for i := range g.Advantages {
		g.Advantages[i] = advantage(i)
	}
	return g
}

// values returns the rewards of each group.
func values(groups []Rewards) [][]float64 {
	out := make([][]float64, len(groups))
	for g := range groups {
		out[g] = groups[g].Values
	}
	return out
}
