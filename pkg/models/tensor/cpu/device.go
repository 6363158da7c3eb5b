package cpu

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Options of a Device. The zero value is the fastest that the machine has.
type Options struct {
	// Threads is how many threads compute; default GOMAXPROCS. Results do not depend on it.
	Threads int
	// Kernels names the inner loops; default the fastest of this machine. Results do not
	// depend on it.
	Kernels Kernels
}

// Device is the processor as a tensor.Device: sessions of one thread each, for passes side
// by side, and a wide one whose operations use all threads.
type Device struct {
	threads int
	kernels Kernels
	narrow  chan *session
	pool    *Pool
	wideMu  sync.Mutex
	wide    *session
}

var (
	_ tensor.Device        = (*Device)(nil)
	_ tensor.FewRowsPacker = (*Device)(nil)
	_ tensor.Doubler       = (*session)(nil)
)

// NewDevice starts the threads and makes the sessions of a CPU device; the caller closes it. A
// number of threads out of range and kernels that this machine does not have are errors.
func NewDevice(o Options) (*Device, error) {
	if o.Threads == 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	if o.Threads < 1 || o.Threads > 4096 {
		return nil, fmt.Errorf("threads: %d; must be between 1 and 4096", o.Threads)
	}
	if o.Kernels == "" {
		o.Kernels = AvailableKernels()[0]
	}
	d := &Device{threads: o.Threads, kernels: o.Kernels, narrow: make(chan *session, o.Threads)}
	for range o.Threads {
		c, err := NewCPUWith(nil, o.Kernels)
		if err != nil {
			return nil, err
		}
		d.narrow <- newSession(c)
	}
	d.pool = NewPool(o.Threads)
	c, err := NewCPUWith(d.pool, o.Kernels)
	if err != nil {
		d.pool.Close()
		return nil, err
	}
	d.wide = newSession(c)
	return d, nil
}

// Name is cpu/ and the kernels.
func (d *Device) Name() string { return "cpu/" + string(d.kernels) }

// Parallel is the number of threads.
func (d *Device) Parallel() int { return d.threads }

// Close ends the threads.
func (d *Device) Close() error {
	d.pool.Close()
	return nil
}

// Run implements tensor.Device: it calls f with a session, whose memory is valid until f returns.
// That is the wide one, with all threads, when wide asks for it and it is free; else a narrow one
// of one thread, when one is free: when several calls compete, one thread each serves them better.
// The error is that of f, or the cause of ctx if it ends before f begins.
func (d *Device) Run(ctx context.Context, wide bool, f func(tensor.Session) error) error {
	if wide && d.threads > 1 && d.wideMu.TryLock() {
		defer d.wideMu.Unlock()
		d.wide.arena.Reset()
		return f(d.wide)
	}
	select {
	case s := <-d.narrow:
		defer func() { d.narrow <- s }()
		s.arena.Reset()
		return f(s)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// WorkingBytes returns the memory, in bytes, of the sessions that are free now, for metrics of
// usage. Those at work are not counted: their memory must not be read meanwhile.
func (d *Device) WorkingBytes() int {
	n := 0
	var free []*session // all are taken before one is given back: it would come again
	for range d.threads {
		select {
		case s := <-d.narrow:
			n, free = n+s.bytes(), append(free, s)
		default:
		}
	}
	for _, s := range free {
		d.narrow <- s
	}
	if d.wideMu.TryLock() {
		n += d.wide.bytes()
		d.wideMu.Unlock()
	}
	return n
}

// leastHalf is from how many elements on a weight stays bf16. Smaller ones are in caches, where widening costs a tenth
// of the time of a product (BenchmarkHalf) and saves next to no memory.
const leastHalf = 1 << 18

// Weight implements tensor.Device: it packs the parts [n_i, K], stacked, as bf16 if they are large, all stored so, and
// the kernels read it, which gives the same bits of products; else as float32. A model calls it for each projection
// when it is opened. Parts of another shape panic; there is no error.
func (d *Device) Weight(parts ...tensor.Array) (tensor.Weight, error) {
	return d.pack(leastHalf, parts), nil
}

// WeightForFewRows implements tensor.FewRowsPacker: small weights stay bf16, too.
func (d *Device) WeightForFewRows(parts ...tensor.Array) (tensor.Weight, error) {
	return d.pack(0, parts), nil
}

// pack is Weight for weights that stay bf16 from so many elements on.
func (d *Device) pack(least int, parts []tensor.Array) tensor.Weight {
	n, k, half := 0, parts[0].Shape[1], d.wide.cpu.k.tileHalf != nil
	for _, p := range parts {
		if len(p.Shape) != 2 || p.Shape[1] != k {
			panic(fmt.Sprintf("tensor: weight of shape %v beside %v", p.Shape, parts[0].Shape))
		}
		n, half = n+p.Shape[0], half && p.DType == tensor.BF16
	}
	if half && n*k >= least {
		ws := make([][]byte, len(parts))
		for i, p := range parts {
			ws[i] = p.Data
		}
		return PackHalf(k, ws...)
	}
	ws := make([][]float32, len(parts))
	for i, p := range parts {
		ws[i] = p.Decode()
	}
	return PackStacked(k, ws...)
}

// Read unpacks a weight.
func (d *Device) Read(dst []float32, w tensor.Weight) error {
	w.(*Packed).Unpack(dst)
	return nil
}

// Filter packs the filter of a convolution.
func (d *Device) Filter(w tensor.Array) (tensor.Filter, error) {
	if len(w.Shape) != 4 {
		panic(fmt.Sprintf("tensor: convolution filter of shape %v", w.Shape))
	}
	return PackConv(w.Decode(), w.Shape[0], w.Shape[1], w.Shape[2], w.Shape[3]), nil
}

// vector is a tensor.Vector.
type vector struct{ data []float32 }

func (v *vector) Len() int   { return len(v.data) }
func (v *vector) Bytes() int { return 4 * len(v.data) }

// Vector keeps the numbers as float32.
func (d *Device) Vector(a tensor.Array) (tensor.Vector, error) { return &vector{a.Decode()}, nil }

// Table keeps a matrix as float32.
func (d *Device) Table(a tensor.Array) (tensor.Matrix, error) {
	if len(a.Shape) != 2 {
		panic(fmt.Sprintf("tensor: table of shape %v", a.Shape))
	}
	x := a.Decode()
	return tensor.Block{Memory: &memory{x}, Len: len(x)}.Matrix(a.Shape[0], a.Shape[1]), nil
}

// Cache is zeros in float32.
func (d *Device) Cache(rows, cols int) (tensor.Matrix, error) {
	x := alignedFloats(rows * cols)
	return tensor.Block{Memory: &memory{x}, Len: len(x)}.Matrix(rows, cols), nil
}

// memory is a tensor.Memory: a block of an arena, a table, or a cache.
type memory struct{ data []float32 }

// cpuMatrix returns m, a view of this device's memory, as the Matrix over float32 that the
// operations of CPU take. A zero m gives a zero Matrix. Memory of another device panics.
func cpuMatrix(m tensor.Matrix) Matrix {
	if m.IsZero() {
		return Matrix{}
	}
	n := 0
	if m.Rows > 0 && m.Cols > 0 {
		n = (m.Rows-1)*m.Stride + m.Cols
	}
	return Matrix{
		Data: m.Memory.(*memory).data[m.Offset : m.Offset+n : m.Offset+n], Rows: m.Rows, Cols: m.Cols,
		Stride: m.Stride,
	}
}

func hostImage(m tensor.Image) Image {
	return NewImage(m.Memory.(*memory).data[m.Offset:], m.N, m.H, m.W, m.C)
}

func hostVector(v tensor.Vector) []float32 {
	if v == nil {
		return nil
	}
	return v.(*vector).data
}

func hostEpilogue(e tensor.Epilogue) Epilogue {
	return Epilogue{
		Bias: hostVector(e.Bias), Act: e.Act, Gate: cpuMatrix(e.Gate), Residual: cpuMatrix(e.Residual),
		Group: e.Group,
	}
}

// session is a CPU and the memory of its passes.
type session struct {
	cpu   *CPU
	arena Arena
}

func newSession(c *CPU) *session { return &session{cpu: c} }

func (s *session) bytes() int { return s.arena.Bytes() + s.cpu.ScratchBytes() }

func (s *session) Block(n int) tensor.Block {
	m, offset := s.arena.allocate(n)
	return tensor.Block{Memory: m, Offset: offset, Len: n}
}

// Factors are float32: products are.
func (s *session) Factors(n int) tensor.Block { return s.Block(n) }

// CopyIn implements tensor.Session: it copies src, row by row, to the matrix dst. Another length
// panics.
func (s *session) CopyIn(dst tensor.Matrix, src []float32) {
	to := cpuMatrix(dst)
	if len(src) != to.Rows*to.Cols {
		panic(fmt.Sprintf("tensor: copy %d elements to %d x %d", len(src), to.Rows, to.Cols))
	}
	for i := range to.Rows {
		copy(to.Row(i), src[i*to.Cols:])
	}
}

// CopyOut implements tensor.Session: it copies the matrix src to dst, row by row. Another length
// panics.
func (s *session) CopyOut(dst []float32, src tensor.Matrix) {
	from := cpuMatrix(src)
	if len(dst) != from.Rows*from.Cols {
		panic(fmt.Sprintf("tensor: copy %d x %d to %d elements", from.Rows, from.Cols, len(dst)))
	}
	for i := range from.Rows {
		copy(dst[i*from.Cols:], from.Row(i))
	}
}

func (s *session) CopyOutLater(dst []float32, src tensor.Matrix) { s.CopyOut(dst, src) }

func (s *session) Linear(dst, x tensor.Matrix, w tensor.Weight, e tensor.Epilogue) {
	s.cpu.Linear(cpuMatrix(dst), cpuMatrix(x), w.(*Packed), hostEpilogue(e))
}

func (s *session) Attention(dst, q, k, v tensor.Matrix, a tensor.Attention) {
	s.cpu.Attention(cpuMatrix(dst), cpuMatrix(q), cpuMatrix(k), cpuMatrix(v), a)
}

func (s *session) LayerNormModulate(dst, x, scale, shift tensor.Matrix, group []int32, eps float32) {
	s.cpu.LayerNormModulate(cpuMatrix(dst), cpuMatrix(x), cpuMatrix(scale), cpuMatrix(shift), group, eps)
}

func (s *session) RMSNorm(dst, x tensor.Matrix, w tensor.Vector, eps float32) {
	s.cpu.RMSNorm(cpuMatrix(dst), cpuMatrix(x), hostVector(w), eps)
}

func (s *session) L2Norm(dst, x tensor.Matrix, w tensor.Vector, eps float32, act tensor.Activation) {
	s.cpu.L2Norm(cpuMatrix(dst), cpuMatrix(x), hostVector(w), eps, act)
}

func (s *session) RMSNormRopePairs(dst, x tensor.Matrix, w tensor.Vector, eps float32, cos, sin tensor.Matrix,
	rows []int32,
) {
	s.RMSNorm(dst, x, w, eps)
	s.RopePairs(dst, dst, cos, sin, rows)
}

func (s *session) RopePairs(dst, x, cos, sin tensor.Matrix, rows []int32) {
	s.cpu.RopePairs(cpuMatrix(dst), cpuMatrix(x), cpuMatrix(cos), cpuMatrix(sin), rows)
}

func (s *session) RopeHalves(dst, x, cos, sin tensor.Matrix, rows []int32) {
	s.cpu.RopeHalves(cpuMatrix(dst), cpuMatrix(x), cpuMatrix(cos), cpuMatrix(sin), rows)
}

func (s *session) SiLUMul(dst, x, y tensor.Matrix) {
	s.cpu.SiLUMul(cpuMatrix(dst), cpuMatrix(x), cpuMatrix(y))
}

func (s *session) Gather(dst, table tensor.Matrix, ids []int32) {
	s.cpu.Gather(cpuMatrix(dst), cpuMatrix(table), ids)
}

func (s *session) Scatter(dst, x tensor.Matrix, rows []int32) {
	s.cpu.Scatter(cpuMatrix(dst), cpuMatrix(x), rows)
}

func (s *session) Conv2D(dst, x tensor.Image, w tensor.Filter, c tensor.Conv, e tensor.Epilogue) {
	s.cpu.Conv2D(hostImage(dst), hostImage(x), w.(*PackedConv), c, hostEpilogue(e))
}

// DoubledConv2D implements tensor.Doubler.
func (s *session) DoubledConv2D(dst, x tensor.Image, w tensor.Filter, e tensor.Epilogue) {
	s.cpu.DoubledConv2D(hostImage(dst), hostImage(x), w.(*PackedConv), hostEpilogue(e))
}

func (s *session) Upsample2(dst, x tensor.Image) { s.cpu.Upsample2(hostImage(dst), hostImage(x)) }
