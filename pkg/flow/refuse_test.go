package flow_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

func TestPlan_Validate(t *testing.T) {
	good := sdePlan(flow.SDE, []int{1}, fiveSteps)
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name   string
		change func(*flow.Plan)
		want   []string
	}{
		{
			"zero value", func(p *flow.Plan) { *p = flow.Plan{} },
			[]string{"sigmas: 0 values", "log_prob_kind", "solver", "latents_dtype"},
		},
		{"too many steps", func(p *flow.Plan) { p.Sigmas = make([]float32, 1002) }, []string{"sigmas: 1002 values"}},
		{
			"sigmas", func(p *flow.Plan) { p.Sigmas = []float32{1, 0.8, 0.8, 0.4, 0.2, 0} },
			[]string{"sigmas[2]: 0.8; must be below the one before it, 0.8"},
		},
		{
			"no terminal", func(p *flow.Plan) { p.Sigmas = []float32{1, 0.8, 0.6, 0.4, 0.2, 0.1} },
			[]string{"sigmas[5]: 0.1; must be 0"},
		},
		{
			"transitions", func(p *flow.Plan) { p.Transitions = p.Transitions[:4] },
			[]string{"transitions: 4 values; must be one less than the 6 sigmas"},
		},
		{"transition", func(p *flow.Plan) { p.Transitions[0] = "sdee" }, []string{`transition: "sdee"`}},
		{"noise level", func(p *flow.Plan) { p.NoiseLevel = -1 }, []string{"noise_level: -1"}},
		{
			"cps noise level", func(p *flow.Plan) { p.Transitions[1] = flow.CPS; p.NoiseLevel = 1.2 },
			[]string{"noise_level: 1.2; must be at most 1 for cps"},
		},
		{
			"density without noise", func(p *flow.Plan) { p.NoiseLevel = 0 },
			[]string{`step 1: log_prob_kind: "density"`, "noise_level 0"},
		},
		{
			"scaled without noise", func(p *flow.Plan) { p.NoiseLevel = 0; p.LogProb = flow.Scaled },
			[]string{`step 1: log_prob_kind: "scaled"`},
		},
		{
			"density of the last cps step", func(p *flow.Plan) { p.Transitions[4] = flow.CPS },
			[]string{`step 4: log_prob_kind: "density"; cps draws no noise`},
		},
		{"storage", func(p *flow.Plan) { p.Storage = tensor.F64 }, []string{`latents_dtype: "F64"`}},
		{
			"several", func(p *flow.Plan) { p.Storage, p.Solver, p.NoiseLevel = "", "ddim", -2 },
			[]string{"latents_dtype", `solver: "ddim"`, "noise_level: -2"},
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p := good
			p.Transitions = slices.Clone(good.Transitions)
			c.change(&p)
			wantError(t, p.Validate(), c.want...)
			if _, err := flow.NewRollout(p, noise(3, 1)); err == nil {
				t.Error("NewRollout took the plan")
			}
			if _, err := flow.Score(p, 1, noise(3, 1), noise(3, 1), noise(3, 1)); err == nil {
				t.Error("Score took the plan")
			}
		})
	}
	// Legal though close to the refusals.
	for _, change := range []func(*flow.Plan){
		func(p *flow.Plan) { p.NoiseLevel, p.LogProb = 0, flow.Squared },
		func(p *flow.Plan) { p.Transitions[4], p.LogProb = flow.CPS, flow.Squared },
		func(p *flow.Plan) { p.NoiseLevel, p.Transitions = 0, flow.Transitions(flow.SDE, []int{}, 5) },
		func(p *flow.Plan) { p.NoiseLevel = 1.2 },
	} {
		p := good
		p.Transitions = slices.Clone(good.Transitions)
		change(&p)
		if err := p.Validate(); err != nil {
			t.Error(err)
		}
	}
}

func TestSample_Refuses(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	boom := errors.New("boom")
	at := func(step int, change func(dst []float32)) flowtest.Velocity {
		calls := 0
		return func(ctx context.Context, dst, x []float32, sigma float32) error {
			err := halfX(ctx, dst, x, sigma)
			if calls == step {
				change(dst)
			}
			calls++
			return err
		}
	}
	cases := []struct {
		name    string
		storage tensor.DType
		x       []float32
		v       flowtest.Velocity
		want    string
	}{
		{
			"NaN velocity", tensor.F32, noise(3, 1), at(2, func(d []float32) { d[1] = nan }),
			"step 2: velocity: element 1 is NaN",
		},
		{
			"infinite velocity", tensor.F32, noise(3, 1), at(3, func(d []float32) { d[0] = -inf }),
			"step 3: velocity: element 0 is -Inf",
		},
		{
			"overflow in F16", tensor.F16, noise(3, 1), at(1, func(d []float32) { d[2] = 1e6 }),
			"step 1: latents: element 2 is -Inf, from -",
		},
		{"overflow in F32", tensor.F32, []float32{3e38}, at(0, func(d []float32) { d[0] = -3e38 * 1.1 }), ""},
		{"velocity error", tensor.F32, noise(3, 1), func(context.Context, []float32, []float32,
			float32,
		) error {
			return boom
		}, "step 0: velocity at sigma 1: boom"},
		{"no latents", tensor.F32, nil, halfX, "0 elements"},
		{"NaN latents", tensor.F32, []float32{0, nan}, halfX, "initial latents: element 1 is NaN"},
		{"latents beyond F16", tensor.F16, []float32{65520}, halfX, "initial latents: element 0 is 65520 as F16"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p := sdePlan(flow.SDE, []int{1}, fiveSteps)
			p.Storage = c.storage
			if c.name == "overflow in F32" {
				p.Sigmas, p.Transitions = []float32{1, 0}, []flow.Transition{flow.ODE}
				c.want = "step 0: latents: element 0 is +Inf"
			}
			got, err := flowtest.Sample(context.Background(), p, c.x, c.v, nil)
			wantError(t, err, c.want)
			if got != nil {
				t.Errorf("latents %v beside the error", got)
			}
		})
	}
}

func TestRollout_Errors(t *testing.T) {
	r, err := flow.NewRollout(odePlan(flow.Euler, []float32{1, 0}), []float32{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Advance([]float32{1})
	wantError(t, err, "step 0: velocity of 1 elements for latents of 2")
	_, again := r.Advance([]float32{1, 1})
	wantError(t, again, "step 0: velocity of 1 elements for latents of 2") // a failed rollout stays failed

	r, err = flow.NewRollout(odePlan(flow.Euler, []float32{1, 0}), []float32{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Advance([]float32{1, 1}); err != nil {
		t.Fatal(err)
	}
	if !r.Done() || !slices.Equal(r.Latents(), []float32{0, 1}) {
		t.Errorf("done %v, latents %v, want true, [0 1]", r.Done(), r.Latents())
	}
	if x, sigma := r.Point(); sigma != 0 || !slices.Equal(x, []float32{0, 1}) {
		t.Errorf("Point when done = %v at %v, want the final latents at 0", x, sigma)
	}
	_, err = r.Advance([]float32{1, 1})
	wantError(t, err, "done")
}

// The caller's latents are neither kept nor changed.
func TestNewRollout_Copies(t *testing.T) {
	x := []float32{0.1, 0.2}
	p := sdePlan(flow.SDE, []int{0}, fiveSteps)
	p.Storage = tensor.BF16
	r, err := flow.NewRollout(p, x)
	if err != nil {
		t.Fatal(err)
	}
	start, _ := r.Point()
	if x[0] != 0.1 || start[0] != 0.10009765625 {
		t.Errorf("x = %v, rollout starts at %v, want 0.1 and its bfloat16", x[0], start[0])
	}
	x[0] = 7
	if start[0] == 7 {
		t.Error("the rollout kept the caller's slice")
	}
}
