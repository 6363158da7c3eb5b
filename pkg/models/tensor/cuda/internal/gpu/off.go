//go:build !cuda

package gpu

import "github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"

const notBuilt = none("this program is built without CUDA; must be cpu, or the program of make build-cuda")

// Built says whether the program is built for GPUs.
const Built = false

// Count is the number of GPUs.
func Count() (int, error) { return 0, notBuilt }

// Usable returns an error for every GPU.
func Usable(int) error { return notBuilt }

// Open opens a GPU by its number, below Count.
func Open(int) (driver.Driver, error) { return nil, notBuilt }
