//go:build cuda

package cuda_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/tensortest"
)

// All operations in bf16 with products by cuBLASLt: the real one on a GPU, or one that
// computes by the processor and refuses what the real one would not understand.
func TestGPU_ProductsOfCuBLASLt(t *testing.T) {
	if _, err := cuda.Count(); errors.Is(err, cuda.ErrNone) && !child() {
		path, err := interpreted()
		if err != nil {
			t.Fatal(err)
		}
		// Where pip puts it.
		dir := t.TempDir()
		blas := filepath.Join(dir, "lib/python3.12/site-packages/nvidia/cu12/lib/libcublasLt.so.12")
		if err := os.MkdirAll(filepath.Dir(blas), 0o700); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("gcc", "-shared", "-fPIC", "-O2", "-o", blas,
			"internal/cublaslt/testdata/cublaslt.c",
			"-lm", "-ldl").CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if out, err := again(t, "MEANDER_LIBCUDA="+path, "MEANDER_LIBCUBLASLT=", "VIRTUAL_ENV="+dir); err != nil ||
			!strings.Contains(out, "/bf16/cublasLt-12.4.5/nondeterministic") ||
			strings.Count(out, "status 13 of cublasLt-12.4.5: product not supported; the own kernels do it") != 1 {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	d, err := cuda.Open(0, cuda.Options{Factors: tensor.BF16, Warn: func(err error) { t.Log(err) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("on %s", d.Name())
	if !strings.Contains(d.Name(), "cublasLt") {
		t.Skip("no cuBLASLt; name the file with MEANDER_LIBCUBLASLT")
	}
	fixed, err := cuda.Open(0, cuda.Options{Factors: tensor.BF16, Deterministic: true})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(fixed.Name(), "cublasLt") {
		t.Errorf("deterministic, on %s", fixed.Name())
	}
	if err := fixed.Close(); err != nil {
		t.Error(err)
	}
	for _, cs := range tensortest.Cases() {
		closeInBF16(t, d, cs)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
