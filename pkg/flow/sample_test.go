package flow_test

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// recorded is a step with its slices copied, so that it outlives the rollout.
type recorded struct {
	flow.Step
	logProb flow.LogProb
}

func record(s *flow.Step) recorded {
	r := recorded{Step: *s}
	r.X, r.Next, r.Mean = slices.Clone(s.X), slices.Clone(s.Next), slices.Clone(s.Mean)
	r.Noise, r.Velocity = slices.Clone(s.Noise), slices.Clone(s.Velocity)
	if s.LogProb != nil {
		r.logProb = *s.LogProb
	}
	return r
}

func run(t failer, p flow.Plan, x []float32, v flowtest.Velocity) []recorded {
	t.Helper()
	var steps []recorded
	_, err := flowtest.Sample(context.Background(), p, x, v, func(s *flow.Step) {
		steps = append(steps, record(s))
	})
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

// failer is what testing.T and rapid.T share.
type failer interface {
	Helper()
	Fatal(args ...any)
}

func sdePlan(t flow.Transition, indices []int, sigmas []float32) flow.Plan {
	p := odePlan(flow.Euler, sigmas)
	p.Transitions = flow.Transitions(t, indices, len(sigmas)-1)
	p.NoiseLevel, p.Seed = 0.7, 99
	return p
}

func noise(n int, seed uint64) []float32 {
	x := make([]float32, n)
	flow.InitialNoise(x, seed)
	return x
}

// The middle step of five is stochastic, with the inputs of the kernel table.
func TestScore_Gated(t *testing.T) {
	p := sdePlan(flow.SDE, []int{2}, fiveSteps)
	next := []float32{0.868021737076085, -0.6498369483043395, 0.032625, 2.4969115805072324}
	for index := range 5 {
		lp, err := flow.Score(p, index, caseX, caseV, next)
		if index != 2 {
			wantError(t, err, `transition: "ode"`)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if !near(lp.Mean, -0.6515271871029717, f32) || !near(lp.Sum, -2.606108748411887, 4*f32) || lp.Count != 4 {
			t.Errorf("log-prob %+v, want mean -0.651527187, sum -2.606108748 over 4", lp)
		}
	}
	for _, index := range []int{-1, 5} {
		_, err := flow.Score(p, index, caseX, caseV, next)
		wantError(t, err, fmt.Sprintf("step_index: %d", index))
	}
}

// What a step says of itself, and that steps join up.
func TestSample_Steps(t *testing.T) {
	p := sdePlan(flow.SDE, []int{1, 3}, fiveSteps)
	x := noise(10, 5)
	steps := run(t, p, x, gaussian{0.5}.velocity)
	if len(steps) != 5 {
		t.Fatalf("%d steps, want 5", len(steps))
	}
	if !slices.Equal(steps[0].X, x) {
		t.Errorf("step 0 starts from %v, want the initial noise %v", steps[0].X, x)
	}
	for i, s := range steps {
		if s.Index != i || s.Sigma != fiveSteps[i] || s.SigmaNext != fiveSteps[i+1] || s.Timestep != 1000*fiveSteps[i] {
			t.Errorf("step %d: index %d, sigma %v to %v, timestep %v", i, s.Index, s.Sigma, s.SigmaNext, s.Timestep)
		}
		if i > 0 && !slices.Equal(s.X, steps[i-1].Next) {
			t.Errorf("step %d does not start where step %d ended", i, i-1)
		}
		stochastic := i == 1 || i == 3
		if (s.LogProb != nil) != stochastic || (s.Noise != nil) != stochastic || (s.NoiseStd > 0) != stochastic ||
			(s.StdDevT > 0) != stochastic {
			t.Errorf("step %d: log-prob %v, noise %v, g %v, n %v; want them exactly on stochastic steps", i, s.LogProb,
				s.Noise,
				s.StdDevT, s.NoiseStd)
		}
		if want := flow.ODE; !stochastic && s.Transition != want || stochastic && s.Transition != flow.SDE {
			t.Errorf("step %d ran %s", i, s.Transition)
		}
		for j := range s.X {
			want := float64(s.Mean[j])
			if stochastic {
				want += s.NoiseStd * float64(s.Noise[j])
			}
			if !near(float64(s.Next[j]), want, f32) {
				t.Errorf("step %d: next[%d] = %v, want mean + n*noise = %v", i, j, s.Next[j], want)
			}
		}
	}
}

// A plain Euler loop, type ode and an empty list of stochastic steps are the same bits.
func TestSample_ODEIdentity(t *testing.T) {
	sigmas, err := qwenImage().Sigmas(10, 1024)
	if err != nil {
		t.Fatal(err)
	}
	field := gaussian{0.5}
	for _, storage := range []tensor.DType{tensor.F32, tensor.F16, tensor.BF16} {
		plain, v := noise(64, 3), make([]float32, 64)
		storage.Round(plain)
		for i := range 10 {
			if err := field.velocity(context.Background(), v, plain, sigmas[i]); err != nil {
				t.Fatal(err)
			}
			for j := range plain {
				plain[j] += float32((sigmas[i+1] - sigmas[i]) * v[j])
			}
			storage.Round(plain)
		}
		ode, empty := sdePlan(flow.ODE, []int{0, 5}, sigmas), sdePlan(flow.CPS, []int{}, sigmas)
		for name, p := range map[string]flow.Plan{"type ode": ode, "empty list": empty} {
			p.Storage = storage
			got, err := flowtest.Sample(context.Background(), p, noise(64, 3), field.velocity, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, plain) {
				t.Errorf("%s, %s: differs from the plain loop", storage, name)
			}
		}
	}
}

// A bfloat16 engine that multiplies the step into a bfloat16 velocity first gets
// 0.93994140625 here. Latents and products are float32 in this package.
func TestSample_ProductIsFloat32(t *testing.T) {
	v := func(_ context.Context, dst, _ []float32, _ float32) error {
		dst[0] = 0.30078125 // 0.3 as bfloat16
		return nil
	}
	states := path(t, odePlan(flow.Euler, []float32{0.6, 0.4, 0}), 1, v)
	if got := float64(states[1]); got != 0.9398437738418579 {
		t.Errorf("x = %.17g, want 0.9398437738418579", got)
	}
	p := odePlan(flow.Euler, []float32{0.6, 0.4, 0})
	p.Storage = tensor.BF16
	if got := path(t, p, 1, v)[1]; got != 0.94140625 {
		t.Errorf("stored as bfloat16: x = %v, want 0.94140625", got)
	}
}

// At noise level 0 every stochastic transition is the ode step up to rounding, and
// its score is exactly 0.
func TestSample_NoiseZeroIsODE(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sigmas := drawSigmas(t)
		x := noise(8, rapid.Uint64().Draw(t, "seed"))
		v := gaussian{rapid.Float64Range(0.3, 1).Draw(t, "s")}.velocity
		want := run(t, sdePlan(flow.ODE, nil, sigmas), x, v)
		for _, transition := range flow.AllTransitions {
			p := sdePlan(transition, flowSteps(sigmas), sigmas)
			p.NoiseLevel, p.LogProb = 0, flow.Squared
			for i, s := range run(t, p, x, v) {
				for j := range s.Next {
					if !near(float64(s.Next[j]), float64(want[i].Next[j]), 1e-5) {
						t.Fatalf("%s step %d: x[%d] = %v, ode has %v", transition, i, j, s.Next[j], want[i].Next[j])
					}
				}
				if s.logProb.Sum != 0 {
					t.Fatalf("%s step %d: score %v without noise, want 0", transition, i, s.logProb.Sum)
				}
			}
		}
	})
}

func flowSteps(sigmas []float32) []int {
	all := make([]int, len(sigmas)-1)
	for i := range all {
		all[i] = i
	}
	return all
}

// drawSigmas draws a valid list of 2 to 9 sigmas, sometimes starting at exactly 1.
func drawSigmas(t *rapid.T) []float32 {
	n := rapid.IntRange(1, 8).Draw(t, "steps")
	sigmas := make([]float32, n+1)
	top := float32(0.99)
	if rapid.Bool().Draw(t, "from 1") {
		top = 1
	}
	for i := range n {
		width := top / float32(n)
		jitter := rapid.Float32Range(0, 0.9).Draw(t, "jitter")
		if i == 0 {
			jitter = 0
		}
		sigmas[i] = top - (float32(i)+jitter)*width
	}
	return sigmas
}

// drawPlan draws a valid plan of any transitions, solver, storage and kind of log-prob.
func drawPlan(t *rapid.T) flow.Plan {
	p := sdePlan(flow.ODE, nil, drawSigmas(t))
	for i := range p.Transitions {
		p.Transitions[i] = rapid.SampledFrom(flow.AllTransitions).Draw(t, "transition")
	}
	p.Storage = rapid.SampledFrom([]tensor.DType{tensor.F32, tensor.F16, tensor.BF16}).Draw(t, "storage")
	p.LogProb = rapid.SampledFrom([]flow.LogProbKind{flow.Density, flow.Scaled, flow.Squared}).Draw(t, "kind")
	p.Solver = rapid.SampledFrom([]flow.Solver{flow.Euler, flow.Heun, flow.RK4, flow.DPM, flow.UniPC}).Draw(t, "solver")
	p.NoiseLevel = rapid.Float64Range(0.05, 1).Draw(t, "noise level")
	p.Seed = rapid.Uint64().Draw(t, "seed")
	if last := len(p.Transitions) - 1; p.Transitions[last] == flow.CPS || p.Transitions[last] == flow.DDIM {
		p.Transitions[last] = flow.ODE // has no density
	}
	return p
}

// Scoring stored latents gives the rollout's bits: ratio exactly 1, for every storage
// type, transition and kind, through the bytes of the wire.
func TestScore_Reproduces(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlan(t)
		x := noise(rapid.IntRange(1, 70).Draw(t, "elements"), p.Seed)
		stored := func(x []float32) []float32 {
			y := make([]float32, len(x))
			if err := p.Storage.DecodeFloats(y, p.Storage.AppendFloats(nil, x)); err != nil {
				t.Fatal(err)
			}
			return y
		}
		for _, s := range run(t, p, x, gaussian{0.4}.velocity) {
			if !slices.Equal(stored(s.X), s.X) || !slices.Equal(stored(s.Next), s.Next) {
				t.Fatalf("step %d: latents are not in %s", s.Index, p.Storage)
			}
			if s.LogProb == nil {
				continue
			}
			got, err := flow.Score(p, s.Index, stored(s.X), s.Velocity, stored(s.Next))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, s.logProb) {
				t.Fatalf("step %d: scored %+v, sampled %+v", s.Index, got, s.logProb)
			}
		}
	})
}

// In float32 the squared residual is the noise's, up to rounding, so the log-prob is
// known without the latents.
func TestSample_LogProbIsTheNoises(t *testing.T) {
	p := sdePlan(flow.SDE, flowSteps(fiveSteps), fiveSteps)
	for _, s := range run(t, p, noise(4096, 1), gaussian{0.5}.velocity) {
		var square float64
		for _, e := range s.Noise {
			square += float64(e) * float64(e) / 4096
		}
		want := -square/2 - math.Log(s.NoiseStd) - math.Log(2*math.Pi)/2
		if !near(s.logProb.Mean, want, f32) {
			t.Errorf("step %d: log-prob %.9g, want %.9g", s.Index, s.logProb.Mean, want)
		}
	}
}

// The noise of a step is the same whichever other steps draw.
func TestSample_NoiseIgnoresGating(t *testing.T) {
	all := run(t, sdePlan(flow.SDE, []int{0, 1, 2, 3, 4}, fiveSteps), noise(6, 1), halfX)
	for _, indices := range [][]int{{3}, {0, 3}, {1, 2, 3, 4}} {
		p := sdePlan(flow.CPS, indices, []float32{0.95, 0.8, 0.6, 0.4, 0.2, 0})
		p.LogProb = flow.Squared
		some := run(t, p, noise(6, 2), halfX)
		if !slices.Equal(some[3].Noise, all[3].Noise) {
			t.Errorf("stochastic steps %v: noise of step 3 is %v, want %v", indices, some[3].Noise, all[3].Noise)
		}
	}
	want := make([]float32, 6)
	flow.StepNoise(want, 99, 3)
	if !slices.Equal(all[3].Noise, want) {
		t.Errorf("noise of step 3 is %v, want StepNoise %v", all[3].Noise, want)
	}
}

// Rollouts advanced in any order, in any company, are those run alone.
func TestRollout_Interleaving(t *testing.T) {
	field := gaussian{0.5}
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(2, 5).Draw(t, "rollouts")
		var rollouts []*flow.Rollout
		var want [][]float32
		for i := range count {
			p := sdePlan(flow.SDE, []int{0, 2}, drawSigmas(t))
			p.Solver = rapid.SampledFrom([]flow.Solver{flow.Euler, flow.Heun, flow.RK4, flow.DPM, flow.UniPC}).Draw(t,
				"solver")
			p.Storage = rapid.SampledFrom([]tensor.DType{tensor.F32, tensor.BF16}).Draw(t, "storage")
			p.Seed = uint64(i)
			x := noise(5+i, uint64(i))
			alone, err := flowtest.Sample(context.Background(), p, x, field.velocity, nil)
			if err != nil {
				t.Fatal(err)
			}
			r, err := flow.NewRollout(p, x)
			if err != nil {
				t.Fatal(err)
			}
			rollouts, want = append(rollouts, r), append(want, alone)
		}
		for open := count; open > 0; {
			r := rollouts[rapid.IntRange(0, count-1).Draw(t, "next")]
			if r.Done() {
				r = rollouts[slices.IndexFunc(rollouts, func(r *flow.Rollout) bool { return !r.Done() })]
			}
			x, sigma := r.Point()
			v := make([]float32, len(x))
			if err := field.velocity(context.Background(), v, x, sigma); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Advance(v); err != nil {
				t.Fatal(err)
			}
			if r.Done() {
				open--
			}
		}
		for i, r := range rollouts {
			if !slices.Equal(r.Latents(), want[i]) {
				t.Fatalf("rollout %d: %v together, %v alone", i, r.Latents(), want[i])
			}
		}
	})
}

// A step of several evaluations reports the velocity at its own start, and only the
// last evaluation completes it.
func TestRollout_SeveralEvaluations(t *testing.T) {
	for solver, n := range map[flow.Solver]int{flow.Heun: 2, flow.RK4: 4} {
		r, err := flow.NewRollout(odePlan(solver, fiveSteps), []float32{1, 2, 3})
		if err != nil {
			t.Fatal(err)
		}
		v := make([]float32, 3)
		for call := range n {
			x, sigma := r.Point()
			if wantMiddle := call > 0; (sigma != 1) != wantMiddle {
				t.Errorf("%s: evaluation %d at sigma %v", solver, call, sigma)
			}
			if err := (gaussian{0.5}).velocity(context.Background(), v, x, sigma); err != nil {
				t.Fatal(err)
			}
			step, err := r.Advance(v)
			if err != nil {
				t.Fatal(err)
			}
			if (step != nil) != (call == n-1) {
				t.Fatalf("%s: evaluation %d of %d returned step %v", solver, call, n, step)
			}
			if step != nil && !slices.Equal(step.Velocity, []float32{1, 2, 3}) { // v = x at sigma 1
				t.Errorf("%s: velocity %v, want the first evaluation", solver, step.Velocity)
			}
		}
		if r.Index() != 1 || r.Done() {
			t.Errorf("%s: index %d, done %v after one step", solver, r.Index(), r.Done())
		}
	}
}

func ExampleSample() {
	sigmas, err := qwenImage().Sigmas(10, 256)
	if err != nil {
		fmt.Println(err)
		return
	}
	seed := flow.SampleSeed(flow.RunBase("demo"), "cat-1", 0)
	x := make([]float32, 256*64)
	flow.InitialNoise(x, seed)
	plan := flow.Plan{
		Sigmas: sigmas, Transitions: flow.Transitions(flow.SDE, []int{1, 2}, 10), NoiseLevel: 0.7,
		LogProb: flow.Density, Solver: flow.Euler, Storage: tensor.F32, Seed: seed,
	}
	// A model whose data is all zeros: the velocity is the noise, x/sigma.
	zeros := func(_ context.Context, dst, x []float32, sigma float32) error {
		for i := range dst {
			dst[i] = x[i] / sigma
		}
		return nil
	}
	_, err = flowtest.Sample(context.Background(), plan, x, zeros, func(s *flow.Step) {
		if s.LogProb != nil {
			fmt.Printf("step %d: %s, sigma %.4f, log-prob %.4f\n", s.Index, s.Transition, s.Sigma, s.LogProb.Mean)
		}
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// step 1: sde, sigma 0.9268, log-prob -1.0629
	// step 2: sde, sigma 0.8473, log-prob -0.6918
}

func ExampleRollout() {
	plan := flow.Plan{
		Sigmas: []float32{1, 0.5, 0}, Transitions: []flow.Transition{flow.ODE, flow.ODE},
		LogProb: flow.Density, Solver: flow.Heun, Storage: tensor.F32,
	}
	r, err := flow.NewRollout(plan, []float32{1})
	if err != nil {
		fmt.Println(err)
		return
	}
	for !r.Done() {
		x, sigma := r.Point()
		step, err := r.Advance([]float32{x[0] / 2}) // the model: v = x/2
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("evaluated at sigma %v, step complete: %v\n", sigma, step != nil)
	}
	fmt.Println(r.Latents())
	// Output:
	// evaluated at sigma 1, step complete: false
	// evaluated at sigma 0.5, step complete: true
	// evaluated at sigma 0.5, step complete: false
	// evaluated at sigma 0, step complete: true
	// [0.61035156]
}
