package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// memory is a tensor.Memory: elements on the device.
type memory struct {
	at    driver.Pointer
	len   int          // elements
	dtype tensor.DType // F32 or BF16
	owner any          // keeps a table's memory
}

// session is a pass. Once err is set its operations do nothing.
type session struct {
	d         *Device
	err       error
	taken     []driver.Pointer
	temporary []driver.Pointer // of the operation that is being put together
	lists     map[*int32]list
	plans     []*plan
	staged    [][]byte // of the host, that copies may still read or write
	fetches   []fetch
}

// fetch is a result on its way to the host.
type fetch struct {
	dst    []float32
	b      []byte
	from   driver.Pointer
	copied driver.Event
}

// list is integers that are on the device already.
type list struct {
	values []int32
	at     driver.Pointer
}

// releaseMemory gives the session's memory back to the pool when its function has returned: kernels
// of other sessions run after those of this one. It waits for the kernels where no later result
// will be waited for, so that an error of theirs is seen.
func (s *session) releaseMemory() {
	if len(s.fetches) == 0 {
		s.check(s.d.driver.Sync())
	}
	s.releaseScratch()
	for _, at := range s.taken {
		s.d.pool.release(at)
	}
	s.taken = nil
}

// awaitResults waits for the results of CopyOutLater, writes them to their slices and releases
// their memory. It returns the session's first error; then these slices hold NaN. Run ends with it.
func (s *session) awaitResults() error {
	if len(s.fetches) > 0 {
		lost := s.d.withContext(func() error {
			for _, f := range s.fetches {
				s.check(s.d.driver.Wait(f.copied))
			}
			return nil
		})
		for _, f := range s.fetches {
			s.d.pool.release(f.from)
			if s.err == nil && lost == nil {
				decode(f.dst, f.b)
			} else {
				fillNaN(f.dst)
			}
		}
		if lost != nil {
			s.d.staging.release(s.staged...)
			return lost
		}
	}
	s.d.staging.release(s.staged...)
	if s.err != nil {
		return s.d.deviceError(s.err)
	}
	return nil
}

// releaseScratch releases the temporary memory of one operation. Kernels run in the order of their launches, so
// the next user of that memory runs later.
func (s *session) releaseScratch() {
	for _, at := range s.temporary {
		s.d.pool.release(at)
	}
	s.temporary = s.temporary[:0]
}

// check notes the first error.
func (s *session) check(err error) {
	if s.err == nil {
		s.err = err
	}
}

// allocate returns device memory of so many bytes until the end of the session. After an error of
// the session it returns 0; no memory is such an error.
func (s *session) allocate(bytes int) driver.Pointer {
	if s.err != nil || bytes == 0 {
		return 0
	}
	at, err := s.d.pool.allocate(bytes)
	if err != nil {
		s.err = err
		return 0
	}
	s.taken = append(s.taken, at)
	return at
}

func (s *session) Block(n int) tensor.Block { return s.block(n, tensor.F32) }

func (s *session) Factors(n int) tensor.Block { return s.block(n, s.d.Factors()) }

func (s *session) block(n int, dtype tensor.DType) tensor.Block {
	if n < 0 {
		panic(fmt.Sprintf("tensor: block of %d elements", n))
	}
	return tensor.Block{Memory: &memory{at: s.allocate(dtype.Size() * n), len: n, dtype: dtype}, Len: n}
}

// scratch returns a matrix with unspecified contents, rows stride elements apart, that lives until
// the operation ends (releaseScratch). After an error its address is 0.
func (s *session) scratch(rows, cols, stride int, dtype tensor.DType) tensor.Matrix {
	n := rows * stride
	m := tensor.Matrix{
		Memory: &memory{at: s.allocate(dtype.Size() * n), len: n, dtype: dtype}, Rows: rows, Cols: cols,
		Stride: stride,
	}
	if at := m.Memory.(*memory).at; at != 0 {
		s.taken = s.taken[:len(s.taken)-1]
		s.temporary = append(s.temporary, at)
	}
	return m
}

func isBF16(m tensor.Matrix) bool { return !m.IsZero() && m.Memory.(*memory).dtype == tensor.BF16 }

// bf16Bits returns the argument by which kernels know the types of their operands: bit i is set if
// matrix i is in bf16.
func bf16Bits(ms ...tensor.Matrix) driver.Arg {
	bits := 0
	for i, m := range ms {
		if isBF16(m) {
			bits |= 1 << i
		}
	}
	return i32(bits)
}

// wide says whether kernels that take eight columns at a time fit rows of so many columns, of all of ms.
func wide(cols int, ms ...tensor.Matrix) bool {
	for _, m := range ms {
		if !m.IsZero() && (m.Offset%8 != 0 || m.Stride%8 != 0 && m.Rows > 1) {
			return false
		}
	}
	return cols%8 == 0
}

// copy copies rows ids of src (nil: all) to dst, from one type to the other.
func (s *session) copy(dst, src tensor.Matrix, ids driver.Arg) {
	name, elements := "copy_f32", dst.Rows*dst.Cols
	if wide(dst.Cols, dst, src) {
		name, elements = "copy_wide", elements/8
	}
	s.launchElements(name, elements, s.address(dst), i32(dst.Stride), s.address(src), i32(src.Stride), ids,
		i32(dst.Rows), i32(dst.Cols), bf16Bits(dst, src))
}

// float is m in float32: itself, or a copy until the operation is done.
func (s *session) float(m tensor.Matrix) tensor.Matrix {
	if !isBF16(m) {
		return m
	}
	own := s.scratch(m.Rows, m.Cols, m.Cols, tensor.F32)
	s.copy(own, m, 0)
	return own
}

// factor is m in bf16, its rows at multiples of 16 bytes: itself, or a copy until the
// operation is done.
func (s *session) factor(m tensor.Matrix) tensor.Matrix {
	if isBF16(m) && m.Offset%8 == 0 && (m.Stride%8 == 0 || m.Rows <= 1) {
		return m
	}
	own := s.scratch(m.Rows, m.Cols, padded(m.Cols), tensor.BF16)
	s.copy(own, m, 0)
	return own
}

// result is where an operation in float32 writes what is to be in dst, and what copies it
// there.
func (s *session) result(dst tensor.Matrix) (to tensor.Matrix, store func()) {
	if !isBF16(dst) {
		return dst, func() {}
	}
	own := s.scratch(dst.Rows, dst.Cols, dst.Cols, tensor.F32)
	return own, func() { s.copy(dst, own, 0) }
}

// address returns the device address of a matrix as an argument of a kernel; 0 where it is absent
// or empty. A view beyond its memory panics.
func (s *session) address(m tensor.Matrix) driver.Arg {
	if m.IsZero() || m.Rows == 0 || m.Cols == 0 {
		return 0
	}
	mem := m.Memory.(*memory)
	if end := m.Offset + (m.Rows-1)*m.Stride + m.Cols; m.Offset < 0 || end > mem.len || m.Stride < 0 {
		panic(fmt.Sprintf("tensor: matrix of %d x %d with stride %d at %d in %d elements", m.Rows, m.Cols, m.Stride,
			m.Offset, mem.len))
	}
	return driver.Address(mem.at + driver.Pointer(mem.dtype.Size()*m.Offset))
}

// array is the address of a weight, a kernel or a vector.
func (s *session) array(a *array) driver.Arg {
	return driver.Address(a.at)
}

func (s *session) vector(v tensor.Vector) driver.Arg {
	if v == nil {
		return 0
	}
	return s.array(v.(*array))
}

// uploadInts puts a list of numbers on the device and returns its address; once in a session while
// the list stays the same. It is 0 for nil and after an error.
func (s *session) uploadInts(x []int32) driver.Arg {
	if len(x) == 0 {
		return 0
	}
	if l, ok := s.lists[&x[0]]; ok && slices.Equal(l.values, x) {
		return driver.Address(l.at)
	}
	at := s.allocate(4 * len(x))
	if s.err != nil {
		return 0
	}
	b := s.stage(4 * len(x))
	if b == nil {
		return 0
	}
	for i, v := range x {
		binary.LittleEndian.PutUint32(b[4*i:], uint32(v))
	}
	s.check(s.d.driver.Send(at, b))
	s.lists[&x[0]] = list{slices.Clone(x), at}
	return driver.Address(at)
}

// stage returns host memory for copies until the session has finished; nil after an error.
func (s *session) stage(bytes int) []byte {
	if s.err != nil {
		return nil
	}
	b, err := s.d.staging.allocate(bytes)
	if err != nil {
		s.err = err
		return nil
	}
	s.staged = append(s.staged, b)
	return b[:bytes]
}

// launch runs a kernel over x by y blocks of threads. After an error of the session it does
// nothing, and its own error is kept for Run.
func (s *session) launch(name string, x, y, threads int, args ...driver.Arg) {
	s.launchGrid(name, driver.Grid{Blocks: driver.Dim{X: x, Y: y}, Threads: driver.Dim{X: threads}}, args...)
}

func (s *session) launchGrid(name string, g driver.Grid, args ...driver.Arg) {
	if s.err != nil || g.Blocks.X == 0 || g.Blocks.Y == 0 {
		return
	}
	began := time.Now()
	s.check(s.d.driver.Launch(s.d.kernels[name], g, args...))
	s.profile(name, began)
}

// profile tells what has been launched since, where anybody wants to know.
func (s *session) profile(name string, began time.Time) {
	if s.d.profile != nil {
		s.check(s.d.driver.Sync())
		s.d.profile(name, time.Since(began))
	}
}

// launchTiles runs a kernel with a block for each square tile of m rows and n columns. All are in x: in y a grid has
// 65535 at most, fewer than an image of 2048 x 2048 pixels has tiles.
func (s *session) launchTiles(name string, m, n, tile, threads int, args ...driver.Arg) {
	s.launch(name, blocks(m, tile)*blocks(n, tile), 1, threads, args...)
}

// launchElements runs a kernel with a thread for each element.
func (s *session) launchElements(name string, elements int, args ...driver.Arg) {
	s.launch(name, blocks(elements, 128), 1, 128, args...)
}

// launchWarps runs a kernel with a warp for each item.
func (s *session) launchWarps(name string, items, y int, args ...driver.Arg) {
	s.launch(name, blocks(items, 4), y, 128, args...)
}

// blocks is how many it takes; kernels count in 32 bits.
func blocks(items, each int) int {
	if items > math.MaxInt32-1024 {
		panic(fmt.Sprintf("tensor: %d elements in one operation; must be below 2^31", items))
	}
	return (items + each - 1) / each
}

func want(op, name string, m tensor.Matrix, rows, cols int) {
	if m.Rows != rows || m.Cols != cols {
		panic(fmt.Sprintf("tensor: %s: %s is %d x %d, want %d x %d", op, name, m.Rows, m.Cols, rows, cols))
	}
}

// checkRows panics unless ids is a list of row numbers, one for each of rows, from 0 to limit-1. op
// and name are for the message.
func checkRows(op, name string, ids []int32, rows, limit int) {
	if len(ids) != rows {
		panic(fmt.Sprintf("tensor: %s: %d %s for %d rows", op, len(ids), name, rows))
	}
	for _, id := range ids {
		if id < 0 || int(id) >= limit {
			panic(fmt.Sprintf("tensor: %s: %s %d of %d", op, name, id, limit))
		}
	}
}

func i32(n int) driver.Arg { return driver.Int(n) }

func dense(m tensor.Matrix) bool { return m.Rows <= 1 || m.Stride == m.Cols }

// CopyIn implements tensor.Session. It converts on the GPU if dst is in bf16 or not dense. Another
// length panics; errors of the device come from Run.
func (s *session) CopyIn(dst tensor.Matrix, src []float32) {
	if len(src) != dst.Rows*dst.Cols {
		panic(fmt.Sprintf("tensor: copy %d elements to %d x %d", len(src), dst.Rows, dst.Cols))
	}
	defer s.releaseScratch()
	to := dst
	if isBF16(dst) || !dense(dst) {
		to = s.scratch(dst.Rows, dst.Cols, dst.Cols, tensor.F32)
	}
	at := s.address(to)
	if len(src) == 0 || s.err != nil {
		return
	}
	b := s.stage(4 * len(src))
	if b == nil {
		return
	}
	s.check(s.d.driver.Send(driver.Pointer(at), tensor.F32.AppendFloats(b[:0], src)))
	if to != dst {
		s.copy(dst, to, 0)
	}
}

// CopyOut implements tensor.Session: it waits for the kernels and copies src to dst. dst is NaN
// when the session has failed, so that garbage is not taken for a result.
func (s *session) CopyOut(dst []float32, src tensor.Matrix) {
	copied(dst, src)
	defer s.releaseScratch()
	from := src
	if isBF16(src) || !dense(src) {
		from = s.scratch(src.Rows, src.Cols, src.Cols, tensor.F32)
		s.copy(from, src, 0)
	}
	at := s.address(from)
	if len(dst) == 0 {
		return
	}
	if b := s.stage(4 * len(dst)); b != nil {
		s.check(s.d.driver.CopyOut(b, driver.Pointer(at)))
		decode(dst, b)
	}
	if s.err != nil {
		fillNaN(dst)
	}
}

// CopyOutLater implements tensor.Session: dst is set when Run returns. It copies src to memory of
// its own, so that the other memory of the session is free for the next one. When the session fails
// dst is NaN.
func (s *session) CopyOutLater(dst []float32, src tensor.Matrix) {
	copied(dst, src)
	if len(dst) == 0 {
		return
	}
	fillNaN(dst)
	own := s.scratch(src.Rows, src.Cols, src.Cols, tensor.F32)
	s.copy(own, src, 0)
	b := s.stage(4 * len(dst))
	if s.err == nil {
		f := fetch{dst: dst, b: b, from: own.Memory.(*memory).at}
		if f.copied, s.err = s.d.driver.Fetch(b, f.from); s.err == nil {
			s.temporary = slices.DeleteFunc(s.temporary, func(p driver.Pointer) bool { return p == f.from })
			s.fetches = append(s.fetches, f)
		}
	}
	s.releaseScratch()
}

// copied checks the sizes of a copy to the host.
func copied(dst []float32, src tensor.Matrix) {
	if len(dst) != src.Rows*src.Cols {
		panic(fmt.Sprintf("tensor: copy %d x %d to %d elements", src.Rows, src.Cols, len(dst)))
	}
}

func fillNaN(x []float32) {
	for i := range x {
		x[i] = float32(math.NaN())
	}
}
