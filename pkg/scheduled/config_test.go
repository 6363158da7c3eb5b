package scheduled_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/scheduled"
)

// What a scheduler_config.json says of noise, with the defaults of diffusers, as levels and as the
// schedule of all timesteps.
func TestParseNoise(t *testing.T) {
	for _, tt := range []struct {
		name, config string
		timesteps, n int
		prediction   scheduled.Prediction
		first, last  float32 // of the schedule, before its 0
	}{
		{"flow", `{"_class_name": "FlowMatchEulerDiscreteScheduler"}`, 5, 5, scheduled.Flow, 1, 0.25},
		{"a solver of flow", `{"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": true}`, 5, 5, scheduled.Flow, 1, 0.25},
		{"the defaults", `{"_class_name": "DDPMScheduler"}`, 0, 1001, scheduled.Epsilon, 0.99997985, 0.01},
		{"scaled", `{"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}`, 1000, 1001, scheduled.V, 0.9976672, 0.02915476},
	} {
		n, err := scheduled.ParseNoise([]byte(tt.config))
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		levels, err := n.Levels(tt.timesteps)
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		s := levels.Sigmas()
		near := func(got, want float32) bool { return got > want-1e-6 && got < want+1e-6 }
		if levels.Prediction() != tt.prediction || len(s) != tt.n || !near(s[0], tt.first) ||
			!near(s[len(s)-2], tt.last) || s[len(s)-1] != 0 {
			t.Errorf("%s: %s, %d sigmas from %v to %v, %v", tt.name, levels.Prediction(), len(s), s[0], s[len(s)-2],
				s[len(s)-1])
		}
		if falls := slices.IsSortedFunc(s, func(a, b float32) int { return int((b - a) * (1 << 30)) }); !falls {
			t.Errorf("%s: the schedule rises", tt.name)
		}
	}
	for config, want := range map[string]string{
		`{"_class_name": "DDPMScheduler", "prediction_type": "sample"}`:                                       `prediction_type: "sample"; must be epsilon or v_prediction`,
		`{"_class_name": "DDPMScheduler", "beta_schedule": "squaredcos_cap_v2"}`:                              `beta_schedule: "squaredcos_cap_v2"; must be linear or scaled_linear`,
		`{"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1}`:                        "num_train_timesteps: 1; must be 2 to",
		`{"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": true}`:                             "use_flow_sigmas: true; must be false with prediction_type epsilon",
		`{"_class_name": "CogVideoXDDIMScheduler"}`:                                                           `_class_name: "CogVideoXDDIMScheduler"; must be one of DDIM`,
		`{"_class_name": "DDPMScheduler", "trained_betas": [0.1]}`:                                            "trained_betas: not supported",
		`{"_class_name": "DDPMScheduler", "rescale_betas_zero_snr": true}`:                                    "must be false with prediction_type epsilon",
		`{"_class_name": "PNDMScheduler", "prediction_type": "v_prediction", "rescale_betas_zero_snr": true}`: "must be false with PNDMScheduler, which has none",
		`[]`: "parse scheduler config",
	} {
		if _, err := scheduled.ParseNoise([]byte(config)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", config, err, want)
		}
	}
}

// Zero terminal SNR: the table of every class that has it is diffusers' in all its timesteps, which computes it in
// float32.
func TestParseNoise_Diffusers(t *testing.T) {
	var golden struct {
		Tables []struct {
			Config json.RawMessage
			Abar   []float64 // at some timesteps
			At     []int
		}
	}
	readVectors(t, "testdata/tables.json", &golden)
	for _, c := range golden.Tables {
		n, err := scheduled.ParseNoise(c.Config)
		if err != nil {
			t.Errorf("%s: %v", c.Config, err)
			continue
		}
		levels, err := n.Levels(0)
		if err != nil {
			t.Errorf("%s: %v", c.Config, err)
			continue
		}
		for i, at := range c.At {
			a := levels.At(float64(at)).A
			near(t, fmt.Sprintf("%s: abar[%d]", c.Config, at), a*a, c.Abar[i], 3e-6)
		}
	}
	if len(golden.Tables) < 30 {
		t.Errorf("%d tables, want 30", len(golden.Tables))
	}
}
