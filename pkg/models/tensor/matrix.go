package tensor

import "fmt"

// Memory is a piece of a device's memory. Only the device knows what it is.
type Memory any

// Block is n adjacent float elements of a device, to be seen as matrices and images.
type Block struct {
	Memory Memory
	Offset int // elements
	Len    int
}

// Matrix views the first rows*cols elements as a dense matrix.
func (b Block) Matrix(rows, cols int) Matrix {
	if rows < 0 || cols < 0 || b.Len < rows*cols {
		panic(fmt.Sprintf("tensor: matrix of %d x %d over %d elements", rows, cols, b.Len))
	}
	return Matrix{Memory: b.Memory, Offset: b.Offset, Rows: rows, Cols: cols, Stride: cols}
}

// Image views the first n*h*w*c elements as an image.
func (b Block) Image(n, h, w, c int) Image {
	if n < 0 || h < 0 || w < 0 || c < 0 || b.Len < n*h*w*c {
		panic(fmt.Sprintf("tensor: image of %d x %d x %d x %d over %d elements", n, h, w, c, b.Len))
	}
	return Image{Memory: b.Memory, Offset: b.Offset, N: n, H: h, W: w, C: c}
}

// Matrix is a row-major view of a device's memory: element (i, j) is Offset + i*Stride + j.
// A slice of columns of a wider matrix is a Matrix too, so that fused projections need no
// copies. The zero Matrix stands for an absent argument.
type Matrix struct {
	Memory     Memory
	Offset     int
	Rows, Cols int
	Stride     int
}

// NewMatrix allocates a dense matrix in a session. Its contents are unspecified.
func NewMatrix(s Session, rows, cols int) Matrix {
	if rows < 0 || cols < 0 {
		panic("tensor: negative dimension")
	}
	return s.Block(rows*cols).Matrix(rows, cols)
}

// NewFactors allocates a dense matrix for factors, as Session.Factors does.
func NewFactors(s Session, rows, cols int) Matrix {
	if rows < 0 || cols < 0 {
		panic("tensor: negative dimension")
	}
	return s.Factors(rows*cols).Matrix(rows, cols)
}

// IsZero reports whether m is the absent argument.
func (m Matrix) IsZero() bool { return m.Memory == nil && m.Rows == 0 && m.Cols == 0 }

// SliceRows views rows i0 <= i < i1.
func (m Matrix) SliceRows(i0, i1 int) Matrix {
	if i0 < 0 || i1 < i0 || i1 > m.Rows {
		panic(fmt.Sprintf("tensor: rows %d:%d of %d", i0, i1, m.Rows))
	}
	m.Offset += i0 * m.Stride
	m.Rows = i1 - i0
	return m
}

// SliceCols views columns j0 <= j < j1.
func (m Matrix) SliceCols(j0, j1 int) Matrix {
	if j0 < 0 || j1 < j0 || j1 > m.Cols {
		panic(fmt.Sprintf("tensor: columns %d:%d of %d", j0, j1, m.Cols))
	}
	m.Offset += j0
	m.Cols = j1 - j0
	return m
}

// Image is a dense batch of images in a device's memory, channels last: element
// (n, y, x, c) is Offset + ((n*H+y)*W+x)*C + c.
type Image struct {
	Memory     Memory
	Offset     int
	N, H, W, C int
}

// Matrix views the image as [N*H*W, C], one row a pixel. A 1x1 convolution is Linear
// on it, norms over channels apply to it directly.
func (m Image) Matrix() Matrix {
	return Matrix{Memory: m.Memory, Offset: m.Offset, Rows: m.N * m.H * m.W, Cols: m.C, Stride: m.C}
}

// Array is numbers of the host on their way to a device: dense, row-major, little-endian,
// in the element type of their file (F64, F32, F16 or BF16).
type Array struct {
	DType DType
	Shape []int
	Data  []byte
}

// Floats is an Array of float32.
func Floats(x []float32, shape ...int) Array {
	return Array{DType: F32, Shape: shape, Data: F32.AppendFloats(nil, x)}
}

// Len is the number of elements.
func (a Array) Len() int {
	n := 1
	for _, d := range a.Shape {
		n *= d
	}
	return n
}

// Decode returns the elements as float32; it panics where the data does not fit the shape.
func (a Array) Decode() []float32 {
	x := make([]float32, a.Len())
	if err := a.DType.DecodeFloats(x, a.Data); err != nil {
		panic("tensor: " + err.Error())
	}
	return x
}
