package estimator_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// of is an estimator with its defaults, changed.
func of(t testing.TB, name string, change func(c *estimator.Config)) estimator.Config {
	t.Helper()
	c, err := estimator.Default(name)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(&c)
	}
	return c
}

// What verl has no function for, or recordings no case of.
func TestEstimate_Methods(t *testing.T) {
	type change = func(c *estimator.Config)
	mode := func(m string) change { return func(c *estimator.Config) { c.Mode = m } }
	none := func(c *estimator.Config) { c.Std = schemas.StdNone }
	global := func(c *estimator.Config) { c.Std = schemas.StdGlobal }
	tests := []struct {
		name      string
		estimator string
		change    change
		rewards   [][]float64
		want      [][]float64 // nil: not in the table
	}{
		{"B", "dr_grpo", nil, exampleB, [][]float64{{-.3, -.1, .1, .3}, {0, 0, 0, 0}, {-.5, 0, 0, .5}}},
		{"B, best alone", "grpo_passk", nil, exampleB, [][]float64{{0, 0, 0, 0.774593669}, {0, 0, 0, 0}, nil}},
		{"B, best alone, no scale", "grpo_passk", none, exampleB, [][]float64{{0, 0, 0, .2}, {0, 0, 0, 0}, {0, 0, 0, .5}}},
		{"two best: no lead", "grpo_passk", none, [][]float64{{1, 3, 3}, {5}}, [][]float64{{0, 0, 0}, {0}}},
		{"A, as Flow-GRPO's code", "per_prompt", global, exampleA, [][]float64{{-0.894347198, 0.894347198}, {-0.894347198, 0.894347198}}},
		{"A, own std", "per_prompt", nil, exampleA, [][]float64{{-0.999900010, 0.999900010}, {-0.999900010, 0.999900010}}},
		{"B", "per_prompt", global, exampleB, [][]float64{{-0.888693300, -0.296231100, 0.296231100, 0.888693300}, {0, 0, 0, 0}, {-1.481155500, 0, 0, 1.481155500}}},
		{"rewards as they are", "per_prompt", mode("rwr"), exampleB, exampleB},
		{"the best", "per_prompt", mode("sft"), exampleB, [][]float64{{0, 0, 0, 1}, {1, 1, 1, 1}, {0, 0, 0, 1}}},
		{"best and worst", "per_prompt", mode("dpo"), exampleB, [][]float64{{-1, 0, 0, 1}, {-1, 1, 0, 0}, {-1, 0, 0, 1}}},
		{"first best, first worst", "per_prompt", mode("dpo"), [][]float64{{2, 1, 2, 1}, {4}}, [][]float64{{1, -1, 0, 0}, {0}}},
		// Groups of one, scale of all: mean 1.5, population std sqrt(1.25).
		{"without groups", "per_prompt", global, [][]float64{{1}, {3}, {0}, {2}}, [][]float64{{-.4471735990}, {1.341520797}, {-1.341520797}, {.4471735990}}},
		{"no reward but 0", "gpg", nil, [][]float64{{0, 0}}, [][]float64{{0, 0}}},
		{"the advantage of flow_grpo", "dance_grpo", global, exampleA, [][]float64{{-0.774536674, 0.774536674}, {-0.774536674, 0.774536674}}},
	}
	for _, tt := range tests {
		t.Run(tt.estimator+", "+tt.name, func(t *testing.T) {
			for g, group := range estimate(t, of(t, tt.estimator, tt.change), tt.rewards) {
				for i, want := range tt.want[g] {
					if got := group.Advantages[i]; math.Abs(got-want) > 5e-9*math.Abs(want)+1e-15 {
						t.Errorf("group %d: advantages %.10f, want %.10f", g, group.Advantages, tt.want[g])
						break
					}
				}
			}
		})
	}
}

// DiffusionNFT with c = 5, on rewards whose mean is 0 and without a scale.
func TestEstimate_DiffusionNFT(t *testing.T) {
	rewards := [][]float64{{-10, -5, -2, 0, 1.5, 5, 10, .5}}
	tests := map[string][]float64{
		estimator.ModeContinuous:   {0, 0, .3, .5, .65, 1, 1, .55},
		estimator.ModePositiveOnly: {.5, .5, .5, .5, .65, 1, 1, .55},
		estimator.ModeNegativeOnly: {0, 0, .3, .5, .5, .5, .5, .5},
		estimator.ModeOneOnly:      {.5, .5, .5, .5, .6, .6, .6, .6},
		estimator.ModeBinary:       {.4, .4, .4, .5, .6, .6, .6, .6},
	}
	for mode, want := range tests {
		cfg := of(t, "diffusion_nft", func(c *estimator.Config) { c.Std, c.Mode = schemas.StdNone, mode })
		got := estimate(t, cfg, rewards)[0].Advantages
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-15 {
				t.Errorf("%s: %v, want %v", mode, got, want)
				break
			}
		}
	}
}

func TestEstimate_Clip(t *testing.T) {
	got := estimate(t, of(t, "dr_grpo", func(c *estimator.Config) { c.AdvClipMax = 2 }), [][]float64{{-8, -1, 0, 9}})
	if want := "[-2 -1 0 2]"; fmt.Sprint(got[0].Advantages) != want {
		t.Errorf("advantages %v, want %s", got[0].Advantages, want)
	}
}

// A row that is there twice biases the advantages: groups are made of distinct samples.
func TestEstimate_Padding(t *testing.T) {
	cfg := config(schemas.StdGlobal, schemas.BasisSample, 1)
	for _, tt := range []struct {
		rewards [][]float64
		want    [][]float64
	}{
		{[][]float64{{1, 3, 1}, {0, 2}}, [][]float64{{-0.584654069, 1.16930814, -0.584654069}, {-0.876981103, 0.876981103}}},
		{[][]float64{{1, 3, 1, 3}, {0, 2}}, [][]float64{{-0.825654648, 0.825654648, -0.825654648, 0.825654648}, {-0.825654648, 0.825654648}}},
	} {
		for g, group := range estimate(t, cfg, tt.rewards) {
			for i, want := range tt.want[g] {
				if !near(group.Advantages[i], want, 5e-9) {
					t.Errorf("group %d: %.9f, want %.9f", g, group.Advantages, tt.want[g])
					break
				}
			}
		}
	}
}

func TestEstimate_RefusesInput(t *testing.T) {
	gdpo := of(t, "gdpo", func(c *estimator.Config) { c.Weights = []float64{1, .5} })
	for name, tt := range map[string]struct {
		cfg   estimator.Config
		group estimator.Rewards
		fault string
	}{
		"gdpo without scores":   {gdpo, estimator.Rewards{Values: []float64{1, 2}}, "group 0: scores of 0 samples; must be those of all 2"},
		"gdpo with one score":   {gdpo, estimator.Rewards{Values: []float64{1}, Scores: [][]float64{{1}}}, "sample 0 has 1 scores; must be 2"},
		"gdpo with NaN":         {gdpo, estimator.Rewards{Values: []float64{1}, Scores: [][]float64{{1, math.NaN()}}}, "score 1 of sample 0 is NaN"},
		"lengths of too few":    {of(t, "opo", nil), estimator.Rewards{Values: []float64{1, 2}, Lengths: []int{1}}, "1 lengths; must be one per sample, 2"},
		"a length of 0":         {of(t, "opo", nil), estimator.Rewards{Values: []float64{1, 2}, Lengths: []int{1, 0}}, "lengths[1]: 0"},
		"nft beyond float64":    {of(t, "diffusion_nft", func(c *estimator.Config) { c.Std = "none" }), estimator.Rewards{Values: []float64{1.7e308, 1.6e308}}, "too large"},
		"whiten with one value": {of(t, "reinforce_plus_plus", nil), estimator.Rewards{Values: []float64{1}}, "one reward in all"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := estimator.Estimate(tt.cfg, []estimator.Rewards{tt.group})
			if err == nil || !strings.Contains(err.Error(), tt.fault) {
				t.Errorf("error %v, want one about %q", err, tt.fault)
			}
		})
	}
}
