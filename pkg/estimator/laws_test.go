package estimator_test

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

func drawConfig(t *rapid.T) estimator.Config {
	return estimator.Config{
		Name: estimator.FlowGRPO, Gamma: 1,
		Std: rapid.SampledFrom([]string{schemas.StdGroup, schemas.StdGlobal, schemas.StdNone}).
			Draw(t, "std"),
		StdBasis: rapid.SampledFrom([]string{
			schemas.BasisSample, schemas.BasisExpanded, schemas.BasisPopulation,
		}).Draw(t, "std_basis"),
		Epsilon: rapid.SampledFrom([]float64{1e-8, 1e-4, 1}).Draw(t, "epsilon"),
		Columns: rapid.IntRange(1, 50).Draw(t, "columns"),
	}
}

// Rewards are multiples of 1/64 of moderate size, so that shifts by such numbers and
// scalings by powers of two are exact and the laws hold to a few ulps.
func drawRewards(t *rapid.T) [][]float64 {
	reward := rapid.Custom(func(t *rapid.T) float64 { return float64(rapid.IntRange(-640, 640).Draw(t, "64r")) / 64 })
	return rapid.SliceOfN(rapid.SliceOfN(reward, 1, 12), 1, 6).Draw(t, "rewards")
}

func mustEstimate(t *rapid.T, cfg estimator.Config, rewards [][]float64) []estimator.Group {
	if cfg.Std == schemas.StdGlobal && len(rewards) == 1 && len(rewards[0]) == 1 {
		t.Skip("one value in all is refused")
	}
	got, err := estimator.Estimate(cfg, plain(rewards))
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func size(g estimator.Group) float64 {
	s := 1.0
	for _, a := range g.Advantages {
		s = max(s, math.Abs(a))
	}
	return s
}

func TestLaw_GroupSumsToZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		for _, g := range mustEstimate(t, drawConfig(t), drawRewards(t)) {
			var sum float64
			for _, a := range g.Advantages {
				sum += a
			}
			if math.Abs(sum) > 1e-12*size(g) {
				t.Fatalf("advantages %v sum to %v", g.Advantages, sum)
			}
		}
	})
}

// A constant added to all rewards of one group changes no advantage, as long as the
// scale is the group's own or none; added to all groups, never.
func TestLaw_ShiftInvariance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg, rewards := drawConfig(t), drawRewards(t)
		before := mustEstimate(t, cfg, rewards)
		common := float64(rapid.IntRange(-6400, 6400).Draw(t, "64*shift")) / 64
		shifted := make([][]float64, len(rewards))
		for g := range rewards {
			shift := common
			if cfg.Std != schemas.StdGlobal {
				shift *= float64(g + 1)
			}
			for _, r := range rewards[g] {
				shifted[g] = append(shifted[g], r+shift)
			}
		}
		for g, after := range mustEstimate(t, cfg, shifted) {
			for i := range after.Advantages {
				if math.Abs(after.Advantages[i]-before[g].Advantages[i]) > 1e-10*size(before[g]) {
					t.Fatalf("group %d: %v, shifted %v", g, before[g].Advantages, after.Advantages)
				}
			}
		}
	})
}

// Rewards and epsilon times a power of two: the same advantages bit for bit with a
// scale, and as many times larger without one.
func TestLaw_Scale(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg, rewards := drawConfig(t), drawRewards(t)
		before := mustEstimate(t, cfg, rewards)
		factor := math.Ldexp(1, rapid.IntRange(-20, 20).Draw(t, "exponent"))
		scaled := make([][]float64, len(rewards))
		for g := range rewards {
			for _, r := range rewards[g] {
				scaled[g] = append(scaled[g], r*factor)
			}
		}
		cfg.Epsilon *= factor
		for g, after := range mustEstimate(t, cfg, scaled) {
			want := slices.Clone(before[g].Advantages)
			if cfg.Std == schemas.StdNone {
				for i := range want {
					want[i] *= factor
				}
			}
			if !slices.Equal(after.Advantages, want) || after.Std != before[g].Std*factor ||
				after.Mean != before[g].Mean*factor {
				t.Fatalf("group %d: %+v, scaled by %v %+v", g, before[g], factor, after)
			}
		}
	})
}

// Advantages go with their rewards, whatever the order of samples and groups; higher
// reward, higher advantage.
func TestLaw_Order(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg, rewards := drawConfig(t), drawRewards(t)
		before := mustEstimate(t, cfg, rewards)
		reversed := make([][]float64, len(rewards))
		for g := range rewards {
			reversed[g] = slices.Clone(rewards[len(rewards)-1-g])
			slices.Reverse(reversed[g])
		}
		after := mustEstimate(t, cfg, reversed)
		slices.Reverse(after)
		for g := range after {
			slices.Reverse(after[g].Advantages)
			for i := range after[g].Advantages {
				if math.Abs(after[g].Advantages[i]-before[g].Advantages[i]) > 1e-12*size(before[g]) {
					t.Fatalf("group %d: %v, in another order %v", g, before[g].Advantages, after[g].Advantages)
				}
				for j := range i {
					if rewards[g][i] > rewards[g][j] && before[g].Advantages[i] <= before[g].Advantages[j] {
						t.Fatalf("group %d: rewards %v, advantages %v", g, rewards[g], before[g].Advantages)
					}
				}
			}
		}
	})
}

// The bases are ordered: population <= expanded <= sample, each a wider spread.
func TestLaw_BasisOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg, rewards := drawConfig(t), drawRewards(t)
		std := func(basis string) []estimator.Group {
			cfg.StdBasis = basis
			return mustEstimate(t, cfg, rewards)
		}
		population, expanded, sample := std(schemas.BasisPopulation), std(schemas.BasisExpanded), std(schemas.BasisSample)
		for g := range rewards {
			if population[g].Std > expanded[g].Std || expanded[g].Std > sample[g].Std*(1+1e-15) {
				t.Fatalf("group %d: population %v, expanded %v, sample %v", g, population[g].Std, expanded[g].Std,
					sample[g].Std)
			}
		}
	})
}

// Input is read only.
func TestEstimate_KeepsRewards(t *testing.T) {
	rewards := [][]float64{{3, 1, 2}}
	got := estimate(t, estimator.DefaultConfig(), rewards)
	got[0].Advantages[0] = 99
	if !slices.Equal(rewards[0], []float64{3, 1, 2}) {
		t.Errorf("rewards became %v", rewards[0])
	}
}
