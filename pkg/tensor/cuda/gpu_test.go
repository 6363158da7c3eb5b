//go:build cuda

package cuda_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cuda"
	"github.com/meander-rl/meander/pkg/tensor/tensortest"
)

// interpreted is the path of a driver library whose GPUs are interpreted.
var interpreted = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "libcuda")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "libcuda.so")
	out, err := exec.Command("go", "build", "-tags", "cuda", "-buildmode=c-shared", "-o", path, "./internal/libcuda").CombinedOutput()
	if err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
})

func TestMain(m *testing.M) {
	status := m.Run()
	if path, err := interpreted(); err == nil && os.Getenv("MEANDER_LIBCUDA") == "" {
		_ = os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(status)
}

// again runs a test in a process of its own, where the driver's library is another one.
func again(t *testing.T, env ...string) (output string, err error) {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	c.Env = append(os.Environ(), env...)
	out, err := c.CombinedOutput()
	return string(out), err
}

// child says that this process is one of again.
func child() bool { return os.Getenv("MEANDER_LIBCUDA") != "" }

// All operations through gorgonia.org/cu and the shim: on the first GPU, or an interpreted one
// where there is none.
func TestGPU_Conformance(t *testing.T) {
	if _, err := cuda.Count(); errors.Is(err, cuda.ErrNone) && !child() {
		path, err := interpreted()
		if err != nil {
			t.Fatal(err)
		}
		if out, err := again(t, "MEANDER_LIBCUDA="+path); err != nil || strings.Contains(out, "still taken") || !strings.Contains(out, "--- PASS: TestGPU_Conformance/") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	d, err := cuda.Open(0, cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("on %s", d.Name())
	tensortest.Run(t, d)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A fault of the GPU in any call of the driver is an error of the pass. After the ones that a GPU
// survives the next pass is right; after the others the device says that it is lost.
func TestGPU_Faults(t *testing.T) {
	if child() {
		faultyPass(t)
		return
	}
	path, err := interpreted()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ fail, want string }{
		{"0:719", "the device is lost: launch failed"},
		{"3:700", "lost: illegal address"},
		{"5:999", "lost: the driver does not know"},
		{"8:46", "lost: the GPU is busy"},
		{"0:701", "launch out of resources"},
	} {
		out, err := again(t, "MEANDER_LIBCUDA="+path, "PTXVM_FAIL="+tt.fail)
		if err != nil || !strings.Contains(out, tt.want) || strings.Contains(out, "still taken") {
			t.Errorf("PTXVM_FAIL=%s: %v, want %q in\n%s", tt.fail, err, tt.want, out)
		}
	}
}

func faultyPass(t *testing.T) {
	d, err := cuda.Open(0, cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = pass(d)
	if err == nil {
		t.Fatal("nothing failed")
	}
	_, next := pass(d)
	switch lost := errors.Is(err, tensor.ErrDeviceLost); {
	case lost && !errors.Is(next, tensor.ErrDeviceLost):
		t.Errorf("after %v the next pass returned %v", err, next)
	case lost:
		t.Logf("lost: %v", err)
	case next != nil:
		t.Errorf("after %v the next pass returned %v", err, next)
	}
	t.Log(err)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// Without a driver the same program starts and says what is missing.
func TestGPU_NoDriver(t *testing.T) {
	if !child() {
		for _, tt := range []struct{ env, want string }{
			{"MEANDER_LIBCUDA=/nowhere/libcuda.so.1", "no CUDA driver: /nowhere/libcuda.so.1: cannot open shared object file: No such file or directory; must be cpu, or install NVIDIA's driver"},
			{"PTXVM_GPUS=0", "the CUDA driver finds no GPU; must be cpu"},
			{"PTXVM_GPUS=2", "no such GPU; must be one of cuda:0 to cuda:1"},
		} {
			path, err := interpreted()
			if err != nil {
				t.Fatal(err)
			}
			out, err := again(t, "MEANDER_LIBCUDA="+path, tt.env)
			if err != nil || !strings.Contains(out, tt.want) {
				t.Errorf("%s: %v, want %q in\n%s", tt.env, err, tt.want, out)
			}
		}
		return
	}
	_, err := cuda.Open(7, cuda.Options{})
	t.Logf("cuda:7: %v", err)
	if n, _ := cuda.Count(); n == 0 && !errors.Is(err, cuda.ErrNone) {
		t.Errorf("%v; want ErrNone", err)
	}
}
