package cuda

import (
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cuda/internal/driver"
)

// Rows and columns of a product that a block makes.
const (
	tile    = 64
	mmaTile = 128 // in bf16
)

// rounded is a copy of m in bf16, and the stride of its rows.
func (s *session) rounded(m tensor.Matrix) (at driver.Arg, stride int) {
	stride = padded(m.Cols)
	at = driver.Address(s.take(2 * m.Rows * stride))
	s.each("copy_bf16", m.Rows*m.Cols, at, i32(stride), s.at(m), i32(m.Stride), 0, i32(m.Rows), i32(m.Cols))
	return at, stride
}

// epilogue is the last arguments of a product of m rows and n columns.
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
			rowList(op, "gate row", e.Group, m, e.Gate.Rows)
			group = s.ints(e.Group)
		}
	}
	if !e.Residual.IsZero() {
		want(op, "residual", e.Residual, m, n)
	}
	return []driver.Arg{
		s.vector(e.Bias), i32(int(e.Act)), s.at(e.Gate), i32(e.Gate.Stride), group, s.at(e.Residual), i32(e.Residual.Stride),
	}
}

func (s *session) Linear(dst, x tensor.Matrix, w tensor.Weight, e tensor.Epilogue) {
	a := w.(*array)
	want("linear", "x", x, x.Rows, a.k)
	want("linear", "dst", dst, x.Rows, a.n)
	m := x.Rows
	if a.stride > 0 {
		factor, stride := s.rounded(x)
		args := append([]driver.Arg{s.at(dst), i32(dst.Stride), factor, i32(stride), s.array(a), i32(a.stride), i32(m), i32(a.n), i32(a.k)},
			s.epilogue("linear", e, m, a.n)...)
		s.launch("linear_bf16", blocks(a.n, mmaTile), blocks(m, mmaTile), 256, args...)
		return
	}
	args := append([]driver.Arg{s.at(dst), i32(dst.Stride), s.at(x), i32(x.Stride), s.array(a), i32(m), i32(a.n), i32(a.k)},
		s.epilogue("linear", e, m, a.n)...)
	s.launch("linear_f32", blocks(a.n, tile), blocks(m, tile), 64, args...)
}

func (s *session) Conv2D(dst, x tensor.Image, w tensor.Kernel, c tensor.Conv, e tensor.Epilogue) {
	a, stride := w.(*array), max(1, c.Stride)
	oh, ow := c.OutSize(a.kh, a.kw, x.H, x.W)
	if x.C != a.in || dst.N != x.N || dst.H != oh || dst.W != ow || dst.C != a.n {
		panic(fmt.Sprintf("tensor: convolution of %d x %d x %d x %d to %d x %d x %d x %d", x.N, x.H, x.W, x.C, dst.N, dst.H, dst.W, dst.C))
	}
	m := dst.N * oh * ow
	args := append([]driver.Arg{
		s.atImage(dst), s.atImage(x), s.array(a), i32(x.N), i32(x.H), i32(x.W), i32(x.C), i32(oh), i32(ow), i32(a.n),
		i32(a.kh), i32(a.kw), i32(stride), i32(c.Top), i32(c.Left),
	}, s.epilogue("convolution", e, m, a.n)...)
	s.launch("conv_f32", blocks(a.n, tile), blocks(m, tile), 64, args...)
}

func (s *session) Upsample2(dst, x tensor.Image) {
	if dst.N != x.N || dst.H != 2*x.H || dst.W != 2*x.W || dst.C != x.C {
		panic(fmt.Sprintf("tensor: upsample %d x %d x %d x %d to %d x %d x %d x %d", x.N, x.H, x.W, x.C, dst.N, dst.H, dst.W, dst.C))
	}
	s.each("upsample2_f32", dst.N*dst.H*dst.W*dst.C, s.atImage(dst), s.atImage(x), i32(x.N), i32(x.H), i32(x.W), i32(x.C))
}

func (s *session) LayerNormModulate(dst, x, scale, shift tensor.Matrix, group []int32, eps float32) {
	want("layer norm", "x", x, dst.Rows, dst.Cols)
	want("layer norm", "scale", scale, scale.Rows, dst.Cols)
	want("layer norm", "shift", shift, scale.Rows, dst.Cols)
	if group != nil {
		rowList("layer norm", "group", group, dst.Rows, scale.Rows)
	}
	s.warps("layer_norm_f32", dst.Rows, 1, s.at(dst), i32(dst.Stride), s.at(x), i32(x.Stride), s.at(scale), i32(scale.Stride),
		s.at(shift), i32(shift.Stride), s.ints(group), i32(dst.Rows), i32(dst.Cols), driver.Float(eps))
}

func (s *session) norm(op string, dst, x tensor.Matrix, w tensor.Vector, length int, eps float32, act tensor.Activation) {
	n := w.Len()
	want(op, "x", x, dst.Rows, dst.Cols)
	if n == 0 || dst.Cols%n != 0 {
		panic(fmt.Sprintf("tensor: %s: %d columns in groups of %d", op, dst.Cols, n))
	}
	groups := dst.Cols / n
	s.warps("norm_f32", dst.Rows*groups, 1, s.at(dst), i32(dst.Stride), s.at(x), i32(x.Stride), s.vector(w), i32(dst.Rows),
		i32(groups), i32(n), i32(length), driver.Float(eps), i32(int(act)))
}

func (s *session) RMSNorm(dst, x tensor.Matrix, w tensor.Vector, eps float32) {
	s.norm("rms norm", dst, x, w, 0, eps, tensor.Identity)
}

func (s *session) L2Norm(dst, x tensor.Matrix, w tensor.Vector, eps float32, act tensor.Activation) {
	s.norm("l2 norm", dst, x, w, 1, eps, act)
}

func (s *session) rope(dst, x, cos, sin tensor.Matrix, rows []int32, halves int) {
	want("rope", "x", x, dst.Rows, dst.Cols)
	want("rope", "sin", sin, cos.Rows, cos.Cols)
	half := cos.Cols
	if half == 0 || dst.Cols%(2*half) != 0 {
		panic(fmt.Sprintf("tensor: rope: %d columns in heads of %d", dst.Cols, 2*half))
	}
	switch {
	case rows != nil:
		rowList("rope", "table row", rows, dst.Rows, cos.Rows)
	case cos.Rows < dst.Rows:
		panic(fmt.Sprintf("tensor: rope: tables of %d rows for %d", cos.Rows, dst.Rows))
	}
	pairs := dst.Cols / 2
	s.each("rope_f32", dst.Rows*pairs, s.at(dst), i32(dst.Stride), s.at(x), i32(x.Stride), s.at(cos), i32(cos.Stride),
		s.at(sin), i32(sin.Stride), s.ints(rows), i32(dst.Rows), i32(pairs), i32(half), i32(halves))
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
	s.each("silu_mul_f32", dst.Rows*dst.Cols, s.at(dst), i32(dst.Stride), s.at(x), i32(x.Stride), s.at(y), i32(y.Stride),
		i32(dst.Rows), i32(dst.Cols))
}

func (s *session) Gather(dst, table tensor.Matrix, ids []int32) {
	want("gather", "dst", dst, len(ids), table.Cols)
	rowList("gather", "row", ids, len(ids), table.Rows)
	s.each("copy_f32", dst.Rows*dst.Cols, s.at(dst), i32(dst.Stride), s.at(table), i32(table.Stride), s.ints(ids), i32(dst.Rows), i32(dst.Cols))
}

// columns of a value that one warp makes.
const valueColumns = 128

func (s *session) Attention(dst, q, k, v tensor.Matrix, a tensor.Attention) {
	kv := a.KVHeads
	if kv == 0 {
		kv = a.Heads
	}
	if a.Heads < 1 || kv < 1 || a.Heads%kv != 0 || q.Cols%a.Heads != 0 || k.Cols%kv != 0 || v.Cols%kv != 0 || q.Cols/a.Heads != k.Cols/kv {
		panic(fmt.Sprintf("tensor: attention: %d heads, %d of keys, over %d, %d and %d columns", a.Heads, kv, q.Cols, k.Cols, v.Cols))
	}
	d, dv := q.Cols/a.Heads, v.Cols/kv
	want("attention", "dst", dst, q.Rows, a.Heads*dv)
	want("attention", "v", v, k.Rows, kv*dv)
	if a.Mask != nil && len(a.Mask) != k.Rows {
		panic(fmt.Sprintf("tensor: attention: mask of %d for %d keys", len(a.Mask), k.Rows))
	}
	scale := a.Scale
	if scale == 0 {
		scale = float32(1 / math.Sqrt(float64(d)))
	}
	queries, keys := attended(a, q.Rows, k.Rows)
	n := len(queries) / 3
	if n == 0 || dv == 0 {
		return
	}
	if s.d.bf16 && d == dv && d%8 == 0 && d <= 128 {
		s.flash(dst, q, k, v, queries, keys, a.Heads, kv, scale)
		return
	}
	if dst.Memory == q.Memory && (d != dv || dv > valueColumns) {
		// A warp would write what others still read.
		own := tensor.NewMatrix(s, q.Rows, q.Cols)
		s.each("copy_f32", q.Rows*q.Cols, s.at(own), i32(own.Stride), s.at(q), i32(q.Stride), 0, i32(q.Rows), i32(q.Cols))
		q = own
	}
	s.warps("attention_f32", n*a.Heads, blocks(dv, valueColumns), s.at(dst), i32(dst.Stride), s.at(q), i32(q.Stride), s.at(k), i32(k.Stride),
		s.at(v), i32(v.Stride), s.ints(queries), s.ints(keys), i32(n), i32(a.Heads), i32(kv), i32(d), i32(dv), driver.Float(scale))
}

// queryTile is the queries that a block of flash attention takes.
const queryTile = 64

// flash is attention with factors in bf16, for heads of a multiple of 8 columns.
func (s *session) flash(dst, q, k, v tensor.Matrix, queries, keys []int32, heads, kv int, scale float32) {
	// A tile's queries see the first of one list of keys.
	var tiles []int32
	for i := 0; i < len(queries); i += 3 {
		last := len(tiles) - 2
		if last < 0 || tiles[last+1] == queryTile || queries[3*tiles[last]+1] != queries[i+1] {
			tiles = append(tiles, int32(i/3), 0)
			last += 2
		}
		tiles[last+1]++
	}
	d := q.Cols / heads
	name := "attention_bf16_128"
	switch {
	case d <= 32:
		name = "attention_bf16_32"
	case d <= 64:
		name = "attention_bf16_64"
	}
	fq, sq := s.rounded(q)
	fk, sk := s.rounded(k)
	fv, sv := s.rounded(v)
	s.launch(name, len(tiles)/2, heads, 128, s.at(dst), i32(dst.Stride), fq, i32(sq), fk, i32(sk), fv, i32(sv),
		s.ints(tiles), s.ints(queries), s.ints(keys), i32(heads), i32(kv), i32(d), driver.Float(scale))
}

// attended lists, for each query, its row, where its keys begin in keys, and how many they
// are; and the rows of the keys. What is masked is not listed.
func attended(a tensor.Attention, queryRows, keyRows int) (queries, keys []int32) {
	seq := func(rows []int32, lq, lk int) {
		first, positions := len(keys), make([]int, 0, lk)
		for j := range lk {
			row := int32(j)
			if rows != nil {
				row = rows[j]
			}
			if a.Mask == nil || a.Mask[row] {
				keys = append(keys, row)
				positions = append(positions, j)
			}
		}
		seen := 0
		for i := range lq {
			row := int32(i)
			if rows != nil {
				row = rows[i]
			}
			for seen < len(positions) && (!a.Causal || positions[seen] <= i+lk-lq) {
				seen++
			}
			queries = append(queries, row, int32(first), int32(seen))
		}
	}
	if a.Sequences == nil {
		seq(nil, queryRows, keyRows)
	}
	for _, rows := range a.Sequences {
		rowList("attention", "row", rows, len(rows), min(queryRows, keyRows))
		seq(rows, len(rows), len(rows))
	}
	return queries, keys
}
