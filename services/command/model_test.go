package command

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

// A folder whose scheduler no rollout can follow does not load, and info says why.
func TestModelInfo_Scheduler(t *testing.T) {
	bustest.Sequential(t, others)
	for _, tt := range []struct{ config, want string }{
		{`{}`, "loads: yes"},
		{`{"shift": 3, "use_dynamic_shifting": false}`, "loads: yes"},
		{`{"use_karras_sigmas": true}`, "use_karras_sigmas: true"},
		{`{"use_exponential_sigmas": true}`, "use_exponential_sigmas: true"},
		{`{"use_beta_sigmas": true}`, "use_beta_sigmas: true"},
		{`{"invert_sigmas": true}`, "invert_sigmas: true"},
		{`{"stochastic_sampling": true, "num_train_timesteps": 500}`, "loads: no, 2 problems"},
		{`{"shift": "3"}`, "shift"},
		{"version https://git-lfs.github.com/spec/v1\n", "read scheduler/scheduler_config.json: a pointer of Git LFS; fetch"},
		{`{`, "loads: no, 1 problem\n  read scheduler/scheduler_config.json: not JSON"},
	} {
		dir := checkpoint.Dir(t, checkpoint.Config{})
		if err := os.WriteFile(filepath.Join(dir, "scheduler", "scheduler_config.json"), []byte(tt.config), 0o600); err != nil {
			t.Fatal(err)
		}
		out, _, err := command(t.Context(), "model", "info", dir)
		var exit *exitError
		if refused := errors.As(err, &exit) && exit.status == exitFailed; refused == strings.Contains(out, "loads: yes") || !strings.Contains(out, tt.want) {
			t.Errorf("%s: %v, want %q in\n%s", tt.config, err, tt.want, out)
		}
	}
}

// A name that is no model's is answered with those there are, of images and of texts.
func TestModel_Misspelt(t *testing.T) {
	t.Setenv("MEANDER_MODELS", "../../deploy/models")
	for _, args := range [][]string{{"model", "info", "sign"}, {"run", "--dry-run", "--model", "sign", "a fox"}} {
		expect(t, exitUsage, `must be one of signs, sums, synthetic, synthetic-epsilon, synthetic-v, or a folder with a model_index.json or a config.json`, args...)
		expect(t, exitUsage, "did you mean signs?", args...)
	}
}
