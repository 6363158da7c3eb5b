//go:build cuda

package cuda_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/tensortest"
)

// libraryDir is where the tests of this process build a driver library.
var libraryDir string

// interpreted is the path of a driver library whose GPUs are interpreted.
var interpreted = sync.OnceValues(func() (string, error) {
	path := filepath.Join(libraryDir, "libcuda.so")
	out, err := exec.Command("go", "build", "-tags", "cuda,netgo,osusergo", "-buildmode=c-shared", "-o", path,
		"../../../../integration/tools/libcuda").CombinedOutput()
	if err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
})

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "libcuda")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a folder of this test
	libraryDir = dir
	return m.Run()
}

// again runs a test in a process of its own, where the driver's library is another one.
func again(t *testing.T, env ...string) (output string, err error) {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run", "^"+strings.ReplaceAll(t.Name(), "/", "$/^")+"$", "-test.v")
	c.Env = append(os.Environ(), env...)
	out, err := c.CombinedOutput()
	return string(out), err
}

// child says that this process is one of again.
func child() bool { return os.Getenv("MEANDER_LIBCUDA") != "" }

// onGPU runs a test on the first GPU, or on an interpreted one where there is none and
// MEANDER_GPU does not ask for a real one.
func onGPU(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	_, err := cuda.Count()
	switch {
	case err == nil:
		test(t)
		return
	case !errors.Is(err, cuda.ErrNone) || child() || os.Getenv("MEANDER_GPU") != "":
		t.Fatal(err)
	}
	path, err := interpreted()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := again(t, "MEANDER_LIBCUDA="+path, "PTXVM_UNCHECKED="+unchecked(t)); err != nil ||
		strings.Contains(out, "still taken") || !strings.Contains(out, "--- PASS: "+t.Name()) {
		t.Fatalf("%v\n%s", err, out)
	}
}

// unchecked is set for what takes long on an interpreted GPU: that these kernels and launches read only what was
// written, and in order, is checked without the library, by TestDevice_Conformance.
func unchecked(t *testing.T) string {
	if t.Name() == "TestGPU_Conformance" || strings.HasPrefix(t.Name(), "TestGPU_Signs/") ||
		strings.HasPrefix(t.Name(), "TestGPU_Paints") {
		return "1"
	}
	return ""
}

// All operations through gorgonia.org/cu and the shim.
func TestGPU_Conformance(t *testing.T) {
	onGPU(t, func(t *testing.T) {
		d := openGPU(t, tensor.F32)
		t.Logf("on %s", d.Name())
		tensortest.Run(t, d)
	})
}

func openGPU(t *testing.T, factors tensor.DType) *cuda.Device {
	t.Helper()
	return openGPUAs(t, cuda.Options{Factors: factors})
}

func openGPUAs(t *testing.T, o cuda.Options) *cuda.Device {
	t.Helper()
	d, err := cuda.Open(0, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// The shipped checkpoint on a GPU: in float32 beside the CPU, in bf16 beside that.
func TestGPU_Signs(t *testing.T) {
	t.Run("F32", func(t *testing.T) {
		onGPU(t, func(t *testing.T) { signsOnGPU(t, tensor.F32, 1e-5) })
	})
	t.Run("BF16", func(t *testing.T) {
		onGPU(t, func(t *testing.T) { signsOnGPU(t, tensor.BF16, 1e-2) })
	})
}

func signsOnGPU(t *testing.T, factors tensor.DType, tolerance float64) {
	host, height, width := processor(t, 0), signHeight, signWidth
	if child() { // each pixel takes an interpreted one long
		height, width = height/2, width/2
	}
	const prompt = `a red sign that says "A"`
	want := paint(t, host, prompt, 1, height, width)
	got := paint(t, openGPU(t, factors), prompt, 1, height, width)
	e := distance(got.velocity, want.velocity)
	t.Logf("relative L2 distance of the velocity %.2g, of the pixels %.2g; at most %g and %g", e,
		distance(got.pixels, want.pixels), tolerance, 10*tolerance)
	if !(e <= tolerance) || !(distance(got.pixels, want.pixels) <= 10*tolerance) {
		t.Error("too far from the CPU")
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
	for _, tt := range []struct {
		fail string
		lost bool
		want string
	}{
		{"0:719", true, "launch failed"},
		{"3:700", true, "illegal address"},
		{"5:999", true, "the driver does not know"},
		{"8:46", true, "the GPU is busy"},
		{"0:701", false, "launch out of resources"},
	} {
		out, err := again(t, "MEANDER_LIBCUDA="+path, "PTXVM_FAIL="+tt.fail)
		if err != nil || !strings.Contains(out, tt.want) || strings.Contains(out, "the device is lost") != tt.lost ||
			strings.Contains(out, "still taken") {
			t.Errorf("PTXVM_FAIL=%s: %v, want %q, lost %v, in\n%s", tt.fail, err, tt.want, tt.lost, out)
		}
	}
	step, n := 9, 1 // the long form fails each call of the driver
	if os.Getenv("MEANDER_SOAK") != "" {
		step = 1
	}
	for ; ; n += step {
		out, err := again(t, "MEANDER_LIBCUDA="+path, fmt.Sprintf("PTXVM_FAIL=%d:719", n))
		if strings.Contains(out, "nothing failed") {
			break
		}
		if err != nil || !strings.Contains(out, "the device is lost") || !strings.Contains(out, "launch failed") {
			t.Errorf("call %d: %v\n%s", n, err, out)
		}
	}
	if n < 30 {
		t.Errorf("only %d calls of the driver", n)
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
	case !lost && next != nil:
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
			{"MEANDER_LIBCUDA=/nowhere/libcuda.so.1", "no CUDA driver: /nowhere/libcuda.so.1: cannot open shared object " +
				"file: No such file or directory; must be cpu, or install NVIDIA's driver"},
			{"PTXVM_GPUS=0", "the CUDA driver finds no GPU; must be cpu"},
			{"PTXVM_INIT=34", "a stub to link with, not a driver (CUresult 34); must be cpu, or take it out of"},
			{"PTXVM_INIT=36", "older than the CUDA beside it (CUresult 36); must be cpu, or install a newer driver"},
			{"PTXVM_INIT=802", "are not ready (CUresult 802); must be cpu, or start nvidia-fabricmanager"},
			{"PTXVM_INIT=803", "have different versions (CUresult 803); must be cpu, or restart the machine"},
			{"PTXVM_INIT=804", "cuda-compat does not work with these GPUs (CUresult 804); must be cpu, or take it out of"},
			{"PTXVM_INIT=3", "the CUDA driver does not start (CUresult 3); must be cpu, or look for the reason in dmesg"},
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

// A checkpoint with heads of 128 on a GPU, from noise to pixels, with a LoRA pushed on the way.
func TestGPU_PaintsAndTakesALoRA(t *testing.T) {
	for factors, tolerance := range map[tensor.DType]float64{tensor.F32: 1e-5, tensor.BF16: 3e-2} {
		t.Run(string(factors), func(t *testing.T) {
			onGPU(t, func(t *testing.T) {
				host := processor(t, 0)
				checkPushed(t, host, openGPU(t, factors), tolerance)
			})
		})
	}
}
