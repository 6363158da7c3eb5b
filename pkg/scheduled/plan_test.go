package scheduled_test

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/scheduled"
	"pgregory.net/rapid"
)

// planVectors are those of schemas/testdata/noise.json, which the independent
// noise_check.py beside it wrote. They are to be met to the bit.
type planVectors struct {
	Scheduled []struct {
		Seed     string             `json:"seed"`
		Step     int                `json:"step"`
		N        int                `json:"timesteps"`
		M        int                `json:"max_step_offset"`
		Strategy scheduled.Strategy `json:"strategy"`
		Ramp     struct {
			Probability *string         `json:"probability"`
			Start       *string         `json:"prob_start"`
			End         *string         `json:"prob_end"`
			RampSteps   int             `json:"ramp_steps"`
			StartStep   int             `json:"start_step"`
			Shape       scheduled.Shape `json:"ramp_shape"`
		} `json:"ramp"`
		Probability string   `json:"probability"`
		Drawn       []int    `json:"drawn_timesteps"`
		Given       []string `json:"given_timesteps"`
		Samples     [][4]any `json:"samples"`
	} `json:"scheduled"`
}

func hexFloat(t *testing.T, s string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestSettings_DrawHasTheBitsOfTheContract(t *testing.T) {
	var vectors planVectors
	readVectors(t, "../../schemas/testdata/noise.json", &vectors)
	if len(vectors.Scheduled) < 10 {
		t.Fatal("noise.json has too few plans")
	}
	for i, c := range vectors.Scheduled {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			seed, err := strconv.ParseUint(c.Seed, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			optional := func(s *string) *float64 {
				if s == nil {
					return nil
				}
				return new(hexFloat(t, *s))
			}
			s := scheduled.DefaultSettings()
			s.Timesteps, s.MaxStepOffset, s.Strategy = c.N, c.M, c.Strategy
			s.Ramp = scheduled.Ramp{
				Probability: *optional(c.Ramp.Probability), StartStep: c.Ramp.StartStep, RampSteps: c.Ramp.RampSteps,
				Shape: c.Ramp.Shape, Start: optional(c.Ramp.Start), End: optional(c.Ramp.End),
			}
			given := make([]float64, len(c.Given))
			for i := range given {
				given[i] = hexFloat(t, c.Given[i])
				if drawn := scheduled.DrawTimestep(seed, c.Step, i, c.N); drawn != c.Drawn[i] {
					t.Errorf("timestep %d: drew %d, want %d", i, drawn, c.Drawn[i])
				}
			}
			p, err := s.Draw(seed, c.Step, given)
			if err != nil {
				t.Fatal(err)
			}
			if want := hexFloat(t, c.Probability); p.Probability != want {
				t.Errorf("probability %x, want %x", p.Probability, want)
			}
			for i, got := range p.Samples {
				want := c.Samples[i]
				if [4]any{float64(got.Base), float64(got.Source), float64(got.Offset), string(got.Reason)} != want {
					t.Errorf("sample %d: %+v, want %v", i, got, want)
				}
			}
		})
	}
}

func settings(m int, p float64) scheduled.Settings {
	s := scheduled.DefaultSettings()
	s.MaxStepOffset, s.Ramp.Probability = m, p
	return s
}

func draw(t *testing.T, s scheduled.Settings, timesteps ...float64) []scheduled.Sample {
	t.Helper()
	p, err := s.Draw(1, 0, timesteps)
	if err != nil {
		t.Fatal(err)
	}
	return p.Samples
}

func TestSettings_DrawAtTheEdges(t *testing.T) {
	timesteps := slices.Repeat([]float64{0, 623.4, 999}, 50)
	for _, s := range draw(t, settings(0, 1), timesteps...) {
		if s.Reason != scheduled.Disabled || s.Source != s.Base || s.Offset != 0 {
			t.Fatalf("without offsets: %+v", s)
		}
	}
	for _, s := range draw(t, settings(4, 0), timesteps...) {
		if s.Reason != scheduled.Masked || s.Source != s.Base || s.Offset != 0 || s.Rolls() {
			t.Fatalf("at probability 0: %+v", s)
		}
	}
	seen := map[scheduled.Reason]bool{}
	beyond := false
	for i, s := range draw(t, settings(10, 1), timesteps...) {
		seen[s.Reason] = true
		if s.Index != i || s.Timestep != timesteps[i] || s.Base != int(timesteps[i]) {
			t.Errorf("sample %d: %+v", i, s)
		}
		if s.Base == 999 && (s.Rolls() || s.Source != 999) {
			t.Errorf("at the top: %+v", s)
		}
		beyond = beyond || s.Offset > s.Steps()
		if s.Base == 0 && s.Rolls() && s.Source != s.Offset {
			t.Errorf("at the bottom: %+v", s)
		}
	}
	if seen[scheduled.Masked] || !seen[scheduled.AtTop] || !seen[scheduled.ZeroOffset] || !seen[""] || !beyond {
		t.Errorf("at probability 1: %v, offset beyond the top: %v", seen, beyond)
	}
}

func TestSettings_DrawLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 5000).Draw(t, "n")
		s := settings(rapid.IntRange(0, n-1).Draw(t, "m"), rapid.Float64Range(0, 1).Draw(t, "p"))
		s.Timesteps = n
		s.Strategy = rapid.SampledFrom([]scheduled.Strategy{
			scheduled.Uniform, scheduled.BiasedEarly,
			scheduled.BiasedLate,
		}).Draw(t, "strategy")
		timesteps := rapid.SliceOfN(rapid.Float64Range(0, float64(n)-1), 1, 20).Draw(t, "timesteps")
		seed, step := rapid.Uint64().Draw(t, "seed"), rapid.IntRange(0, 1<<32-1).Draw(t, "step")
		p, err := s.Draw(seed, step, timesteps)
		if err != nil {
			t.Fatal(err)
		}
		rolls := 0
		for _, x := range p.Samples {
			if x.Offset < 0 || x.Offset > s.MaxStepOffset || x.Source != min(x.Base+x.Offset, n-1) || x.Steps() < 0 {
				t.Fatalf("%+v", x)
			}
			if x.Rolls() != (x.Offset > 0 && x.Source > x.Base) {
				t.Fatalf("%+v", x)
			}
			if x.Rolls() {
				rolls++
			}
		}
		// A sample's draws depend on nothing but its place.
		again, err := s.Draw(seed, step, timesteps[:1])
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(again.Samples, p.Samples[:1]) {
			t.Fatalf("alone %+v, among others %+v", again.Samples[0], p.Samples[0])
		}
		m := p.Metrics([]float64{1, 2})
		if m["scheduled_sampling/rolled_fraction"] != float64(rolls)/float64(len(timesteps)) ||
			m["scheduled_sampling/drift_l2"] != 1.5 || len(m) != 6 {
			t.Fatalf("%v", m)
		}
	})
}

func TestSettings_DrawRefuses(t *testing.T) {
	s := settings(4, 0.5)
	for _, timestep := range []float64{-1, 1000, math.NaN(), math.Inf(1)} {
		if _, err := s.Draw(1, 0, []float64{5, timestep}); err == nil ||
			!strings.Contains(err.Error(), "timesteps[1]") {
			t.Errorf("timestep %v: %v", timestep, err)
		}
	}
	for _, step := range []int{-1, 1 << 32} {
		if _, err := s.Draw(1, step, nil); err == nil || !strings.Contains(err.Error(), "step: ") {
			t.Errorf("step %d: %v", step, err)
		}
	}
	s.Strategy = "late"
	if _, err := s.Draw(1, 0, nil); err == nil {
		t.Error("an unknown strategy is drawn")
	}
}

func TestSettings_Validate(t *testing.T) {
	if err := scheduled.DefaultSettings().Validate(); err != nil {
		t.Fatal(err)
	}
	nan := math.NaN()
	for want, spoil := range map[string]func(*scheduled.Settings){
		"timesteps: 1;":                          func(s *scheduled.Settings) { s.Timesteps = 1 },
		"max_step_offset: -1;":                   func(s *scheduled.Settings) { s.MaxStepOffset = -1 },
		"max_step_offset: 1000":                  func(s *scheduled.Settings) { s.MaxStepOffset = 1000 },
		`strategy: "late"`:                       func(s *scheduled.Settings) { s.Strategy = "late" },
		"probability: 1.5":                       func(s *scheduled.Settings) { s.Ramp.Probability = 1.5 },
		"prob_start: -0.1":                       func(s *scheduled.Settings) { s.Ramp.Start = new(-0.1) },
		"prob_end: NaN":                          func(s *scheduled.Settings) { s.Ramp.End = &nan },
		"ramp_steps: -1":                         func(s *scheduled.Settings) { s.Ramp.RampSteps = -1 },
		"start_step: -1":                         func(s *scheduled.Settings) { s.Ramp.StartStep = -1 },
		`ramp_shape: "sudden"`:                   func(s *scheduled.Settings) { s.Ramp.Shape = "sudden" },
		`prediction: "x0"`:                       func(s *scheduled.Settings) { s.Prediction = "x0" },
		`compat: ""`:                             func(s *scheduled.Settings) { s.Compat = "" },
		`sampler: "ddim"`:                        func(s *scheduled.Settings) { s.Sampler = "ddim" },
		"order: -1":                              func(s *scheduled.Settings) { s.Order = -1 },
		"order: 10":                              func(s *scheduled.Settings) { s.Order = 10 },
		"order: 4; must be at most 3 with dpm":   func(s *scheduled.Settings) { s.Sampler, s.Order = scheduled.DPM, 4 },
		"order: 2; must be at most 1 with euler": func(s *scheduled.Settings) { s.Sampler, s.Order = scheduled.Euler, 2 },
		"order: 3; must be 4 with rk4":           func(s *scheduled.Settings) { s.Sampler, s.Order = scheduled.RK4, 3 },
		"sampler: rk4; must be":                  func(s *scheduled.Settings) { s.Sampler, s.Compat = scheduled.RK4, scheduled.SimpleTuner },
		`reflexflow: "maybe"`:                    func(s *scheduled.Settings) { s.Switch = "maybe" },
		"reflexflow.alpha: +Inf":                 func(s *scheduled.Settings) { s.ReflexFlow.Alpha = math.Inf(1) },
		"reflexflow.beta1: -1":                   func(s *scheduled.Settings) { s.ReflexFlow.Beta1 = -1 },
		"reflexflow.beta2: NaN":                  func(s *scheduled.Settings) { s.ReflexFlow.Beta2 = nan },
	} {
		s := scheduled.DefaultSettings()
		spoil(&s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	// All faults at once.
	err := scheduled.Settings{}.Validate()
	for _, field := range []string{
		"timesteps", "strategy", "ramp_shape", "prediction", "compat", "sampler",
		"reflexflow",
	} {
		if err == nil || !strings.Contains(err.Error(), field+":") {
			t.Errorf("%v lacks %s", err, field)
		}
	}
}

func TestSettings_Warnings(t *testing.T) {
	for want, change := range map[string]func(*scheduled.Settings){
		"reflexflow.alpha: 1.5; ": func(s *scheduled.Settings) { s.MaxStepOffset, s.ReflexFlow.Alpha = 4, 1.5 },
		"sampler: unipc; flow":    func(s *scheduled.Settings) { s.Compat = scheduled.SimpleTuner },
		"order: 7; dpm uses 3": func(s *scheduled.Settings) {
			s.Compat, s.Sampler, s.Order, s.Prediction = scheduled.SimpleTuner, scheduled.DPM, 7, scheduled.V
		},
		"a rollout adds noise":    func(s *scheduled.Settings) { s.Compat, s.Prediction = scheduled.SimpleTuner, scheduled.Epsilon },
		"reflexflow: on; changes": func(s *scheduled.Settings) { s.Switch, s.Prediction = scheduled.On, scheduled.V },
	} {
		s := scheduled.DefaultSettings()
		if w := s.Warnings(); len(w) > 0 {
			t.Fatalf("the defaults warn: %q", w)
		}
		change(&s)
		if err := s.Validate(); err != nil {
			t.Errorf("%q: %v", want, err)
		}
		if w := fmt.Sprint(s.Warnings()); !strings.Contains(w, want) {
			t.Errorf("%s, want %q", w, want)
		}
	}
}

func TestSettings_Steps(t *testing.T) {
	for _, c := range []struct {
		sampler    scheduled.Sampler
		order      int
		prediction scheduled.Prediction
		compat     scheduled.Compat
		want       string
	}{
		{scheduled.UniPC, 0, scheduled.Flow, scheduled.Exact, "unipc 2"},
		{scheduled.UniPC, 5, scheduled.Epsilon, scheduled.Exact, "unipc 5"},
		{scheduled.DPM, 0, scheduled.V, scheduled.Exact, "dpm 2"},
		{scheduled.Euler, 0, scheduled.V, scheduled.Exact, "euler 1"},
		{scheduled.RK4, 0, scheduled.Flow, scheduled.Exact, "rk4 4"},
		{scheduled.UniPC, 2, scheduled.Flow, scheduled.SimpleTuner, "euler 1"},
		{scheduled.DPM, 7, scheduled.V, scheduled.SimpleTuner, "dpm 3"},
		{scheduled.Euler, 2, scheduled.V, scheduled.SimpleTuner, "euler 1"},
	} {
		s := scheduled.Settings{Sampler: c.sampler, Order: c.order, Prediction: c.prediction, Compat: c.compat}
		sampler, order := s.Steps()
		if got := fmt.Sprint(sampler, " ", order); got != c.want {
			t.Errorf("%+v: %s, want %s", c, got, c.want)
		}
	}
}

func TestSettings_ReflexOn(t *testing.T) {
	for _, c := range []struct {
		position   scheduled.Switch
		m          int
		prediction scheduled.Prediction
		want       bool
	}{
		{scheduled.Auto, 4, scheduled.Flow, true},
		{scheduled.Auto, 0, scheduled.Flow, false},
		{scheduled.On, 0, scheduled.Flow, true},
		{scheduled.Off, 4, scheduled.Flow, false},
		{scheduled.Auto, 4, scheduled.Epsilon, false},
		{scheduled.On, 4, scheduled.V, false},
	} {
		s := scheduled.Settings{Switch: c.position, MaxStepOffset: c.m, Prediction: c.prediction}
		if s.ReflexOn() != c.want {
			t.Errorf("%+v: %v", c, !c.want)
		}
	}
}
