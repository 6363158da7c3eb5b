package cpu

import (
	"fmt"
	"math"
	"unsafe"
)

// panelCols is the width of a packed panel: one AVX-512 register, two AVX2 or four
// NEON registers. Every kernel reads the same layout.
const panelCols = 16

// Packed is a weight matrix in panels of 16 output columns, ready for the kernels:
// element (n, k) lies at data[(n/16)*16*K + k*16 + n%16]; columns past N are zero.
// It is read-only in use and may be shared.
type Packed struct {
	n, k int
	data []float32
	half []uint16 // the same in bf16, for which data is nil
}

// Pack packs w [n, k] row-major, the layout of a torch Linear weight (y = x w^T), for PackConv; Device.Weight packs the
// weights of projections by PackStacked or PackHalf.
func Pack(w []float32, n, k int) *Packed {
	if len(w) != n*k {
		panic(fmt.Sprintf("tensor: weight of %d elements, want %d x %d", len(w), n, k))
	}
	p := newPacked(n, k)
	p.setRows(0, w)
	return p
}

// PackStacked packs several weights [n_i, k] as one with n = sum of n_i, for fused projections such
// as query, key and value. A weight whose length is no multiple of k panics.
func PackStacked(k int, ws ...[]float32) *Packed {
	n := 0
	for _, w := range ws {
		if k <= 0 || len(w)%k != 0 {
			panic(fmt.Sprintf("tensor: stacked weight of %d elements, k %d", len(w), k))
		}
		n += len(w) / k
	}
	p := newPacked(n, k)
	n = 0
	for _, w := range ws {
		p.setRows(n, w)
		n += len(w) / k
	}
	return p
}

// PackHalf packs weights of bf16 as they are, stacked: half the memory. Products of few rows, which are as fast as
// their weights can be read, are faster, others up to 9 % slower (BenchmarkHalf). ws are little-endian.
func PackHalf(k int, ws ...[]byte) *Packed {
	n := 0
	for _, w := range ws {
		n += len(w) / 2 / k
	}
	p := &Packed{n: n, k: k, half: make([]uint16, panels(n)*panelCols*k)}
	row := 0
	for _, w := range ws {
		for ; len(w) > 0; w = w[2*k:] {
			col := p.half[row/panelCols*panelCols*k+row%panelCols:]
			for j := range k {
				col[j*panelCols] = uint16(w[2*j]) | uint16(w[2*j+1])<<8
			}
			row++
		}
	}
	return p
}

// at is the address of an element, of data or of half.
func (p *Packed) at(i int) *float32 {
	if p.half != nil {
		return (*float32)(unsafe.Pointer(&p.half[i]))
	}
	return &p.data[i]
}

func newPacked(n, k int) *Packed {
	if n <= 0 || k <= 0 {
		panic(fmt.Sprintf("tensor: pack a weight of %d x %d", n, k))
	}
	return &Packed{n: n, k: k, data: alignedFloats(panels(n) * panelCols * k)}
}

// setRows writes the weights w, whole rows of length k, as the rows from n0 on into their panels.
func (p *Packed) setRows(n0 int, w []float32) {
	for r := range len(w) / p.k {
		n := n0 + r
		col := p.data[n/panelCols*panelCols*p.k+n%panelCols:]
		for j, v := range w[r*p.k : (r+1)*p.k] {
			col[j*panelCols] = v
		}
	}
}

// Unpack writes the weights back to dst [N, K], as they were before packing: adapters add to them.
// Another length panics.
func (p *Packed) Unpack(dst []float32) {
	if len(dst) != p.n*p.k {
		panic(fmt.Sprintf("tensor: unpack to %d elements, want %d x %d", len(dst), p.n, p.k))
	}
	for n := range p.n {
		first := n/panelCols*panelCols*p.k + n%panelCols
		for j := range p.k {
			at := first + j*panelCols
			if p.half != nil {
				dst[n*p.k+j] = math.Float32frombits(uint32(p.half[at]) << 16)
				continue
			}
			dst[n*p.k+j] = p.data[at]
		}
	}
}

// N returns the number of output columns.
func (p *Packed) N() int { return p.n }

// K returns the length of the reduction.
func (p *Packed) K() int { return p.k }

// Bytes returns the memory held.
func (p *Packed) Bytes() int { return 4*len(p.data) + 2*len(p.half) }

func panels(n int) int { return (n + panelCols - 1) / panelCols }

// Matrix is a row-major view: element (i, j) is Data[i*Stride+j]. A slice of columns
// of a wider matrix is a Matrix too, so that fused projections need no copies. The
// zero Matrix stands for an absent argument.
type Matrix struct {
	Data   []float32
	Rows   int
	Cols   int
	Stride int
}

// NewMatrix views the first rows*cols elements of data as a dense matrix.
func NewMatrix(data []float32, rows, cols int) Matrix {
	if rows < 0 || cols < 0 || len(data) < rows*cols {
		panic(fmt.Sprintf("tensor: matrix of %d x %d over %d elements", rows, cols, len(data)))
	}
	return Matrix{Data: data[:rows*cols], Rows: rows, Cols: cols, Stride: cols}
}

// IsZero reports whether m is the absent argument.
func (m Matrix) IsZero() bool { return m.Data == nil && m.Rows == 0 && m.Cols == 0 }

// Row returns row i, Cols elements.
func (m Matrix) Row(i int) []float32 {
	return m.Data[i*m.Stride : i*m.Stride+m.Cols : i*m.Stride+m.Cols]
}

// SliceRows views rows i0 <= i < i1; the view shares the memory. Rows out of range panic.
func (m Matrix) SliceRows(i0, i1 int) Matrix {
	if i0 < 0 || i1 < i0 || i1 > m.Rows {
		panic(fmt.Sprintf("tensor: rows %d:%d of %d", i0, i1, m.Rows))
	}
	if i0 == i1 || m.Cols == 0 {
		return Matrix{Data: m.Data[:0], Rows: i1 - i0, Cols: m.Cols, Stride: m.Stride}
	}
	return Matrix{Data: m.Data[i0*m.Stride : (i1-1)*m.Stride+m.Cols], Rows: i1 - i0, Cols: m.Cols, Stride: m.Stride}
}

// SliceCols views columns j0 <= j < j1; the view shares the memory. With it Linear takes the block of its result that
// gets the epilogue. Columns out of range panic.
func (m Matrix) SliceCols(j0, j1 int) Matrix {
	if j0 < 0 || j1 < j0 || j1 > m.Cols {
		panic(fmt.Sprintf("tensor: columns %d:%d of %d", j0, j1, m.Cols))
	}
	if m.Rows == 0 || j0 == j1 {
		return Matrix{Data: m.Data[:0], Rows: m.Rows, Cols: j1 - j0, Stride: m.Stride}
	}
	return Matrix{Data: m.Data[j0 : (m.Rows-1)*m.Stride+j1], Rows: m.Rows, Cols: j1 - j0, Stride: m.Stride}
}

func (m Matrix) isDense() bool { return m.Stride == m.Cols }

// dense returns rows i0:i1 of a dense matrix in one slice, nil for the absent one.
func (m Matrix) dense(i0, i1 int) []float32 {
	if m.IsZero() {
		return nil
	}
	return m.Data[i0*m.Cols : i1*m.Cols]
}

// check panics unless m is a well-formed rows x cols view.
func (m Matrix) check(op, name string, rows, cols int) {
	if m.Rows != rows || m.Cols != cols {
		panic(fmt.Sprintf("tensor: %s: %s is %d x %d, want %d x %d", op, name, m.Rows, m.Cols, rows, cols))
	}
	m.checkView(op, name)
}

// checkView panics, with the names of the operation and the operand, unless the data is long enough
// for rows, columns and stride.
func (m Matrix) checkView(op, name string) {
	if m.Rows == 0 || m.Cols == 0 {
		return
	}
	if m.Rows < 0 || m.Cols < 0 || m.Stride < m.Cols || len(m.Data) < (m.Rows-1)*m.Stride+m.Cols {
		panic(fmt.Sprintf("tensor: %s: %s has %d elements for %d x %d, stride %d", op, name, len(m.Data), m.Rows,
			m.Cols, m.Stride))
	}
}
