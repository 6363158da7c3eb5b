package flow_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/tensor"
)

// testdata/rollout.json is written by an independent implementation in plain Python,
// testdata/rollout_check.py --write. Latents, coefficients and log-probs agree in
// every bit, on every architecture.
func TestSample_PythonVectors(t *testing.T) {
	b, err := os.ReadFile("testdata/rollout.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Cases []struct {
			Transitions []flow.Transition
			NoiseLevel  float64          `json:"noise_level"`
			LogProbKind flow.LogProbKind `json:"log_prob_kind"`
			Storage     tensor.DType
			Seed        long
			Elements    int
			Sigmas      []float
			Steps       []struct {
				StdDevT    float  `json:"std_dev_t"`
				NoiseStd   float  `json:"noise_std"`
				LogProbSum *float `json:"log_prob_sum"`
			}
			Latents []float
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Cases) == 0 {
		t.Fatal("no cases")
	}
	for i, c := range file.Cases {
		p := flow.Plan{
			Transitions: c.Transitions, NoiseLevel: c.NoiseLevel, LogProb: c.LogProbKind,
			Solver: flow.Euler, Storage: c.Storage, Seed: uint64(c.Seed),
		}
		for _, sigma := range c.Sigmas {
			p.Sigmas = append(p.Sigmas, float32(sigma))
		}
		steps := run(t, p, noise(c.Elements, p.Seed), halfX)
		for j, s := range steps {
			want := c.Steps[j]
			if s.StdDevT != float64(want.StdDevT) || s.NoiseStd != float64(want.NoiseStd) {
				t.Errorf("case %d step %d: g, n = %x, %x, want %x, %x", i, j, s.StdDevT, s.NoiseStd, float64(want.StdDevT), float64(want.NoiseStd))
			}
			if (s.LogProb == nil) != (want.LogProbSum == nil) {
				t.Errorf("case %d step %d: log-prob %v, want %v", i, j, s.LogProb, want.LogProbSum)
			} else if s.LogProb != nil && s.logProb.Sum != float64(*want.LogProbSum) {
				t.Errorf("case %d step %d: log-prob sum %x, want %x", i, j, s.logProb.Sum, float64(*want.LogProbSum))
			}
		}
		for j, got := range steps[len(steps)-1].Next {
			if float64(got) != float64(c.Latents[j]) {
				t.Errorf("case %d: final x[%d] = %x, want %x", i, j, got, float64(c.Latents[j]))
			}
		}
	}
}

// The second implementation still agrees with the vectors that Go is tested against.
func TestSample_Python(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 on PATH: the vectors were checked in Go alone")
	}
	out, err := exec.CommandContext(t.Context(), python, "testdata/rollout_check.py").CombinedOutput()
	if err != nil {
		t.Fatalf("rollout_check.py: %v\n%s", err, out)
	}
}

// testdata/diffusers.json is written by testdata/diffusers_golden.py: sigmas of 16
// schedules, and whole ODE runs of UniPC, DPM-Solver++ and Euler on the Gaussian field
// from x = 1. Upstream computes in float32 throughout.
func TestDiffusersGolden(t *testing.T) {
	b, err := os.ReadFile("testdata/diffusers.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Schedules []struct {
			Config        json.RawMessage
			Steps, Tokens int
			Sigmas        []float64
		}
		Runs []struct {
			Solver flow.Solver
			Shift  float64
			Steps  int
			Sigmas []float64
			Path   []float64
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Schedules) == 0 || len(file.Runs) == 0 {
		t.Fatal("no cases")
	}
	for _, c := range file.Schedules {
		s, err := flow.ParseSchedule(c.Config)
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.Sigmas(c.Steps, c.Tokens)
		if err != nil {
			t.Fatal(err)
		}
		allNear(t, fmt.Sprintf("%s, %d steps: sigmas", c.Config, c.Steps), got, c.Sigmas, 1e-6)
	}
	for _, c := range file.Runs {
		name := fmt.Sprintf("%s, shift %v, %d steps: ", c.Solver, c.Shift, c.Steps)
		got, err := staticShift(c.Shift).SolverSigmas(c.Solver, c.Steps, 0)
		if err != nil {
			t.Fatal(err)
		}
		allNear(t, name+"sigmas", got, c.Sigmas, 1e-6)
		for i, sigma := range c.Sigmas {
			got[i] = float32(sigma)
		}
		allNear(t, name+"x", path(t, odePlan(c.Solver, got), 1, gaussian{0.5}.velocity)[1:], c.Path, f32)
	}
}
