package integration_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// settingEdits add a setting of a sample, noise_scale, as CONTRIBUTING.md says: each puts text before a place of a file.
var settingEdits = []struct{ file, before, text string }{
	{
		"schemas/prompt.go", "\t// SDEStepIndices are the steps that run SDEType",
		"\t// NoiseScale is a factor of NoiseLevel.\n\tNoiseScale *float64 `msgpack:\"noise_scale,omitempty\" range:\"0..1\" absent:\"1\" flag:\"noise-scale\"`\n",
	},
	{
		"schemas/sampling.go", "}\n\n// Segment returns the steps",
		"\tNoiseScale float64 `msgpack:\"noise_scale,omitempty\" range:\"0..1\" for:\"image\"`\n",
	},
	{
		"pkg/sampling/plan.go", "\tfor _, t := range s.Transitions {",
		"\tif s.NoiseScale > 0 {\n\t\tp.NoiseLevel *= s.NoiseScale\n\t}\n",
	},
}

// A new setting that decides bits goes from the prompt to the sampler and verify, whose tests run here over sources that
// have one, and a language model refuses it by its name.
func TestExtend_SettingIsVerified(t *testing.T) {
	skipShort(t)
	t.Parallel()
	if len(settingEdits) > 4 {
		t.Errorf("a setting touches %d files; must be at most 4", len(settingEdits))
	}
	dir := filepath.Join(root, "build", "test", "setting") // one place: the test is cached
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	replace := map[string]string{}
	overlay := func(file, text string) {
		name := filepath.Join(dir, strings.ReplaceAll(file, "/", "_")+".txt") // ./... must not find it
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		path, err := filepath.Abs(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		replace[path] = name
	}
	for _, e := range settingEdits {
		data, err := os.ReadFile(filepath.Join(root, e.file))
		if err != nil {
			t.Fatal(err)
		}
		head, tail, ok := strings.Cut(string(data), e.before)
		if !ok {
			t.Fatalf("%s has no %q", e.file, e.before)
		}
		overlay(e.file, head+e.text+e.before+tail)
	}
	scenario, err := os.ReadFile("testdata/setting_test.go.txt")
	if err != nil {
		t.Fatal(err)
	}
	overlay("services/verify/setting_test.go", string(scenario))
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, list, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-trimpath", "-vet=off", "-overlay", file, "-run", "^TestSetting_", "./services/verify")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
