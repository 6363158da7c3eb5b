package nn_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// What DPMSolverMultistepScheduler of diffusers saves is no JSON.
func TestReadScheduler_DPM(t *testing.T) {
	dir := t.TempDir()
	err := os.Mkdir(filepath.Join(dir, "scheduler"), 0o700)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "scheduler/scheduler_config.json"), []byte(
			`{"_class_name": "DPMSolverMultistepScheduler", "flow_shift": 3.0, "lambda_min_clipped": -Infinity,
			"prediction_type": "flow_prediction", "use_flow_sigmas": true}`), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = folder.Close() }()
	config, err := nn.ReadScheduler(folder)
	if err != nil {
		t.Fatal(err)
	}
	if !json.Valid(config) || !strings.Contains(string(config), `"flow_shift": 3.0, "lambda_min_clipped": null,`) {
		t.Errorf("%s; want it as it is, without the infinity", config)
	}
}

// diffusers takes the class of the index: a configuration of another one would be read by other rules.
func TestReadScheduler_Class(t *testing.T) {
	const euler = `{"_class_name": "FlowMatchEulerDiscreteScheduler"}`
	for _, c := range []struct{ index, config, want string }{
		{`{"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}`, euler, ""},
		{`{"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}`, `{"shift": 3}`, ""},
		{`{}`, euler, ""},
		{``, euler, ""},
		{
			`{"scheduler": ["diffusers", "UniPCMultistepScheduler"]}`, euler,
			`_class_name: "FlowMatchEulerDiscreteScheduler"; must be "UniPCMultistepScheduler", as in model_index.json`,
		},
		{`{"scheduler": ["diffusers", "X"]}`, `nope`, "not JSON"},
	} {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "scheduler"), 0o700); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{
			"model_index.json": c.index, "scheduler/scheduler_config.json": c.config,
		} {
			if text == "" {
				continue
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		folder, err := safetensors.OpenFolder(dir)
		if err != nil {
			t.Fatal(err)
		}
		got, err := nn.ReadScheduler(folder)
		if c.want == "" && (err != nil || string(got) != c.config) ||
			c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s %s: %q, %v; want error %q", c.index, c.config, got, err, c.want)
		}
		if err := folder.Close(); err != nil {
			t.Error(err)
		}
	}
}
