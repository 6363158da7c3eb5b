package flow_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/flow"
)

// near reports whether got is within abs of want.
func near(got, want, abs float64) bool { return math.Abs(got-want) <= abs }

// allNear fails t unless got and want agree element by element within abs.
func allNear[F float32 | float64](t *testing.T, what string, got []F, want []float64, abs float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	for i := range got {
		if !near(float64(got[i]), want[i], abs) {
			t.Errorf("%s[%d] = %.9g, want %.9g", what, i, got[i], want[i])
		}
	}
}

// wantError fails t unless err is there and names everything in want.
func wantError(t *testing.T, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", want)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not contain %q", err, w)
		}
	}
}

func staticShift(shift float64) flow.Schedule {
	s := qwenImage()
	s.UseDynamicShifting, s.ShiftTerminal, s.Shift = false, nil, shift
	return s
}

// qwenImage is the schedule of the Qwen-Image checkpoints, whose pipeline made the goldens.
func qwenImage() flow.Schedule {
	terminal := 0.02
	return flow.Schedule{
		NumTrainTimesteps: 1000, Shift: 1, UseDynamicShifting: true,
		BaseShift: 0.5, MaxShift: 0.9, BaseImageSeqLen: 256, MaxImageSeqLen: 8192,
		ShiftTerminal: &terminal, TimeShiftType: "exponential",
	}
}

// withoutTerminal is Qwen-Image's schedule before the terminal stretch.
func withoutTerminal() flow.Schedule {
	s := qwenImage()
	s.ShiftTerminal = nil
	return s
}

// What the recordings of diffusers do not have, and one of each; computed in float64 from the formulas of its
// schedulers.
func TestSchedule_Sigmas(t *testing.T) {
	cases := []struct {
		name  string
		s     flow.Schedule
		steps int
		seq   int
		want  []float64
	}{
		{"static shift 3", staticShift(3), 4, 0, []float64{1, 0.9, 0.75, 0.5, 0}},
		{"static, one step", staticShift(3), 1, 0, []float64{1, 0}},
		{"qwen 512", qwenImage(), 4, 1024, []float64{1, 0.749268269581561, 0.432587973802191, 0.02, 0}},
		{"qwen, one step has nothing to stretch", qwenImage(), 1, 1024, []float64{1, 0}},
		{"uni_flow, shift 3", uniFlow(t, 3), 4, 0, []float64{1, 0.900119976004799, 0.750374812593703, 0.500999000999001, 0}},
		{"mu 1, 2 steps", constantMu(1), 2, 1, []float64{1, 0.731058578630005, 0}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.s.Sigmas(c.steps, c.seq)
			if err != nil {
				t.Fatal(err)
			}
			allNear(t, "sigmas", got, c.want, 1e-6)
		})
	}
}

func TestSchedule_Terminal(t *testing.T) {
	got, err := qwenImage().Sigmas(50, 4096)
	if err != nil {
		t.Fatal(err)
	}
	if got[0] != 1 || !near(float64(got[49]), 0.02, 1e-7) || got[50] != 0 {
		t.Errorf("sigmas[0, 49, 50] = %v, %v, %v, want 1, 0.02, 0", got[0], got[49], got[50])
	}
	none := 0.0 // as diffusers reads it
	s := qwenImage()
	s.ShiftTerminal = &none
	got, err = s.Sigmas(50, 4096)
	want, wantErr := withoutTerminal().Sigmas(50, 4096)
	if err != nil || wantErr != nil || !slices.Equal(got, want) {
		t.Errorf("shift_terminal 0: %v, %v, want %v", got, err, want)
	}
}

// withGrid returns a schedule with another grid.
func withGrid(s flow.Schedule, g flow.Grid) flow.Schedule {
	s.Grid = g
	return s
}

// uniFlow is the schedule of a folder with UniPC in flow mode.
func uniFlow(t *testing.T, shift float64) flow.Schedule {
	t.Helper()
	s, err := flow.ParseSchedule(fmt.Appendf(nil, `{"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": true,
		"prediction_type": "flow_prediction", "flow_shift": %v}`, shift))
	if err != nil {
		t.Fatal(err)
	}
	return withGrid(s, flow.GridUniFlow)
}

// constantMu is a schedule whose mu depends on nothing.
func constantMu(mu float64) flow.Schedule {
	s := withoutTerminal()
	s.MuRule, s.ConstantMu = flow.MuConstant, mu
	return s
}

// A grid or a rule that does not fit the scheduler is refused by its name.
func TestSchedule_RefusesGridAndMu(t *testing.T) {
	none, unknown, stray := qwenImage(), qwenImage(), qwenImage()
	none.MuRule, unknown.MuRule, stray.ConstantMu = flow.MuNone, "cubic", 0.5
	for _, c := range []struct {
		s    flow.Schedule
		want string
	}{
		{withGrid(qwenImage(), "cosine"), `grid: "cosine"; must be linspace, linspace_torch, scheduler, uni_flow, diffusion or pipeline`},
		{withGrid(staticShift(3), flow.GridUniFlow), "grid: uni_flow; must be linspace or scheduler with FlowMatchEuler"},
		{withGrid(uniFlow(t, 3), flow.GridScheduler), "grid: scheduler; must be linspace or uni_flow with UniPC"},
		{none, "mu: none; must be linear, flux2 or constant with use_dynamic_shifting"},
		{unknown, `mu: "cubic"; must be linear, none, flux2 or constant`},
		{stray, "mu_constant: 0.5; must be a finite number with mu constant, else 0"},
		{constantMu(math.NaN()), "mu_constant: NaN"},
	} {
		_, err := c.s.Sigmas(4, 1024)
		wantError(t, err, c.want)
	}
	static := staticShift(3) // needs no mu
	static.MuRule = flow.MuNone
	if _, err := static.Sigmas(4, 1024); err != nil {
		t.Error(err)
	}
}

// Sigmas of the caller stand in for the grid.
func TestSchedule_ShiftedIgnoresTheGrid(t *testing.T) {
	given := []float64{1, 0.75, 0.5, 0.25}
	want, err1 := staticShift(3).Shifted(given, 0)
	got, err2 := withGrid(staticShift(3), flow.GridScheduler).Shifted(given, 0)
	if err1 != nil || err2 != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v, %v", got, err2, want, err1)
	}
}

func TestSchedule_Shifted(t *testing.T) {
	cases := []struct {
		name string
		s    flow.Schedule
		in   []float64
		want []float64
	}{
		{"static shift 3 once", staticShift(3), []float64{1, 0.75, 0.5, 0.25}, []float64{1, 0.9, 0.75, 0.5, 0}},
		{"no shift", staticShift(1), []float64{0.9, 0.1}, []float64{0.9, 0.1, 0}},
		{
			"qwen's own grid", qwenImage(),
			[]float64{1, 0.75, 0.5, 0.25},
			[]float64{1, 0.749268269581561, 0.432587973802191, 0.02, 0},
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.s.Shifted(c.in, 1024)
			if err != nil {
				t.Fatal(err)
			}
			allNear(t, "sigmas", got, c.want, 1e-6)
		})
	}
	bad := []struct {
		name string
		in   []float64
		want string
	}{
		{"empty", nil, "num_inference_steps: 0"},
		{"too many", make([]float64, 1001), "num_inference_steps: 1001"},
		{"not decreasing", []float64{0.5, 0.5}, "sigmas[1]: 0.5"},
		{"above 1", []float64{1.5, 0.5}, "sigmas[0]: 1.5"},
		{"zero", []float64{1, 0}, "sigmas[1]: 0"},
		{"NaN", []float64{1, math.NaN()}, "sigmas[1]: NaN"},
		{"infinite", []float64{math.Inf(1)}, "sigmas[0]: +Inf"},
		{"equal as float32", []float64{0.5, 0.5 - 1e-12}, "sigmas[1]: 0.5"},
	}
	for _, c := range bad {
		t.Run(c.name, func(t *testing.T) {
			_, err := staticShift(1).Shifted(c.in, 1024)
			wantError(t, err, c.want)
		})
	}
}

func TestParseSchedule(t *testing.T) {
	qwen := `{"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.34.0.dev0",
		"base_image_seq_len": 256, "base_shift": 0.5, "invert_sigmas": false, "max_image_seq_len": 8192,
		"max_shift": 0.9, "num_train_timesteps": 1000, "shift": 1.0, "shift_terminal": 0.02, "stochastic_sampling": false,
		"time_shift_type": "exponential", "use_beta_sigmas": false, "use_dynamic_shifting": true,
		"use_exponential_sigmas": false, "use_karras_sigmas": false}`
	got, err := flow.ParseSchedule([]byte(qwen))
	if err != nil {
		t.Fatal(err)
	}
	want := qwenImage()
	if got.ShiftTerminal == nil || *got.ShiftTerminal != *want.ShiftTerminal {
		t.Errorf("shift_terminal = %v, want %v", got.ShiftTerminal, *want.ShiftTerminal)
	}
	got.ShiftTerminal, want.ShiftTerminal = nil, nil
	if got != want {
		t.Errorf("ParseSchedule = %+v, want %+v", got, want)
	}

	defaults, err := flow.ParseSchedule([]byte(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	if defaults.Shift != 1 || defaults.UseDynamicShifting || defaults.MaxShift != 1.15 ||
		defaults.MaxImageSeqLen != 4096 || defaults.ShiftTerminal != nil {
		t.Errorf("ParseSchedule({}) = %+v, want diffusers' defaults", defaults)
	}
}

// solver is the configuration of a solver on flow sigmas, with one more key.
func solver(class, more string) string {
	config := fmt.Sprintf(`{"_class_name": %q, "use_flow_sigmas": true, %s`, class, more)
	if !strings.Contains(more, "prediction_type") {
		config += `, "prediction_type": "flow_prediction"`
	}
	return config + "}"
}

func TestParseSchedule_Refuses(t *testing.T) {
	cases := []struct{ config, want string }{
		{`{"use_karras_sigmas": true}`, "use_karras_sigmas: true"},
		{`{"use_exponential_sigmas": true}`, "use_exponential_sigmas: true"},
		{`{"use_beta_sigmas": true}`, "use_beta_sigmas: true"},
		{`{"invert_sigmas": true}`, "invert_sigmas: true"},
		{`{"stochastic_sampling": true}`, "stochastic_sampling: true"},
		{`{"num_train_timesteps": 500}`, "num_train_timesteps: 500"},
		{`{"shift": 0}`, "shift: 0"},
		{`{"shift": -3}`, "shift: -3"},
		{`{"shift_terminal": 1}`, "shift_terminal: 1"},
		{`{"use_dynamic_shifting": true, "time_shift_type": "cubic"}`, `time_shift_type: "cubic"`},
		{`{"use_dynamic_shifting": true, "max_image_seq_len": 256}`, "max_image_seq_len: 256"},
		{`{"shift": "3"}`, "shift"},
		{
			`{"_class_name": "IPNDMScheduler"}`,
			`_class_name: "IPNDMScheduler"; must be FlowMatchEulerDiscreteScheduler, DDIMScheduler`,
		},
		{`{"_class_name": "FlowMatchHeunDiscreteScheduler"}`, `_class_name: "FlowMatchHeunDiscreteScheduler"`},
		{`{"_class_name": "DEISMultistepScheduler", "use_flow_sigmas": true, "flow_shift": 3}`, `_class_name: "DEIS`},
		{`{"prediction_type": "epsilon"}`, `prediction_type: "epsilon"; must be flow_prediction`},
		{`{"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"}`, "use_flow_sigmas: false"},
		{`{"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": true}`, `prediction_type: ""; must be flow_pred`},
		{solver("UniPCMultistepScheduler", `"prediction_type": "v_prediction"`), `prediction_type: "v_prediction"`},
		{solver("UniPCMultistepScheduler", `"flow_shift": 0`), "flow_shift: 0; must be a finite number above 0"},
		{solver("UniPCMultistepScheduler", `"final_sigmas_type": "sigma_min"`), `final_sigmas_type: "sigma_min"`},
		{solver("UniPCMultistepScheduler", `"use_karras_sigmas": true`), "use_karras_sigmas: true"},
		{solver("DPMSolverMultistepScheduler", `"use_lu_lambdas": true`), "use_lu_lambdas: true"},
		{solver("DPMSolverMultistepScheduler", `"shift_terminal": 0.1`), "shift_terminal: 0.1; must be null"},
		{solver("DPMSolverMultistepScheduler", `"time_shift_type": "linear"`), `time_shift_type: "linear"`},
		{`{"_class_name": "FlowMatchEulerDiscreteScheduler", "strange": 1}`, "strange: an unknown key"},
		{`{"shift": 1, "shift": 2}`, "shift: stands there twice"},
		{`[1]`, "scheduler config"},
		{`{"shift": 1`, "scheduler config"},
		{`{"_class_name": "` + strings.Repeat("x", 1<<20) + `"}`, "1048576"},
	}
	for _, c := range cases {
		_, err := flow.ParseSchedule([]byte(c.config))
		wantError(t, err, c.want)
	}
	_, err := flow.ParseSchedule([]byte(`{"shift": -1, "invert_sigmas": true, "num_train_timesteps": 2}`))
	wantError(t, err, "shift: -1", "invert_sigmas", "num_train_timesteps") // all faults at once
}

// Whatever the bytes: an error, or a schedule whose sigmas are valid or refused.
func FuzzParseSchedule(f *testing.F) {
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"use_dynamic_shifting": true, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}`))
	f.Add([]byte(`{"shift": 1e308}`))
	f.Add([]byte(`{"use_dynamic_shifting": true, "time_shift_type": "linear", "base_shift": -1e308, "max_shift": 1e308}`))
	f.Add([]byte(`{"shift": null, "shift_terminal": 1e-320}`))
	f.Add([]byte(`{"shift": 0.2}`)) // its first sigma is the float32 above 1
	f.Fuzz(func(t *testing.T, config []byte) {
		s, err := flow.ParseSchedule(config)
		if err != nil {
			return
		}
		sigmas, err := s.Sigmas(5, 1024)
		if err != nil {
			return
		}
		if len(sigmas) != 6 || sigmas[5] != 0 || !(sigmas[0] <= flow.MaxSigma) {
			t.Fatalf("sigmas %v", sigmas)
		}
		for i := 1; i < 6; i++ {
			if !(sigmas[i] < sigmas[i-1]) {
				t.Fatalf("sigmas %v", sigmas)
			}
		}
	})
}

func TestSchedule_SigmasRefuses(t *testing.T) {
	linear := qwenImage()
	linear.TimeShiftType, linear.BaseShift = "linear", -1
	cases := []struct {
		name  string
		s     flow.Schedule
		steps int
		seq   int
		want  string
	}{
		{"no steps", qwenImage(), 0, 1024, "num_inference_steps: 0"},
		{"too many steps", qwenImage(), 1001, 1024, "num_inference_steps: 1001"},
		{"dynamic without a size", qwenImage(), 4, 0, "image_seq_len: 0"},
		{"absurd size", qwenImage(), 4, 1 << 40, "image_seq_len: 1099511627776"},
		{"linear with a negative mu", linear, 4, 256, "one is -1"},
		{"zero value", flow.Schedule{}, 4, 256, "num_train_timesteps"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := c.s.Sigmas(c.steps, c.seq)
			wantError(t, err, c.want)
		})
	}
}

// Whatever the schedule: T+1 sigmas, at most 1, strictly decreasing, the last is 0.
func TestSchedule_SigmasDecreaseToZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := qwenImage()
		s.UseDynamicShifting = rapid.Bool().Draw(t, "dynamic")
		s.Shift = rapid.Float64Range(0.2, 12).Draw(t, "shift")
		s.TimeShiftType = rapid.SampledFrom([]string{"exponential", "linear"}).Draw(t, "type")
		if rapid.Bool().Draw(t, "terminal") {
			tau := rapid.Float64Range(0.001, 0.3).Draw(t, "tau")
			s.ShiftTerminal = &tau
		} else {
			s.ShiftTerminal = nil
		}
		steps := rapid.IntRange(1, flow.MaxSteps).Draw(t, "steps")
		sigmas, err := s.Sigmas(steps, rapid.IntRange(16, 16384).Draw(t, "tokens"))
		if err != nil {
			t.Fatal(err)
		}
		if len(sigmas) != steps+1 || sigmas[0] > flow.MaxSigma || sigmas[steps] != 0 {
			t.Fatalf("%d sigmas from %v to %v, want %d from at most 1 and a rounding to 0", len(sigmas), sigmas[0],
				sigmas[len(sigmas)-1], steps+1)
		}
		for i := 1; i < len(sigmas); i++ {
			if !(sigmas[i] < sigmas[i-1]) {
				t.Fatalf("sigmas[%d] = %v after %v", i, sigmas[i], sigmas[i-1])
			}
		}
	})
}

// Two static shifts in a row are one by their product.
func TestSchedule_ShiftComposes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := rapid.Float64Range(0.3, 4).Draw(t, "a")
		b := rapid.Float64Range(0.3, 4).Draw(t, "b")
		in := []float64{1, 0.8, 0.45, 0.1}
		first, err := staticShift(a).Shifted(in, 1)
		if err != nil {
			t.Fatal(err)
		}
		mid := make([]float64, len(in))
		for i := range mid {
			mid[i] = min(float64(first[i]), 1) // a rounding may take it above, and callers give at most 1
		}
		twice, err := staticShift(b).Shifted(mid, 1)
		if err != nil {
			t.Fatal(err)
		}
		once, err := staticShift(a*b).Shifted(in, 1)
		if err != nil {
			t.Fatal(err)
		}
		for i := range once {
			if !near(float64(twice[i]), float64(once[i]), 1e-6) {
				t.Fatalf("sigmas[%d] = %v in two shifts, %v in one", i, twice[i], once[i])
			}
		}
	})
}

func ExampleSchedule_Sigmas() {
	sigmas, err := qwenImage().Sigmas(4, 1024) // 512x512 pixels
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%.4f\n", sigmas)
	// Output: [1.0000 0.7493 0.4326 0.0200 0.0000]
}
