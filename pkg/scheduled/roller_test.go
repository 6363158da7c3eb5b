package scheduled_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/scheduled"
)

// rollCase is a rollout of spec.json or rolls.json.
type rollCase struct {
	Name       string               `json:"name"`
	Prediction scheduled.Prediction `json:"prediction"`
	Timesteps  int                  `json:"timesteps"`
	BetaFirst  float64              `json:"beta_first"`
	BetaLast   float64              `json:"beta_last"`
	ZeroSNR    bool                 `json:"zero_snr"`
	X0         []float64            `json:"x0"`
	Noise      []float64            `json:"noise"`
	Source     int                  `json:"source"`
	Target     int                  `json:"target"`
	Sampler    scheduled.Sampler    `json:"sampler"`
	Order      int                  `json:"order"`
	Compat     scheduled.Compat     `json:"compat"`
	Model      struct {
		Scale float64 `json:"scale"` // scale*x + shift
		Shift float64 `json:"shift"`
		True  float64 `json:"true"` // or this share of what is right
	} `json:"model"`
	States    [][]float64 `json:"states"`
	Teacher   []float64   `json:"teacher"`
	Growth    float64     `json:"growth"`
	Tolerance float64     `json:"tolerance"`
}

func (c rollCase) levels(t *testing.T) *scheduled.Levels {
	t.Helper()
	levels, err := scheduled.FlowLevels(c.Timesteps)
	if c.Prediction != scheduled.Flow {
		var noise scheduled.Noise
		noise, err = scheduled.ParseNoise(fmt.Appendf(nil, `{"_class_name": "DDPMScheduler", "prediction_type": %q,
			"num_train_timesteps": %d, "beta_start": %v, "beta_end": %v, "rescale_betas_zero_snr": %v}`,
			c.Prediction, c.Timesteps, c.BetaFirst, c.BetaLast, c.ZeroSNR))
		if err == nil {
			levels, err = noise.Levels(0)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return levels
}

// right is the prediction of a perfect model.
func right(p scheduled.Prediction, l scheduled.Level, x0, noise float64) float64 {
	switch p {
	case scheduled.Flow:
		return noise - x0
	case scheduled.V:
		return l.A*noise - l.U*x0
	}
	return noise
}

func model[T scheduled.Float](c rollCase, levels *scheduled.Levels) func(dst, x []T, timestep float64) {
	return func(dst, x []T, timestep float64) {
		for i := range dst {
			dst[i] = T(c.Model.Scale*float64(x[i]) + c.Model.Shift)
			if c.Model.True != 0 {
				dst[i] = T(c.Model.True * right(c.Prediction, levels.At(timestep), c.X0[i], c.Noise[i]))
			}
		}
	}
}

func convert[T, F scheduled.Float](x []F) []T {
	out := make([]T, len(x))
	for i, v := range x {
		out[i] = T(v)
	}
	return out
}

// roll takes a rollout to its end: predict sets dst to the output of the model for x, each sees every step.
func roll[T scheduled.Float](
	t *testing.T, r *scheduled.Roller[T], predict func(dst, x []T, timestep float64), each func(scheduled.Step),
) {
	t.Helper()
	for !r.Done() {
		x, timestep := r.Input()
		prediction := make([]T, len(x))
		predict(prediction, x, timestep)
		step, complete, err := r.Advance(prediction)
		if err != nil {
			t.Fatal(err)
		}
		if complete {
			each(step)
		}
	}
}

// run rolls a case and returns its steps and its latents, the first before any step.
func run[T scheduled.Float](t *testing.T, c rollCase) ([]scheduled.Step, [][]float64) {
	t.Helper()
	levels := c.levels(t)
	if c.Compat == "" {
		c.Compat = scheduled.Exact
	}
	x := make([]T, len(c.X0))
	scheduled.Noised(x, convert[T](c.X0), convert[T](c.Noise), levels.At(float64(c.Source)))
	start := slices.Clone(x)
	r, err := scheduled.NewRoller(scheduled.Rollout{
		Levels: levels, Sampler: c.Sampler, Order: c.Order, Compat: c.Compat, Source: c.Source, Target: c.Target,
	}, x)
	if err != nil {
		t.Fatal(err)
	}
	var steps []scheduled.Step
	states := [][]float64{convert[float64](x)}
	roll(t, r, model[T](c, levels), func(s scheduled.Step) {
		steps = append(steps, s)
		states = append(states, convert[float64](r.Latent()))
	})
	if !slices.Equal(x, start) {
		t.Error("the latent it was given has changed")
	}
	return steps, states
}

// falls holds that the timestep goes down by ones and the noise with it.
func falls(t *testing.T, levels *scheduled.Levels, c rollCase, steps []scheduled.Step) {
	t.Helper()
	u := levels.At(float64(c.Source)).U
	for i, s := range steps {
		if s.From != c.Source-i || s.To != s.From-1 || s.Next != levels.At(float64(s.To)) ||
			s.Here != levels.At(float64(s.From)) {
			t.Errorf("step %d goes from %d at %v to %d at %v", i, s.From, s.Here, s.To, s.Next)
		}
		if !(s.Next.U < u) {
			t.Errorf("step %d: noise goes from %v to %v; it must fall", i, u, s.Next.U)
		}
		u = s.Next.U
	}
	if len(steps) != c.Source-c.Target {
		t.Errorf("%d steps, want %d", len(steps), c.Source-c.Target)
	}
}

func TestRoll_WorkedNumbers(t *testing.T) {
	var golden struct {
		Rolls []rollCase `json:"rolls"`
	}
	readVectors(t, "testdata/rolls.json", &golden)
	if len(golden.Rolls) < 90 {
		t.Fatalf("rolls.json has %d rollouts", len(golden.Rolls))
	}
	for _, c := range append(readSpec(t).Rolls, golden.Rolls...) {
		t.Run(c.Name, func(t *testing.T) {
			levels := c.levels(t)
			steps, states := run[float64](t, c)
			for i, want := range c.States {
				if want != nil {
					allNear(t, fmt.Sprintf("state %d", i), states[i], want, c.Tolerance)
				}
			}
			last := states[len(states)-1]
			if c.Teacher != nil {
				teacher := make([]float64, len(c.X0))
				scheduled.Noised(teacher, c.X0, c.Noise, levels.At(float64(c.Target)))
				allNear(t, "teacher", teacher, c.Teacher, c.Tolerance)
				if d := scheduled.Drift(last, teacher); c.Model.True == 1 && d > 1e-12 || c.Model.True != 1 &&
					!(d > 1e-5 && d < 0.01) {
					t.Errorf("drift %g", d)
				}
			}
			if c.Compat != scheduled.SimpleTuner || c.Prediction == scheduled.Flow {
				falls(t, levels, c, steps)
			}
			if c.Growth != 0 {
				growth := 1.0
				for _, s := range steps {
					growth *= s.Next.U / s.Here.U
				}
				near(t, "growth of the noise", growth, c.Growth, 6e-10)
			}
			// The form that a sampler runs differs by its rounding.
			_, narrow := run[float32](t, c)
			for i := range states {
				allNear(t, fmt.Sprintf("float32 state %d", i), narrow[i], states[i], 4e-6)
			}
		})
	}
}

// Rollouts in the way of the public trainer are those of its library.
func TestRoll_SimpleTunersLibrary(t *testing.T) {
	var golden struct {
		Rolls []rollCase `json:"rolls"`
	}
	readVectors(t, "testdata/simpletuner.json", &golden)
	most := map[scheduled.Sampler]int{scheduled.UniPC: 3, scheduled.UniP: 6}
	for _, c := range golden.Rolls {
		if n := most[c.Sampler]; n > 0 && c.Order > n {
			r := scheduled.Rollout{
				Levels: c.levels(t), Sampler: c.Sampler, Order: c.Order, Compat: c.Compat, Source: c.Source,
			}
			want := fmt.Sprintf("order: %d; must be at most %d with %s", c.Order, n, c.Sampler)
			if _, err := scheduled.NewRoller(r, []float64{1}); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v; want %s", c.Name, err, want)
			}
			continue
		}
		_, states := run[float64](t, c)
		for i, want := range c.States {
			allNear(t, fmt.Sprintf("%s: state %d", c.Name, i), states[i], want, 1e-11)
		}
	}
	if len(golden.Rolls) < 130 {
		t.Errorf("%d rollouts, want 130", len(golden.Rolls))
	}
}

type stepping struct {
	sampler scheduled.Sampler
	order   int
}

func allSamplers() []stepping {
	all := []stepping{
		{scheduled.Euler, 1},
		{scheduled.DPM, 1},
		{scheduled.DPM, 2},
		{scheduled.DPM, 3},
		{scheduled.RK4, 4},
	}
	for order := 1; order <= 9; order++ {
		all = append(all, stepping{scheduled.UniPC, order}, stepping{scheduled.UniP, order})
	}
	return all
}

// The prediction that is right lands on the teacher-forced latent, from everywhere.
func TestRoll_PerfectModelLandsOnTheTeacher(t *testing.T) {
	for _, prediction := range []scheduled.Prediction{scheduled.Flow, scheduled.Epsilon, scheduled.V} {
		for _, s := range allSamplers() {
			t.Run(fmt.Sprintf("%s/%s/%d", prediction, s.sampler, s.order), func(t *testing.T) {
				c := rollCase{
					Prediction: prediction, Timesteps: 100, BetaFirst: 1e-3, BetaLast: 0.1, Sampler: s.sampler, Order: s.order,
					X0: []float64{0.5, -0.25, 1.5, 0}, Noise: []float64{1, 0.8, -2, 0.3},
				}
				c.Model.True = 1
				levels := c.levels(t)
				for _, way := range [][2]int{{99, 90}, {50, 40}, {29, 27}, {10, 0}, {1, 0}, {99, 0}, {7, 7}, {0, 0}} {
					c.Source, c.Target = way[0], way[1]
					if s.order > 6 && c.Source-c.Target > 10 {
						continue // orders that high amplify their own rounding
					}
					steps, states := run[float64](t, c)
					falls(t, levels, c, steps)
					teacher := make([]float64, len(c.X0))
					scheduled.Noised(teacher, c.X0, c.Noise, levels.At(float64(c.Target)))
					allNear(t, fmt.Sprint(way), states[len(states)-1], teacher, 1e-9)
					if s.order <= 3 || s.sampler == scheduled.RK4 {
						_, narrow := run[float32](t, c)
						allNear(t, fmt.Sprint(way, " float32"), narrow[len(narrow)-1], teacher, 5e-5)
					}
				}
			})
		}
	}
}

// The order of a method shows where a finer table is walked over the same range: gaussian
// data has a closed form.
func TestRoll_ConvergenceOrder(t *testing.T) {
	const sd = 0.3 // of the data
	cases := []struct {
		stepping
		prediction scheduled.Prediction
		want       float64
	}{
		{stepping{scheduled.Euler, 1}, scheduled.Flow, 1},
		{stepping{scheduled.DPM, 2}, scheduled.Flow, 2},
		{stepping{scheduled.DPM, 3}, scheduled.Flow, 2},   // its first steps are of order 1 and 2
		{stepping{scheduled.UniPC, 1}, scheduled.Flow, 2}, // the corrector adds one
		{stepping{scheduled.UniPC, 2}, scheduled.Flow, 3},
		{stepping{scheduled.RK4, 4}, scheduled.Flow, 4},
	}
	for _, c := range cases {
		t.Run(fmt.Sprintf("%s/%s/%d", c.prediction, c.sampler, c.order), func(t *testing.T) {
			var x, y []float64
			for _, n := range []int{81, 161, 321} {
				if c.sampler == scheduled.RK4 {
					n = (n-1)/4 + 1
				}
				levels, err := scheduled.FlowLevels(n)
				if err != nil {
					t.Fatal(err)
				}
				at := func(l scheduled.Level) float64 { return math.Sqrt(l.A*l.A*sd*sd + l.U*l.U) }
				source, target := (n-1)*9/10, (n-1)/10
				r, err := scheduled.NewRoller(scheduled.Rollout{
					Levels: levels, Sampler: c.sampler, Order: c.order,
					Compat: scheduled.Exact, Source: source, Target: target,
				},
					[]float64{at(levels.At(float64(source)))})
				if err != nil {
					t.Fatal(err)
				}
				roll(t, r, func(dst, x []float64, timestep float64) {
					l := levels.At(timestep)
					dst[0] = x[0] * (l.U - l.A*sd*sd) / (at(l) * at(l))
				}, func(scheduled.Step) {})
				x = append(x, math.Log(float64(n-1)))
				y = append(y, math.Log(math.Abs(r.Latent()[0]-at(levels.At(float64(target))))))
			}
			slope := (y[0] - y[2]) / (x[2] - x[0])
			if math.Abs(slope-c.want) > 0.35 {
				t.Errorf("order %.2f, want %v", slope, c.want)
			}
		})
	}
}

// Latents of one rollout have the same bits however many others are in hand.
func TestRoller_Interleaved(t *testing.T) {
	c := rollCase{
		Prediction: scheduled.V, Timesteps: 100, BetaFirst: 1e-3, BetaLast: 0.1, X0: []float64{0.5, -0.2},
		Noise: []float64{1, 0.3}, Source: 60, Target: 50,
	}
	c.Model.Scale, c.Model.Shift = 0.7, 0.1
	levels := c.levels(t)
	predict := model[float32](c, levels)
	var rollers []*scheduled.Roller[float32]
	for _, s := range allSamplers() {
		r, err := scheduled.NewRoller(scheduled.Rollout{
			Levels: levels, Sampler: s.sampler, Order: s.order,
			Compat: scheduled.Exact, Source: c.Source, Target: c.Target,
		}, []float32{0.4, -0.9})
		if err != nil {
			t.Fatal(err)
		}
		rollers = append(rollers, r)
	}
	asked := make([]int, len(rollers))
	for busy := true; busy; {
		busy = false
		for i, r := range rollers {
			if r.Done() {
				continue
			}
			busy = true
			x, timestep := r.Input()
			v := make([]float32, len(x))
			predict(v, x, timestep)
			kept := slices.Clone(v)
			if _, _, err := r.Advance(v); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(v, kept) {
				t.Error("Advance changed the prediction")
			}
			asked[i]++
		}
	}
	for i, s := range allSamplers() {
		alone, err := scheduled.NewRoller(scheduled.Rollout{
			Levels: levels, Sampler: s.sampler, Order: s.order,
			Compat: scheduled.Exact, Source: c.Source, Target: c.Target,
		}, []float32{0.4, -0.9})
		if err != nil {
			t.Fatal(err)
		}
		var orders []int
		roll(t, alone, predict, func(s scheduled.Step) { orders = append(orders, s.Order) })
		if !slices.Equal(alone.Latent(), rollers[i].Latent()) {
			t.Errorf("%s %d: %v alone, %v among others", s.sampler, s.order, alone.Latent(), rollers[i].Latent())
		}
		if want := 10 * s.sampler.Evaluations(); asked[i] != want {
			t.Errorf("%s: %d evaluations, want %d", s.sampler, asked[i], want)
		}
		if s.sampler != scheduled.RK4 && (orders[0] != 1 || orders[9] != s.order || !slices.IsSorted(orders)) {
			t.Errorf("%s %d: orders %v", s.sampler, s.order, orders)
		}
	}
}

// A flow rollout by Euler is what pkg/flow's Sample makes of the same sigmas.
func TestRoll_AgreesWithFlow(t *testing.T) {
	c := rollCase{
		Prediction: scheduled.Flow, Timesteps: 1000, X0: []float64{0.5}, Noise: []float64{1}, Source: 603,
		Target: 600, Sampler: scheduled.Euler,
	}
	c.Model.Scale, c.Model.Shift = 0.5, 0.1
	_, states := run[float32](t, c)
	levels := c.levels(t)
	sigmas := []float32{
		float32(levels.At(603).U), float32(levels.At(602).U), float32(levels.At(601).U),
		float32(levels.At(600).U), 0,
	}
	plan := flow.Plan{
		Sigmas: sigmas, Transitions: flow.Transitions(flow.ODE, nil, 4), Solver: flow.Euler,
		LogProb: flow.Density, Storage: tensor.F32,
	}
	i := 0
	_, err := flowtest.Sample(t.Context(), plan, []float32{float32(states[0][0])},
		func(_ context.Context, dst, x []float32, _ float32) error {
			dst[0] = 0.5*x[0] + 0.1
			return nil
		}, func(s *flow.Step) {
			if i++; i < len(states) {
				near(t, "x", float64(s.Next[0]), states[i][0], 2e-7)
			}
		})
	if err != nil {
		t.Fatal(err)
	}
}

// The public trainer's way: flow models step with Euler whatever the sampler is, and epsilon
// and v models get noisier.
func TestRoll_SimpleTuner(t *testing.T) {
	c := rollCase{
		Prediction: scheduled.Flow, Timesteps: 100, X0: []float64{0.5}, Noise: []float64{1}, Source: 56,
		Target: 46, Compat: scheduled.SimpleTuner,
	}
	c.Model.Scale = 0.7
	c.Sampler = scheduled.Euler
	_, euler := run[float64](t, c)
	for _, sampler := range []scheduled.Sampler{scheduled.DPM, scheduled.UniPC} {
		c.Sampler, c.Compat = sampler, scheduled.SimpleTuner
		if _, got := run[float64](t, c); got[10][0] != euler[10][0] {
			t.Errorf("%s: %v, want Euler's %v", sampler, got[10], euler[10])
		}
		c.Compat = scheduled.Exact
		if _, got := run[float64](t, c); got[10][0] == euler[10][0] {
			t.Errorf("exact %s is Euler", sampler)
		}
	}
	c.BetaFirst, c.BetaLast, c.Compat = 1e-3, 0.1, scheduled.SimpleTuner
	for _, c.Prediction = range []scheduled.Prediction{scheduled.Epsilon, scheduled.V} {
		steps, _ := run[float64](t, c)
		for _, s := range steps {
			if !(s.Next.U > s.Here.U) {
				t.Errorf("%s: noise goes from %v to %v", c.Prediction, s.Here, s.Next)
			}
		}
	}
}

// int(t/N*N) loses one for some t of some N: then the public trainer's step ends where it
// began.
func TestRoll_SimpleTunerLosesPlaces(t *testing.T) {
	for n, lost := range map[int][]int{100: {29, 57, 58}, 1000: nil, 1024: nil} {
		c := rollCase{
			Prediction: scheduled.Epsilon, Timesteps: n, BetaFirst: 1e-4, BetaLast: 0.02, X0: []float64{0.5},
			Noise: []float64{1}, Sampler: scheduled.Euler, Compat: scheduled.SimpleTuner,
		}
		levels := c.levels(t)
		for c.Source = 1; c.Source < n-1; c.Source++ {
			c.Target = c.Source - 1
			steps, _ := run[float64](t, c)
			want := levels.At(float64(c.Source + 1))
			if slices.Contains(lost, c.Source) {
				want = steps[0].Here
			}
			if steps[0].Next != want {
				t.Errorf("timestep %d of %d steps to %v, want %v", c.Source, n, steps[0].Next, want)
			}
		}
	}
}

func TestNewRoller_Refuses(t *testing.T) {
	levels, err := scheduled.FlowLevels(10)
	if err != nil {
		t.Fatal(err)
	}
	good := scheduled.Rollout{Levels: levels, Sampler: scheduled.UniPC, Compat: scheduled.Exact, Source: 5, Target: 3}
	cases := map[string]func(*scheduled.Rollout){
		"source:":    func(r *scheduled.Rollout) { r.Source = 10 },
		"source: -1": func(r *scheduled.Rollout) { r.Source = -1 },
		"target:":    func(r *scheduled.Rollout) { r.Target = 6 },
		"target: -1": func(r *scheduled.Rollout) { r.Target = -1 },
		"sampler:":   func(r *scheduled.Rollout) { r.Sampler = "heun" },
		"order: 10":  func(r *scheduled.Rollout) { r.Order = 10 },
		"order: 4":   func(r *scheduled.Rollout) { r.Sampler, r.Order = scheduled.DPM, 4 },
		"no rk4":     func(r *scheduled.Rollout) { r.Sampler, r.Compat = scheduled.RK4, scheduled.SimpleTuner },
	}
	for want, spoil := range cases {
		r := good
		spoil(&r)
		if _, err := scheduled.NewRoller(r, []float64{1}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", r, err, want)
		}
	}
}

func TestRoll_Stops(t *testing.T) {
	c := rollCase{Prediction: scheduled.Flow, Timesteps: 10}
	r, err := scheduled.NewRoller(scheduled.Rollout{
		Levels: c.levels(t), Sampler: scheduled.Euler, Compat: scheduled.Exact, Source: 5,
	}, []float64{1})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Advance([]float64{1, 2}); err == nil || !strings.Contains(err.Error(), "2 elements") {
		t.Errorf("a prediction of another length: %v", err)
	}
	still, err := scheduled.NewRoller(scheduled.Rollout{
		Levels: c.levels(t), Sampler: scheduled.Euler, Compat: scheduled.Exact,
	}, []float64{1})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := still.Advance([]float64{1}); err == nil || !strings.Contains(err.Error(), "target 0") {
		t.Errorf("after the end: %v", err)
	}
}
