//go:build cuda

// Package cuext is the calls of the CUDA driver that gorgonia.org/cu lacks: memory of the host
// that copies need not move first, shared memory beyond 48 KiB, why a text of PTX was refused.
package cuext

/*
#include <stddef.h>
#include <stdlib.h>

static int call_alloc(void *f, void **p, size_t n) { return ((int (*)(void **, size_t, unsigned))f)(p, n, 0); }
static int call_attribute(void *f, void *fn, int attribute,
	int value) { return ((int (*)(void *, int, int))f)(fn, attribute, value); }

// CU_JIT_ERROR_LOG_BUFFER and its size.
static int call_load(void *f, void **module, const char *image, char *log, size_t size) {
  int options[2] = {5, 6};
  void *values[2] = {log, (void *)size};
  return ((int (*)(void **, const void *, unsigned, int *, void **))f)(module, image, 2, options, values);
}
*/
import "C"

import (
	"strings"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/internal/cudashim"
)

// maxDynamicShared is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
const maxDynamicShared = 8

func result(code C.int) error {
	if code == 0 {
		return nil
	}
	return driver.Code(code)
}

// HostAlloc allocates so many bytes of page-locked host memory.
func HostAlloc(bytes int) ([]byte, error) {
	f := cudashim.Symbol("cuMemHostAlloc")
	if f == nil {
		return nil, driver.ErrNotFound
	}
	var p unsafe.Pointer
	if err := result(C.call_alloc(f, &p, C.size_t(bytes))); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), bytes), nil
}

// HostFree gives it back.
func HostFree(b []byte) error { return cu.MemFreeHost(unsafe.Pointer(unsafe.SliceData(b))) }

// SetMaxDynamicShared lets launches of a kernel have so many bytes of dynamic shared memory.
func SetMaxDynamicShared(f cu.Function, bytes int) error {
	set := cudashim.Symbol("cuFuncSetAttribute")
	if set == nil {
		return driver.ErrNotFound
	}
	return result(C.call_attribute(set, *(*unsafe.Pointer)(unsafe.Pointer(&f)), maxDynamicShared, C.int(bytes)))
}

// LoadModule loads a text of PTX. An error has what the compiler of the driver says.
func LoadModule(ptx string) (m cu.Module, log string, err error) {
	load := cudashim.Symbol("cuModuleLoadDataEx")
	if load == nil {
		return m, "", driver.ErrNotFound
	}
	const size = 8 << 10
	text, buffer := C.CString(ptx), (*C.char)(C.calloc(size, 1))
	defer C.free(unsafe.Pointer(text))
	defer C.free(unsafe.Pointer(buffer))
	err = result(C.call_load(load, (*unsafe.Pointer)(unsafe.Pointer(&m)), text, buffer, size-1))
	return m, strings.TrimSpace(C.GoString(buffer)), err
}
