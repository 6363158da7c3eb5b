//go:build cuda

// Package cublaslt is products of bf16 by NVIDIA's cuBLASLt, which it opens when it is asked
// to: a program with it runs without that library. It knows no header of it; the layouts of
// what is passed are the same in its versions 11 to 13.
package cublaslt

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  void *library, *handle;
  int (*create)(void **);
  int (*destroy)(void *);
  size_t (*version)(void);
  int (*desc_create)(void **, int compute, int scale);
  int (*desc_set)(void *, int attribute, const void *, size_t);
  int (*desc_destroy)(void *);
  int (*layout_create)(void **, int type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*layout_destroy)(void *);
  int (*preference_create)(void **);
  int (*preference_set)(void *, int attribute, const void *, size_t);
  int (*preference_destroy)(void *);
  int (*heuristic)(void *, void *, void *, void *, void *, void *, void *, int, void *, int *);
  int (*matmul)(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
	void *, void *, void *,
                const void *, void *, size_t, void *);
} blas;

// What the library answers for a product: 96 bytes.
typedef struct {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} choice;

typedef struct {
  void *desc, *w, *x, *dst;
  choice chosen;
} plan;

static blas *blas_open(const char *path) {
  blas *b = calloc(1, sizeof *b);
  b->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!b->library) {
    free(b);
    return 0;
  }
  int missing = 0;
#define FIND(field, name) missing |= !(*(void **)&b->field = dlsym(b->library, "cublasLt" name))
  FIND(create, "Create");
  FIND(destroy, "Destroy");
  FIND(version, "GetVersion");
  FIND(desc_create, "MatmulDescCreate");
  FIND(desc_set, "MatmulDescSetAttribute");
  FIND(desc_destroy, "MatmulDescDestroy");
  FIND(layout_create, "MatrixLayoutCreate");
  FIND(layout_destroy, "MatrixLayoutDestroy");
  FIND(preference_create, "MatmulPreferenceCreate");
  FIND(preference_set, "MatmulPreferenceSetAttribute");
  FIND(preference_destroy, "MatmulPreferenceDestroy");
  FIND(heuristic, "MatmulAlgoGetHeuristic");
  FIND(matmul, "Matmul");
  if (missing || b->create(&b->handle)) {
    dlclose(b->library);
    free(b);
    return 0;
  }
  return b;
}

static size_t blas_version(blas *b) { return b->version(); }

static void blas_close(blas *b) {
  b->destroy(b->handle);
  dlclose(b->library);
  free(b);
}

enum { F32 = 0, BF16 = 14, COMPUTE_F32 = 68, TRANSPOSED = 1, TRANSA = 3, EPILOGUE = 7, BIAS_POINTER = 8,
	MAX_WORKSPACE = 1, ALIGNMENT_A = 5 };

static void plan_close(blas *b, plan *p) {
  if (p->desc) b->desc_destroy(p->desc);
  if (p->w) b->layout_destroy(p->w);
  if (p->x) b->layout_destroy(p->x);
  if (p->dst) b->layout_destroy(p->dst);
  free(p);
}

// The library counts columns first, so that it sees each matrix transposed, and computes
// dst^T [n, m] = w x^T, w being the transpose of what it sees. alignments are those of w, x, dst and
// dst in bytes: else it takes 256 for granted.
static plan *plan_open(blas *b, int64_t m, int64_t n, int64_t k, int64_t dst_stride, int64_t x_stride, int64_t w_stride,
	int bf16, int epilogue,
                       size_t workspace, const uint32_t *alignments, int *status) {
  plan *p = calloc(1, sizeof *p);
  void *preference = 0;
  int transposed = TRANSPOSED, found = 0;
  *status = b->desc_create(&p->desc, COMPUTE_F32, F32);
  if (!*status) *status = b->desc_set(p->desc, TRANSA, &transposed, sizeof transposed);
  if (!*status) *status = b->desc_set(p->desc, EPILOGUE, &epilogue, sizeof epilogue);
  if (!*status) *status = b->layout_create(&p->w, BF16, k, n, w_stride);
  if (!*status) *status = b->layout_create(&p->x, BF16, k, m, x_stride);
  if (!*status) *status = b->layout_create(&p->dst, bf16 ? BF16 : F32, n, m, dst_stride);
  if (!*status) *status = b->preference_create(&preference);
  if (!*status) *status = b->preference_set(preference, MAX_WORKSPACE, &workspace, sizeof workspace);
  for (int i = 0; !*status && i < 4; i++) *status = b->preference_set(preference, ALIGNMENT_A + i, &alignments[i],
	sizeof alignments[i]);
  if (!*status) *status = b->heuristic(b->handle, p->desc, p->w, p->x, p->dst, p->dst, preference, 1, &p->chosen,
	&found);
  if (!*status && (!found || p->chosen.state)) *status = 15; // not supported
  if (preference) b->preference_destroy(preference);
  if (*status) {
    plan_close(b, p);
    return 0;
  }
  return p;
}

static int multiply(blas *b, plan *p, uint64_t dst, uint64_t x, uint64_t w, uint64_t bias, int add,
	uint64_t workspace) {
  float one = 1, kept = add;
  int status = 0;
  if (bias) status = b->desc_set(p->desc, BIAS_POINTER, &bias, sizeof bias);
  if (status) return status;
  return b->matmul(b->handle, p->desc, &one, (void *)w, p->w, (void *)x, p->x, &kept, (void *)dst, p->dst, (void *)dst,
	p->dst, p->chosen.algorithm,
                   (void *)workspace, p->chosen.workspace, 0);
}
*/
import "C"

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"unsafe"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// names of the library, the newest first.
var names = []string{"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"}

// workspaceBytes is what the library may use of the device for a product.
const workspaceBytes = 32 << 20

// Products is the library, opened for the GPU whose context is current.
type Products struct {
	blas      *C.blas
	d         driver.Driver
	workspace driver.Pointer
	plans     map[shape]*C.plan // nil for what it does not support
}

// shape is a product without its addresses.
type shape struct {
	m, n, k, dst, x, w, epilogue int
	bf16                         bool
	alignments                   [4]C.uint32_t // of w, x, dst and dst again
}

// Open finds the library: the file that MEANDER_LIBCUBLASLT names, else where the loader looks, else
// in toolkits and in the packages of pip.
func Open(d driver.Driver) (*Products, error) {
	try := append(slices.Clone(names), installed()...)
	if path := os.Getenv("MEANDER_LIBCUBLASLT"); path != "" {
		try = []string{path}
	}
	p := &Products{d: d, plans: map[shape]*C.plan{}}
	for _, name := range try {
		c := C.CString(name)
		p.blas = C.blas_open(c)
		C.free(unsafe.Pointer(c))
		if p.blas != nil {
			break
		}
	}
	if p.blas == nil {
		return nil, fmt.Errorf("no cuBLASLt: none of %q opens; install it (pip install nvidia-cublas, or an image or "+
			"a toolkit of CUDA), or name the file with MEANDER_LIBCUBLASLT", try)
	}
	var err error
	if p.workspace, err = d.Alloc(workspaceBytes); err != nil {
		C.blas_close(p.blas)
		return nil, fmt.Errorf("workspace of cuBLASLt: %w", err)
	}
	return p, nil
}

// installed lists the library's files in the usual folders of toolkits and of pip, the newest version first.
func installed() []string {
	python, _ := exec.LookPath("python3")
	home, _ := os.UserHomeDir()
	var packages []string // folders of packages of Python
	for _, prefix := range []string{
		filepath.Dir(filepath.Dir(python)), os.Getenv("VIRTUAL_ENV"), os.Getenv("CONDA_PREFIX"),
		filepath.Join(home, ".local"), "/usr/local", "/usr",
	} {
		if filepath.IsAbs(prefix) {
			packages = append(packages, prefix+"/lib/python3*/site-packages", prefix+"/lib/python3*/dist-packages")
		}
	}
	folders := []string{
		"/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib", "/opt/cuda/lib64",
		os.Getenv("CUDA_HOME") + "/lib64",
	}
	for _, p := range packages {
		folders = append(folders, p+"/nvidia/*/lib")
	}
	var found []string
	for _, name := range names {
		for _, folder := range folders {
			files, _ := filepath.Glob(filepath.Join(folder, name))
			found = append(found, files...)
		}
	}
	return found
}

// Name is the library's with its version, e.g. cublasLt-12.4.5.
func (p *Products) Name() string {
	v := int(C.blas_version(p.blas)) // 120405, and 11 alike
	return fmt.Sprintf("cublasLt-%d.%d.%d", v/10000, v/100%100, v%100)
}

// Epilogues of the library.
const (
	epilogueNone = 1
	epilogueBias = 4
	epilogueGELU = 32
)

// Multiply enqueues a product.
func (p *Products) Multiply(q driver.Product) error {
	to := alignment(q.Dst)
	s := shape{
		m: q.M, n: q.N, k: q.K, dst: q.DstStride, x: q.XStride, w: q.WStride, bf16: q.BF16,
		alignments: [4]C.uint32_t{alignment(q.W), alignment(q.X), to, to},
	}
	if q.Bias != 0 {
		s.epilogue |= epilogueBias
	}
	if q.GELU {
		s.epilogue |= epilogueGELU
	}
	if s.epilogue == 0 {
		s.epilogue = epilogueNone
	}
	plan, ok := p.plans[s]
	if !ok {
		bf16 := C.int(0)
		if s.bf16 {
			bf16 = 1
		}
		var status C.int
		plan = C.plan_open(p.blas, C.int64_t(s.m), C.int64_t(s.n), C.int64_t(s.k), C.int64_t(s.dst), C.int64_t(s.x),
			C.int64_t(s.w), bf16, C.int(s.epilogue), workspaceBytes, &s.alignments[0], &status)
		if len(p.plans) >= 4096 { // shapes follow the lengths of prompts
			for old, l := range p.plans {
				p.close(l)
				delete(p.plans, old)
			}
		}
		p.plans[s] = plan
	}
	if plan == nil {
		return driver.ErrUnsupported
	}
	add := C.int(0)
	if q.Add {
		add = 1
	}
	status := C.multiply(p.blas, plan, C.uint64_t(q.Dst), C.uint64_t(q.X), C.uint64_t(q.W), C.uint64_t(q.Bias), add,
		C.uint64_t(p.workspace))
	if status != 0 {
		p.close(plan)
		p.plans[s] = nil // not again
		return fmt.Errorf("product of %d x %d x %d: status %d of %s: %w", q.M, q.N, q.K, int(status), p.Name(),
			driver.ErrUnsupported)
	}
	return nil
}

// alignment is the largest power of two that divides an address, 256 at most: more makes no difference.
func alignment(at driver.Pointer) C.uint32_t { return C.uint32_t(min(256, at&-at)) }

func (p *Products) close(l *C.plan) {
	if l != nil {
		C.plan_close(p.blas, l)
	}
}

// Close gives everything back.
func (p *Products) Close() error {
	for _, l := range p.plans {
		p.close(l)
	}
	C.blas_close(p.blas)
	return p.d.Free(p.workspace)
}
