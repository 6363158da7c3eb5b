//go:build cuda

// Command libcuda is a CUDA driver library of interpreted GPUs, for tests of a whole program:
//
//	.ci/cuda go build -tags cuda -buildmode=c-shared -o build/libcuda.so ./integration/tools/libcuda
//	MEANDER_LIBCUDA=build/libcuda.so PTXVM_GPUS=2 bin/meander up --device cuda:0,cuda:1
//
// It has what package gpu calls, and no more. PTXVM_FAIL=n:code makes the n-th call from the
// first launch on fail with a CUresult, and all after it where a GPU that did that is lost;
// PTXVM_MEMORY is the bytes of each GPU, PTXVM_CAPABILITIES=75,80 the compute capability of the
// first ones (the others have 80). PTXVM_INIT is the CUresult of cuInit.
package main

/*
#include <stdint.h>
#include <stdlib.h>

// The contexts of a thread, as a GPU's number plus 1.
static __thread uintptr_t stack[16];
static __thread int depth;
static int push(uintptr_t c) { if (depth == 16) return 0; stack[depth++] = c; return 1; }
static uintptr_t pop(void) { return depth ? stack[--depth] : 0; }
static uintptr_t current(void) { return depth ? stack[depth - 1] : 0; }
static uint64_t param(void **p, int i, int size) { return size == 8 ? *(uint64_t *)p[i] : *(uint32_t *)p[i]; }
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"runtime/cgo"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

func main() {}

// Codes of calls that no driver.Driver has.
const (
	noDevice       = 100
	invalidDevice  = 101
	invalidContext = 201
)

// gpu is one interpreted GPU.
type gpu struct {
	mu   sync.Mutex
	vm   *ptxvm.VM
	lost driver.Code // what all calls answer from now on; 0: they work
	host map[unsafe.Pointer]int

	launches int
	sleeps   bool // who waits for its context
	queues        // of streams and events
}

var (
	gpus []*gpu

	fault struct {
		sync.Mutex
		calls int // until the one that fails; negative: none does
		code  driver.Code
		armed bool // since the first launch
	}
)

func setting(name string, otherwise int) int {
	n, err := strconv.Atoi(os.Getenv(name))
	if err != nil {
		return otherwise
	}
	return n
}

//export cuInit
func cuInit(flags C.uint) C.int {
	fault.calls = -1
	if text := os.Getenv("PTXVM_FAIL"); text != "" {
		if _, err := fmt.Sscanf(text, "%d:%d", &fault.calls, &fault.code); err != nil {
			fmt.Fprintf(os.Stderr, "PTXVM_FAIL: %q; must be n:code\n", text)
			return C.int(driver.ErrInvalidValue)
		}
	}
	for range setting("PTXVM_GPUS", 1) {
		o := ptxvm.Options{Memory: setting("PTXVM_MEMORY", 0), Unchecked: os.Getenv("PTXVM_UNCHECKED") != ""}
		gpus = append(gpus, &gpu{vm: ptxvm.New(o), host: map[unsafe.Pointer]int{}, queues: newQueues()})
	}
	if len(gpus) == 0 {
		return noDevice
	}
	return C.int(setting("PTXVM_INIT", 0))
}

// injected is the fault whose turn it is.
func injected(launch bool) driver.Code {
	fault.Lock()
	defer fault.Unlock()
	fault.armed = fault.armed || launch
	if !fault.armed || fault.calls < 0 {
		return 0
	}
	fault.calls--
	if fault.calls >= 0 {
		return 0
	}
	return fault.code
}

// on runs a call on the GPU whose context is current.
func on(launch bool, f func(g *gpu) error) C.int {
	c := int(C.current())
	if c == 0 {
		return invalidContext
	}
	g := gpus[c-1]
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.lost != 0 {
		return C.int(g.lost)
	}
	if code := injected(launch); code != 0 {
		if code.Lost() {
			g.lost = code
		}
		return C.int(code)
	}
	err := f(g)
	if err == nil {
		return 0
	}
	code, ok := errors.AsType[driver.Code](err)
	if !ok {
		code = driver.ErrInvalidValue
	}
	fmt.Fprintln(os.Stderr, "libcuda of ptxvm:", err)
	return C.int(code)
}

//export cuDriverGetVersion
func cuDriverGetVersion(version *C.int) C.int {
	*version = 12040
	return 0
}

//export cuDeviceGetCount
func cuDeviceGetCount(count *C.int) C.int {
	*count = C.int(len(gpus))
	return 0
}

//export cuDeviceGet
func cuDeviceGet(device *C.int, ordinal C.int) C.int {
	if ordinal < 0 || int(ordinal) >= len(gpus) {
		return invalidDevice
	}
	*device = ordinal
	return 0
}

//export cuDeviceGetName
func cuDeviceGetName(name *C.char, size, device C.int) C.int {
	to := unsafe.Slice((*byte)(unsafe.Pointer(name)), int(size))
	to[copy(to[:len(to)-1], gpus[device].vm.Name())] = 0
	return 0
}

//export cuDeviceGetAttribute
func cuDeviceGetAttribute(value *C.int, attribute, device C.int) C.int {
	capability := 80
	if list := strings.Split(os.Getenv("PTXVM_CAPABILITIES"), ","); int(device) < len(list) {
		if n, err := strconv.Atoi(list[device]); err == nil {
			capability = n
		}
	}
	switch attribute {
	case 75: // compute capability, major
		*value = C.int(capability / 10)
	case 76: // and minor
		*value = C.int(capability % 10)
	default:
		return C.int(driver.ErrInvalidValue)
	}
	return 0
}

//export cuDevicePrimaryCtxSetFlags_v2
func cuDevicePrimaryCtxSetFlags_v2(device C.int, flags C.uint) C.int {
	gpus[device].sleeps = flags == 4 // CU_CTX_SCHED_BLOCKING_SYNC
	return 0
}

//export cuDevicePrimaryCtxRetain
func cuDevicePrimaryCtxRetain(context *C.uintptr_t, device C.int) C.int {
	if !gpus[device].sleeps {
		fmt.Fprintln(os.Stderr, "libcuda of ptxvm: a context whose waits take a core")
		return C.int(driver.ErrInvalidValue)
	}
	*context = C.uintptr_t(device) + 1
	return 0
}

//export cuDevicePrimaryCtxRelease_v2
func cuDevicePrimaryCtxRelease_v2(device C.int) C.int {
	g := gpus[device]
	if used, n := g.vm.Used(), len(g.host)+len(g.streams)+len(g.events); used+n != 0 && g.lost == 0 {
		fmt.Fprintf(os.Stderr, "libcuda of ptxvm: %d bytes, and %d of memory of the host, streams and events, are "+
			"still taken\n", used, n)
	}
	return 0
}

//export cuCtxPushCurrent_v2
func cuCtxPushCurrent_v2(context C.uintptr_t) C.int {
	if C.push(context) == 0 {
		return invalidContext
	}
	return 0
}

//export cuCtxPopCurrent_v2
func cuCtxPopCurrent_v2(context *C.uintptr_t) C.int {
	if *context = C.pop(); *context == 0 {
		return invalidContext
	}
	return 0
}

//export cuCtxSynchronize
func cuCtxSynchronize() C.int {
	return on(false, func(g *gpu) error { return g.vm.Sync() })
}

//export cuMemGetInfo_v2
func cuMemGetInfo_v2(free, total *C.size_t) C.int {
	return on(false, func(g *gpu) error {
		f, t, err := g.vm.Memory()
		*free, *total = C.size_t(f), C.size_t(t)
		return err
	})
}

//export cuMemAlloc_v2
func cuMemAlloc_v2(p *C.uint64_t, size C.size_t) C.int {
	return on(false, func(g *gpu) error {
		at, err := g.vm.Alloc(int(size))
		*p = C.uint64_t(at)
		return err
	})
}

//export cuMemFree_v2
func cuMemFree_v2(p C.uint64_t) C.int {
	return on(false, func(g *gpu) error { return g.vm.Free(driver.Pointer(p)) })
}

//export cuMemHostAlloc
func cuMemHostAlloc(p *unsafe.Pointer, size C.size_t, _ C.uint) C.int {
	return on(false, func(g *gpu) error {
		*p = C.malloc(size)
		g.host[*p] = int(size)
		return nil
	})
}

//export cuMemFreeHost
func cuMemFreeHost(p unsafe.Pointer) C.int {
	return on(false, func(g *gpu) error {
		if _, ok := g.host[p]; !ok {
			return driver.ErrInvalidValue
		}
		delete(g.host, p)
		C.free(p)
		return nil
	})
}

//export cuMemcpyHtoD_v2
func cuMemcpyHtoD_v2(dst C.uint64_t, src unsafe.Pointer, size C.size_t) C.int {
	return on(false, func(g *gpu) error {
		return g.vm.CopyIn(driver.Pointer(dst), unsafe.Slice((*byte)(src), int(size)))
	})
}

//export cuMemcpyDtoH_v2
func cuMemcpyDtoH_v2(dst unsafe.Pointer, src C.uint64_t, size C.size_t) C.int {
	return on(false, func(g *gpu) error {
		return g.vm.CopyOut(unsafe.Slice((*byte)(dst), int(size)), driver.Pointer(src))
	})
}

//export cuModuleLoadDataEx
func cuModuleLoadDataEx(
	module *C.uintptr_t, image *C.char, count C.uint, options *C.int, values *unsafe.Pointer,
) C.int {
	return on(false, func(g *gpu) error {
		m, err := g.vm.LoadModule([]byte(C.GoString(image)))
		if err == nil {
			*module = C.uintptr_t(cgo.NewHandle(m))
		}
		return err
	})
}

//export cuModuleGetFunction
func cuModuleGetFunction(function *C.uintptr_t, module C.uintptr_t, name *C.char) C.int {
	return on(false, func(*gpu) error {
		f, err := cgo.Handle(module).Value().(driver.Module).Function(C.GoString(name))
		if err == nil {
			*function = C.uintptr_t(cgo.NewHandle(f))
		}
		return err
	})
}

//export cuFuncSetAttribute
func cuFuncSetAttribute(function C.uintptr_t, attribute, value C.int) C.int {
	return on(false, func(*gpu) error { return nil })
}

//export cuLaunchKernel
func cuLaunchKernel(
	function C.uintptr_t, bx, by, bz, tx, ty, tz, shared C.uint, stream unsafe.Pointer, params, extra *unsafe.Pointer,
) C.int {
	return on(true, func(g *gpu) error {
		f := cgo.Handle(function).Value()
		var args []driver.Arg
		for i, size := range ptxvm.ParamSizes(f) {
			args = append(args, driver.Arg(C.param(params, C.int(i), C.int(size))))
		}
		dim := func(x, y, z C.uint) driver.Dim { return driver.Dim{X: int(x), Y: int(y), Z: int(z)} }
		g.launches++
		return g.vm.Launch(f, driver.Grid{Blocks: dim(bx, by, bz), Threads: dim(tx, ty, tz), Shared: int(shared)},
			args...)
	})
}
