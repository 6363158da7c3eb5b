package estimator_test

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

func config(std, basis string, columns int) estimator.Config {
	cfg := estimator.DefaultConfig()
	cfg.Std, cfg.StdBasis, cfg.Columns = std, basis, columns
	return cfg
}

// The rewards of three worked examples. The numbers that the tables below want were
// computed in float64 by a plain Python reading of verl's and Flow-GRPO's formulas and
// are given to 9 digits or more, hence the tolerance.
var (
	exampleA = [][]float64{{1, 3}, {0, 2}}
	exampleB = [][]float64{{.2, .4, .6, .8}, {1, 1, 1, 1}, {0, .5, .5, 1}}
	exampleC = [][]float64{{.9, .1}, {.5}}
)

const tolerance = 2e-9 // relative

func TestEstimate_Examples(t *testing.T) {
	const (
		group, global, none          = schemas.StdGroup, schemas.StdGlobal, schemas.StdNone
		sample, expanded, population = schemas.BasisSample, schemas.BasisExpanded, schemas.BasisPopulation
	)
	pair := func(x float64) []float64 { return []float64{-x, x} }
	both := func(x float64) [][]float64 { return [][]float64{pair(x), pair(x)} }
	four := func(outer, inner, third float64) [][]float64 {
		return [][]float64{{-outer, -inner, inner, outer}, {0, 0, 0, 0}, {-third, 0, 0, third}}
	}
	solo := func(x float64) [][]float64 { return [][]float64{{x, -x}, {0}} }
	tests := []struct {
		name    string
		rewards [][]float64
		cfg     estimator.Config
		stds    []float64 // per group; nil: not in the table
		want    [][]float64
	}{
		{"A, global, one column", exampleA, config(global, sample, 1), []float64{1.290994448736, 1.290994448736}, both(0.774536674)},
		{"A, global, expanded 3", exampleA, config(global, expanded, 3), []float64{1.167748416242, 1.167748416242}, both(0.856275512)},
		{"A, global, population", exampleA, config(global, population, 1), []float64{1.118033988750, 1.118033988750}, both(0.894347198)},
		{"A, group, population", exampleA, config(group, population, 1), []float64{1, 1}, both(0.999900010)},
		{"A, off", exampleA, config(none, sample, 1), nil, both(1)},
		{"B, group, one column", exampleB, config(group, sample, 1), []float64{.258198890, 0, .408248290}, four(1.161445180, 0.387148393, 1.224444940)},
		{"B, group, expanded 3", exampleB, config(group, expanded, 3), []float64{.233549683, 0, .369274473}, four(1.283973490, 0.427991164, 1.353639830)},
		{"C, global, one column", exampleC, config(global, sample, 1), []float64{0.4, 0.4}, solo(0.999750062)},
		{"C, group, expanded 3", exampleC, config(group, expanded, 3), []float64{0.438178046, 0}, solo(0.912662643)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := estimate(t, tt.cfg, tt.rewards)
			for g, want := range tt.want {
				if tt.stds != nil && !near(got[g].Std, tt.stds[g], tolerance) {
					t.Errorf("group %d: std %.12f, want %.12f", g, got[g].Std, tt.stds[g])
				}
				if got[g].Scale != tt.cfg.Std || got[g].StdBasis != tt.cfg.StdBasis {
					t.Errorf("group %d: says %s over %s, want %s over %s", g, got[g].Scale, got[g].StdBasis, tt.cfg.Std,
						tt.cfg.StdBasis)
				}
				for i := range want {
					// The table's zeros that are not of a constant group are those of a
					// reward at a rounded mean.
					if !near(got[g].Advantages[i], want[i], 5e-9) && math.Abs(got[g].Advantages[i]-want[i]) > 1e-15 {
						t.Errorf("group %d: advantages %.10f, want %.10f", g, got[g].Advantages, want)
						break
					}
				}
			}
		})
	}
}

func TestEstimate_Means(t *testing.T) {
	want := []float64{0.5, 1, 0.5}
	for g, e := range estimate(t, config(schemas.StdGlobal, schemas.BasisSample, 1), exampleB) {
		if !near(e.Mean, want[g], 1e-15) {
			t.Errorf("group %d: mean %v, want %v", g, e.Mean, want[g])
		}
	}
}

// Groups whose rewards are equal: a naive standard deviation of these is about 1e-17
// and the mean an ulp off, so advantages must be 0 by comparison, not by arithmetic.
func TestEstimate_ConstantGroups(t *testing.T) {
	for _, std := range []string{schemas.StdGroup, schemas.StdGlobal, schemas.StdNone} {
		for _, basis := range []string{schemas.BasisSample, schemas.BasisExpanded, schemas.BasisPopulation} {
			for _, rewards := range [][]float64{
				{.1, .1, .1},
				{.7, .7, .7},
				{.7},
				{1e300, 1e300},
				{math.MaxFloat64, math.MaxFloat64, math.MaxFloat64},
			} {
				cfg := config(std, basis, 3)
				cfg.Epsilon = 1e-300
				if std == schemas.StdGlobal && len(rewards) == 1 && basis == schemas.BasisSample {
					continue // refused
				}
				e := estimate(t, cfg, [][]float64{rewards})[0]
				if e.Std != 0 || e.Mean != rewards[0] {
					t.Errorf("%s %s %v: mean %v, std %v", std, basis, rewards, e.Mean, e.Std)
				}
				for _, a := range e.Advantages {
					if a != 0 || math.Signbit(a) {
						t.Errorf("%s %s %v: advantages %v, want exactly 0", std, basis, rewards, e.Advantages)
					}
				}
				// Beside a group that does vary, too.
				if rewards[0] < 1 {
					beside := estimate(t, cfg, [][]float64{rewards, {0, 1}})[0]
					for _, a := range beside.Advantages {
						if a != 0 {
							t.Errorf("%s %s %v: advantages %v, want exactly 0", std, basis, rewards, beside.Advantages)
						}
					}
				}
			}
		}
	}
}

func TestEstimate_Refuses(t *testing.T) {
	tests := []struct {
		name    string
		cfg     estimator.Config
		rewards [][]float64
		fault   string
	}{
		{"NaN", estimator.DefaultConfig(), [][]float64{{1, 2}, {1, math.NaN()}}, "group 1: reward 1 is NaN"},
		{"infinite", estimator.DefaultConfig(), [][]float64{{math.Inf(-1), 2}}, "group 0: reward 0 is -Inf"},
		{"empty group", estimator.DefaultConfig(), [][]float64{{1}, {}}, "group 1: no rewards"},
		{"squares beyond float64", estimator.DefaultConfig(), [][]float64{{1e200, -1e200}}, "too large"},
		{"sum beyond float64", config(schemas.StdNone, schemas.BasisSample, 1), [][]float64{{1.7e308, 1.6e308}}, "too large"},
		{"one value", config(schemas.StdGlobal, schemas.BasisSample, 3), [][]float64{{1}}, "one reward in all"},
		{"one value, one step", config(schemas.StdGlobal, schemas.BasisExpanded, 1), [][]float64{{1}}, "one reward in all"},
		{"no columns", config(schemas.StdGroup, schemas.BasisExpanded, 0), exampleA, "columns: 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := estimator.Estimate(tt.cfg, plain(tt.rewards))
			if err == nil || !strings.Contains(err.Error(), tt.fault) {
				t.Errorf("result %v, error %v, want an error about %q", got, err, tt.fault)
			}
		})
	}
}

func TestConfig_Validate(t *testing.T) {
	tests := []struct {
		name   string
		base   string
		change func(c *estimator.Config)
		faults []string // none: it is legal
	}{
		{"unknown", "flow_grpo", func(c *estimator.Config) { c.Name = "ppo" }, []string{`estimator: "ppo"; did you mean opo? must be one of ` + strings.Join(estimator.Names(), ", ")}},
		{"known elsewhere", "flow_grpo", func(c *estimator.Config) { c.Name = "remax" }, []string{`estimator: "remax"; not available: it needs`, "rloo"}},
		{"all at once", "flow_grpo", func(c *estimator.Config) {
			c.Std, c.StdBasis, c.Epsilon, c.Columns, c.Mode, c.AdvClipMax, c.Gamma, c.Weights = "batch", "", math.NaN(),
				-1, "sft", -1, 0, []float64{1}
		}, []string{
			`std: "batch"; must be group or global or none`, `std_basis: ""; must be sample or expanded or population`, "epsilon: NaN", "columns: -1",
			`mode: "sft"; estimator flow_grpo has no modes`, "adv_clip_max: -1", "gamma: 0", "weights: [1]; only estimator gdpo",
		}},
		{"epsilon 0", "flow_grpo", func(c *estimator.Config) { c.Epsilon = 0 }, []string{"epsilon: 0"}},
		{"epsilon below 0", "flow_grpo", func(c *estimator.Config) { c.Epsilon = -1 }, []string{"epsilon: -1"}},
		{"infinite epsilon", "grpo", func(c *estimator.Config) { c.Epsilon = math.Inf(1) }, []string{"epsilon: +Inf"}},
		{"epsilon of none", "rloo", func(c *estimator.Config) { c.Epsilon = 1e-4 }, []string{"epsilon: 0.0001; estimator rloo divides by no standard deviation"}},
		{"scale of none", "rloo", func(c *estimator.Config) { c.Std = "group" }, []string{`std: "group"; must be none with estimator rloo`}},
		{"scale of dr_grpo", "dr_grpo", func(c *estimator.Config) { c.Std = "global" }, []string{`std: "global"; must be none`}},
		{"discount elsewhere", "rloo", func(c *estimator.Config) { c.Gamma = 0.9 }, []string{"gamma: 0.9; estimator rloo does not discount"}},
		{"discount without steps", "reinforce_plus_plus", func(c *estimator.Config) { c.Gamma, c.StdBasis = 0.9, "sample" }, []string{"gamma: 0.9; needs std_basis expanded"}},
		{"discount", "reinforce_plus_plus", func(c *estimator.Config) { c.Gamma = 0.9 }, nil},
		{"group of one", "grpo", func(c *estimator.Config) { c.Singleton = "zero" }, nil},
		{"group of one, misspelt", "gdpo", func(c *estimator.Config) { c.Singleton = "none" }, []string{`singleton: "none"; must be reward or zero with estimator gdpo`}},
		{"group of one elsewhere", "flow_grpo", func(c *estimator.Config) { c.Singleton = "reward" }, []string{`singleton: "reward"; estimator flow_grpo gives a group of one what it always does`}},
		{"discount above 1", "reinforce_plus_plus", func(c *estimator.Config) { c.Gamma, c.StdBasis = 1.1, "expanded" }, []string{"gamma: 1.1; must be above 0 and at most 1"}},
		{"mode", "per_prompt", func(c *estimator.Config) { c.Mode = "binary" }, []string{`mode: "binary"; must be grpo or rwr or sft or dpo`}},
		{"nft without clip", "diffusion_nft", func(c *estimator.Config) { c.AdvClipMax = 0 }, []string{"adv_clip_max: 0; must be above 0"}},
		{"clip", "rloo", func(c *estimator.Config) { c.AdvClipMax = 5 }, nil},
		{"gdpo without weights", "gdpo", func(*estimator.Config) {}, []string{"weights: []; must be one per reward"}},
		{"gdpo weights cancel", "gdpo", func(c *estimator.Config) { c.Weights = []float64{1, -1} }, []string{"total above 0"}},
		{"gdpo NaN weight", "gdpo", func(c *estimator.Config) { c.Weights = []float64{1, math.NaN()} }, []string{"finite"}},
		{"gdpo", "gdpo", func(c *estimator.Config) { c.Weights = []float64{1, 0.5} }, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := estimator.Default(tt.base)
			if err != nil {
				t.Fatal(err)
			}
			tt.change(&c)
			err = c.Validate()
			if (err == nil) != (tt.faults == nil) {
				t.Fatalf("error %v, want %q", err, tt.faults)
			}
			for _, want := range tt.faults {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
		})
	}
}

// Every estimator works with its defaults, and an unknown one is refused with the list.
func TestDefault(t *testing.T) {
	for _, name := range estimator.Names() {
		cfg, err := estimator.Default(name)
		if err != nil {
			t.Fatal(err)
		}
		groups := plain(exampleA)
		if name == estimator.GDPO {
			cfg.Weights = []float64{1}
			groups = []estimator.Rewards{
				{Values: []float64{1, 3}, Scores: [][]float64{{1}, {3}}}, {Values: []float64{0, 2}, Scores: [][]float64{{0}, {2}}},
			}
		}
		got, err := estimator.Estimate(cfg, groups)
		if err != nil || len(got) != 2 || len(got[1].Advantages) != 2 || got[1].Mean != 1 || got[1].Scale != cfg.Std {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if _, err := estimator.Default("ppo"); err == nil || !strings.Contains(err.Error(), "flow_grpo") {
		t.Errorf("error %v, want the list", err)
	}
}

// A spec that is resolved asks for the same config; options that are left out are the estimator's.
func TestConfig_OfASpec(t *testing.T) {
	rewards := []schemas.RewardSpec{{Name: "a"}, {Name: "b", Weight: new(0.5)}}
	for _, name := range estimator.Names() {
		want := of(t, name, nil)
		asked := schemas.AdvantageSpec{Estimator: name}
		for _, std := range []string{"", schemas.StdGroup} { // what a spec asks for, too
			if std != "" && want.Std != schemas.StdNone {
				want.Std, want.Epsilon, want.Gamma, want.AdvClipMax = std, 0.25, 0.5, 3
				asked.Std, asked.Epsilon, asked.Gamma, asked.AdvClipMax = std, new(0.25), new(0.5), new(3.0)
			}
			c, err := estimator.Of(asked)
			if err != nil || !reflect.DeepEqual(c, want) {
				t.Fatalf("%s: %+v, %v; want %+v", name, c, err, want)
			}
			var resolved schemas.AdvantageSpec
			c.Resolve(&resolved)
			again, err := estimator.Of(resolved)
			if err != nil || !reflect.DeepEqual(again, c) {
				t.Errorf("%s: resolved %+v, %v; want %+v", name, again, err, c)
			}
			if c.CountsSteps() != (c.StdBasis == schemas.BasisExpanded || c.Gamma != 1) {
				t.Errorf("%s counts steps: %v", name, c.CountsSteps())
			}
		}
		weights := []float64{1, 0.5}
		if !estimator.PropertiesOf(name).Scores {
			weights = nil
		}
		if want.Weigh(rewards); !slices.Equal(want.Weights, weights) {
			t.Errorf("%s: weights %v, want %v", name, want.Weights, weights)
		}
		if want.Weigh(nil); weights != nil && !slices.Equal(want.Weights, []float64{1}) {
			t.Errorf("%s: weights %v of the model's own reward", name, want.Weights)
		}
	}
	for say, asked := range map[string]schemas.AdvantageSpec{
		"flow_grpo": {Estimator: "flow_grop"}, "value network": {Estimator: "gae"},
		"std none divides": {Std: schemas.StdNone, Epsilon: new(0.5)},
	} {
		if _, err := estimator.Of(asked); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%+v: %v; must say %q", asked, err, say)
		}
	}
}

func ExampleEstimate() {
	groups, err := estimator.Estimate(estimator.DefaultConfig(), []estimator.Rewards{
		{Values: []float64{0.2, 0.4, 0.6, 0.8}}, {Values: []float64{1, 1, 1, 1}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, g := range groups {
		fmt.Printf("mean %.1f std %.3f advantages %.3f\n", g.Mean, g.Std, g.Advantages)
	}
	// Output:
	// mean 0.5 std 0.258 advantages [-1.161 -0.387 0.387 1.161]
	// mean 1.0 std 0.000 advantages [0.000 0.000 0.000 0.000]
}

func estimate(t testing.TB, cfg estimator.Config, rewards [][]float64) []estimator.Group {
	t.Helper()
	got, err := estimator.Estimate(cfg, plain(rewards))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(rewards) {
		t.Fatalf("%d groups, want %d", len(got), len(rewards))
	}
	for g := range got {
		if len(got[g].Advantages) != len(rewards[g]) {
			t.Fatalf("group %d: %d advantages for %d rewards", g, len(got[g].Advantages), len(rewards[g]))
		}
	}
	return got
}

// plain are groups that have rewards and nothing else.
func plain(rewards [][]float64) []estimator.Rewards {
	out := make([]estimator.Rewards, len(rewards))
	for g := range rewards {
		out[g].Values = rewards[g]
	}
	return out
}

func near(got, want, relative float64) bool {
	return math.Abs(got-want) <= relative*math.Abs(want)
}
