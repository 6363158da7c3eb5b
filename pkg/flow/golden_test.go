package flow_test

import (
	"encoding/json"
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
