package tensor

import "unsafe"

// alignFloats is a cache line in float32: vector loads never straddle two lines.
const alignFloats = 16

// Arena hands out float32 slices that live until the next Reset. After one pass over
// the largest shape it allocates no more: Reset keeps the memory, merged into one
// block of the high-water size. The zero Arena is ready. Not for concurrent use.
type Arena struct {
	block []float32   // current block
	old   [][]float32 // earlier, full blocks of this pass
	used  int         // floats taken from block
	total int         // floats in old blocks
}

// Mark is a position in an Arena, for scoped scratch.
type Mark struct{ blocks, used int }

// Floats returns n elements, aligned to a cache line, with unspecified contents.
func (a *Arena) Floats(n int) []float32 {
	if n < 0 {
		panic("tensor: arena: negative length")
	}
	need := (n + alignFloats - 1) / alignFloats * alignFloats
	if a.used+need > len(a.block) {
		a.grow(need)
	}
	s := a.block[a.used : a.used+n : a.used+n]
	a.used += need
	return s
}

// Matrix returns a dense rows x cols matrix with unspecified contents.
func (a *Arena) Matrix(rows, cols int) Matrix {
	if rows < 0 || cols < 0 {
		panic("tensor: arena: negative dimension")
	}
	return Matrix{Data: a.Floats(rows * cols), Rows: rows, Cols: cols, Stride: cols}
}

// Mark returns the present position.
func (a *Arena) Mark() Mark { return Mark{len(a.old), a.used} }

// Release gives back what was taken since m, if the block has not changed since;
// otherwise that memory waits for Reset.
func (a *Arena) Release(m Mark) {
	if m.blocks == len(a.old) && m.used <= a.used {
		a.used = m.used
	}
}

// Reset gives back everything.
func (a *Arena) Reset() {
	if len(a.old) > 0 {
		size := a.total + len(a.block)
		clear(a.old)
		a.old, a.total = a.old[:0], 0
		a.block = alignedFloats(size)
	}
	a.used = 0
}

// Bytes returns the memory held.
func (a *Arena) Bytes() int { return 4 * (a.total + len(a.block)) }

func (a *Arena) grow(need int) {
	if len(a.block) > 0 {
		a.old = append(a.old, a.block)
		a.total += len(a.block)
	}
	a.block = alignedFloats(max(need, 2*len(a.block), 4096))
	a.used = 0
}

// alignedFloats allocates n zeros on a cache-line boundary.
func alignedFloats(n int) []float32 {
	b := make([]float32, n+alignFloats)
	off := 0
	if r := uintptr(unsafe.Pointer(&b[0])) % (4 * alignFloats); r != 0 {
		off = int(4*alignFloats-r) / 4
	}
	return b[off : off+n : off+n]
}

// scratch is one reusable slice.
type scratch struct{ buf []float32 }

func (s *scratch) floats(n int) []float32 {
	if len(s.buf) < n {
		s.buf = alignedFloats(n + n/4)
	}
	return s.buf[:n]
}
