package estimator_test

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// checkMethods checks a law for each estimator, with rewards that are drawn.
func checkMethods(t *testing.T, law func(t *rapid.T, cfg estimator.Config, rewards [][]float64)) {
	for _, name := range estimator.Names() {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { law(t, drawMethod(t, name), drawGroups(t)) })
		})
	}
}

// drawMethod is an estimator with its defaults and one of its modes; flow_grpo with any of its options. gdpo has two
// scores, the reward and its magnitude. A group of one has 0 where that is a choice, since the laws are about distances
// from a mean; TestLaw_Singleton has the other.
func drawMethod(t *rapid.T, name string) estimator.Config {
	cfg, err := estimator.Default(name)
	if err != nil {
		t.Fatal(err)
	}
	switch cfg.Name {
	case estimator.FlowGRPO:
		cfg.Std = rapid.SampledFrom(schemas.StdScales).Draw(t, "std")
		cfg.StdBasis = rapid.SampledFrom(schemas.StdBases).Draw(t, "std_basis")
		cfg.Epsilon = rapid.SampledFrom([]float64{1e-8, 1e-4, 1}).Draw(t, "epsilon")
		cfg.Columns = rapid.IntRange(1, 50).Draw(t, "columns")
	case estimator.PerPrompt:
		cfg.Mode = rapid.SampledFrom([]string{"grpo", "rwr", "sft", "dpo"}).Draw(t, "mode")
	case estimator.DiffusionNFT:
		cfg.Mode = rapid.SampledFrom([]string{"continuous", "positive_only", "negative_only", "one_only", "binary"}).
			Draw(t, "mode")
	case estimator.GDPO:
		cfg.Weights = []float64{1, 0.5}
	}
	if cfg.Singleton != "" {
		cfg.Singleton = schemas.SingletonZero
	}
	return cfg
}

// drawGroups are at least two rewards in all.
func drawGroups(t *rapid.T) [][]float64 {
	reward := rapid.Custom(func(t *rapid.T) float64 { return float64(rapid.IntRange(-64, 64).Draw(t, "64r")) / 64 })
	return append(rapid.SliceOfN(rapid.SliceOfN(reward, 1, 8), 1, 4).Draw(t, "rewards"), []float64{0.25, 1.5})
}

func size(g estimator.Group) float64 {
	s := 1.0
	for _, a := range g.Advantages {
		s = max(s, math.Abs(a))
	}
	return s
}

func run(t *rapid.T, cfg estimator.Config, rewards [][]float64) []estimator.Group {
	groups := plain(rewards)
	if cfg.Name == estimator.GDPO {
		for g := range groups {
			for _, v := range groups[g].Values {
				groups[g].Scores = append(groups[g].Scores, []float64{v, math.Abs(v)})
			}
		}
	}
	got, err := estimator.Estimate(cfg, groups)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func equal(a, b []estimator.Group, tolerance float64) bool {
	for g := range a {
		for i := range a[g].Advantages {
			if math.Abs(a[g].Advantages[i]-b[g].Advantages[i]) > tolerance*size(a[g]) {
				return false
			}
		}
	}
	return true
}

// Another order of samples and groups gives each sample the same advantage. The exception
// are equal rewards of which only the first counts. In a group a higher reward has a higher advantage.
func TestLaw_MethodOrder(t *testing.T) {
	checkMethods(t, func(t *rapid.T, cfg estimator.Config, rewards [][]float64) {
		if cfg.Name == estimator.GRPOPassK || cfg.Mode == estimator.ModeDPO {
			for g := range rewards {
				slices.Sort(rewards[g])
				rewards[g] = slices.Compact(rewards[g])
			}
		}
		reversed := make([][]float64, len(rewards))
		for g := range rewards {
			reversed[g] = slices.Clone(rewards[len(rewards)-1-g])
			slices.Reverse(reversed[g])
		}
		after := run(t, cfg, reversed)
		slices.Reverse(after)
		for g := range after {
			slices.Reverse(after[g].Advantages)
		}
		before := run(t, cfg, rewards)
		if !equal(before, after, 1e-10) {
			t.Fatalf("%s %s: %+v, in another order %+v", cfg.Name, cfg.Mode, before, after)
		}
		switch cfg.Name {
		case estimator.PerPrompt, estimator.GRPOPassK, estimator.GDPO, estimator.DiffusionNFT:
			return // these have equal advantages of several rewards, or look at more than the reward
		}
		for g := range before {
			for i, a := range before[g].Advantages {
				for j := range i {
					if rewards[g][i] > rewards[g][j] && a <= before[g].Advantages[j] {
						t.Fatalf("%s: rewards %v, advantages %v", cfg.Name, rewards[g], before[g].Advantages)
					}
				}
			}
		}
	})
}

// A constant added to all rewards changes nothing, and of groups that stand for themselves one of each group, but where
// the rewards themselves are the result (rwr), or those that are not 0 are counted (gpg), or a score is not linear
// in them (gdpo here).
func TestLaw_MethodShift(t *testing.T) {
	checkMethods(t, func(t *rapid.T, cfg estimator.Config, rewards [][]float64) {
		if cfg.Mode == estimator.ModeRWR || cfg.Name == estimator.GPG || cfg.Name == estimator.GDPO {
			return // the law does not hold
		}
		shift := float64(rapid.IntRange(-640, 640).Draw(t, "64*shift")) / 64
		shifted := make([][]float64, len(rewards))
		for g := range rewards {
			own := shift
			if !cfg.NeedsBatch() {
				own *= float64(g + 1)
			}
			for _, r := range rewards[g] {
				shifted[g] = append(shifted[g], r+own)
			}
		}
		if before, after := run(t, cfg, rewards), run(t, cfg, shifted); !equal(before, after, 1e-9) {
			t.Fatalf("%s %s: %+v, shifted %+v", cfg.Name, cfg.Mode, before, after)
		}
	})
}

// Advantages that are distances from a group's mean sum to 0 in each group; whitened ones
// in the whole batch.
func TestLaw_MethodSum(t *testing.T) {
	checkMethods(t, func(t *rapid.T, cfg estimator.Config, rewards [][]float64) {
		got := run(t, cfg, rewards)
		total, largest := 0.0, 1.0
		for g := range got {
			sum := 0.0
			for _, a := range got[g].Advantages {
				sum += a
			}
			total, largest = total+sum, max(largest, size(got[g]))
			switch cfg.Name {
			case estimator.ReinforcePlusPlus, estimator.ReinforcePlusPlusBaseline, estimator.GDPO:
			case estimator.PerPrompt, estimator.GRPOPassK, estimator.DiffusionNFT: // rewards, one sample, a probability
			default:
				if math.Abs(sum) > 1e-11*size(got[g]) {
					t.Fatalf("%s: %v sums to %v", cfg.Name, got[g].Advantages, sum)
				}
			}
		}
		switch cfg.Name {
		case estimator.ReinforcePlusPlus, estimator.ReinforcePlusPlusBaseline, estimator.GDPO:
			if math.Abs(total) > 1e-10*largest {
				t.Fatalf("%s: all advantages sum to %v", cfg.Name, total)
			}
		}
	})
}

// Groups without variance, of one among them, get exactly 0 from every estimator that
// compares within groups, 1/2 as a probability; and a clamp holds for all.
func TestLaw_MethodBounds(t *testing.T) {
	checkMethods(t, func(t *rapid.T, cfg estimator.Config, rewards [][]float64) {
		if cfg.Name != estimator.DiffusionNFT {
			cfg.AdvClipMax = 0.5
		}
		same := rapid.SampledFrom([]float64{0.1, 0.7, -3}).Draw(t, "equal")
		rewards[0] = slices.Repeat([]float64{same}, len(rewards[0]))
		got := run(t, cfg, rewards)
		for _, g := range got {
			for _, a := range g.Advantages {
				if cfg.Name == estimator.DiffusionNFT && !(a >= 0 && a <= 1) || math.Abs(a) > 1 ||
					cfg.Name != estimator.DiffusionNFT && math.Abs(a) > 0.5 {
					t.Fatalf("%s: advantages %v", cfg.Name, g.Advantages)
				}
			}
		}
		if cfg.Name == estimator.ReinforcePlusPlus || cfg.Name == estimator.PerPrompt &&
			cfg.Mode != estimator.ModeGRPO {
			return // these look beyond the group, or at the rewards themselves
		}
		want := 0.0
		if cfg.Name == estimator.DiffusionNFT {
			want = 0.5
		}
		for _, a := range got[0].Advantages {
			if a != want {
				t.Fatalf("%s: rewards %v, advantages %v", cfg.Name, rewards[0], got[0].Advantages)
			}
		}
	})
}

// Every sample twice gives each the same advantage wherever nothing counts the samples
// but means and population standard deviations. It does not hold with an unbiased
// standard deviation (grpo, whitening, gdpo) or n-1 (rloo), nor where one sample of a group
// stands out (grpo_passk, dpo): the double is as good.
func TestLaw_MethodDuplication(t *testing.T) {
	checkMethods(t, func(t *rapid.T, cfg estimator.Config, rewards [][]float64) {
		switch cfg.Name {
		case estimator.FlowGRPO, estimator.DanceGRPO, estimator.DiffusionNFT:
			cfg.StdBasis = schemas.BasisPopulation
			cfg.Std = rapid.SampledFrom([]string{schemas.StdGroup, schemas.StdGlobal, schemas.StdNone}).
				Draw(t, "std")
		case estimator.GRPO, estimator.RLOO, estimator.ReinforcePlusPlus, estimator.ReinforcePlusPlusBaseline,
			estimator.GRPOPassK, estimator.GDPO:
			return // the law does not hold
		}
		if cfg.Mode == estimator.ModeDPO {
			return // the law does not hold
		}
		doubled := make([][]float64, len(rewards))
		for g := range rewards {
			doubled[g] = slices.Concat(rewards[g], rewards[g])
		}
		after := run(t, cfg, doubled)
		for g := range after {
			n := len(rewards[g])
			if !slices.Equal(after[g].Advantages[:n], after[g].Advantages[n:]) {
				t.Fatalf("%s %s: doubles differ: %v", cfg.Name, cfg.Mode, after[g].Advantages)
			}
			after[g].Advantages = after[g].Advantages[:n]
		}
		if before := run(t, cfg, rewards); !equal(before, after, 1e-10) {
			t.Fatalf("%s %s: %+v, doubled %+v", cfg.Name, cfg.Mode, before, after)
		}
	})
}

// Rewards times a power of two, and epsilon with them: the same bits where advantages are
// normalised or ranks, and as many times larger where they are distances or rewards.
func TestLaw_MethodScale(t *testing.T) {
	checkMethods(t, func(t *rapid.T, cfg estimator.Config, rewards [][]float64) {
		if cfg.Name == estimator.GRPOPassK && rapid.Bool().Draw(t, "no scale") {
			cfg.Std = schemas.StdNone
		}
		factor := math.Ldexp(1, rapid.IntRange(-8, 8).Draw(t, "exponent"))
		scaled := make([][]float64, len(rewards))
		for g := range rewards {
			for _, r := range rewards[g] {
				scaled[g] = append(scaled[g], r*factor)
			}
		}
		before := run(t, cfg, rewards)
		want := 1.0
		if cfg.Std == schemas.StdNone || cfg.Mode == estimator.ModeRWR {
			want = factor
		}
		switch cfg.Name {
		case estimator.ReinforcePlusPlus, estimator.ReinforcePlusPlusBaseline:
			cfg.Epsilon *= factor * factor // of a variance
		default:
			cfg.Epsilon *= factor
		}
		for g, after := range run(t, cfg, scaled) {
			for i, a := range after.Advantages {
				if a != before[g].Advantages[i]*want || cfg.Name == estimator.FlowGRPO &&
					(after.Std != before[g].Std*factor || after.Mean != before[g].Mean*factor) {
					t.Fatalf("%s %s: %v, scaled by %v %v", cfg.Name, cfg.Mode, before[g].Advantages, factor,
						after.Advantages)
				}
			}
		}
	})
}

// What a group of one gets is a choice that groups of more do not notice, but where the
// whole batch is whitened; and one that stands for itself has its reward, times a factor
// that is the batch's.
func TestLaw_Singleton(t *testing.T) {
	checkMethods(t, func(t *rapid.T, cfg estimator.Config, rewards [][]float64) {
		if cfg.Singleton == "" {
			return // no choice
		}
		zero := run(t, cfg, rewards)
		cfg.Singleton = schemas.SingletonReward
		own := run(t, cfg, rewards)
		whitened := cfg.Name == estimator.ReinforcePlusPlusBaseline || cfg.Name == estimator.GDPO
		singles := slices.ContainsFunc(rewards, func(g []float64) bool { return len(g) == 1 })
		factor := math.NaN()
		for g := range rewards {
			switch r := rewards[g][0]; {
			case len(rewards[g]) == 1 && whitened:
			case len(rewards[g]) == 1 && r == 0:
				if own[g].Advantages[0] != 0 {
					t.Fatalf("%s: reward 0, advantage %v", cfg.Name, own[g].Advantages)
				}
			case len(rewards[g]) == 1:
				if f := own[g].Advantages[0] / r; math.Abs(f-factor) > 1e-15*f || f < 1-1e-5 {
					t.Fatalf("%s: %v times the reward, before %v", cfg.Name, f, factor)
				} else {
					factor = f
				}
			case whitened && singles:
			case !slices.Equal(own[g].Advantages, zero[g].Advantages):
				t.Fatalf("%s: rewards %v, advantages %v and %v", cfg.Name, rewards[g], own[g].Advantages,
					zero[g].Advantages)
			}
		}
	})
}

// The bases are ordered: population <= expanded <= sample, each a wider spread.
func TestLaw_BasisOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg, rewards := drawMethod(t, estimator.FlowGRPO), drawGroups(t)
		std := func(basis string) []estimator.Group {
			cfg.StdBasis = basis
			return run(t, cfg, rewards)
		}
		population, expanded, sample := std(schemas.BasisPopulation), std(schemas.BasisExpanded),
			std(schemas.BasisSample)
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
