//go:build cuda

package integration_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// forGPUs has the program for GPUs and a driver of interpreted ones, in a folder where they stay.
var forGPUs = sync.OnceValues(func() (dir string, err error) {
	if dir, err = filepath.Abs(filepath.Join(root, "build", "test-cuda")); err != nil {
		return "", err
	}
	for _, build := range [][]string{
		{"-o", filepath.Join(dir, "meander"), "./services/cmd/meander"},
		{"-buildmode=c-shared", "-o", filepath.Join(dir, "libcuda.so"), "./integration/tools/libcuda"},
	} {
		c := exec.Command("go", append([]string{"build", "-tags", "cuda,netgo,osusergo"}, build...)...)
		c.Dir = root
		if out, err := c.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%w\n%s", err, out)
		}
	}
	return dir, nil
})

// onInterpretedGPUs returns a function that runs the program for GPUs with two interpreted ones and one more variable
// of the environment.
func onInterpretedGPUs(t *testing.T) (run func(env string, args ...string) (string, error)) {
	t.Helper()
	programs, err := forGPUs()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	models, err := filepath.Abs(filepath.Join(root, "deploy", "models"))
	if err != nil {
		t.Fatal(err)
	}
	return func(env string, args ...string) (string, error) {
		c := exec.Command(filepath.Join(programs, "meander"), args...)
		c.Dir, c.Env = dir, append(os.Environ(), "MEANDER_MODELS="+models,
			"MEANDER_LIBCUDA="+filepath.Join(programs, "libcuda.so"), "PTXVM_UNCHECKED=1", "PTXVM_GPUS=2", env)
		out, err := c.CombinedOutput()
		return string(out), err
	}
}

// A program for GPUs that computes on the CPU, or leaves a GPU out, warns and says why.
func TestGPU_WarnsOfGPUsNotUsed(t *testing.T) {
	run := onInterpretedGPUs(t)
	sample := []string{
		"run", "--log-level", "warn", "--group-size", "1", "--steps", "1", "--height", "32", "--width", "32",
		"--out", "-",
	}
	for env, want := range map[string][]string{
		"PTXVM_INIT=802": {"no GPU; computes on the CPU", "(CUresult 802)", "start nvidia-fabricmanager"},
		"PTXVM_CAPABILITIES=75,61": {
			"no GPU; computes on the CPU", "cuda:0: ptxvm has compute capability 7.5",
			"cuda:1: ptxvm has compute capability 6.1",
		},
		"PTXVM_CAPABILITIES=75": {"GPU left out", "cuda:0: ptxvm has compute capability 7.5"},
	} {
		out, err := run(env, append(sample, "--store", strings.ReplaceAll(env, ",", "-"), "a")...)
		for _, text := range append(want, "1 of 1 groups complete") {
			if err != nil || !strings.Contains(out, text) {
				t.Errorf("%s: %v, want %s in\n%s", env, err, text, out)
			}
		}
	}
}

// doctor counts the GPUs that can be used, and says what is wrong with the others.
func TestGPU_DoctorCountsUsable(t *testing.T) {
	run := onInterpretedGPUs(t)
	for env, want := range map[string][]string{
		"PTXVM_CAPABILITIES=75":    {"CUDA: 1 GPU", "CUDA: cuda:0: ptxvm has compute capability 7.5", "CUDA_VISIBLE_DEVICES"},
		"PTXVM_CAPABILITIES=75,61": {"CUDA: no GPU that is new enough", "CUDA: cuda:1: ptxvm has compute capability 6.1"},
		"PTXVM_CAPABILITIES=":      {"CUDA: 2 GPUs"},
	} {
		out, _ := run(env, "doctor", "--store", strings.ReplaceAll(env, ",", "-"))
		for _, text := range want {
			if !strings.Contains(out, text) {
				t.Errorf("%s: want %s in\n%s", env, text, out)
			}
		}
	}
}

// The program computes on two interpreted GPUs. One is lost in the middle: its samples are made on
// the other, and all of them prove right. With the last one the program ends.
func TestGPU_Lost(t *testing.T) {
	run := onInterpretedGPUs(t)
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

// A sampler on a GPU keeps a LoRA beside its weights; the processor, which adds it to them, finds the same log-probs.
func TestGPU_LoRA(t *testing.T) {
	run := onInterpretedGPUs(t)
	adapter, err := filepath.Abs(filepath.Join(root, "deploy", "models", "signs-flow-grpo"))
	if err != nil {
		t.Fatal(err)
	}
	out, err := run("", "run", "--run", "a", "--group-size", "1", "--steps", "2", "--height", "32", "--width", "32",
		"--out", "-", "--device", "cuda:0", "--adapter", adapter, "a")
	if err != nil || !strings.Contains(out, "1 of 1 groups complete, 1 sample,") {
		t.Fatalf("run: %v\n%s", err, out)
	}
	out, err = run("", "verify", "--run", "a", "--device", "cpu", "--tolerance", "1e-5")
	if err != nil || !strings.Contains(out, "2 log-probs recomputed, 1 pushed version fetched") ||
		!strings.Contains(out, "\nverified") {
		t.Errorf("verify on the processor: %v\n%s", err, out)
	}
}
