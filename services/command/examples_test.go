package command

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The files are those of the repository, where the documents name them; what a user has changed is never written over.
func TestExamples(t *testing.T) {
	repository, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	wrote := strings.Fields(expect(t, exitOK, "", "examples"))
	for _, name := range []string{"deploy/demo/prompts.txt", "deploy/scorers/worker.py", "deploy/models/signs"} {
		if !slices.Contains(wrote, name) {
			t.Errorf("says %q; want %s among them", wrote, name)
		}
	}
	for _, name := range []string{
		"demo/prompts.txt", "demo/verl-ocr.jsonl", "demo/adapter/adapter_model.safetensors", "scorers/worker.py",
		"models/signs/vae/diffusion_pytorch_model.safetensors", "models/signs-flow-grpo/adapter_model.safetensors",
		"models/sums/model.safetensors",
	} {
		have, err := os.ReadFile(filepath.Join("deploy", name))
		want, err2 := os.ReadFile(filepath.Join(repository, "deploy", name))
		if errors.Join(err, err2) != nil || !slices.Equal(have, want) {
			t.Errorf("%s: %v; want the bytes of the repository", name, errors.Join(err, err2))
		}
	}
	expect(t, exitOK, "", "examples", "--json")

	const file = "deploy/demo/prompts.txt"
	if err := errors.Join(os.WriteFile(file, []byte("mine"), 0o600), os.Remove("deploy/demo/sums.txt")); err != nil {
		t.Fatal(err)
	}
	expect(t, exitUsage, "1 file; other content is there, and nothing was written; choose another folder, or move it "+
		"away: "+file, "examples")
	if mine, _ := os.ReadFile(file); string(mine) != "mine" {
		t.Errorf("%s is %q; was written over", file, mine)
	}
	if _, err := os.Stat("deploy/demo/sums.txt"); err == nil {
		t.Error("sums.txt is written after a refusal")
	}
}
