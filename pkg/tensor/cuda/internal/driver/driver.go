// Package driver is what a CUDA device asks of whoever runs its kernels: a GPU's driver,
// or package ptxvm, which interprets the same PTX without one.
package driver

import (
	"fmt"
	"math"
)

// Driver is one GPU. One goroutine uses it at a time. Every call may fail; after the fault
// of a kernel all later ones do, with the same error.
type Driver interface {
	// Name is the device's, e.g. NVIDIA H100 80GB HBM3.
	Name() string
	// LoadModule makes the kernels of a PTX text ready to launch.
	LoadModule(ptx []byte) (Module, error)
	// Alloc takes device memory with unspecified contents, aligned to 256 bytes. It fails
	// with ErrMemory when there is not enough.
	Alloc(bytes int) (Pointer, error)
	// Free gives back what Alloc returned.
	Free(p Pointer) error
	// CopyIn writes host memory to the device, CopyOut the other way. They follow the
	// launches before them; the host memory is the caller's again when they return.
	CopyIn(dst Pointer, src []byte) error
	CopyOut(dst []byte, src Pointer) error
	// Launch enqueues a kernel. Launches run one after another.
	Launch(f Function, g Grid, args ...Arg) error
	// Sync waits for all launches and returns the fault of one that failed.
	Sync() error
}

// Module is a loaded PTX text.
type Module interface {
	// Function finds a kernel by its name.
	Function(name string) (Function, error)
}

// Function is a kernel of a module; only its driver knows what it is.
type Function any

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
	ErrInvalidPTX   Code = 218
	ErrNotFound     Code = 500
	ErrAddress      Code = 700
	ErrResources    Code = 701
	ErrTimeout      Code = 702
	ErrMisaligned   Code = 716
	ErrLaunchFailed Code = 719
)

func (c Code) Error() string {
	switch c {
	case ErrInvalidValue:
		return "invalid value"
	case ErrMemory:
		return "out of device memory"
	case ErrInvalidPTX:
		return "invalid PTX"
	case ErrNotFound:
		return "not found"
	case ErrAddress:
		return "illegal address"
	case ErrResources:
		return "launch out of resources"
	case ErrTimeout:
		return "launch ran too long"
	case ErrMisaligned:
		return "misaligned address"
	case ErrLaunchFailed:
		return "launch failed"
	}
	return fmt.Sprintf("CUresult %d", int(c))
}
