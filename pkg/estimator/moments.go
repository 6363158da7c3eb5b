package estimator

import "math"

// moments of a set of values.
type moments struct {
	count    int
	elements float64 // steps that the values stand for, each for its own number of them; 0: for Config.Columns
	mean     float64
	squares  float64 // sum of squared distances from mean, of all elements where they are counted
	constant bool    // all values are equal
	alone    bool    // one value, that stands for itself
}

// within are the moments of the rewards of one group.
func within(cfg Config, rewards []float64) moments {
	m := spread(rewards)
	m.alone = m.count == 1 && cfg.Singleton == SingletonReward
	return m
}

// centre is what the rewards of the group are measured from.
func (m moments) centre() float64 {
	if m.alone {
		return 0
	}
	return m.mean
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

// spread takes the moments of rows of values, one for each group of rewards: in the expanded basis over all steps that each
// stands for, where samples differ in them.
func (cfg Config) spread(rows [][]float64, groups []Rewards) moments {
	m := spread(rows...)
	if cfg.StdBasis != BasisExpanded || groups[0].Lengths == nil {
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

// variance in the basis of cfg; 0 for equal values, which guards the unbiased form of a
// single one.
func (m moments) variance(cfg Config) float64 {
	if m.constant {
		return 0
	}
	n := float64(m.count)
	if m.elements > 0 {
		return m.squares / (m.elements - 1)
	}
	switch cfg.StdBasis {
	case BasisExpanded:
		t := float64(cfg.Columns)
		return t * m.squares / (float64(n*t) - 1)
	case BasisPopulation:
		return m.squares / n
	default:
		return m.squares / (n - 1)
	}
}

func (m moments) std(cfg Config) float64 {
	if m.alone && cfg.Std == StdGroup {
		return 1
	}
	return math.Sqrt(m.variance(cfg))
}

// scale is what a distance from the centre is divided by, where std is the spread.
func (cfg Config) scale(std float64) float64 {
	if cfg.Std == StdNone {
		return 1
	}
	return std + cfg.Epsilon
}

// group is the result of the group that m describes, with exactly 0 for equal rewards.
func (m moments) group(std float64, advantage func(i int) float64) Group {
	g := Group{Advantages: make([]float64, m.count), Mean: m.mean, Std: std}
	if m.constant && !m.alone {
		return g
	}
	for i := range g.Advantages {
		g.Advantages[i] = advantage(i)
	}
	return g
}

func values(groups []Rewards) [][]float64 {
	out := make([][]float64, len(groups))
	for g := range groups {
		out[g] = groups[g].Values
	}
	return out
}
