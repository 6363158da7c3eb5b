package cpu

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Epilogue is what Linear and Conv2D do with a product y before storing it:
//
//	dst[i,j] = Residual[i,j] + Gate[g,j] * Act(y[i,j] + Bias[j]), g = Group[i].
//
// Every part is optional. The bias is where the chain of multiply-adds starts; gate
// and residual are one more fma. Without a gate the residual is a plain addition,
// without a residual the gate is a plain product.
type Epilogue struct {
	Bias     []float32 // [N]
	Act      tensor.Activation
	Gate     Matrix  // [groups, N]
	Residual Matrix  // [M, N]; it may alias dst
	Group    []int32 // [M], the Gate row of each row; nil: row 0 for all
}

// check panics if the epilogue does not fit a product of rows x n. Linear and Conv2D call it before
// they compute.
func (e *Epilogue) check(rows, n int) {
	if e.Bias != nil && len(e.Bias) != n {
		panic(fmt.Sprintf("tensor: bias of %d elements, want %d", len(e.Bias), n))
	}
	if !e.Residual.IsZero() {
		e.Residual.check("epilogue", "residual", rows, n)
	}
	if !e.Gate.IsZero() {
		e.Gate.check("epilogue", "gate", e.Gate.Rows, n)
		checkGroup(e.Group, rows, e.Gate.Rows)
	}
	if e.Act < tensor.Identity || e.Act > tensor.GELU {
		panic(fmt.Sprintf("tensor: unknown activation %d", e.Act))
	}
}

// checkGroup panics unless group, which assigns a row of a table (gates, modulations, angles) to
// each of rows, has one index from 0 to groups-1 for each; nil means row 0 for all.
func checkGroup(group []int32, rows, groups int) {
	if group == nil {
		if rows > 0 && groups < 1 {
			panic("tensor: no row group")
		}
		return
	}
	if len(group) != rows {
		panic(fmt.Sprintf("tensor: %d row groups for %d rows", len(group), rows))
	}
	for _, g := range group {
		if g < 0 || int(g) >= groups {
			panic(fmt.Sprintf("tensor: row group %d of %d", g, groups))
		}
	}
}

// plain reports whether nothing is left to do after the product.
func (e *Epilogue) plain() bool {
	return e.Act == tensor.Identity && e.Gate.IsZero() && e.Residual.IsZero()
}

// Linear computes dst = x w^T with an epilogue, the projection of networks: dst [M, N], x [M, K], w
// [N, K],
//
//	y[i,j] = sum_k x[i,k] w[j,k].
//
// dst must not overlap x; the residual may be dst itself. Shapes that do not fit panic.
func (c *CPU) Linear(dst, x Matrix, w *Packed, e Epilogue) {
	dst.check("linear", "dst", x.Rows, w.n)
	x.check("linear", "x", x.Rows, w.k)
	e.check(x.Rows, w.n)
	if x.Rows == 0 {
		return
	}
	c.multiply(dst, x, w, e)
}

// zeros returns n zeros, read-only. It may replace c.zero, so an operation calls it for its largest n before its
// threads start.
func (c *CPU) zeros(n int) []float32 {
	if len(c.zero) < n {
		c.zero = make([]float32, n)
	}
	return c.zero[:n]
}

// Block sizes of a product: a block of x (blockRows x blockK) stays in the second
// level cache, a panel pair of w (blockK x 32) in the first. Longer chains go on
// through dst, so that block sizes never show in the bits.
const (
	blockRows = 192
	blockK    = 384
	blockCols = 32 * panelCols
)

// linearTask is one product; a part is a block of rows times a block of columns.
type linearTask struct {
	c         *CPU
	dst, x    Matrix
	w         *Packed
	e         Epilogue
	rowBlocks int
	rowStep   int
	colStep   int
}

// multiply computes dst = x w^T with an epilogue for Linear, which has checked the shapes, in
// blocks that the threads share. The bits do not depend on the blocks.
func (c *CPU) multiply(dst, x Matrix, w *Packed, e Epilogue) {
	t := &c.linear
	*t = linearTask{c: c, dst: dst, x: x, w: w, e: e}
	threads := c.threadsFor(x.Rows * w.n * w.k)
	t.rowStep, t.colStep = blockRows, blockCols
	if threads > 1 {
		// Two parts a thread let a late helper still be of use.
		for t.parts() < 2*threads && t.colStep > 4*panelCols {
			t.colStep /= 2
		}
		for t.parts() < 2*threads && t.rowStep > 2*maxTileRows {
			t.rowStep /= 2
		}
	}
	c.run(t, t.parts(), threads)
	*t = linearTask{}
}

func (t *linearTask) parts() int {
	t.rowBlocks = (t.x.Rows + t.rowStep - 1) / t.rowStep
	return t.rowBlocks * ((t.w.n + t.colStep - 1) / t.colStep)
}

// part implements task: it computes block i of the product and its epilogue. slot names the
// thread's scratch memory.
func (t *linearTask) part(i, slot int) {
	i0 := i % t.rowBlocks * t.rowStep
	i1 := min(i0+t.rowStep, t.x.Rows)
	j0 := i / t.rowBlocks * t.colStep
	j1 := min(j0+t.colStep, t.w.n)
	s := &t.c.slots[slot]
	k := t.w.k
	inPlace := !t.e.Residual.IsZero() && &t.e.Residual.Data[0] == &t.dst.Data[0]
	if inPlace {
		// The product may not overwrite the residual before it is added.
		strip := Matrix{Data: s.strip.floats((i1 - i0) * (j1 - j0)), Rows: i1 - i0, Cols: j1 - j0, Stride: j1 - j0}
		t.multiply(s, strip, 0, 0, i0, i1, j0, j1, k)
		t.applyEpilogue(strip, i0, i1, j0, j1)
		return
	}
	t.multiply(s, t.dst, i0, j0, i0, i1, j0, j1, k)
	if !t.e.plain() {
		t.applyEpilogue(t.dst.SliceRows(i0, i1).SliceCols(j0, j1), i0, i1, j0, j1)
	}
}

// multiply writes rows i0:i1, columns j0:j1 of x w^T + bias, summed over k columns, to out at (oi,
// oj), tile by tile. The sum of an element runs over k in ascending order, whatever the block.
func (t *linearTask) multiply(s *slot, out Matrix, oi, oj, i0, i1, j0, j1, k int) {
	kern := t.c.k
	tile := kern.tile
	if t.w.half != nil {
		tile = kern.tileHalf
	}
	for k0 := 0; k0 < k; k0 += blockK {
		k1 := min(k0+blockK, k)
		for j := j0; j < j1; {
			np := min(kern.tileCols, panels(j1-j))
			cols := min(np*panelCols, j1-j)
			a := &s.tile
			a.lda, a.k, a.panels = t.x.Stride, k1-k0, np
			a.b, a.bstride = t.w.at(j/panelCols*panelCols*k+k0*panelCols), panelCols*k
			a.init = tileZero
			if k0 > 0 {
				a.init = tileLoad
			} else if t.e.Bias != nil {
				s.setBias(t.e.Bias[j : j+cols])
			}
			for i := i0; i < i1; {
				a.rows = tileHeight(i1-i, kern.tileRows)
				a.a = &t.x.Data[i*t.x.Stride+k0]
				at := (oi+i-i0)*out.Stride + oj + j - j0
				s.runTile(tile, out.Data[at:], out.Stride, cols)
				i += a.rows
			}
			j += cols
		}
	}
}

// setBias has the next tile start its sums from bias, one value for each column, padded when its
// last panel is not full.
func (s *slot) setBias(bias []float32) {
	s.tile.init = tileBias
	if len(bias)%panelCols == 0 {
		s.tile.bias = &bias[0]
		return
	}
	clear(s.bias[copy(s.bias, bias):])
	s.tile.bias = &s.bias[0]
}

// runTile runs the kernel on the tile that is set up in s and puts its first cols columns to dst,
// whose rows are stride apart. A tile that sticks out of dst goes through a copy.
func (s *slot) runTile(tile func(*tile), dst []float32, stride, cols int) {
	a := &s.tile
	if cols == a.panels*panelCols {
		a.c, a.ldc = &dst[0], stride
		tile(a)
		return
	}
	w := a.panels * panelCols
	a.c, a.ldc = &s.edge[0], w
	if a.init == tileLoad {
		for r := range a.rows {
			copy(s.edge[r*w:r*w+cols], dst[r*stride:r*stride+cols])
		}
	}
	tile(a)
	for r := range a.rows {
		copy(dst[r*stride:r*stride+cols], s.edge[r*w:r*w+cols])
	}
}

// tileHeight splits the remaining rows in tiles of nearly equal height, since a tile
// of few rows cannot hide the latency of its multiply-adds.
func tileHeight(rows, most int) int {
	if rows <= most {
		return rows
	}
	n := (rows + most - 1) / most
	return (rows + n - 1) / n
}

// applyEpilogue applies the epilogue to y, the product of rows i0:i1 and columns j0:j1.
func (t *linearTask) applyEpilogue(y Matrix, i0, i1, j0, j1 int) {
	t.e.applyTo(t.c.k, t.dst.SliceRows(i0, i1).SliceCols(j0, j1), y, i0, j0)
}

// applyTo applies the epilogue (activation, gate, residual) to y, whose first element is (i0, j0)
// of the product, and puts the result to dst, the same part of the destination; dst may be y.
// Blocks of products and rows of convolutions end with it.
func (e *Epilogue) applyTo(kern *kernelSet, dst, y Matrix, i0, j0 int) {
	gated, added := !e.Gate.IsZero(), !e.Residual.IsZero()
	var res Matrix
	if added {
		res = e.Residual.SliceRows(i0, i0+y.Rows).SliceCols(j0, j0+y.Cols)
	}
	if !gated && dst.isDense() && y.isDense() && res.isDense() {
		e.applyRun(kern, dst.dense(0, y.Rows), y.dense(0, y.Rows), nil, res.dense(0, res.Rows))
		return
	}
	for i := range y.Rows {
		var g, r []float32
		if gated {
			n := 0
			if e.Group != nil {
				n = int(e.Group[i0+i])
			}
			g = e.Gate.Row(n)[j0 : j0+y.Cols]
		}
		if added {
			r = res.Row(i)
		}
		e.applyRun(kern, dst.Row(i), y.Row(i), g, r)
	}
}

// applyRun applies the activation, the gate and the residual to one run of elements y, in this
// order, and writes dst. gate and res may be nil, dst may be y.
func (e *Epilogue) applyRun(kern *kernelSet, dst, y, gate, res []float32) {
	switch e.Act {
	case tensor.SiLU:
		kern.silu(y, y)
	case tensor.GELU:
		kern.gelu(y, y)
	}
	switch {
	case gate != nil && res != nil:
		kern.gate(dst, gate, y, res)
	case gate != nil:
		kern.mul(dst, y, gate)
	case res != nil:
		kern.add(dst, y, res)
	case &dst[0] != &y[0]:
		copy(dst, y)
	}
}
