package sampler_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
)

// A model whose schedule cannot be followed is refused before it is announced.
func TestRun_RefusesScheduler(t *testing.T) {
	dir := checkpoint.Dir(t, checkpoint.Config{})
	if err := os.WriteFile(filepath.Join(dir, "scheduler", "scheduler_config.json"), []byte(`{"use_karras_sigmas": true}`), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := sampler.DefaultConfig()
	cfg.Model = dir
	if err := sampler.Run(t.Context(), cfg, nil, zerolog.Nop()); err == nil ||
		!strings.Contains(err.Error(), "use_karras_sigmas: true") {
		t.Errorf("Run = %v, want an error that names use_karras_sigmas", err)
	}
}

// Who makes a schedule, who carries it and who computes with it agree on its largest sigma.
func TestMaxSigma(t *testing.T) {
	for name, sigma := range map[string]float64{"schemas": schemas.MaxSigma, "model": model.MaxSigma} {
		if sigma != flow.MaxSigma {
			t.Errorf("%s has %v, flow %v", name, sigma, flow.MaxSigma)
		}
	}
}
