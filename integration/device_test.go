package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

// A GPU that the program cannot have is refused before anything is stored, with the reason and
// the fix; auto takes the CPU.
func TestDevice_NotThere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, args := range [][]string{
		{"run", "--device", "cuda:0", "a"},
		{"up", "--device", "cuda:0", "--listen", "127.0.0.1:0"},
	} {
		got := meander(t, dir, args...)
		if want := "device: cuda:0: this program is built without CUDA; must be cpu, or the program of make " +
			"build-cuda"; got.code != 2 || !strings.Contains(got.stderr, want) {
			t.Errorf("%v: exit status %d, %s; want 2 and %s", args, got.code, got.stderr, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "meander-data")); err == nil {
		t.Error("a store was made")
	}
	got := meander(t, dir, "run", "--device", "auto", "--log-level", "info", "--model", "synthetic", "--steps", "1",
		"-n",
		"1", "--out", "-", "a")
	if got.code != 0 || !strings.Contains(got.stderr, "no GPU; computes on the CPU") ||
		!strings.Contains(got.stderr, "this program is built without CUDA") {
		t.Errorf("auto: exit status %d, %s", got.code, got.stderr)
	}
}

// The page for operators has the memory that the model's published size takes, as `model info`
// computes it from headers alone.
func TestDevice_MemoryTable(t *testing.T) {
	sequential(t)
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "published")
	if err := checkpoint.WritePublished(dir, checkpoint.Changes{Hollow: true}); err != nil {
		t.Fatal(err)
	}
	got := meander(t, t.TempDir(), "model", "info", dir)
	_, table, begins := strings.Cut(got.stdout, "ON A GPU")
	table, _, ends := strings.Cut(table, "\n\n")
	if !begins || !ends {
		t.Fatalf("no table in %s", got.stdout)
	}
	inDocument(t, "deploy/guide/gpus.md", "memory", "```text\nON A GPU"+table+"\n```\n")
}

// The script for a machine with a GPU runs to its end on one without, and says for each line what
// that would need.
func TestDevice_ScriptWithoutGPU(t *testing.T) {
	sequential(t)
	t.Parallel()
	programs := filepath.Dir(program(t, "meander"))
	report := filepath.Join(t.TempDir(), "gpu.md")
	c := exec.Command("bash", filepath.Join(root, "deploy", "bench", "gpu.sh"), programs, report)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	data, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for _, line := range []string{
		"conformance of all operations", "velocities of signs in f32", "velocities of signs in bf16", "a run of signs",
		"verify of that run", "states of both runs", "conformance in bf16, own kernels", "conformance in bf16, cuBLASLt",
		"products and attention of Qwen-Image at 1024 pixels", "velocities of two of its layers",
		"matrix products", "attention", "copies", "launch overhead", "evaluations and images/s", "memory at its largest",
		"share of each kernel",
		"share of a sample's time outside of the model",
	} {
		notMeasured(t, text, line)
	}
	if !strings.Contains(text, "| the same run on the CPU | run cpu: complete, 1 of 1 groups complete") {
		t.Errorf("no run on the CPU in\n%s", text)
	}
}

// notMeasured checks that a report has a line and says what it needs.
func notMeasured(t *testing.T, report, line string) {
	t.Helper()
	_, row, found := strings.Cut(report, "| "+line)
	if row, _, _ = strings.Cut(row, "\n"); !found || !strings.Contains(row, "**not measured**: needs ") {
		t.Errorf("line %q, %v: %s; must say what it needs", line, found, row)
	}
}

// namedByTiny returns the names of the tiny checkpoints that the tests of the torch engine make.
func namedByTiny(t *testing.T) (names []string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, "pkg/client/python/tests/torch_engine/tiny.py"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(data), "PIPELINES = {\n")
	table, _, _ = strings.Cut(table, "}\n")
	for line := range strings.Lines(table) {
		names = append(names, strings.Split(line, `"`)[1])
	}
	if len(names) == 0 {
		t.Fatal("tiny.py names no checkpoint")
	}
	return names
}

// So does the one for the torch engine, where Python has no torch: none of its lines waits for what cannot come.
func TestDevice_TorchScriptWithoutTorch(t *testing.T) {
	t.Parallel()
	report := filepath.Join(t.TempDir(), "gpu-torch.md")
	c := exec.Command("bash", filepath.Join(root, "deploy", "bench", "gpu-torch.sh"),
		filepath.Dir(program(t, "meander")),
		report)
	c.Env = append(os.Environ(), "PYTHON=false")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	data, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for _, family := range namedByTiny(t) {
		for _, way := range []string{" in f32 ", " in bf16 ", " in bf16, deterministic "} {
			notMeasured(t, text, family+way)
		}
	}
	for _, line := range []string{
		"wan in f32, deterministic", "networks, media and rows", "rows that do not fit", "a run of 2 layers",
	} {
		notMeasured(t, text, line)
	}
	for _, section := range []string{
		"SD3.5 medium: dtypes and rows", "What a call costs",
		"Qwen-Image, 8 of 60 layers",
	} {
		if _, after, ok := strings.Cut(text, "## "+section); !ok ||
			!strings.Contains(after, "**not measured to its end**") {
			t.Errorf("%s: missing, or does not say what it needs", section)
		}
	}
}
