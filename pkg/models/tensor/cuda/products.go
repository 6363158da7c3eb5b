package cuda

import (
	"errors"
	"fmt"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// Products returns the driver's library of matrix products, behind the lock of the driver. Without
// one the error is driver.ErrUnsupported or the reason why it did not open; the kernels then
// multiply.
func (l *locked) Products() (driver.Products, error) {
	m, ok := l.Driver.(driver.Multiplier)
	if !ok {
		return nil, driver.ErrUnsupported
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	p, err := m.Products()
	if err != nil {
		return nil, err
	}
	return &lockedProducts{l, p}, nil
}

// lockedProducts takes turns with the driver.
type lockedProducts struct {
	l *locked
	p driver.Products
}

func (l *lockedProducts) Name() string { return l.p.Name() }

func (l *lockedProducts) Multiply(p driver.Product) error {
	l.l.mu.Lock()
	defer l.l.mu.Unlock()
	return l.p.Multiply(p)
}

func (l *lockedProducts) Close() error {
	l.l.mu.Lock()
	defer l.l.mu.Unlock()
	return l.p.Close()
}

// product is x a^T, of the rows of a result from there on.
type product struct {
	x    tensor.Matrix
	a    *array
	from int
}

// libraryProduct computes Linear in bf16 by the library, of the sum of products, the last of all rows
// and those before of different ones; it returns false where the library
// does not have one of them, and those before it may be in dst. What the library cannot do after the last one, kernel
// finish_f32 or finish_wide does. An error of the device is kept for Run.
func (s *session) libraryProduct(dst tensor.Matrix, e tensor.Epilogue, sum ...product) bool {
	if s.d.products == nil {
		return false
	}
	to, alone := dst, e.Gate.IsZero() && e.Residual.IsZero() && (e.Act == tensor.Identity || e.Act == tensor.GELU) &&
		dst.Offset%8 == 0 && dst.Stride%8 == 0
	if !alone {
		to = s.scratch(dst.Rows, dst.Cols, padded(dst.Cols), tensor.F32)
	}
	for i, p := range sum {
		last := i == len(sum)-1
		part := to.SliceRows(p.from, p.from+p.x.Rows)
		if !s.multiply(driver.Product{Add: last && i > 0}, part, p.x, p.a, e, alone && last) {
			return false
		}
	}
	if !alone {
		s.finish(dst, to, e)
	}
	return true
}

// multiply has the library compute to = x a^T, p.Add says whether added to what is there; with bias and activation of e
// if the library finishes it. false: the library does not have the product.
func (s *session) multiply(
	p driver.Product, to, x tensor.Matrix, a *array, e tensor.Epilogue, finishes bool,
) bool {
	if s.err != nil || a.n == 0 || a.k == 0 {
		return false
	}
	p.M, p.N, p.K, p.X, p.XStride = x.Rows, a.n, a.k, driver.Pointer(s.address(x)), x.Stride
	p.W, p.WStride = driver.Pointer(s.array(a)), a.stride
	if finishes {
		p.GELU = e.Act == tensor.GELU
		p.Bias = s.biasAs(to, e.Bias)
	}
	p.Dst, p.DstStride, p.BF16 = driver.Pointer(s.address(to)), to.Stride, isBF16(to)
	if s.err != nil {
		return true
	}
	began := time.Now()
	if err := s.d.products.Multiply(p); errors.Is(err, driver.ErrUnsupported) {
		if err != driver.ErrUnsupported { //nolint:errorlint // a wrapped one says what failed
			s.d.libraryFailed.Do(func() {
				s.d.warn(fmt.Errorf("%w; the own kernels do it and others like it, more slowly", err))
			})
		}
		return false
	} else if err != nil {
		s.check(err)
		return true
	}
	s.profile(s.d.products.Name(), began)
	return true
}

// finish makes dst from a product y in float32: its epilogue.
func (s *session) finish(dst, y tensor.Matrix, e tensor.Epilogue) {
	args := append([]driver.Arg{
		s.address(dst), i32(dst.Stride), s.address(y), i32(y.Stride), i32(dst.Rows), i32(dst.Cols),
	}, s.epilogue("linear", e, dst.Rows, dst.Cols)...)
	name, elements := "finish_f32", dst.Rows*dst.Cols
	if wide(dst.Cols, dst, y, e.Gate, e.Residual) {
		name, elements = "finish_wide", elements/8
	}
	s.launchElements(name, elements, append(args, bf16Bits(dst))...)
}

// biasAs returns the address of a bias in the type of dst, as the library wants it; 0 for no bias. Of bf16 the bias
// keeps a copy from the first time on.
func (s *session) biasAs(dst tensor.Matrix, bias tensor.Vector) driver.Pointer {
	if bias == nil {
		return 0
	}
	b := bias.(*array)
	if !isBF16(dst) {
		return b.at
	}
	if s.err != nil {
		return 0
	}
	if b.half == nil {
		half := &array{n: 1, k: b.k, dtype: tensor.BF16, stride: padded(b.k)}
		s.check(s.d.allocateArray(half))
		s.copy(half.row(), b.row(), 0)
		if s.err != nil {
			return 0
		}
		b.half = half
	}
	return b.half.at
}

// row is a vector as a matrix of one row.
func (a *array) row() tensor.Matrix {
	m := &memory{at: a.at, len: a.stride, dtype: a.dtype, owner: a}
	return tensor.Matrix{Memory: m, Rows: 1, Cols: a.k, Stride: a.stride}
}
