package flow_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/tensor"
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
				t.Errorf("case %d step %d: g, n = %x, %x, want %x, %x", i, j, s.StdDevT, s.NoiseStd,
					float64(want.StdDevT),
					float64(want.NoiseStd))
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

// bits are little-endian float32 values in base64.
type bits []float32

func (b *bits) UnmarshalJSON(text []byte) error {
	var raw []byte
	if err := json.Unmarshal(text, &raw); err != nil {
		return err
	}
	for ; len(raw) >= 4; raw = raw[4:] {
		*b = append(*b, math.Float32frombits(binary.LittleEndian.Uint32(raw)))
	}
	return nil
}

// diffusersGolden is testdata/diffusers.json, written by deploy/golden/make_schedules.py.
type diffusersGolden struct {
	Schedules []struct {
		Config json.RawMessage
		Cases  []struct {
			Steps, Tokens     int
			Given             []float64 // sigmas that the caller chose
			Sigmas, Timesteps bits      // [T+1], [T]
		}
	}
	Runs []struct {
		Solver flow.Solver
		Shift  float64
		Steps  int
		Sigmas bits
		Path   []float64
	}
}

func readDiffusersGolden(t *testing.T) diffusersGolden {
	t.Helper()
	b, err := os.ReadFile("testdata/diffusers.json")
	if err != nil {
		t.Fatal(err)
	}
	var file diffusersGolden
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Schedules) < 200 || len(file.Runs) == 0 {
		t.Fatalf("%d schedules and %d runs, want 200 and some", len(file.Schedules), len(file.Runs))
	}
	return file
}

// Sigmas and timesteps are those of QwenImagePipeline in every bit, and a trainer finds
// each timestep of ours in the table of a scheduler of its own as index_for_timestep
// looks: by equality.
func TestSchedule_Diffusers(t *testing.T) {
	above, cases := 0, 0
	for _, g := range readDiffusersGolden(t).Schedules {
		s, err := flow.ParseSchedule(g.Config)
		if err != nil {
			t.Fatalf("%s: %v", g.Config, err)
		}
		for _, c := range g.Cases {
			cases++
			name := fmt.Sprintf("%s, %d steps, given %v, %d tokens", g.Config, c.Steps, c.Given, c.Tokens)
			var got []float32
			if c.Given != nil {
				got, err = s.Shifted(c.Given, c.Tokens)
			} else {
				got, err = s.Sigmas(c.Steps, c.Tokens)
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if c.Sigmas[0] > 1 {
				above++
			}
			if !slices.Equal(got, c.Sigmas) {
				t.Errorf("%s: sigmas %v, want %v", name, got, c.Sigmas)
				continue
			}
			if len(c.Timesteps) != len(got)-1 {
				t.Fatalf("%s: %d timesteps for %d sigmas", name, len(c.Timesteps), len(got))
			}
			for i, sigma := range got[:len(got)-1] {
				if at := indexForTimestep(c.Timesteps, flow.Timestep(sigma)); at != i {
					t.Errorf("%s: timestep %v of step %d is at %d of diffusers' table", name, flow.Timestep(sigma), i,
						at)
				}
			}
		}
	}
	t.Logf("%d cases; diffusers' first sigma is above 1 in %d", cases, above)
}

// Of UniPC and DPM-Solver++ on flow sigmas the schedule is theirs in every bit, but for a first sigma of 1, and for the
// last bit where DPM-Solver++ writes a dynamic shift in another form.
func TestSchedule_DiffusersSolvers(t *testing.T) {
	b, err := os.ReadFile("testdata/shifts.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Schedules []struct {
			Config json.RawMessage
			Cases  []struct {
				Given  []float64
				Tokens int
				Sigmas bits
			}
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	cases := 0
	for _, g := range file.Schedules {
		s, err := flow.ParseSchedule(g.Config)
		if err != nil {
			t.Fatalf("%s: %v", g.Config, err)
		}
		for _, c := range g.Cases {
			cases++
			got, err := s.Shifted(c.Given, c.Tokens)
			if err != nil {
				t.Fatalf("%s, given %v: %v", g.Config, c.Given, err)
			}
			if got[0] == 1 && c.Sigmas[0] == float32(1-1e-6) {
				c.Sigmas[0] = 1
			}
			within := func(a, b float32) bool {
				dpm := bytes.Contains(g.Config, []byte("DPMSolver")) && s.UseDynamicShifting
				return a == b || dpm && math.Abs(float64(a)-float64(b)) <= 6e-8
			}
			if !slices.EqualFunc(got, c.Sigmas, within) {
				t.Errorf("%s, given %v: sigmas %v, want %v", g.Config, c.Given, got, c.Sigmas)
			}
		}
	}
	if cases < 200 {
		t.Errorf("%d cases, want 200", cases)
	}
}

// Grids of schedulers that choose their own, and the mu of Flux2Pipeline, are those of diffusers in every bit, but for
// the 1e-6 that UniPC takes off a first sigma of 1. Recorded by deploy/golden/make_grids.py.
func TestSchedule_DiffusersGrids(t *testing.T) {
	b, err := os.ReadFile("testdata/grids.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Schedules []struct {
			Config json.RawMessage
			Grid   flow.Grid
			Mu     flow.MuRule
			Cases  []struct {
				Steps, Tokens int
				Mu            *float64
				Sigmas        bits
			}
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	grids := map[flow.Grid]int{}
	for _, g := range file.Schedules {
		s, err := flow.ParseSchedule(g.Config)
		if err != nil {
			t.Fatalf("%s: %v", g.Config, err)
		}
		s.Grid, s.MuRule = g.Grid, g.Mu
		for _, c := range g.Cases {
			grids[g.Grid]++
			name := fmt.Sprintf("%s of %s, %d steps, %d tokens", g.Grid, g.Config, c.Steps, c.Tokens)
			if c.Mu != nil && s.Mu(c.Steps, c.Tokens) != *c.Mu {
				t.Errorf("%s: mu %v, want %v", name, s.Mu(c.Steps, c.Tokens), *c.Mu)
			}
			got, err := s.Sigmas(c.Steps, c.Tokens)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if got[0] == 1 && g.Grid == flow.GridUniFlow && c.Sigmas[0] == float32(1-1e-6) {
				c.Sigmas[0] = 1
			}
			if !slices.Equal(got, c.Sigmas) {
				t.Errorf("%s: sigmas %v, want %v", name, got, c.Sigmas)
			}
		}
	}
	if grids[flow.GridScheduler] < 60 || grids[flow.GridUniFlow] < 20 || grids[flow.GridLinspace] < 30 ||
		grids[flow.GridTorch] < 130 {
		t.Errorf("%v cases, want 60 of scheduler, 20 of uni_flow 30 of linspace, and 130 of linspace_torch", grids)
	}
}

// indexForTimestep is FlowMatchEulerDiscreteScheduler.index_for_timestep, with -1 where
// that raises.
func indexForTimestep(table []float32, timestep float32) int {
	var indices []int
	for i, t := range table {
		if t == timestep {
			indices = append(indices, i)
		}
	}
	switch {
	case len(indices) == 0:
		return -1
	case len(indices) > 1:
		return indices[1]
	}
	return indices[0]
}

// Whole ODE runs of UniPC, DPM-Solver++ and Euler on the Gaussian field from x = 1.
// Upstream computes in float32 throughout.
func TestSample_Diffusers(t *testing.T) {
	ones := 0
	for _, c := range readDiffusersGolden(t).Runs {
		name := fmt.Sprintf("%s, shift %v, %d steps: ", c.Solver, c.Shift, c.Steps)
		if c.Solver == flow.Euler { // the others start at sigmas of their own upstream
			got, err := staticShift(c.Shift).Sigmas(c.Steps, 0)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, c.Sigmas) {
				t.Errorf("%ssigmas %v, want %v", name, got, c.Sigmas)
			}
		}
		allNear(t, name+"x", path(t, odePlan(c.Solver, c.Sigmas), 1, gaussian{0.5}.velocity)[1:], c.Path, f32)
		if c.Solver == flow.UniPC && c.Sigmas[0] == float32(1-1e-6) {
			c.Sigmas[0], ones = 1, ones+1 // the rounding of which is all that is left
			got := path(t, odePlan(c.Solver, c.Sigmas), 1, gaussian{0.5}.velocity)
			allNear(t, name+"x from 1", got[1:], c.Path, f32)
		}
	}
	if ones == 0 {
		t.Error("no run of UniPC begins at the sigma that diffusers has in the place of 1")
	}
}

// What a file leaves out is what the classes of diffusers have, recorded by deploy/golden/make_defaults.py.
func TestParseSchedule_DefaultsOfDiffusers(t *testing.T) {
	b, err := os.ReadFile("testdata/defaults.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct{ Classes map[string]map[string]any }
	if err := json.Unmarshal(b, &golden); err != nil {
		t.Fatal(err)
	}
	for class, want := range golden.Classes {
		config := `{}`
		if class != "FlowMatchEulerDiscreteScheduler" {
			config = fmt.Sprintf(`{"_class_name": %q, "prediction_type": "flow_prediction", "use_flow_sigmas": true}`, class)
			want["shift"] = want["flow_shift"]
			if want["final_sigmas_type"] != "zero" || want["use_flow_sigmas"] != false ||
				want["prediction_type"] != "epsilon" {
				t.Errorf("%s: %v", class, want)
			}
		}
		s, err := flow.ParseSchedule([]byte(config))
		if err != nil {
			t.Errorf("%s: %v", class, err)
			continue
		}
		if b, err = json.Marshal(s); err != nil {
			t.Fatal(err)
		}
		var got map[string]any
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		compared := 0
		for key, value := range got {
			if w, ok := want[key]; ok {
				compared++
				if value != w {
					t.Errorf("%s: %s: %v, want %v", class, key, value, w)
				}
			}
		}
		if compared < 7 {
			t.Errorf("%s: %d keys compared, want 7", class, compared)
		}
	}
}
