package cpu

import "unsafe"

// alignFloats is a cache line in float32: vector loads never straddle two lines.
const alignFloats = 16

// Arena allocates float32 slices that live until the next Reset. After one pass over
// the largest shape it allocates no more: Reset keeps the memory, merged into one
// block of the high-water size. The zero Arena is ready. Not for concurrent use.
type Arena struct {
	block *memory   // current block
	old   []*memory // earlier, full blocks of this pass
	used  int       // floats taken from block
	total int       // floats in old blocks
}

// Floats returns n elements, aligned to a cache line, with unspecified contents.
func (a *Arena) Floats(n int) []float32 {
	m, offset := a.allocate(n)
	return m.data[offset : offset+n : offset+n]
}

// allocate takes n floats of the arena and returns the block that holds them and their offset in
// it, aligned to a cache line. When the current block is full it starts a larger one. A negative n
// panics.
func (a *Arena) allocate(n int) (m *memory, offset int) {
	if n < 0 {
		panic("tensor: arena: negative length")
	}
	need := (n + alignFloats - 1) / alignFloats * alignFloats
	if a.block == nil || a.used+need > len(a.block.data) {
		a.grow(need)
	}
	offset = a.used
	a.used += need
	return a.block, offset
}

// Reset gives back everything that was allocated since the last one; a session calls it before each
// pass. Several blocks become one of their total size, so that the next pass of this size allocates
// nothing.
func (a *Arena) Reset() {
	if len(a.old) > 0 {
		size := a.total + len(a.block.data)
		clear(a.old)
		a.old, a.total = a.old[:0], 0
		a.block = &memory{alignedFloats(size)}
	}
	a.used = 0
}

// Bytes returns the memory held.
func (a *Arena) Bytes() int {
	n := a.total
	if a.block != nil {
		n += len(a.block.data)
	}
	return 4 * n
}

// grow makes a new current block of at least need floats, twice the last one if that is more. The
// full block stays until Reset, because allocated slices point into it.
func (a *Arena) grow(need int) {
	size := 0
	if a.block != nil {
		size = len(a.block.data)
		a.old = append(a.old, a.block)
		a.total += size
	}
	a.block = &memory{alignedFloats(max(need, 2*size, 4096))}
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
