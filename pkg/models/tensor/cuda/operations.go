package cuda

import (
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// Rows and columns of a product that a block makes.
const (
	tile    = 64
	mmaTile = 128 // in bf16

	wideColumns = 4096 // of a row of layer_norm_wide
)

// epilogue checks e and returns the arguments that end those of every product kernel, for a product
// of m rows and n columns. op names the operation in panics about shapes that do not fit.
func (s *session) epilogue(op string, e tensor.Epilogue, m, n int) []driver.Arg {
	if e.Bias != nil && e.Bias.Len() != n {
		panic(fmt.Sprintf("tensor: %s: bias of %d for %d columns", op, e.Bias.Len(), n))
	}
	if e.Act < tensor.Identity || e.Act > tensor.GELU {
		panic(fmt.Sprintf("tensor: %s: activation %d", op, e.Act))
	}
	var group driver.Arg
	if !e.Gate.IsZero() {
		want(op, "gate", e.Gate, e.Gate.Rows, n)
		if e.Group != nil {
			checkRows(op, "gate row", e.Group, m, e.Gate.Rows)
			group = s.uploadInts(e.Group)
		}
	}
	if !e.Residual.IsZero() {
		want(op, "residual", e.Residual, m, n)
	}
	gate, residual := s.float(e.Gate), s.float(e.Residual)
	return []driver.Arg{
		s.vector(e.Bias), i32(int(e.Act)), s.address(gate), i32(gate.Stride), group, s.address(residual),
		i32(residual.Stride),
	}
}

// Linear implements tensor.Session: in bf16 by the library if it takes the product, else by a
// kernel. Shapes that do not fit panic; errors of the device come from Run.
func (s *session) Linear(dst, x tensor.Matrix, w tensor.Weight, e tensor.Epilogue) {
	want("linear", "x", x, x.Rows, w.K())
	want("linear", "dst", dst, x.Rows, w.N())
	if _, ok := w.(*adapted); ok {
		s.adaptedLinear(dst, x, []tensor.RowsOf{{W: w, To: x.Rows}}, e)
		return
	}
	defer s.releaseScratch()
	if x, a := s.multiplied(x), w.(*array); !s.libraryProduct(dst, e, product{x: x, a: a}) {
		s.linear(dst, x, a, e)
	}
}

// multiplied is x in the type of factors.
func (s *session) multiplied(x tensor.Matrix) tensor.Matrix {
	if s.d.bf16 {
		return s.factor(x)
	}
	return s.float(x)
}

// LinearOf implements tensor.RowsMultiplier.
func (s *session) LinearOf(dst, x tensor.Matrix, rows []tensor.RowsOf, e tensor.Epilogue) {
	for from := 0; len(rows) > 0; {
		a, n := rows[0].W, 1
		if a, ok := a.(*adapted); ok {
			for n < len(rows) && isBeside(a.array, rows[n].W) {
				n++
			}
		}
		to, part := rows[n-1].To, slices.Clone(rows[:n])
		for i := range part {
			part[i].To -= from
		}
		y, z, own := dst.SliceRows(from, to), x.SliceRows(from, to), e.Rows(from, to)
		switch {
		case from == to:
		case n == 1:
			s.Linear(y, z, a, own)
		default:
			want("linear", "x", z, z.Rows, a.K())
			want("linear", "dst", y, z.Rows, a.N())
			s.adaptedLinear(y, z, part, own)
		}
		rows, from = rows[n:], to
	}
}

// isBeside says whether w is weight base with products beside it.
func isBeside(base *array, w tensor.Weight) bool {
	a, ok := w.(*adapted)
	return ok && a.array == base
}

// sumRows is how many rows of a sum in float32 adaptedLinear holds at once.
const sumRows = 1024

// lowRows are the rows from..to-1 of a product with x down^T, which up multiplies.
type lowRows struct {
	from, to int
	low      tensor.Matrix
	up       *array
}

// adaptedLinear is Linear of a weight with products beside it, which rows have of their own. What the library does not
// have, the kernels do: they add in float32, in dst if it has that type, and the epilogue follows.
func (s *session) adaptedLinear(dst, x tensor.Matrix, rows []tensor.RowsOf, e tensor.Epilogue) {
	defer s.releaseScratch()
	x = s.multiplied(x)
	base := rows[0].W.(*adapted).array
	var parts []lowRows
	var sums []product
	from := 0
	for _, r := range rows {
		a, z := r.W.(*adapted), x.SliceRows(from, r.To)
		low := s.scratch(z.Rows, a.down.n, padded(a.down.n), s.d.Factors())
		if !s.libraryProduct(low, tensor.Epilogue{}, product{x: z, a: a.down}) {
			s.linear(low, z, a.down, tensor.Epilogue{})
		}
		parts, sums = append(parts, lowRows{from, r.To, low, a.up}), append(sums, product{low, a.up, from})
		from = r.To
	}
	if s.libraryProduct(dst, e, append(sums, product{x: x, a: base})...) {
		return
	}
	if e.Act == tensor.Identity && !isBF16(dst) {
		s.linear(dst, x, base, e)
		for _, p := range parts {
			to := dst.SliceRows(p.from, p.to)
			own := e.Rows(p.from, p.to)
			s.linear(to, p.low, p.up, tensor.Epilogue{Gate: e.Gate, Group: own.Group, Residual: to})
		}
		return
	}
	sum := dst
	if isBF16(dst) || !e.Residual.IsZero() {
		sum = s.scratch(min(dst.Rows, sumRows), dst.Cols, padded(dst.Cols), tensor.F32)
	}
	for from := 0; from < dst.Rows; from += sum.Rows {
		to := min(from+sum.Rows, dst.Rows)
		own := sum.SliceRows(0, to-from)
		s.linear(own, x.SliceRows(from, to), base, tensor.Epilogue{})
		for _, p := range parts {
			if i, j := max(from, p.from), min(to, p.to); i < j {
				at := own.SliceRows(i-from, j-from)
				s.linear(at, p.low.SliceRows(i-p.from, j-p.from), p.up, tensor.Epilogue{Residual: at})
			}
		}
		s.finish(dst.SliceRows(from, to), own, e.Rows(from, to))
	}
}

// linear launches Linear of a kernel; x is in the type of factors. The caller releases the scratch memory.
func (s *session) linear(dst, x tensor.Matrix, a *array, e tensor.Epilogue) {
	if a.dtype == tensor.BF16 {
		args := append([]driver.Arg{
			s.address(dst), i32(dst.Stride), s.address(x), i32(x.Stride), s.array(a), i32(a.stride), i32(x.Rows),
			i32(a.n), i32(a.k),
		}, s.epilogue("linear", e, x.Rows, a.n)...)
		s.launchTiles("linear_bf16", x.Rows, a.n, mmaTile, 256, append(args, bf16Bits(dst))...)
		return
	}
	to, store := s.result(dst)
	args := append([]driver.Arg{
		s.address(to), i32(to.Stride), s.address(x), i32(x.Stride), s.array(a), i32(x.Rows), i32(a.n), i32(a.k),
	}, s.epilogue("linear", e, x.Rows, a.n)...)
	s.launchTiles("linear_f32", x.Rows, a.n, tile, 64, args...)
	store()
}

// Conv2D implements tensor.Session by one kernel, in bf16 where the filter is. Shapes that do not
// fit panic; errors of the device come from Run.
func (s *session) Conv2D(dst, from tensor.Image, w tensor.Filter, c tensor.Conv, e tensor.Epilogue) {
	a, stride := w.(*array), max(1, c.Stride)
	oh, ow := c.OutSize(a.kh, a.kw, from.H, from.W)
	if from.C != a.in || dst.N != from.N || dst.H != oh || dst.W != ow || dst.C != a.n {
		panic(fmt.Sprintf("tensor: convolution of %d x %d x %d x %d to %d x %d x %d x %d", from.N, from.H, from.W,
			from.C, dst.N, dst.H, dst.W, dst.C))
	}
	defer s.releaseScratch()
	m := dst.N * oh * ow
	args := func(to, x tensor.Matrix) []driver.Arg {
		return append([]driver.Arg{
			s.address(to), s.address(x), s.array(a), i32(dst.N), i32(from.H), i32(from.W), i32(from.C), i32(oh),
			i32(ow),
			i32(a.n),
			i32(a.kh), i32(a.kw), i32(stride), i32(c.Top), i32(c.Left),
		}, s.epilogue("convolution", e, m, a.n)...)
	}
	if a.dtype == tensor.BF16 {
		s.launchTiles("conv_bf16", m, a.n, mmaTile, 256,
			append(args(dst.Matrix(), s.factor(from.Matrix())), bf16Bits(dst.Matrix()))...)
		return
	}
	to, store := s.result(dst.Matrix())
	s.launchTiles("conv_f32", m, a.n, tile, 64, args(to, s.float(from.Matrix()))...)
	store()
}

// Upsample2 implements tensor.Session: nearest neighbour, twice the height and width. Shapes that
// do not fit panic.
func (s *session) Upsample2(dst, x tensor.Image) {
	if dst.N != x.N || dst.H != 2*x.H || dst.W != 2*x.W || dst.C != x.C {
		panic(fmt.Sprintf("tensor: upsample %d x %d x %d x %d to %d x %d x %d x %d", x.N, x.H, x.W, x.C, dst.N, dst.H,
			dst.W, dst.C))
	}
	to, from := dst.Matrix(), x.Matrix()
	s.launchElements("upsample2_f32", to.Rows*to.Cols, s.address(to), s.address(from), i32(x.N), i32(x.H), i32(x.W),
		i32(x.C), bf16Bits(to, from))
}

// LayerNormModulate implements tensor.Session, one warp for each row. Shapes that do not fit panic;
// errors of the device come from Run.
func (s *session) LayerNormModulate(dst, x, scale, shift tensor.Matrix, group []int32, eps float32) {
	want("layer norm", "x", x, dst.Rows, dst.Cols)
	want("layer norm", "scale", scale, scale.Rows, dst.Cols)
	want("layer norm", "shift", shift, scale.Rows, dst.Cols)
	if group != nil {
		checkRows("layer norm", "group", group, dst.Rows, scale.Rows)
	}
	defer s.releaseScratch()
	scale, shift = s.float(scale), s.float(shift)
	name, warps := "layer_norm_f32", dst.Rows
	if dst.Cols <= wideColumns && wide(dst.Cols, dst, x, scale, shift) {
		name, warps = "layer_norm_wide", 4*dst.Rows
	}
	s.launchWarps(name, warps, 1, s.address(dst), i32(dst.Stride), s.address(x), i32(x.Stride), s.address(scale),
		i32(scale.Stride), s.address(shift), i32(shift.Stride), s.uploadInts(group), i32(dst.Rows), i32(dst.Cols),
		driver.Float(eps), bf16Bits(dst, x))
}

// norm launches the kernel that RMSNorm and L2Norm (op) share, over groups of w.Len() columns;
// length is 0 for the mean of squares, else their sum is taken. The name op is for panics about
// shapes.
func (s *session) norm(op string, dst, x tensor.Matrix, w tensor.Vector, length int, eps float32,
	act tensor.Activation,
) {
	n := w.Len()
	want(op, "x", x, dst.Rows, dst.Cols)
	if n == 0 || dst.Cols%n != 0 {
		panic(fmt.Sprintf("tensor: %s: %d columns in groups of %d", op, dst.Cols, n))
	}
	groups := dst.Cols / n
	s.launchWarps("norm_f32", dst.Rows*groups, 1, s.address(dst), i32(dst.Stride), s.address(x), i32(x.Stride),
		s.vector(w), i32(dst.Rows),
		i32(groups), i32(n), i32(length), driver.Float(eps), i32(int(act)), bf16Bits(dst, x))
}

func (s *session) RMSNorm(dst, x tensor.Matrix, w tensor.Vector, eps float32) {
	s.norm("rms norm", dst, x, w, 0, eps, tensor.Identity)
}

func (s *session) L2Norm(dst, x tensor.Matrix, w tensor.Vector, eps float32, act tensor.Activation) {
	s.norm("l2 norm", dst, x, w, 1, eps, act)
}

// checkRotation panics unless the arguments of a rotary embedding fit: x as dst, whose columns are
// heads of 2*cos.Cols, and angles for every row.
func checkRotation(dst, x, cos, sin tensor.Matrix, rows []int32) {
	want("rope", "x", x, dst.Rows, dst.Cols)
	want("rope", "sin", sin, cos.Rows, cos.Cols)
	half := cos.Cols
	if half == 0 || dst.Cols%(2*half) != 0 {
		panic(fmt.Sprintf("tensor: rope: %d columns in heads of %d", dst.Cols, 2*half))
	}
	switch {
	case rows != nil:
		checkRows("rope", "table row", rows, dst.Rows, cos.Rows)
	case cos.Rows < dst.Rows:
		panic(fmt.Sprintf("tensor: rope: tables of %d rows for %d", cos.Rows, dst.Rows))
	}
}

// rope launches both forms of rotary embeddings: halves is 1 for RopeHalves, 0 for RopePairs.
// Arguments that do not fit panic.
func (s *session) rope(dst, x, cos, sin tensor.Matrix, rows []int32, halves int) {
	checkRotation(dst, x, cos, sin, rows)
	defer s.releaseScratch()
	cos, sin = s.float(cos), s.float(sin)
	half, pairs := cos.Cols, dst.Cols/2
	s.launchElements("rope_f32", dst.Rows*pairs, s.address(dst), i32(dst.Stride), s.address(x), i32(x.Stride),
		s.address(cos), i32(cos.Stride),
		s.address(sin), i32(sin.Stride), s.uploadInts(rows), i32(dst.Rows), i32(pairs), i32(half), i32(halves),
		bf16Bits(dst, x))
}

// RMSNormRopePairs implements tensor.Session: norm and rotation in one kernel, because both read
// every element. Shapes that do not fit panic; errors of the device come from Run.
func (s *session) RMSNormRopePairs(dst, x tensor.Matrix, w tensor.Vector, eps float32, cos, sin tensor.Matrix,
	rows []int32,
) {
	checkRotation(dst, x, cos, sin, rows)
	half := cos.Cols
	if w.Len() != 2*half {
		panic(fmt.Sprintf("tensor: rms norm and rope: %d weights for heads of %d", w.Len(), 2*half))
	}
	defer s.releaseScratch()
	cos, sin = s.float(cos), s.float(sin)
	heads := dst.Cols / (2 * half)
	name, warps := "norm_rope_f32", dst.Rows*heads
	if (half == 32 || half == 64 || half == 128) && wide(dst.Cols, dst, x) {
		name, warps = "norm_rope_wide", blocks(dst.Rows*dst.Cols/8, 32)
	}
	s.launchWarps(name, warps, 1, s.address(dst), i32(dst.Stride), s.address(x), i32(x.Stride), s.vector(w),
		s.address(cos), i32(cos.Stride), s.address(sin), i32(sin.Stride), s.uploadInts(rows), i32(dst.Rows), i32(heads),
		i32(half), driver.Float(eps), bf16Bits(dst, x))
}

func (s *session) RopePairs(dst, x, cos, sin tensor.Matrix, rows []int32) {
	s.rope(dst, x, cos, sin, rows, 0)
}

func (s *session) RopeHalves(dst, x, cos, sin tensor.Matrix, rows []int32) {
	s.rope(dst, x, cos, sin, rows, 1)
}

func (s *session) SiLUMul(dst, x, y tensor.Matrix) {
	want("silu mul", "x", x, dst.Rows, dst.Cols)
	want("silu mul", "y", y, dst.Rows, dst.Cols)
	s.launchElements("silu_mul_f32", dst.Rows*dst.Cols, s.address(dst), i32(dst.Stride), s.address(x), i32(x.Stride),
		s.address(y), i32(y.Stride),
		i32(dst.Rows), i32(dst.Cols), bf16Bits(dst, x, y))
}

func (s *session) Gather(dst, table tensor.Matrix, ids []int32) {
	want("gather", "dst", dst, len(ids), table.Cols)
	checkRows("gather", "row", ids, len(ids), table.Rows)
	s.copy(dst, table, s.uploadInts(ids))
}

// Scatter implements tensor.Session: it copies runs of adjacent rows, each by a launch of its own.
// Rows out of range panic.
func (s *session) Scatter(dst, x tensor.Matrix, rows []int32) {
	want("scatter", "x", x, len(rows), dst.Cols)
	checkRows("scatter", "row", rows, len(rows), dst.Rows)
	for i := 0; i < len(rows); {
		n := 1
		for i+n < len(rows) && rows[i+n] == rows[i]+int32(n) {
			n++
		}
		s.copy(dst.SliceRows(int(rows[i]), int(rows[i])+n), x.SliceRows(i, i+n), 0)
		i += n
	}
}
