package flow_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
)

// Grids are those of diffusers' own schedulers: timesteps to the bit, but for those between the timesteps of training
// with Karras' sigmas; sigmas to two units in the last place of float32. With rescale_betas_zero_snr, the
// share of the data to one unit of 1: torch's square root is not rounded alike on all machines.
func TestDiffusion_Diffusers(t *testing.T) {
	b, err := os.ReadFile("testdata/diffusions.json") // deploy/golden/make_diffusions.py
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Schedules []struct {
			Config json.RawMessage
			Cases  []struct {
				Steps             int
				Sigmas, Timesteps bits
				Std               float64
			}
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	cases, exact := 0, 0
	for _, g := range file.Schedules {
		s, err := flow.ParseSchedule(g.Config)
		if err != nil {
			t.Fatalf("%s: %v", g.Config, err)
		}
		tolerance, zeroSNR := 0.0, strings.Contains(string(g.Config), `"rescale_betas_zero_snr": true`)
		if strings.Contains(string(g.Config), `"use_karras_sigmas": true`) {
			tolerance = 1e-3
		}
		for _, c := range g.Cases {
			name := fmt.Sprintf("%s, %d steps", g.Config, c.Steps)
			if n := len(c.Sigmas); c.Sigmas[n-1] == c.Sigmas[n-2] {
				if _, err := s.Sigmas(c.Steps, 1); err == nil {
					t.Errorf("%s: a step that leads nowhere is accepted", name)
				}
				continue
			}
			sigmas, err := s.Sigmas(c.Steps, 1)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			timesteps, std, err := s.Timesteps(c.Steps)
			if err != nil || len(timesteps) != len(c.Timesteps) || len(sigmas) != len(c.Sigmas) {
				t.Fatalf("%s: %d timesteps, %d sigmas, %v", name, len(timesteps), len(sigmas), err)
			}
			for i, got := range sigmas {
				off, want := math.Abs(float64(got-c.Sigmas[i])), float64(c.Sigmas[i])
				if off > 0x2p-23*want && !(zeroSNR && off*want <= 0x1p-23) {
					t.Errorf("%s: sigmas[%d] = %v; want %v", name, i, got, c.Sigmas[i])
				}
			}
			for i, got := range timesteps {
				if math.Abs(float64(got-c.Timesteps[i])) > tolerance {
					t.Errorf("%s: timesteps[%d] = %v; want %v", name, i, got, c.Timesteps[i])
				}
			}
			if math.Abs(std-c.Std) > 1e-6 {
				t.Errorf("%s: the first state has a deviation of %v; want %v", name, std, c.Std)
			}
			cases++
			if slices.Equal(sigmas, c.Sigmas) {
				exact++
			}
		}
	}
	if t.Logf("%d grids, the sigmas of %d equal to the bit", cases, exact); cases < 200 {
		t.Errorf("%d grids compared", cases)
	}
}

// Each setting that would change the grid or the model's estimate, and is not supported, is refused by its name.
func TestDiffusion_Refuses(t *testing.T) {
	for _, c := range []struct{ class, setting, want string }{
		{"DDIM", `"trained_betas": [0.1]`, "trained_betas: given; must be null"},
		{"DDIM", `"clip_sample": true`, "clip_sample: true; must be false"},
		{"DDPM", `"thresholding": true`, "thresholding: true; must be false"},
		{"DDIM", `"beta_schedule": "sigmoid"`, `beta_schedule: "sigmoid"; must be linear or scaled_linear or squaredcos`},
		{"DDIM", `"beta_end": 2`, "beta_start, beta_end: 0.0001, 2; must be above 0"},
		{"DDIM", `"prediction_type": "flow_prediction"`, "prediction_type"},
		{"DDIM", `"timestep_spacing": "cosine"`, "timestep_spacing"},
		{"DDIM", `"rescale_betas_zero_snr": true`, "rescale_betas_zero_snr: true; must be false with prediction_type epsilon"},
		{"DDIM", `"num_train_timesteps": 1`, "num_train_timesteps: 1; must be 2 to"},
		{"DDIM", `"steps_offset": -1`, "steps_offset: -1"},
		{"DDIM", `"eta": 1`, "eta"},
		{"EulerDiscrete", `"use_beta_sigmas": true`, "use_beta_sigmas: true; must be false"},
		{"EulerDiscrete", `"use_exponential_sigmas": true`, "use_exponential_sigmas: true; must be false"},
		{"EulerDiscrete", `"interpolation_type": "log_linear"`, "interpolation_type"},
		{"EulerDiscrete", `"timestep_type": "continuous"`, "timestep_type"},
		{"EulerDiscrete", `"final_sigmas_type": "half"`, "final_sigmas_type"},
		{"EulerDiscrete", `"sigma_max": 0`, "sigma_max"},
		{"DDIM", `"set_alpha_to_one": false`, "set_alpha_to_one, final_sigmas_type: the last step begins at timestep 0"},
		{"DDIM", `"steps_offset": 999`, "num_inference_steps: 10; must be fewer: with steps_offset 999"},
	} {
		config := `{"_class_name": "` + c.class + `Scheduler", ` + c.setting + `}`
		if !strings.Contains(c.setting, "clip_sample") {
			config = config[:len(config)-1] + `, "clip_sample": false}`
		}
		s, err := flow.ParseSchedule([]byte(config))
		if err == nil {
			_, err = s.Sigmas(10, 1)
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", config, err, c.want)
		}
	}
	s, err := flow.ParseSchedule([]byte(`{"_class_name": "PNDMScheduler", "steps_offset": 1, "clip_sample": true}`))
	if err != nil {
		t.Fatalf("a key that the class does not read: %v", err)
	}
	if _, err := s.Shifted([]float64{1, 0.5}, 1); err == nil {
		t.Error("sigmas of a prompt are accepted")
	}
}

// ddim is the step of DDPO, DDIM with eta, in other coordinates: the same mean, the same deviation, and a log-prob that
// differs by the constant ln(a'+b'), so that ratios are equal. The reference is its formula in float64 over the alphas
// of Stable Diffusion 1.5; states, coefficients and sigmas here are float32.
func TestDDIM_IsTheStepOfDDPO(t *testing.T) {
	s, err := flow.ParseSchedule([]byte(`{"_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012,
		"beta_schedule": "scaled_linear", "clip_sample": false, "set_alpha_to_one": false, "steps_offset": 1}`))
	if err != nil {
		t.Fatal(err)
	}
	const steps, n = 50, 512
	sigmas, err := s.Sigmas(steps, 1)
	if err != nil {
		t.Fatal(err)
	}
	var alphas [1000]float64
	for i, product := 0, 1.0; i < len(alphas); i++ {
		root := math.Sqrt(0.00085) + (math.Sqrt(0.012)-math.Sqrt(0.00085))*float64(i)/999
		product *= 1 - root*root
		alphas[i] = product
	}
	drawn := noise(3*n, 7)
	x, out, eps := drawn[:n], drawn[n:2*n], drawn[2*n:]
	for _, eta := range []float64{0.1, 1} {
		p := flow.Plan{
			Sigmas: sigmas, OpenEnd: true, Transitions: slices.Repeat([]flow.Transition{flow.DDIM}, steps), NoiseLevel: eta,
			LogProb: flow.Density, Solver: flow.Euler, Storage: "F32",
		}
		for i := range steps {
			now, before := alphas[981-20*i], alphas[0]
			if at := 981 - 20*i - 20; at >= 0 {
				before = alphas[at]
			}
			std := eta * math.Sqrt((1-before)/(1-now)*(1-now/before))
			scale, scaleNext := math.Sqrt(now)+math.Sqrt(1-now), math.Sqrt(before)+math.Sqrt(1-before)
			y, v, next := make([]float32, n), make([]float32, n), make([]float32, n)
			means, mean := make([]float64, n), 0.0
			for k := range n {
				x0 := (float64(x[k]) - math.Sqrt(1-now)*float64(out[k])) / math.Sqrt(now)
				means[k] = math.Sqrt(before)*x0 + math.Sqrt(1-before-std*std)*float64(out[k])
				y[k], v[k] = float32(float64(x[k])/scale), float32(float64(out[k])-x0)
			}
			k, err := p.StepTransition(i)
			if err != nil {
				t.Fatal(err)
			}
			if off := math.Abs(k.NoiseStd*scaleNext/std - 1); off > 5e-6 {
				t.Errorf("eta %v, step %d: deviation %v; want %v", eta, i, k.NoiseStd*scaleNext, std)
			}
			got := make([]float32, n)
			if err := k.Draw(next, got, y, v, eps, p.Storage); err != nil {
				t.Fatal(err)
			}
			for k := range n {
				if off := math.Abs(float64(got[k])*scaleNext - means[k]); off > 5e-6 {
					t.Fatalf("eta %v, step %d: mean %v; want %v", eta, i, float64(got[k])*scaleNext, means[k])
				}
				d := (float64(next[k])*scaleNext - means[k]) / std
				mean += (-d*d/2 - math.Log(std) - math.Log(2*math.Pi)/2) / n
			}
			lp, err := flow.Score(p, i, y, v, next)
			if err != nil {
				t.Fatal(err)
			}
			if off := math.Abs(lp.Mean - math.Log(scaleNext) - mean); off > 1e-5 {
				t.Errorf("eta %v, step %d: log-prob %v; want %v", eta, i, lp.Mean-math.Log(scaleNext), mean)
			}
		}
	}
}
