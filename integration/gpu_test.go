//go:build cuda

package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The program computes on two interpreted GPUs. One is lost in the middle: its samples are made on
// the other, and all of them prove right. With the last one the program ends.
func TestGPU_Lost(t *testing.T) {
	dir := t.TempDir()
	for _, build := range [][]string{
		{"-o", filepath.Join(dir, "meander"), "./services/cmd/meander"},
		{"-buildmode=c-shared", "-o", filepath.Join(dir, "libcuda.so"), "./integration/tools/libcuda"},
	} {
		c := exec.Command("go", append([]string{"build", "-tags", "cuda"}, build...)...)
		c.Dir = root
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	models, err := filepath.Abs(filepath.Join(root, "deploy", "models"))
	if err != nil {
		t.Fatal(err)
	}
	run := func(env string, args ...string) (string, error) {
		c := exec.Command(filepath.Join(dir, "meander"), args...)
		c.Dir, c.Env = dir, append(os.Environ(), "MEANDER_MODELS="+models,
			"MEANDER_LIBCUDA="+filepath.Join(dir, "libcuda.so"), "PTXVM_UNCHECKED=1", "PTXVM_GPUS=2", env)
		out, err := c.CombinedOutput()
		return string(out), err
	}
	sample := []string{
		"run", "--run", "a", "--group-size", "3", "--steps", "2", "--height", "32", "--width", "32",
		"--out", "-",
	}
	out, err := run("PTXVM_FAIL=300:719", append(sample, "--device", "cuda:0,cuda:1", "a")...)
	if err != nil || !strings.Contains(out, "device lost; its samples go elsewhere") ||
		!strings.Contains(out, "1 of 1 groups complete, 3 samples") {
		t.Fatalf("with one lost: %v\n%s", err, out)
	}
	if out, err = run("PTXVM_FAIL=", "verify", "--run", "a", "--device", "cuda:1"); err != nil ||
		!strings.Contains(out, "6 log-probs recomputed") || !strings.Contains(out, "max |ratio-1| = 0\n") {
		t.Errorf("verify: %v\n%s", err, out)
	}
	if out, err = run("PTXVM_FAIL=300:719", append(sample, "--store", "other", "--device", "cuda:1",
		"a")...); err == nil || !strings.Contains(out, "no device is left") {
		t.Errorf("with the last one lost: %v\n%s", err, out)
	}
}
