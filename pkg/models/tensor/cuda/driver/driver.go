// Package driver is the interface between a CUDA device and what runs its kernels: a GPU's driver,
// or package ptxvm, which interprets the same PTX without one.
package driver

import (
	"errors"
	"fmt"
	"math"
)

// Driver is one GPU. One goroutine uses it at a time, and binds itself to it first. Every call
// may fail; after the fault of a kernel all later ones do, with the same error.
type Driver interface {
	// Name is the device's, e.g. NVIDIA H100 80GB HBM3.
	Name() string
	// Capability is the compute capability, 90 for 9.0.
	Capability() int
	// Bind makes the GPU that of the calling goroutine until release, which it calls itself. All
	// calls below are made in between; it nests.
	Bind() (release func(), err error)
	// Memory is the bytes of the device that are free, and all it has.
	Memory() (free, total int, err error)
	// LoadModule makes the kernels of a PTX text ready to launch.
	LoadModule(ptx []byte) (Module, error)
	// Alloc allocates device memory with unspecified contents, aligned to 256 bytes. It fails
	// with ErrMemory when there is not enough.
	Alloc(bytes int) (Pointer, error)
	// Free gives back what Alloc returned.
	Free(p Pointer) error
	// Host allocates host memory that copies fast; FreeHost frees it.
	Host(bytes int) ([]byte, error)
	FreeHost(b []byte) error
	// CopyIn writes host memory to the device, CopyOut the other way. They follow the
	// launches before them; the host memory is the caller's again when they return.
	CopyIn(dst Pointer, src []byte) error
	CopyOut(dst []byte, src Pointer) error
	// Send is CopyIn of memory of Host in its turn among the launches: src is not to change until
	// Sync, or the Wait for a later Fetch, has returned.
	Send(dst Pointer, src []byte) error
	// Fetch copies what src is after the launches so far to memory of Host, beside launches that
	// come later. Both are its own until the Wait for it has returned.
	Fetch(dst []byte, src Pointer) (Event, error)
	// Wait waits for what Fetch returned, once. It alone may be called while another call is made.
	Wait(e Event) error
	// Launch enqueues a kernel. Launches run one after another.
	Launch(f Function, g Grid, args ...Arg) error
	// Sync waits for all launches and returns the fault of one that failed.
	Sync() error
	// Close gives the GPU back. What was taken from it has been given back before.
	Close() error
}

// Module is a loaded PTX text.
type Module interface {
	// Function finds a kernel by its name.
	Function(name string) (Function, error)
}

// Function is a kernel of a module; only its driver knows what it is.
type Function any

// Event is what Fetch has yet to do; only its driver knows what it is.
type Event any

// Pointer is an address in device memory; 0 is none.
type Pointer uint64

// Grid is the shape of a launch: blocks, threads of each, and the bytes of dynamic shared
// memory that a block has.
type Grid struct {
	Blocks, Threads Dim
	Shared          int
}

// Dim is a shape in blocks or threads; a zero counts as 1.
type Dim struct{ X, Y, Z int }

// Count is the number of blocks or threads.
func (d Dim) Count() int { return max(d.X, 1) * max(d.Y, 1) * max(d.Z, 1) }

// Arg is one parameter of a kernel, its bytes in the low end.
type Arg uint64

// Address passes a pointer.
func Address(p Pointer) Arg { return Arg(p) }

// Int passes a 32-bit integer; it panics when n has more bits.
func Int(n int) Arg {
	if n != int(int32(n)) {
		panic(fmt.Sprintf("cuda: %d as a 32-bit argument", n))
	}
	return Arg(uint32(int32(n)))
}

// Float passes a float32.
func Float(x float32) Arg { return Arg(math.Float32bits(x)) }

// Code is an error of a driver, numbered as CUresult.
type Code int

// Codes that have a meaning here. An error of a Driver wraps one.
const (
	ErrInvalidValue Code = 1
	ErrMemory       Code = 2
	ErrUnavailable  Code = 46
	ErrECC          Code = 214
	ErrInvalidPTX   Code = 218
	ErrContained    Code = 226
	ErrNotFound     Code = 500
	ErrAddress      Code = 700
	ErrResources    Code = 701
	ErrTimeout      Code = 702
	ErrMisaligned   Code = 716
	ErrLaunchFailed Code = 719
	ErrTensorLeak   Code = 721
	ErrTerminated   Code = 810
	ErrExternal     Code = 911
	ErrUnknown      Code = 999
)

var texts = map[Code]string{
	ErrInvalidValue: "invalid value",
	ErrMemory:       "out of device memory",
	ErrUnavailable:  "the GPU is busy or not available",
	ErrECC:          "uncorrectable error of the GPU's memory",
	ErrInvalidPTX:   "invalid PTX",
	ErrContained:    "a fault of the hardware or of access to another GPU",
	ErrNotFound:     "not found",
	ErrAddress:      "illegal address",
	ErrResources:    "launch out of resources",
	ErrTimeout:      "launch ran too long",
	ErrMisaligned:   "misaligned address",
	ErrLaunchFailed: "launch failed",
	ErrTensorLeak:   "a kernel ended without freeing its tensor memory",
	ErrTerminated:   "the MPS server ended this process's use of the GPU",
	ErrExternal:     "a fault in a device that the GPU waited for",
	ErrUnknown:      "the driver does not know what happened",
}

func (c Code) Error() string {
	if text, ok := texts[c]; ok {
		return fmt.Sprintf("%s (CUresult %d)", text, int(c))
	}
	return fmt.Sprintf("CUresult %d", int(c))
}

// Lost says that nothing works on the GPU after this error until the process has ended: a
// kernel's fault, a fault of the hardware, a driver that has gone. Of 226, 721, 810 and 911
// (CUDA_ERROR_CONTAINED, TENSOR_MEMORY_LEAK, MPS_CLIENT_TERMINATED, EXTERNAL_DEVICE) NVIDIA's header
// says so in words: the process must be terminated and relaunched.
func (c Code) Lost() bool {
	switch c {
	case 4, ErrUnavailable, ErrECC, 220, ErrUnknown: // 4: the driver ends; 220: NVLink
		return true
	case ErrContained, ErrTensorLeak, ErrTerminated, ErrExternal:
		return true
	}
	return c == ErrAddress || c == ErrTimeout || c >= 709 && c <= 719 && c != 711 && c != 712 && c != 713
}

// Multiplier is a Driver with a library of products beside the kernels: a faster one, whose
// order of sums is not ours.
type Multiplier interface {
	// Products opens the library, or says why there is none.
	Products() (Products, error)
}

// Products is used like a Driver.
type Products interface {
	// Name is the library's, with its version.
	Name() string
	// Multiply enqueues a product among the launches. For one that the library does not have it returns
	// ErrUnsupported, for one that it has and fails at an error that wraps it.
	Multiply(p Product) error
	Close() error
}

// ErrUnsupported is a product that a library does not have.
var ErrUnsupported = errors.New("product not supported")

// Product is dst [m, n] = act(x [m, k] w[n, k]^T + bias): x and w in bf16, dst and bias in
// float32, or in bf16. Strides are of rows, in elements.
type Product struct {
	Dst, X, W, Bias             Pointer // Bias may be 0
	DstStride, XStride, WStride int
	M, N, K                     int
	BF16                        bool
	GELU                        bool // by the tanh
	Add                         bool // to what is at Dst, before Bias and GELU
}
