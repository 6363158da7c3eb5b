package cpu

import "fmt"

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
