package synthetic_test

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// The sampler against what the synthetic model's mixtures predict, at the smallest
// image: 16x16 pixels, one token, 64 elements. Seeds are fixed, so a test that
// passes keeps passing; "within k standard errors" says how surprised to be.
const (
	imageEdge = 16
	dims      = 64
)

// fieldOf is the velocity of a prompt.
func fieldOf(t *testing.T, m *synthetic.Model, prompt string) (flowtest.Velocity, *synthetic.Mixture) {
	t.Helper()
	cond, err := m.Encode(t.Context(), []string{prompt})
	if err != nil {
		t.Fatal(err)
	}
	mix, err := m.Mixture(prompt, imageEdge, imageEdge)
	if err != nil {
		t.Fatal(err)
	}
	return func(ctx context.Context, dst, x []float32, sigma float32) error {
		row := model.Row{X: x, Sigma: sigma, Conditioning: cond[0], Dst: dst}
		return m.Velocity(ctx, []model.Row{row}, media.ImageSize(imageEdge, imageEdge))
	}, mix
}

func oneField(t *testing.T, cfg synthetic.Config, prompt string) (flowtest.Velocity, *synthetic.Mixture) {
	t.Helper()
	return fieldOf(t, synthetic.NewWith(cfg), prompt)
}

// even is the grid 1, 1-1/T, .., 0.
func even(steps int) []float32 {
	sigmas := make([]float32, steps+1)
	for i := range sigmas {
		sigmas[i] = float32(1 - float64(i)/float64(steps))
	}
	return sigmas
}

const noiseLevel = 0.7

func plan(kind flow.Transition, solver flow.Solver, sigmas []float32, seed uint64) flow.Plan {
	p := flow.Plan{
		Sigmas: sigmas, NoiseLevel: noiseLevel, LogProb: flow.Squared, Solver: solver, Storage: tensor.F32, Seed: seed,
	}
	for range len(sigmas) - 1 {
		p.Transitions = append(p.Transitions, kind)
	}
	return p
}

// chain runs one sample; each sees the latents after every step.
func chain(t *testing.T, p flow.Plan, v flowtest.Velocity, each func(index int, x []float32)) []float32 {
	t.Helper()
	x := make([]float32, dims)
	flow.InitialNoise(x, p.Seed)
	out, err := flowtest.Sample(t.Context(), p, x, v, func(s *flow.Step) {
		if each != nil {
			each(s.Index, s.Next)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// stepLaw returns the variance after one Euler-type step from variance v on data
// N(mu, s^2), where the velocity's slope is c = (sigma-(1-sigma)*s^2)/V: each
// transition's own formula, with x and v replaced by their linear parts 1 and c.
// The mean needs no such law: (1-sigma)*mu goes to (1-sigma')*mu under all of them.
func stepLaw(kind flow.Transition, sigmas []float32, i int, s, v float64) float64 {
	sigma, next := float64(sigmas[i]), float64(sigmas[i+1])
	a, delta := 1-sigma, next-sigma
	c := (sigma - a*s*s) / (a*a*s*s + sigma*sigma)
	var m, n float64
	switch kind {
	case flow.ODE:
		m = 1 + delta*c
	case flow.SDE, flow.DanceSDE:
		g := noiseLevel
		if kind == flow.SDE {
			g *= math.Sqrt(sigma / (1 - min(sigma, float64(sigmas[1]))))
		}
		m, n = 1+delta*c+delta*g*g/(2*sigma)*(1+a*c), g*math.Sqrt(-delta)
	case flow.DDIM:
		r := 0.0
		if sigma < 1 {
			r = next * (1 - sigma) / (sigma * (1 - next))
		}
		n = noiseLevel * next * math.Sqrt(1-r*r)
		m = (1-next)*(1-sigma*c) + math.Sqrt(next*next-n*n)*(1+a*c)
	case flow.CPS:
		sin, cos := math.Sincos(noiseLevel * math.Pi / 2)
		m, n = (1-next)*(1-sigma*c)+next*cos*(1+a*c), next*sin
	}
	return m*m*v + n*n
}

// With one component every chain is Gaussian at every step: its mean is (1-sigma)*mu,
// its variance follows stepLaw. The mean is tested element by element, the variance
// over all elements, both within 5 standard errors.
func TestSampler_GaussianChain(t *testing.T) {
	t.Parallel()
	const steps, samples, std = 20, 1500, 0.5
	velocity, mix := oneField(t, synthetic.Config{Components: 1, MinStd: std, MaxStd: std, Contrast: 1}, "a green hill")
	sigmas := even(steps)
	for _, kind := range flow.AllTransitions {
		t.Run(string(kind), func(t *testing.T) {
			var sum, squares [steps][dims]float64 // of the distance from (1-sigma)*mu
			for n := range samples {
				chain(t, plan(kind, flow.Euler, sigmas, uint64(n)), velocity, func(index int, x []float32) {
					a := 1 - float64(sigmas[index+1])
					for i := range x {
						d := float64(x[i]) - a*float64(mix.Means[0][i])
						sum[index][i] += d
						squares[index][i] += d * d
					}
				})
			}
			variance, count := 1.0, float64(samples)
			for index := range steps {
				variance = stepLaw(kind, sigmas, index, std, variance)
				var total float64
				for i := range dims {
					if d := sum[index][i] / count; math.Abs(d) > 5*math.Sqrt(variance/count) {
						t.Errorf("step %d, element %d: mean off by %v, standard error %v", index, i, d,
							math.Sqrt(variance/count))
					}
					total += squares[index][i]
				}
				got := total / (count * dims)
				if limit := 5 * variance * math.Sqrt(2/(count*dims)); math.Abs(got-variance) > limit {
					t.Errorf("step %d: variance %v, want %v within %v", index, got, variance, limit)
				}
			}
		})
	}
}

// The closed form of a mixture, reached by sampling. For ode (Heun) and sde with many
// steps: mean and variance of every element at intermediate sigmas and at the end.
// For all transitions: how often each component is hit, its mean, and the variance
// inside it, which is its own where steps are small.
//
// cps is no discretisation of a process: it replaces a fixed share of the noise at
// each step, and where the data estimate is an average, variance is lost for good. So
// its inner variance is held to stepLaw, and not to the mixture's. It keeps much of its
// past, too: the law holds once the chain has forgotten the first steps, where the
// components are not yet told apart, which takes more steps than sde needs.
func TestSampler_MixtureMarginals(t *testing.T) {
	t.Parallel()
	cases := []struct {
		kind  flow.Transition
		steps int
		// bias is what discretisation may add to the error of a variance, as a share of it;
		// below 0: the chain's variance is not the mixture's.
		bias float64
	}{
		{flow.ODE, 40, 0.01},
		{flow.SDE, 120, 0.03},
		{flow.DanceSDE, 120, 0.03},
		{flow.DDIM, 50, -1},
		{flow.CPS, 50, -1},
		{flow.SDE, 10, -1},
	}
	const samples = 2000
	velocity, mix := fieldOf(t, synthetic.New(), "a blue cat")
	for _, c := range cases {
		t.Run(fmt.Sprintf("%s, %d steps", c.kind, c.steps), func(t *testing.T) {
			sigmas := even(c.steps)
			at := map[int]*moments{} // by step index, a few on the way and the last
			for _, share := range []float64{0.25, 0.5, 0.75, 1} {
				index := int(share*float64(c.steps)) - 1
				at[index] = newMoments(mix, float64(sigmas[index+1]))
			}
			inside := make([]within, len(mix.Weights))
			r := make([]float64, len(mix.Weights))
			for n := range samples {
				x := chain(t, plan(c.kind, flow.Heun, sigmas, uint64(n)), velocity, func(index int, x []float32) {
					if m := at[index]; m != nil {
						m.add(x)
					}
				})
				mix.Responsibilities(r, x, 0)
				k := largest(r)
				inside[k].add(x, mix.Means[k])
			}
			if c.bias >= 0 {
				for index, m := range at {
					m.check(t, fmt.Sprintf("sigma %.2f", sigmas[index+1]), c.bias)
				}
			}
			for k, in := range inside {
				in.check(t, c.kind, sigmas, c.bias, samples, mix.Weights[k], mix.Stds[k])
			}
		})
	}
}

// moments accumulates what a marginal predicts.
type moments struct {
	mean, variance         []float64 // predicted
	first, second, quartic [dims]float64
	count                  float64
}

func newMoments(mix *synthetic.Mixture, sigma float64) *moments {
	m := &moments{mean: make([]float64, dims), variance: make([]float64, dims)}
	mix.Marginal(m.mean, m.variance, sigma)
	return m
}

func (m *moments) add(x []float32) {
	m.count++
	for i := range x {
		d := float64(x[i]) - m.mean[i]
		m.first[i] += d
		m.second[i] += d * d
		m.quartic[i] += d * d * d * d
	}
}

// check holds every element within 5 standard errors, those of variances taken from
// the fourth moments, plus the share bias of the variance.
func (m *moments) check(t *testing.T, where string, bias float64) {
	t.Helper()
	for i := range dims {
		if d, se := m.first[i]/m.count, math.Sqrt(m.variance[i]/m.count); math.Abs(d) > 5*se {
			t.Errorf("%s, element %d: mean off by %v, standard error %v", where, i, d, se)
		}
		got := m.second[i] / m.count
		se := math.Sqrt((m.quartic[i]/m.count - got*got) / m.count)
		if math.Abs(got-m.variance[i]) > 5*se+bias*m.variance[i] {
			t.Errorf("%s, element %d: variance %v, want %v, standard error %v", where, i, got, m.variance[i], se)
		}
	}
}

// within accumulates the final samples of one component.
type within struct {
	count   float64
	first   [dims]float64
	squares float64
}

func (w *within) add(x, mean []float32) {
	w.count++
	for i := range x {
		d := float64(x[i]) - float64(mean[i])
		w.first[i] += d
		w.squares += d * d
	}
}

func (w *within) check(t *testing.T, kind flow.Transition, sigmas []float32, bias float64, samples int, weight,
	std float64,
) {
	t.Helper()
	total := float64(samples)
	if se := math.Sqrt(weight * (1 - weight) / total); math.Abs(w.count/total-weight) > 4*se {
		t.Errorf("component of weight %v: hit by a share of %v, standard error %v", weight, w.count/total, se)
	}
	variance := 1.0
	for i := range len(sigmas) - 1 {
		variance = stepLaw(kind, sigmas, i, std, variance)
	}
	if kind == flow.ODE {
		variance = std * std // Heun is not the law's Euler; its own error is below bias
	}
	if bias >= 0 && math.Abs(variance/(std*std)-1) > bias {
		t.Errorf("component of std %v: predicted variance %v is not within %v of the mixture's", std, variance, bias)
	}
	share := 0.0
	if kind == flow.ODE {
		share = bias
	}
	got := w.squares / (w.count * dims)
	if limit := variance * (5*math.Sqrt(2/(w.count*dims)) + share); math.Abs(got-variance) > limit {
		t.Errorf("component of std %v: variance %v, want %v within %v", std, got, variance, limit)
	}
	// Squared standardised means of 64 elements: chi-squared, mean 64, variance 128.
	var chi float64
	for _, s := range w.first {
		chi += s * s / (w.count * variance)
	}
	if math.Abs(chi-dims) > 5*math.Sqrt(2*dims) {
		t.Errorf("component of std %v: chi-squared of the mean %v, want %v within %v", std, chi, float64(dims),
			5*math.Sqrt(2*dims))
	}
}

func largest(x []float64) int {
	best := 0
	for i := range x {
		if x[i] > x[best] {
			best = i
		}
	}
	return best
}

// The slope of log error against log steps, on a mixture whose components overlap, so
// that the field bends. The path from 0.9 to 0.1, in the open interval: every solver
// is special at sigma 0 and 1. The truth is a fine Runge-Kutta run in float64.
func TestSampler_ConvergenceOrder(t *testing.T) {
	t.Parallel()
	const first, last = 0.9, 0.1
	velocity, mix := oneField(t, synthetic.Config{Components: 3, MinStd: 0.4, MaxStd: 0.6, Contrast: 0.3},
		"orange and teal")
	start := make([]float32, dims)
	flow.InitialNoise(start, 5)
	truth := rungeKutta(mix, start, first, last, 400)
	cases := []struct {
		solver   flow.Solver
		steps    []int
		low, top float64
	}{
		{flow.Euler, []int{32, 64, 128}, 0.9, 1.1},
		{flow.Heun, []int{16, 32, 64}, 1.9, 2.1},
		{flow.DPM, []int{16, 32, 64}, 1.9, 2.1},
		{flow.UniPC, []int{16, 32, 64}, 2.7, 3.1}, // the corrector is one order above the predictor
		{flow.RK4, []int{10, 14, 20}, 3.7, 4.3},
	}
	for _, c := range cases {
		t.Run(string(c.solver), func(t *testing.T) {
			var errors []float64
			for _, steps := range c.steps {
				sigmas := make([]float32, steps+1, steps+2)
				for i := range sigmas {
					sigmas[i] = float32(first + (last-first)*float64(i)/float64(steps))
				}
				var reached []float32
				_, err := flowtest.Sample(t.Context(), plan(flow.ODE, c.solver, append(sigmas, 0), 0), start, velocity,
					func(s *flow.Step) {
						if s.Index == steps-1 {
							reached = append(reached, s.Next...)
						}
					})
				if err != nil {
					t.Fatal(err)
				}
				var squares float64
				for i := range reached {
					d := float64(reached[i]) - truth[i]
					squares += d * d
				}
				errors = append(errors, math.Sqrt(squares/dims))
			}
			n := len(errors) - 1
			order := math.Log(errors[0]/errors[n]) / math.Log(float64(c.steps[n])/float64(c.steps[0]))
			t.Logf("steps %v: errors %.3g, order %.2f", c.steps, errors, order)
			if order < c.low || order > c.top {
				t.Errorf("order %.2f, want %v to %v", order, c.low, c.top)
			}
		})
	}
}

// rungeKutta integrates the mixture's velocity with the classical method. The state is
// float64; only the velocity is rounded.
func rungeKutta(mix *synthetic.Mixture, start []float32, first, last float64, steps int) []float64 {
	x, point, v := make([]float64, dims), make([]float32, dims), make([]float32, dims)
	for i := range x {
		x[i] = float64(start[i])
	}
	h := (last - first) / float64(steps)
	for n := range steps {
		sigma := first + h*float64(n)
		sum, k := make([]float64, dims), make([]float64, dims)
		for _, stage := range []struct{ at, weight float64 }{{0, 1}, {0.5, 2}, {0.5, 2}, {1, 1}} {
			for i := range point {
				point[i] = float32(x[i] + stage.at*h*k[i])
			}
			mix.Velocity(v, point, sigma+stage.at*h)
			for i := range k {
				k[i] = float64(v[i])
				sum[i] += stage.weight * k[i]
			}
		}
		for i := range x {
			x[i] += h / 6 * sum[i]
		}
	}
	return x
}
