package flow_test

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// moments returns mean and variance in float64.
func moments(x []float32) (mean, variance float64) {
	for _, v := range x {
		mean += float64(v) / float64(len(x))
	}
	for _, v := range x {
		d := float64(v) - mean
		variance += d * d / float64(len(x))
	}
	return mean, variance
}

// One step 0.6 to 0.4 on the Gaussian field (s = 0.5) from the exact marginal, whose
// variance is 0.4. Targets follow from the step's linear map; the true marginal at
// 0.4 is 0.25. A million elements, within 5 standard errors.
func TestMarginal_OneStep(t *testing.T) {
	const count = 1 << 20
	cases := []struct {
		t    flow.Transition
		want float64
	}{
		{flow.ODE, 0.225},
		{flow.SDE, 0.275255625},
		{flow.CPS, 0.1983895979995872},
	}
	x, v, next := make([]float32, count), make([]float32, count), make([]float32, count)
	eps := make([]float32, count)
	flow.InitialNoise(x, 11)
	flow.StepNoise(eps, 11, 0)
	for i := range x {
		x[i] *= float32(math.Sqrt(0.4))
	}
	if err := (gaussian{0.5}).velocity(context.Background(), v, x, 0.6); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		k, err := flow.NewStepTransition(c.t, 0.7, fiveSteps, 2)
		if err != nil {
			t.Fatal(err)
		}
		if err := k.Draw(next, make([]float32, count), x, v, eps, tensor.F32); err != nil {
			t.Fatal(err)
		}
		mean, variance := moments(next)
		if limit := 5 * math.Sqrt(c.want/count); !near(mean, 0, limit) {
			t.Errorf("%s: mean %v, want 0 within %v", c.t, mean, limit)
		}
		if limit := 5 * c.want * math.Sqrt(2.0/count); !near(variance, c.want, limit) {
			t.Errorf("%s: variance %v, want %v within %v", c.t, variance, c.want, limit)
		}
	}
}

// Whole chains: the variance of x_T over many elements agrees with the linear
// recursion var' = (A + B*c)^2*var + n^2 of the kernels. For ode and the two sdes that
// recursion tends to the data's variance 0.25 as steps grow (sde's slowly, for its
// g grows at sigma near 1). Not for cps: it replaces a fixed share of the noise at
// every step, however small, and loses variance where the data estimate is a mean.
func TestMarginal_Chain(t *testing.T) {
	const count = 1 << 16
	field := gaussian{0.5}
	recursion := func(kind flow.Transition, a float64, sigmas []float32) float64 {
		variance := 1.0
		for i := range len(sigmas) - 1 {
			k, err := flow.NewStepTransition(kind, a, sigmas, i)
			if err != nil {
				t.Fatal(err)
			}
			c := make([]float32, 1)
			if err := field.velocity(context.Background(), c, []float32{1}, sigmas[i]); err != nil {
				t.Fatal(err)
			}
			m := float64(k.A) + float64(k.B)*float64(c[0])
			variance = m*m*variance + k.NoiseStd*k.NoiseStd
		}
		return variance
	}
	for _, kind := range flow.AllTransitions {
		t.Run(string(kind), func(t *testing.T) {
			p := sdePlan(kind, flowSteps(uniform(20)), uniform(20))
			p.LogProb = flow.Squared
			got, err := flowtest.Sample(context.Background(), p, noise(count, 4), field.velocity, nil)
			if err != nil {
				t.Fatal(err)
			}
			mean, variance := moments(got)
			want := recursion(kind, 0.7, p.Sigmas)
			if !near(mean, 0, 5*math.Sqrt(want/count)) || !near(variance, want, 5*want*math.Sqrt(2.0/count)) {
				t.Errorf("20 steps: mean %v, variance %v, want 0, %v", mean, variance, want)
			}
			coarse := math.Abs(recursion(kind, 0.7, uniform(250)) - 0.25)
			fine := math.Abs(recursion(kind, 0.7, uniform(1000)) - 0.25)
			t.Logf("distance from the data's variance: %.2g at 250 steps, %.2g at 1000", coarse, fine)
			if kind != flow.CPS && (fine > 0.0025 || fine >= coarse) {
				t.Errorf("distance from the data's variance %v at 250 steps, %v at 1000: want it to fall below 1 %%",
					coarse, fine)
			}
		})
	}
}

func BenchmarkKernel(b *testing.B) {
	const n = 16384
	x, v, eps := noise(n, 1), noise(n, 2), noise(n, 3)
	next, mean := make([]float32, n), make([]float32, n)
	rate := func(b *testing.B) {
		b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds()/1e6, "M/s")
	}
	for _, kind := range []flow.Transition{flow.SDE, flow.CPS, flow.ODE} {
		k, err := flow.NewStepTransition(kind, 0.7, fiveSteps, 2)
		if err != nil {
			b.Fatal(err)
		}
		for _, storage := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F16} {
			b.Run(fmt.Sprintf("op=draw/transition=%s/storage=%s", kind, storage), func(b *testing.B) {
				for b.Loop() {
					if err := k.Draw(next, mean, x, v, eps, storage); err != nil {
						b.Fatal(err)
					}
				}
				rate(b)
			})
		}
		if kind == flow.ODE {
			continue
		}
		b.Run(fmt.Sprintf("op=log_prob/transition=%s", kind), func(b *testing.B) {
			for b.Loop() {
				if _, err := k.LogProb(flow.Density, x, v, next); err != nil {
					b.Fatal(err)
				}
			}
			rate(b)
		})
	}
}

// A whole step of a rollout, model aside: noise, draw, check and score.
func BenchmarkRollout(b *testing.B) {
	const n = 16384
	for _, c := range []struct {
		t      flow.Transition
		solver flow.Solver
	}{{flow.SDE, flow.Euler}, {flow.ODE, flow.Euler}, {flow.ODE, flow.UniPC}} {
		b.Run(fmt.Sprintf("transition=%s/solver=%s", c.t, c.solver), func(b *testing.B) {
			p := sdePlan(c.t, flowSteps(uniform(1000)), uniform(1000))
			p.Solver = c.solver
			x, v := noise(n, 1), make([]float32, n)
			var r *flow.Rollout
			for b.Loop() {
				if r == nil || r.Done() {
					var err error
					if r, err = flow.NewRollout(p, x); err != nil {
						b.Fatal(err)
					}
				}
				if _, err := r.Advance(v); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds()/1e6, "M/s")
		})
	}
}
