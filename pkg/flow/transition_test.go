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

// kernelCases were computed in float64 from the published formulas by plain Python,
// with decimal sigmas. The second group is from verl-omni's scheduler formulas.
func kernelCases() []kernelCase {
	nan := math.NaN()
	base := []kernelCase{
		{
			name: "sde first", t: flow.SDE, a: 0.7, index: 0, g: 1.5652475842498528, n: 0.7,
			mean: []float64{0.655, -0.1775, 0.03875, 1.49}, next: []float64{0.865, -1.0175, 0.03875, 2.89},
			density: -1.25351358926594, scaled: -0.69125, squared: -0.677425,
		},
		{
			name: "sde middle", t: flow.SDE, a: 0.7, index: 2, g: 0.8573214099741122, n: 0.38340579025361615,
			mean:    []float64{0.753, -0.18975, 0.032625, 1.7301},
			next:    []float64{0.868021737076085, -0.6498369483043395, 0.032625, 2.4969115805072324},
			density: -0.6515271871029717, scaled: -0.69125, squared: -0.2032275,
		},
		{
			name: "sde last", t: flow.SDE, a: 0.7, index: 4, g: 0.35, n: 0.15652475842498526,
			mean:    []float64{0.81425, -0.220375, 0.0479375, 1.8526},
			next:    []float64{0.8612074275274955, -0.40820471010998227, 0.0479375, 2.1656495168499705},
			density: 0.2443525475110555, scaled: -0.69125, squared: -0.03387125,
		},
		{
			name: "sde middle, a 1.2", t: flow.SDE, a: 1.2, index: 2, g: 1.4696938456699067, n: 0.6572670690061991,
			mean:    []float64{0.468, 0.024, -0.098, 1.2456},
			next:    []float64{0.66518012070186, -0.764720482807439, -0.098, 2.5601341380123985},
			density: -1.1905236878356589, scaled: -0.69125, squared: -0.59724,
		},
		{
			name: "dance middle", t: flow.DanceSDE, a: 0.7, index: 2, g: 0.7, n: 0.3130495168499705,
			mean:    []float64{0.802, -0.2265, 0.0550833333333333, 1.8134},
			next:    []float64{0.8959148550549912, -0.6021594202199647, 0.0550833333333333, 2.439499033699941},
			density: -0.44879463304888995, scaled: -0.69125, squared: -0.135485,
		},
		{
			name: "cps first", t: flow.CPS, a: 0.7, index: 0, g: 0.7128052193506943, n: 0.7128052193506943,
			mean:    []float64{0.4631923997916375, -0.08159619989581879, -0.009201900052090595, 1.106384799583275},
			next:    []float64{0.6770339655968458, -0.9369624631166519, -0.009201900052090595, 2.5319952382846633},
			density: -1.2716414526737274, scaled: -0.69125, squared: -0.7024361956141899,
		},
		{
			name: "cps middle", t: flow.CPS, a: 0.7, index: 2, g: 0.35640260967534715, n: 0.35640260967534715,
			mean:    []float64{0.6379154398749824, -0.1034365799062369, -0.020122090057299633, 1.5344562477874701},
			next:    []float64{0.7448362227775865, -0.5311197115165535, -0.020122090057299633, 2.2472614671381645},
			density: -0.5784942721137825, scaled: -0.69125, squared: -0.17560904890354756,
		},
		{
			name: "cps middle, a 0.8", t: flow.CPS, a: 0.8, index: 2, g: 0.3804226065180614, n: 0.3804226065180614,
			mean:    []float64{0.5683281572999749, -0.0512461179749812, -0.05201626123751146, 1.4161578674099573},
			next:    []float64{0.6824549392553934, -0.5077532457966549, -0.05201626123751146, 2.17700308044608},
			density: -0.643716011408899, scaled: -0.69125, squared: -0.20007727957786914,
		},
		{
			name: "cps last has no noise", t: flow.CPS, a: 0.7, index: 4, g: 0, n: 0,
			mean: []float64{0.9, -0.3, 0.1, 1.98}, next: []float64{0.9, -0.3, 0.1, 1.98},
			density: nan, scaled: nan, squared: 0,
		},
	}
	for i := range base {
		base[i].sigmas, base[i].x, base[i].v, base[i].e = fiveSteps, caseX, caseV, caseNoise
	}
	return append(base, verlCases()...)
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

// The coefficients of the middle and end steps, and the constants of every sde step
// at a = 0.7.
func TestKernel_Coefficients(t *testing.T) {
	ab := []struct {
		t     flow.Transition
		a     float64
		index int
		A, B  float64
	}{
		{flow.SDE, 0.7, 0, 0.755, -0.2},
		{flow.SDE, 0.7, 2, 0.8775, -0.249},
		{flow.SDE, 0.7, 4, 0.93875, -0.249},
		{flow.SDE, 1.2, 2, 0.64, -0.344},
		{flow.ODE, 0.7, 2, 1, -0.2},
		{flow.CPS, 1, 2, 0.6, -0.36}, // all noise is fresh: the data estimate alone
	}
	for _, c := range ab {
		k, err := flow.NewStepTransition(c.t, c.a, fiveSteps, c.index)
		if err != nil {
			t.Fatal(err)
		}
		if !near(float64(k.A), c.A, 1e-6) || !near(float64(k.B), c.B, 1e-6) {
			t.Errorf("%s a=%v step %d: A, B = %v, %v, want %v, %v", c.t, c.a, c.index, k.A, k.B, c.A, c.B)
		}
	}
	constants := []float64{
		-0.56226358926594, -0.4506918136088356, 0.03972281289702806, 0.4451879210051921,
		0.9356025475110554,
	}
	for i, want := range constants {
		k, err := flow.NewStepTransition(flow.SDE, 0.7, fiveSteps, i)
		if err != nil {
			t.Fatal(err)
		}
		mean, next := make([]float32, 4), make([]float32, 4)
		if err := k.Draw(next, mean, caseX, caseV, make([]float32, 4), tensor.F32); err != nil {
			t.Fatal(err)
		}
		lp, err := k.LogProb(flow.Density, caseX, caseV, next) // no noise: the constants alone
		if err != nil {
			t.Fatal(err)
		}
		if !near(lp.Mean, want, 1e-6) {
			t.Errorf("step %d: log normaliser %.9g, want %.9g", i, lp.Mean, want)
		}
	}
}

// What a trainer computes from stored latents and a slightly different velocity.
func TestKernel_Recompute(t *testing.T) {
	moved := []float32{0.51, -1.02, 0.75, 0.13}
	k, err := flow.NewStepTransition(flow.SDE, 0.7, fiveSteps, 2)
	if err != nil {
		t.Fatal(err)
	}
	next := []float32{0.868021737076085, -0.6498369483043395, 0.032625, 2.4969115805072324}
	mean, ignored := make([]float32, 4), make([]float32, 4)
	if err := k.Draw(ignored, mean, caseX, moved, make([]float32, 4), tensor.F32); err != nil {
		t.Fatal(err)
	}
	allNear(t, "mean", mean, []float64{0.75051, -0.18477, 0.032625, 1.72263}, f32)
	before, err := k.LogProb(flow.Density, caseX, caseV, next)
	if err != nil {
		t.Fatal(err)
	}
	after, err := k.LogProb(flow.Density, caseX, moved, next)
	if err != nil {
		t.Fatal(err)
	}
	ratio := math.Exp(after.Mean - before.Mean)
	if !near(after.Mean, -0.6657263713449176, f32) || !near(ratio, 0.9859011487311201, f32) {
		t.Errorf("log-prob %.9g, ratio %.9g, want -0.665726371, 0.985901149", after.Mean, ratio)
	}

	// n and g give the divisors of the KL terms trainers use.
	m0 := []float64{0.753, -0.18975, 0.032625, 1.7301}
	var square float64
	for i, m := range mean {
		square += (float64(m) - m0[i]) * (float64(m) - m0[i]) / 4
	}
	for _, c := range []struct {
		name      string
		std, want float64
	}{{"g", k.StdDevT, 1.47621428571431e-05}, {"n", k.NoiseStd, 7.38107142857155e-05}} {
		if got := square / (2 * c.std * c.std); !near(got/c.want, 1, 1e-3) {
			t.Errorf("KL with %s = %v, want %v", c.name, got, c.want)
		}
	}

	cps, err := flow.NewStepTransition(flow.CPS, 0.7, fiveSteps, 2)
	if err != nil {
		t.Fatal(err)
	}
	next = []float32{0.7448362227775865, -0.5311197115165535, -0.020122090057299633, 2.2472614671381645}
	score, err := cps.LogProb(flow.Squared, caseX, moved, next)
	if err != nil {
		t.Fatal(err)
	}
	if !near(score.Mean, -0.18009306394001376, f32) {
		t.Errorf("cps score = %.9g, want -0.180093064", score.Mean)
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
