package ptxvm

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// Kind is what a kernel did wrong.
type Kind string

// Kinds of faults.
const (
	Bounds        Kind = "out of bounds"
	Freed         Kind = "freed memory"
	Misaligned    Kind = "misaligned"
	Uninitialised Kind = "uninitialised"
	Pending       Kind = "copy pending"
	ReadOnly      Kind = "read-only memory"
	Race          Kind = "race"
	Proxy         Kind = "proxy fence"
	Divergence    Kind = "divergence"
	Arithmetic    Kind = "unspecified result"
	Descriptor    Kind = "matrix descriptor"
	Budget        Kind = "instruction budget"
)

// Fault is what went wrong in a launch, and where. It wraps a driver.Code.
type Fault struct {
	Kind   Kind
	Kernel string
	Line   int    // of the PTX text, from 1
	Text   string // the instruction
	Block  driver.Dim
	Thread driver.Dim
	Reason string
}

// Error says all of it.
func (f *Fault) Error() string {
	return fmt.Sprintf("kernel %s, line %d: %s: block (%d, %d, %d), thread (%d, %d, %d): %s: %s", f.Kernel, f.Line,
		f.Text,
		f.Block.X, f.Block.Y, f.Block.Z, f.Thread.X, f.Thread.Y, f.Thread.Z, f.Kind, f.Reason)
}

// Unwrap is the code that a GPU's driver would have answered, if it had noticed.
func (f *Fault) Unwrap() error {
	switch f.Kind {
	case Bounds, Freed, ReadOnly:
		return driver.ErrAddress
	case Misaligned:
		return driver.ErrMisaligned
	case Budget:
		return driver.ErrTimeout
	}
	return driver.ErrLaunchFailed
}

// fail ends the launch; run recovers it.
func (w *warp) fail(kind Kind, lane int, format string, args ...any) {
	b, in := w.block, w.at
	thread := w.first + lane
	nx, ny := b.grid.Threads.X, b.grid.Threads.Y
	panic(&Fault{
		Kind: kind, Kernel: b.kernel.name, Line: in.line, Text: in.text, Block: b.index,
		Thread: driver.Dim{X: thread % nx, Y: thread / nx % ny, Z: thread / nx / ny},
		Reason: fmt.Sprintf(format, args...),
	})
}
