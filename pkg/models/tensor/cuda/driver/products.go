package driver

import "errors"

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
