package flow_test

import (
	"context"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// gaussian is the velocity field of data drawn from N(0, s^2): closed form, so that
// solvers and marginals can be checked exactly. With var(sigma) = (1-sigma)^2 s^2 +
// sigma^2, v = x*(sigma - (1-sigma)*s^2)/var and x(sigma) = x(1)*sqrt(var(sigma)).
type gaussian struct{ s float64 }

func (g gaussian) variance(sigma float64) float64 {
	return (1-sigma)*(1-sigma)*g.s*g.s + sigma*sigma
}

func (g gaussian) velocity(_ context.Context, dst, x []float32, sigma float32) error {
	t := float64(sigma)
	c := (t - (1-t)*g.s*g.s) / g.variance(t)
	for i, xi := range x {
		dst[i] = float32(float64(xi) * c)
	}
	return nil
}

// halfX is the field dx/dsigma = x/2, whatever sigma.
func halfX(_ context.Context, dst, x []float32, _ float32) error {
	for i, xi := range x {
		dst[i] = xi / 2
	}
	return nil
}

func odePlan(solver flow.Solver, sigmas []float32) flow.Plan {
	return flow.Plan{
		Sigmas: sigmas, Transitions: flow.Transitions(flow.ODE, nil, len(sigmas)-1),
		LogProb: flow.Density, Solver: solver, Storage: tensor.F32,
	}
}

// uniform is T+1 sigmas from 1 to 0 at equal distances.
func uniform(steps int) []float32 {
	sigmas := make([]float32, steps+1)
	for i := range sigmas {
		sigmas[i] = float32(steps-i) / float32(steps)
	}
	return sigmas
}

// path runs a plan from x and returns the first element of the latents after every
// step.
func path(t *testing.T, p flow.Plan, x float32, v flowtest.Velocity) []float32 {
	t.Helper()
	states := []float32{x}
	_, err := flowtest.Sample(context.Background(), p, []float32{x}, v, func(s *flow.Step) {
		states = append(states, s.Next[0])
	})
	if err != nil {
		t.Fatal(err)
	}
	return states
}

// Gaussian field with s = 0.5 on the uniform grid from x(1) = 1: error of x_T against
// the exact 0.5, float64 values from plain Python. RK4's are below float32 from 8
// steps on.
func TestSolver_GaussianErrors(t *testing.T) {
	want := map[flow.Solver]map[int]float64{
		flow.Euler: {4: -0.1594594594594595, 8: -0.0852154455185223, 16: -0.0443169066083664, 32: -0.0226364299252734},
		flow.Heun: {
			4: 0.004834695562346281, 8: 0.002441425924176288, 16: 0.000763809841727747,
			32: 0.000209996407583679,
		},
		flow.RK4: {4: 6.070037e-06, 8: 7.03065e-08, 16: 8.94623e-08, 32: 8.54614e-09},
	}
	for solver, errors := range want {
		for steps, e := range errors {
			states := path(t, odePlan(solver, uniform(steps)), 1, gaussian{0.5}.velocity)
			if got := float64(states[steps]) - 0.5; !near(got, e, 1e-6) {
				t.Errorf("%s, %d steps: error %.9g, want %.9g", solver, steps, got, e)
			}
		}
	}
}

// The order is the slope of log error against log steps, over step counts where the
// method is asymptotic and its error well above float32.
func TestSolver_ConvergenceOrder(t *testing.T) {
	cases := []struct {
		solver flow.Solver
		field  gaussian
		steps  []int
		want   float64
	}{
		{flow.Euler, gaussian{0.5}, []int{32, 64, 128}, 1},
		{flow.Heun, gaussian{0.1}, []int{64, 128, 256}, 2},
		{flow.DPM, gaussian{0.1}, []int{64, 128, 256}, 2},
		{flow.UniPC, gaussian{0.5}, []int{32, 64, 128}, 3}, // the corrector is one order above the predictor
		{flow.RK4, gaussian{0.1}, []int{8, 16, 32}, 4},
	}
	for _, c := range cases {
		t.Run(string(c.solver), func(t *testing.T) {
			var logSteps, logErrors []float64
			for _, steps := range c.steps {
				// Stop in the open interval: every solver is special at sigma 0 and 1.
				sigmas := make([]float32, steps+1)
				for i := range sigmas {
					sigmas[i] = float32(0.9 - 0.8*float64(i)/float64(steps))
				}
				sigmas = append(sigmas, 0)
				x := math.Sqrt(c.field.variance(float64(sigmas[0])))
				states := path(t, odePlan(c.solver, sigmas), float32(x), c.field.velocity)
				exact := math.Sqrt(c.field.variance(float64(sigmas[steps])))
				e := math.Abs(float64(states[steps]) - exact)
				logSteps = append(logSteps, math.Log(float64(steps)))
				logErrors = append(logErrors, math.Log(e))
				t.Logf("%4d steps: error %.3g", steps, e)
			}
			if got := -slope(logSteps, logErrors); !near(got, c.want, 0.1) {
				t.Errorf("order %.2f, want %v", got, c.want)
			}
		})
	}
}

// slope is the least-squares slope of y over x.
func slope(x, y []float64) float64 {
	n := float64(len(x))
	var sx, sy, sxx, sxy float64
	for i := range x {
		sx += x[i]
		sy += y[i]
		sxx += x[i] * x[i]
		sxy += x[i] * y[i]
	}
	return (n*sxy - sx*sy) / (n*sxx - sx*sx)
}

// The step to sigma 0 of the multistep solvers, and of Euler, is the data estimate;
// the step from sigma 1 is finite though lambda is not.
func TestSolver_Limits(t *testing.T) {
	for _, solver := range []flow.Solver{flow.Euler, flow.DPM, flow.UniPC} {
		t.Run(string(solver), func(t *testing.T) {
			p := odePlan(solver, []float32{1, 0.9, 0.5, 0.1, 0})
			x := []float32{1.5, -0.25}
			_, err := flowtest.Sample(context.Background(), p, x, gaussian{0.5}.velocity, func(s *flow.Step) {
				if s.SigmaNext > 0 {
					return
				}
				for i := range s.X {
					if want := float64(s.X[i]) - float64(s.Sigma)*float64(s.Velocity[i]); !near(float64(s.Next[i]),
						want, 1e-7) {
						t.Errorf("final x: %v; must be the data estimate %v", s.Next[i], want)
					}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			// One step alone goes through both ends.
			got := path(t, odePlan(solver, []float32{1, 0}), 1.5, gaussian{0.5}.velocity)
			if got[1] != 0 { // v = x at sigma 1
				t.Errorf("1 to 0 in one step: x = %v, want 0", got[1])
			}
		})
	}
}

// A stochastic step ends the history: what follows is what would follow a fresh start
// from the same latents.
func TestSolver_HistoryResets(t *testing.T) {
	sigmas := []float32{0.9, 0.8, 0.7, 0.5, 0.3, 0.1, 0}
	for _, solver := range []flow.Solver{flow.DPM, flow.UniPC, flow.Heun, flow.RK4} {
		p := odePlan(solver, sigmas)
		p.Transitions[2] = flow.SDE
		p.NoiseLevel = 0.7
		states := path(t, p, 0.8, gaussian{0.5}.velocity)
		fresh := path(t, odePlan(solver, sigmas[3:]), states[3], gaussian{0.5}.velocity)
		for i, want := range fresh {
			if got := states[3+i]; got != want {
				t.Errorf("%s: x after step %d = %v, want %v as from a fresh start", solver, 2+i, got, want)
			}
		}
		// The test can fail: with history the multistep solvers go elsewhere.
		if solver == flow.DPM || solver == flow.UniPC {
			p.Transitions[2] = flow.ODE
			whole := path(t, p, 0.8, gaussian{0.5}.velocity)
			restarted := path(t, odePlan(solver, sigmas[3:]), whole[3], gaussian{0.5}.velocity)
			if whole[4] == restarted[1] {
				t.Errorf("%s: history makes no difference", solver)
			}
		}
	}
}

func TestSolver_Evaluations(t *testing.T) {
	want := map[flow.Solver]int{flow.Euler: 1, flow.Heun: 2, flow.RK4: 4, flow.DPM: 1, flow.UniPC: 1, "dopri": 0}
	for solver, n := range want {
		if got := solver.Evaluations(); got != n {
			t.Errorf("%s: Evaluations() = %d, want %d", solver, got, n)
		}
		if got := solver.ByTransition(); got != (solver == flow.Euler) {
			t.Errorf("%s: ByTransition() = %v", solver, got)
		}
		if n == 0 {
			continue
		}
		calls := 0
		count := func(ctx context.Context, dst, x []float32, sigma float32) error {
			calls++
			return halfX(ctx, dst, x, sigma)
		}
		path(t, odePlan(solver, uniform(5)), 1, count)
		if calls != 5*n {
			t.Errorf("%s: %d evaluations in 5 steps, want %d", solver, calls, 5*n)
		}
	}
}
