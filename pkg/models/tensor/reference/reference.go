// Package reference is a tensor.Device that is slow and obviously correct: float64
// throughout, one plain loop per formula, no threads. Other devices are measured against
// it, operation by operation (tensortest) and whole networks.
package reference

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Device computes in float64. The zero value is ready.
type Device struct{}

var _ tensor.Device = Device{}

// Name is reference.
func (Device) Name() string { return "reference" }

// Parallel is 1: nothing is gained by more.
func (Device) Parallel() int { return 1 }

// Run calls f with a session of its own.
func (Device) Run(ctx context.Context, _ bool, f func(tensor.Session) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return f(session{})
}

// WorkingBytes is 0: sessions keep nothing.
func (Device) WorkingBytes() int { return 0 }

// Close does nothing.
func (Device) Close() error { return nil }

// array is a weight [n, k], a filter [out, in, kh, kw], or a vector.
type array struct {
	shape []int
	data  []float64
}

func newArray(a tensor.Array) *array { return &array{a.Shape, widen(a.Decode())} }

func widen(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

func (a *array) N() int                  { return a.shape[0] }
func (a *array) K() int                  { return a.shape[1] }
func (a *array) Len() int                { return len(a.data) }
func (a *array) Bytes() int              { return 8 * len(a.data) }
func (a *array) Channels() (in, out int) { return a.shape[1], a.shape[0] }
func (a *array) Size() (kh, kw int)      { return a.shape[2], a.shape[3] }

// Weight implements tensor.Device: it stacks the parts [n_i, K], widened to float64. Parts of
// another shape panic.
func (Device) Weight(parts ...tensor.Array) (tensor.Weight, error) {
	w := &array{shape: []int{0, parts[0].Shape[1]}}
	for _, p := range parts {
		if len(p.Shape) != 2 || p.Shape[1] != w.shape[1] {
			panic(fmt.Sprintf("tensor: weight of shape %v beside %v", p.Shape, parts[0].Shape))
		}
		w.shape[0] += p.Shape[0]
		w.data = append(w.data, widen(p.Decode())...)
	}
	return w, nil
}

// Read rounds to float32, which is exact for weights from files.
func (Device) Read(dst []float32, w tensor.Weight) error {
	for i, v := range w.(*array).data {
		dst[i] = float32(v)
	}
	return nil
}

// Filter keeps the layout of the file.
func (Device) Filter(w tensor.Array) (tensor.Filter, error) {
	if len(w.Shape) != 4 {
		panic(fmt.Sprintf("tensor: convolution filter of shape %v", w.Shape))
	}
	return newArray(w), nil
}

// Vector widens the numbers.
func (Device) Vector(a tensor.Array) (tensor.Vector, error) { return newArray(a), nil }

// Table widens the numbers.
func (Device) Table(a tensor.Array) (tensor.Matrix, error) {
	if len(a.Shape) != 2 {
		panic(fmt.Sprintf("tensor: table of shape %v", a.Shape))
	}
	return block(widen(a.Decode())).Matrix(a.Shape[0], a.Shape[1]), nil
}

// Cache is zeros.
func (Device) Cache(rows, cols int) (tensor.Matrix, error) {
	return block(make([]float64, rows*cols)).Matrix(rows, cols), nil
}

// memory is a tensor.Memory.
type memory struct{ data []float64 }

func block(x []float64) tensor.Block { return tensor.Block{Memory: &memory{x}, Len: len(x)} }

// Float64s returns the elements of a matrix of this device, row by row, in float64 as it has them:
// what other devices are compared with.
func Float64s(m tensor.Matrix) []float64 {
	out := make([]float64, 0, m.Rows*m.Cols)
	for i := range m.Rows {
		for j := range m.Cols {
			out = append(out, get(m, i, j))
		}
	}
	return out
}

func get(m tensor.Matrix, i, j int) float64 {
	return m.Memory.(*memory).data[m.Offset+i*m.Stride+j]
}

func row(m tensor.Matrix, i int) []float64 {
	at := m.Offset + i*m.Stride
	return m.Memory.(*memory).data[at : at+m.Cols]
}

// setEach sets dst[i, j] = f(i, j). It computes all elements before it stores the first: f may read
// dst.
func setEach(dst tensor.Matrix, f func(i, j int) float64) {
	values := make([]float64, 0, dst.Rows*dst.Cols)
	for i := range dst.Rows {
		for j := range dst.Cols {
			values = append(values, f(i, j))
		}
	}
	if len(values) == 0 {
		return
	}
	to := dst.Memory.(*memory).data
	for i := range dst.Rows {
		copy(to[dst.Offset+i*dst.Stride:], values[i*dst.Cols:(i+1)*dst.Cols])
	}
}

// want panics unless the matrix has these dimensions.
func want(op, name string, m tensor.Matrix, rows, cols int) {
	if m.Rows != rows || m.Cols != cols {
		panic(fmt.Sprintf("tensor: %s: %s is %d x %d, want %d x %d", op, name, m.Rows, m.Cols, rows, cols))
	}
}
