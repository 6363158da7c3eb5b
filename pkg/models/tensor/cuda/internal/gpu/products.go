//go:build cuda

package gpu

import (
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/internal/cublaslt"
)

// Products opens cuBLASLt, on the primary context that it shares with the driver.
func (d *device) Products() (driver.Products, error) { return cublaslt.Open(d) }
