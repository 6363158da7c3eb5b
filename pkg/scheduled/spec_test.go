package scheduled_test

import (
	"encoding/json"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/meander-rl/meander/pkg/scheduled"
)

// spec is testdata/spec.json: worked numbers, read by the tests of the Python client, too.
type spec struct {
	Ramps []struct {
		Name     string             `json:"name"`
		Settings rampSettings       `json:"settings"`
		Want     map[string]float64 `json:"want"`
	} `json:"ramps"`
	Offsets []struct {
		Strategy scheduled.Strategy `json:"strategy"`
		M        int                `json:"m"`
		Shares   []float64          `json:"shares"`
	} `json:"offsets"`
	Forwards []struct {
		Batch      int                  `json:"batch"`
		P          float64              `json:"p"`
		M          int                  `json:"m"`
		Prediction scheduled.Prediction `json:"prediction"`
		Forwards   float64              `json:"forwards"`
	} `json:"forwards"`
	Levels struct {
		rollCase
		At map[string][]float64 `json:"at"`
	} `json:"levels"`
	Rolls      []rollCase `json:"rolls"`
	ReflexFlow reflexSpec `json:"reflexflow"`
}

type rampSettings struct {
	Probability float64          `json:"probability"`
	Start       *float64         `json:"prob_start"`
	End         *float64         `json:"prob_end"`
	RampSteps   int              `json:"ramp_steps"`
	StartStep   int              `json:"start_step"`
	Shape       scheduled.Shape  `json:"ramp_shape"`
	Compat      scheduled.Compat `json:"compat"`
}

func (r rampSettings) ramp() scheduled.Ramp {
	if r.Shape == "" {
		r.Shape = scheduled.Linear
	}
	return scheduled.Ramp{
		Probability: r.Probability, StartStep: r.StartStep, RampSteps: r.RampSteps, Shape: r.Shape,
		Start: r.Start, End: r.End,
	}
}

func readVectors(t *testing.T, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.FromSlash(name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func readSpec(t *testing.T) spec {
	t.Helper()
	var s spec
	readVectors(t, "testdata/spec.json", &s)
	if len(s.Ramps) < 6 || len(s.Offsets) < 3 || len(s.Rolls) < 11 || len(s.ReflexFlow.Cases) < 4 {
		t.Fatal("spec.json lacks a section")
	}
	return s
}

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance) {
		t.Errorf("%s = %.15g, want %.15g within %g", what, got, want, tolerance)
	}
}

func allNear(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s has %d numbers, want %d", what, len(got), len(want))
	}
	for i := range got {
		near(t, what+" ["+strconv.Itoa(i)+"]", got[i], want[i], tolerance)
	}
}

func TestRamp_At(t *testing.T) {
	for _, c := range readSpec(t).Ramps {
		t.Run(c.Name, func(t *testing.T) {
			compat := c.Settings.Compat
			if compat == "" {
				compat = scheduled.Exact
			}
			for _, at := range slices.Sorted(maps.Keys(c.Want)) {
				step, err := strconv.Atoi(at)
				if err != nil {
					t.Fatal(err)
				}
				near(t, "step "+at, c.Settings.ramp().At(step, compat), c.Want[at], 6e-7)
			}
		})
	}
}

// What is drawn is spread as the worked shares say.
func TestStrategy_Offsets(t *testing.T) {
	for _, c := range readSpec(t).Offsets {
		s := scheduled.DefaultSettings()
		s.MaxStepOffset, s.Strategy, s.Ramp.Probability = c.M, c.Strategy, 1
		const n = 20000
		p, err := s.Draw(7, 0, make([]float64, n))
		if err != nil {
			t.Fatal(err)
		}
		drawn := make([]float64, c.M+1)
		for _, sample := range p.Samples {
			drawn[sample.Offset] += 1.0 / n
		}
		allNear(t, string(c.Strategy)+" drawn", drawn, c.Shares, 0.015) // over 4 standard deviations
	}
}

// Plans cost what the worked numbers say, in the mean.
func TestPlan_Forwards(t *testing.T) {
	for _, c := range readSpec(t).Forwards {
		for _, sampler := range []scheduled.Sampler{scheduled.UniPC, scheduled.RK4} {
			s := scheduled.DefaultSettings()
			s.Prediction, s.MaxStepOffset, s.Ramp.Probability, s.Sampler = c.Prediction, c.M, c.P, sampler
			total, batches := 0, 4000
			for step := range batches {
				p, err := s.Draw(11, step, make([]float64, c.Batch))
				if err != nil {
					t.Fatal(err)
				}
				total += p.Forwards()
			}
			if sampler == scheduled.UniPC {
				near(t, string(c.Prediction), float64(total)/float64(batches), c.Forwards, 0.3)
			} else if c.Prediction != scheduled.Flow {
				near(t, string(c.Prediction)+", rk4", float64(total)/float64(batches), 4*c.Forwards, 1.2)
			}
		}
	}
}

func TestLevels_At(t *testing.T) {
	s := readSpec(t).Levels
	s.Prediction = scheduled.Epsilon
	levels := s.levels(t)
	for at, want := range s.At {
		timestep, err := strconv.Atoi(at)
		if err != nil {
			t.Fatal(err)
		}
		l := levels.At(float64(timestep))
		allNear(t, at, []float64{l.U, l.A}, want, 6e-10)
	}
	// Half a timestep on, half of the way in U/A, and still x = A*x0 + U*noise of variance 1.
	low, mid, high := levels.At(100), levels.At(100.5), levels.At(101)
	near(t, "U/A", mid.U/mid.A, (low.U/low.A+high.U/high.A)/2, 1e-15)
	near(t, "U^2 + A^2", mid.U*mid.U+mid.A*mid.A, 1, 1e-15)
}

func TestLevels_Refuse(t *testing.T) {
	for _, abar := range [][]float64{nil, {0.9}, {1, 0.5}, {0.9, 0.9}, {0.5, 0.9}, {0.9, 0}, {0.9, math.NaN()}} {
		if _, err := scheduled.VarianceLevels(scheduled.Epsilon, abar); err == nil {
			t.Errorf("alphas_cumprod %v are accepted", abar)
		}
	}
	if _, err := scheduled.VarianceLevels(scheduled.Flow, []float64{0.9, 0.5}); err == nil {
		t.Error("alphas_cumprod of a flow model are accepted")
	}
	for _, n := range []int{-1, 0, 1, 1<<20 + 1} {
		if _, err := scheduled.FlowLevels(n); err == nil {
			t.Errorf("%d timesteps are accepted", n)
		}
	}
}
