package flow_test

import (
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// One sample of four elements, used by most cases below.
var (
	fiveSteps = []float32{1, 0.8, 0.6, 0.4, 0.2, 0}
	caseX     = []float32{1, -0.5, 0.25, 2}
	caseV     = []float32{0.5, -1, 0.75, 0.1}
	caseNoise = []float32{0.3, -1.2, 0, 2}
)

// f32 is the tolerance of float32 arithmetic against a float64 reference on latents
// of order 1. Sigmas themselves are float32, so coefficients carry the same error.
const f32 = 2e-6

type kernelCase struct {
	name    string
	t       flow.Transition
	a       float64
	sigmas  []float32
	index   int
	x, v, e []float32

	g, n       float64
	mean, next []float64
	density    float64 // NaN: not defined
	scaled     float64
	squared    float64
}

// kernelCases are those that verl-omni's scheduler computed, and a step without noise.
func kernelCases() []kernelCase {
	nan := math.NaN()
	return append(verlCases(), kernelCase{
		name: "cps last has no noise", t: flow.CPS, a: 0.7, sigmas: fiveSteps, index: 4, x: caseX, v: caseV, e: caseNoise,
		mean: []float64{0.9, -0.3, 0.1, 1.98}, next: []float64{0.9, -0.3, 0.1, 1.98},
		density: nan, scaled: nan, squared: 0,
	})
}

// verlCases are those that verl computed.
func verlCases() []kernelCase {
	verl := []kernelCase{
		{
			name: "verl sde .9", t: flow.SDE, a: 0.7, sigmas: []float32{0.9, 0.8, 0}, g: 2.1, n: 0.664078308635,
			mean: []float64{0.34015, -0.7799}, next: []float64{0.605781323454, -1.178346985181},
			density: -0.639583331437, squared: -0.11466,
		},
		{
			name: "verl sde 1", t: flow.SDE, a: 0.7, sigmas: []float32{1, 0.9, 0}, g: 2.213594362118, n: 0.7,
			mean: []float64{0.3475, -0.775}, next: []float64{0.6275, -1.195},
			density: -0.692263589266, squared: -0.1274,
		},
		{
			name: "verl sde .1 to 0", t: flow.SDE, a: 0.7, sigmas: []float32{0.1, 0}, g: 0.233333333333, n: 0.073786478737,
			mean: []float64{0.449038888889, -0.997677777778}, next: []float64{0.478553480384, -1.041949665020},
			density: 1.557641245899, squared: -0.00141555555557,
		},
		{
			name: "verl cps .9", t: flow.CPS, a: 0.7, sigmas: []float32{0.9, 0.8, 0}, g: 0.712805219351, n: 0.712805219351,
			mean: []float64{0.238491971890, -0.591928551796}, next: []float64{0.523614059630, -1.019611683406},
			density: -0.710391452674, squared: -0.132103732991,
		},
		{
			name: "verl cps 1", t: flow.CPS, a: 0.7, sigmas: []float32{1, 0.9, 0}, g: 0.801905871770, n: 0.801905871770,
			mean: []float64{0.224295724883, -0.528591449766}, next: []float64{0.545058073591, -1.009734972827},
			density: -0.828174488331, squared: -0.167193787066,
		},
		{
			name: "verl dance .9", t: flow.DanceSDE, a: 0.7, sigmas: []float32{0.9, 0.8, 0}, g: 0.7, n: 0.221359436212,
			mean: []float64{0.455572222222, -0.993322222222}, next: []float64{0.544115996707, -1.126137883949},
			density: 0.459028957231, squared: -0.01274,
		},
	}
	for i := range verl {
		verl[i].x, verl[i].v, verl[i].e = []float32{0.5, -1}, []float32{0.3, 0.2}, []float32{0.4, -0.6}
		verl[i].scaled = -0.13
	}
	return verl
}

func TestKernel(t *testing.T) {
	for _, c := range kernelCases() {
		t.Run(c.name, func(t *testing.T) {
			k, err := flow.NewStepTransition(c.t, c.a, c.sigmas, c.index)
			if err != nil {
				t.Fatal(err)
			}
			if !near(k.StdDevT, c.g, f32) || !near(k.NoiseStd, c.n, f32) {
				t.Errorf("StdDevT, NoiseStd = %.9g, %.9g, want %.9g, %.9g", k.StdDevT, k.NoiseStd, c.g, c.n)
			}
			next, mean := make([]float32, len(c.x)), make([]float32, len(c.x))
			if err := k.Draw(next, mean, c.x, c.v, c.e, tensor.F32); err != nil {
				t.Fatal(err)
			}
			allNear(t, "mean", mean, c.mean, f32)
			allNear(t, "next", next, c.next, f32)

			for kind, want := range map[flow.LogProbKind]float64{
				flow.Density: c.density, flow.Scaled: c.scaled,
				flow.Squared: c.squared,
			} {
				lp, err := k.LogProb(kind, c.x, c.v, next)
				if math.IsNaN(want) {
					wantError(t, err, string(kind), "noise_level 0.7")
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				if !near(lp.Mean, want, f32) {
					t.Errorf("%s = %.9g, want %.9g", kind, lp.Mean, want)
				}
				if lp.Count != len(c.x) || lp.Mean != lp.Sum/float64(lp.Count) {
					t.Errorf("%s: sum %v over %d elements, mean %v", kind, lp.Sum, lp.Count, lp.Mean)
				}
			}
		})
	}
}

// sde with one step reads sigmas[1] = 0, so that g = n = a; cps draws nothing there.
func TestKernel_OneStep(t *testing.T) {
	sde, err := flow.NewStepTransition(flow.SDE, 0.7, []float32{1, 0}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if sde.StdDevT != 0.7 || sde.NoiseStd != 0.7 {
		t.Errorf("sde: g, n = %v, %v, want 0.7, 0.7", sde.StdDevT, sde.NoiseStd)
	}
	cps, err := flow.NewStepTransition(flow.CPS, 0.7, []float32{1, 0}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if cps.NoiseStd != 0 {
		t.Errorf("cps: n = %v, want 0", cps.NoiseStd)
	}
}

// A first sigma of 0.999999, as UniPC's grid has, counts as 1: dividing by 1-sigma
// would make g about 700.
func TestKernel_NearlyOne(t *testing.T) {
	exact, err := flow.NewStepTransition(flow.SDE, 0.7, []float32{1, 0.75, 0}, 0)
	if err != nil {
		t.Fatal(err)
	}
	nearly, err := flow.NewStepTransition(flow.SDE, 0.7, []float32{0.999999, 0.75, 0}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if !near(nearly.StdDevT, exact.StdDevT, 1e-5) {
		t.Errorf("g = %v at 0.999999, %v at 1", nearly.StdDevT, exact.StdDevT)
	}
	_, err = flow.NewStepTransition(flow.SDE, 0.7, []float32{1, 0.999999, 0}, 0)
	wantError(t, err, "sigmas[1]: 0.999999")
}

func TestKernel_Refuses(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	cases := []struct {
		name   string
		t      flow.Transition
		a      float64
		sigmas []float32
		index  int
		want   string
	}{
		{"unknown transition", "euler", 0.7, fiveSteps, 0, `transition: "euler"`},
		{"empty transition", "", 0.7, fiveSteps, 0, `transition: ""`},
		{"negative noise", flow.SDE, -0.1, fiveSteps, 0, "noise_level: -0.1"},
		{"NaN noise", flow.SDE, nan, fiveSteps, 0, "noise_level: NaN"},
		{"infinite noise", flow.DanceSDE, inf, fiveSteps, 0, "noise_level: +Inf"},
		{"overflowing noise", flow.DanceSDE, 1e300, fiveSteps, 0, "noise_level: 1e+300"},
		{"cps above 1", flow.CPS, 1.01, fiveSteps, 0, "noise_level: 1.01"},
		{"negative step", flow.SDE, 0.7, fiveSteps, -1, "step_index: -1"},
		{"step T", flow.SDE, 0.7, fiveSteps, 5, "step_index: 5"},
		{"no sigmas", flow.SDE, 0.7, nil, 0, "sigmas: 0 values"},
		{"sigmas above 1", flow.SDE, 0.7, []float32{2, 0}, 0, "sigmas[0]: 2"},
		{"rising sigmas", flow.SDE, 0.7, []float32{0.5, 0.6, 0}, 0, "sigmas[1]: 0.6"},
		{"no terminal 0", flow.SDE, 0.7, []float32{0.5, 0.4}, 0, "sigmas[1]: 0.4"},
		{"NaN sigma", flow.SDE, 0.7, []float32{1, float32(nan), 0}, 0, "sigmas[1]: NaN"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := flow.NewStepTransition(c.t, c.a, c.sigmas, c.index)
			wantError(t, err, c.want)
		})
	}

	sde, err := flow.NewStepTransition(flow.SDE, 0.7, fiveSteps, 1)
	if err != nil {
		t.Fatal(err)
	}
	four, three := make([]float32, 4), make([]float32, 3)
	wantError(t, sde.Draw(four, four, four, three, four, tensor.F32), "equal lengths")
	wantError(t, sde.Draw(four, four, four, four, nil, tensor.F32), "as much noise")
	wantError(t, sde.Draw(four, four, four, four, four, tensor.I8), "latents_dtype")
	wantError(t, sde.Draw(nil, nil, nil, nil, nil, tensor.F32), "0 elements")
	_, err = sde.LogProb("full", four, four, four)
	wantError(t, err, `log_prob_kind: "full"`)
	_, err = sde.LogProb(flow.Density, four, four, []float32{1, float32(nan), 0, 0})
	wantError(t, err, "not finite")
	ode, err := flow.NewStepTransition(flow.ODE, 0.7, fiveSteps, 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = ode.LogProb(flow.Squared, four, four, four)
	wantError(t, err, `transition: "ode"`)
}
