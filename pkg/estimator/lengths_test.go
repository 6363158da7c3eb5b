package estimator_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// What verl's estimators make of texts with 2, 4, 1 and 3 tokens in two groups: computed in float64 by its formulas on
// padded tokens with their mask, outside of this package.
func TestEstimate_Lengths(t *testing.T) {
	t.Parallel()
	rewards := []estimator.Rewards{
		{Values: []float64{1, 0.2}, Lengths: []int{2, 4}, Scores: [][]float64{{1, 0.9}, {0, 0.5}}},
		{Values: []float64{0, 0.5}, Lengths: []int{1, 3}, Scores: [][]float64{{1, 0.1}, {0, 0.3}}},
	}
	equal := slices.Clone(rewards)
	equal[0].Values = []float64{1, 1}
	for _, c := range []struct {
		name, of string
		change   func(c *estimator.Config)
		groups   []estimator.Rewards
		want     [][]float64 // [n][T], or [n][1] where all tokens have the same
	}{
		{"discounted", estimator.ReinforcePlusPlus, func(c *estimator.Config) { c.Gamma = 0.9 }, rewards, [][]float64{
			{1.523373144798, 1.82460171887},
			{-0.748492760855, -0.699693731855, -0.645472588522, -0.585226873708},
			{-1.187684021852},
			{0.032291703141, 0.167844561473, 0.318458848509},
		}},
		{
			"whitened", estimator.ReinforcePlusPlus, nil, rewards,
			[][]float64{{1.660115865266}, {-0.669871314055}, {-1.252368108885}, {0.203873878191}},
		},
		{
			"baseline", estimator.ReinforcePlusPlusBaseline, nil, rewards,
			[][]float64{{1.177113092861}, {-1.012864754323}, {-0.602243907976}, {0.766492246514}},
		},
		// A group of equal rewards is moved by the mean of all tokens.
		{
			"equal rewards", estimator.ReinforcePlusPlusBaseline, nil, equal,
			[][]float64{{-0.316227702771}, {-0.316227702771}, {-1.897366216628}, {1.264910811085}},
		},
		{
			"each reward by itself", estimator.GDPO, func(c *estimator.Config) { c.Weights = []float64{1, 0.5} },
			rewards,
			[][]float64{{1.587011282945}, {-0.918795166613}, {0.751745124219}, {-0.083529007887}},
		},
		{
			"weighted mean", estimator.OPO, nil, rewards,
			[][]float64{{0.533333333333}, {-0.266666666667}, {-0.375}, {0.125}},
		},
		{
			"spread of all tokens", estimator.FlowGRPO,
			func(c *estimator.Config) { c.Std, c.StdBasis = schemas.StdGlobal, schemas.BasisExpanded }, rewards,
			[][]float64{{1.164654435319}, {-1.164654435319}, {-0.727909022074}, {0.727909022074}},
		},
		// The lengths are nothing to an estimator that neither discounts nor counts steps.
		{
			"sample", estimator.ReinforcePlusPlus, func(c *estimator.Config) { c.StdBasis = schemas.BasisSample },
			rewards,
			[][]float64{{1.32204283759}, {-0.517321110363}, {-0.977162097352}, {0.172440370121}},
		},
	} {
		got, err := estimator.Estimate(of(t, c.of, c.change), c.groups)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for i, want := range c.want {
			g, k := got[i/2], i%2
			row := g.Advantages[k : k+1]
			if len(want) > 1 || g.StepAdvantages != nil {
				row = g.StepAdvantages[k]
			}
			if len(row) != len(want) {
				t.Fatalf("%s: sample %d has %d advantages; want %d", c.name, i, len(row), len(want))
			}
			for j, w := range want {
				if !(math.Abs(row[j]-w) <= 2e-9) {
					t.Errorf("%s: sample %d, token %d: %.12g; want %.12g", c.name, i, j, row[j], w)
				}
			}
		}
	}
}

// Samples of T tokens each are those of T trained steps, with every estimator and basis; lengths of some groups only
// are refused.
func TestEstimate_EqualLengths(t *testing.T) {
	t.Parallel()
	const T = 5
	plain := []estimator.Rewards{
		{Values: []float64{0.2, 0.4, 0.6}, Scores: [][]float64{{1, 2}, {2, 2}, {3, 1}}},
		{Values: []float64{1, 1}, Scores: [][]float64{{1, 1}, {1, 1}}},
	}
	counted := slices.Clone(plain)
	for g := range counted {
		counted[g].Lengths = slices.Repeat([]int{T}, len(counted[g].Values))
	}
	for _, name := range estimator.Names() {
		for _, basis := range []string{schemas.BasisSample, schemas.BasisExpanded} {
			for _, gamma := range []float64{1, 0.8} {
				cfg := of(t, name, func(c *estimator.Config) { c.StdBasis, c.Gamma, c.Columns = basis, gamma, T })
				if name == estimator.GDPO {
					cfg.Weights = []float64{1, 2}
				}
				if cfg.Validate() != nil {
					continue
				}
				want, err := estimator.Estimate(cfg, plain)
				if err != nil {
					t.Fatal(err)
				}
				cfg.Columns = 1 // no one reads it
				got, err := estimator.Estimate(cfg, counted)
				if err != nil {
					t.Fatal(err)
				}
				for g := range want {
					a, b := slices.Concat(append(want[g].StepAdvantages,
						want[g].Advantages)...), slices.Concat(append(got[g].StepAdvantages, got[g].Advantages)...)
					if !slices.EqualFunc(a, b, func(x, y float64) bool { return math.Abs(x-y) < 1e-12 }) {
						t.Errorf("%s, %s, gamma %g: group %d: %v; want %v", name, basis, gamma, g, b, a)
					}
				}
			}
		}
	}
	if _, err := estimator.Estimate(of(t, estimator.OPO, nil),
		[]estimator.Rewards{counted[0], plain[1]}); err == nil || !strings.Contains(err.Error(), "group 1: lengths") {
		t.Errorf("got %v", err)
	}
}
