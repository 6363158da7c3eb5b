// Package gpu is the driver of NVIDIA's GPUs: with the tag cuda, through gorgonia.org/cu.
// Without the tag there are none, and no cgo.
package gpu

import "errors"

// Least is the compute capability that the kernels need, major*10 + minor.
const Least = 80

// ErrNone is wrapped by the errors of a program or machine without GPUs. They say why, and what
// would have to be.
var ErrNone = errors.New("no GPU")

// none is an ErrNone with a reason of its own.
type none string

func (n none) Error() string { return string(n) }

func (none) Is(target error) bool { return target == ErrNone }

// ErrOld is wrapped by the error for a GPU that is too old for the kernels. It says which, and what
// would have to be.
var ErrOld = errors.New("GPU too old")
