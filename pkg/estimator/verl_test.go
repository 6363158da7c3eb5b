package estimator_test

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
)

// verlCase is what verl or verl-omni made of groups of every size, of one too. Options that
// are not there are those of Default.
type verlCase struct {
	Estimator  string
	Std        string
	StdBasis   string `json:"std_basis"`
	Singleton  string
	Mode       string
	Columns    int
	Gamma      float64
	AdvClipMax float64 `json:"adv_clip_max"`
	Weights    []float64
	Groups     []struct {
		Rewards             []float64
		Scores              [][]float64
		Advantages, Returns [][]float64 // [n][T], or [n][1] where all steps have the same
	}
}

func (v verlCase) config(t *testing.T) estimator.Config {
	return of(t, v.Estimator, func(c *estimator.Config) {
		for _, o := range []struct {
			to    *string
			value string
		}{{&c.Std, v.Std}, {&c.StdBasis, v.StdBasis}, {&c.Singleton, v.Singleton}, {&c.Mode, v.Mode}} {
			if o.value != "" {
				*o.to = o.value
			}
		}
		if v.Gamma != 0 {
			c.Gamma = v.Gamma
		}
		if v.AdvClipMax != 0 {
			c.AdvClipMax = v.AdvClipMax
		}
		c.Columns, c.Weights = v.Columns, v.Weights
	})
}

// testdata/verl.json is made by deploy/golden/make_verl_golden.py from the functions of verl
// and verl-omni themselves, in float64; it says which. Both sum in other orders, and a
// division by a spread of 0.01 makes 1e-13 of an ulp: hence the tolerance.
func TestEstimate_Verl(t *testing.T) {
	const tolerance = 1e-11
	data, err := os.ReadFile("testdata/verl.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct{ Cases []verlCase }
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	alone := map[string]int{}
	for number, c := range golden.Cases {
		groups := make([]estimator.Rewards, len(c.Groups))
		for g, group := range c.Groups {
			groups[g] = estimator.Rewards{Values: group.Rewards, Scores: group.Scores}
			if len(group.Rewards) == 1 {
				alone[c.Estimator]++
			}
		}
		cfg := c.config(t)
		got, err := estimator.Estimate(cfg, groups)
		if err != nil {
			t.Errorf("case %d, %s: %v", number, c.Estimator, err)
			continue
		}
		for g, group := range c.Groups {
			for i, want := range group.Advantages {
				for step, w := range want {
					a := got[g].Advantages[i]
					if got[g].StepAdvantages != nil {
						a = got[g].StepAdvantages[i][step]
					}
					if !(math.Abs(a-w) <= tolerance*max(1, math.Abs(w))) {
						t.Errorf("case %d, %+v: group %d, sample %d, step %d: %.15g, verl has %.15g", number, cfg, g,
							i, step, a, w)
					}
				}
				returns := cfg.Returns(group.Rewards[i], cfg.Columns)
				if group.Returns == nil {
					if returns != nil {
						t.Errorf("case %d, %s: returns %v, and verl's are its advantages", number, c.Estimator, returns)
					}
					continue
				}
				for step, w := range group.Returns[i] {
					if !(math.Abs(returns[step]-w) <= tolerance*max(1, math.Abs(w))) {
						t.Errorf("case %d, %s: returns %v, verl has %v", number, c.Estimator, returns, group.Returns[i])
					}
				}
			}
		}
	}
	for _, name := range []string{
		"grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo", "flow_grpo", "diffusion_nft",
	} {
		if alone[name] < 2 {
			t.Errorf("%d groups of one with %s; the vectors should have more", alone[name], name)
		}
	}
}
