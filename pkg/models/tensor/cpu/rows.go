package cpu

import (
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// rowTask is an operation on rows that do not depend on each other.
type rowTask struct {
	c            *CPU
	op           rowOp
	dst, x, y    Matrix
	scale, shift Matrix
	w            []float32
	group        []int32
	ids          []int32
	number       float32
	act          tensor.Activation
	step         int  // rows of a part
	flat         bool // all rows of a part at once
}

type rowOp int

const (
	opSiLUMul rowOp = iota
	opRMSNorm
	opL2Norm
	lastElementsOp = opL2Norm
)

// Operations that work row by row.
const (
	opLayerNorm rowOp = iota + lastElementsOp + 1
	opRopePairs
	opRopeHalves
	opGather
)

// partElements is the least number of elements of a part.
const partElements = 1 << 13

// runRows runs an operation on rows, t, in parts of some rows that the threads share. Rows without
// gaps go as one long row where the operation allows. The caller has checked the shapes.
func (c *CPU) runRows(t rowTask) {
	if t.dst.Rows == 0 || t.dst.Cols == 0 {
		return
	}
	t.c = c
	t.step = max(1, partElements/t.dst.Cols)
	t.flat = t.op <= lastElementsOp && t.dst.isDense() && t.x.isDense() && t.y.isDense()
	c.each = t
	c.run(&c.each, (t.dst.Rows+t.step-1)/t.step, c.threadsFor(16*t.dst.Rows*t.dst.Cols))
	c.each = rowTask{}
}

// part implements task: it computes rows i*step to (i+1)*step-1 of dst.
func (t *rowTask) part(i, _ int) {
	k := t.c.k
	r0, r1 := i*t.step, min((i+1)*t.step, t.dst.Rows)
	if t.flat {
		// Rows without gaps between them are one long row.
		t.computeElements(k, t.dst.dense(r0, r1), t.x.dense(r0, r1), t.y.dense(r0, r1))
		return
	}
	for r := r0; r < r1; r++ {
		dst := t.dst.Row(r)
		switch t.op {
		case opLayerNorm:
			t.layerNorm(k, dst, r)
		case opRopePairs, opRopeHalves:
			t.rotateRow(k, dst, t.x.Row(r), r)
		case opGather:
			copy(dst, t.x.Row(int(t.ids[r])))
		default:
			var y []float32
			if !t.y.IsZero() {
				y = t.y.Row(r)
			}
			t.computeElements(k, dst, t.x.Row(r), y)
		}
	}
}

// computeElements runs the operations of a rowTask that do not depend on where a row ends: those on
// elements, and norms of groups of columns. dst, x and y are one row or several adjacent ones; y is
// nil if the operation has none.
func (t *rowTask) computeElements(k *kernelSet, dst, x, y []float32) {
	switch t.op {
	case opSiLUMul:
		k.siluMul(dst, x, y)
	case opRMSNorm:
		k.scaleNorm(dst, x, t.w, float64(len(t.w)), float64(t.number), 0, 1)
	case opL2Norm:
		k.scaleNorm(dst, x, t.w, 1, 0, float64(t.number), math.Sqrt(float64(len(t.w))))
		switch t.act {
		case tensor.SiLU:
			k.silu(dst, dst)
		case tensor.GELU:
			k.gelu(dst, dst)
		}
	}
}

func (t *rowTask) groupOf(r int) int {
	if t.group == nil {
		return 0
	}
	return int(t.group[r])
}

// SiLUMul computes dst = SiLU(x) * y, the gate of a SwiGLU. dst may be x or y.
func (c *CPU) SiLUMul(dst, x, y Matrix) {
	dst.checkView("silu mul", "dst")
	x.check("silu mul", "x", dst.Rows, dst.Cols)
	y.check("silu mul", "y", dst.Rows, dst.Cols)
	c.runRows(rowTask{op: opSiLUMul, dst: dst, x: x, y: y})
}

func checkModulation(dst, scale, shift Matrix, group []int32) {
	scale.check("modulate", "scale", scale.Rows, dst.Cols)
	shift.check("modulate", "shift", scale.Rows, dst.Cols)
	checkGroup(group, dst.Rows, scale.Rows)
}

// Gather computes dst[i] = table[ids[i]], an embedding lookup: dst [len(ids), C], table [rows, C].
// Ids out of range panic.
func (c *CPU) Gather(dst, table Matrix, ids []int32) {
	dst.check("gather", "dst", len(ids), table.Cols)
	table.checkView("gather", "table")
	for _, id := range ids {
		if id < 0 || int(id) >= table.Rows {
			panic(fmt.Sprintf("tensor: gather row %d of %d", id, table.Rows))
		}
	}
	c.runRows(rowTask{op: opGather, dst: dst, x: table, ids: ids})
}

// Scatter computes dst[rows[i]] = x[i], each of rows once, as caches of keys and values are
// written. Rows out of range panic.
func (c *CPU) Scatter(dst, x Matrix, rows []int32) {
	dst.checkView("scatter", "dst")
	x.check("scatter", "x", len(rows), dst.Cols)
	for _, r := range rows {
		if r < 0 || int(r) >= dst.Rows {
			panic(fmt.Sprintf("tensor: scatter to row %d of %d", r, dst.Rows))
		}
	}
	for i, r := range rows {
		copy(dst.Row(int(r)), x.Row(i))
	}
}

// LayerNormModulate computes the layer norm, (x[i,j] - mean_i) / sqrt(var_i + eps) with the
// biased variance, and modulates it in one pass (adaLN): dst[i,j] = fma(norm[i,j],
// 1 + scale[g,j], shift[g,j]), g = group[i]; a nil group is row 0 for all.
func (c *CPU) LayerNormModulate(dst, x, scale, shift Matrix, group []int32, eps float32) {
	dst.checkView("layer norm", "dst")
	x.check("layer norm", "x", dst.Rows, dst.Cols)
	checkModulation(dst, scale, shift, group)
	c.runRows(rowTask{op: opLayerNorm, dst: dst, x: x, scale: scale, shift: shift, group: group, number: eps})
}

func (t *rowTask) layerNorm(k *kernelSet, dst []float32, r int) {
	x := t.x.Row(r)
	n := float64(len(x))
	mean := k.sum64(x) / n
	rstd := float32(1 / math.Sqrt(k.sumSq64(x, mean)/n+float64(t.number)))
	g := t.groupOf(r)
	k.normMod(dst, x, t.scale.Row(g), t.shift.Row(g), float32(mean), rstd)
}

// RMSNorm computes dst = x / sqrt(mean(x^2) + eps) * w over groups of len(w) columns:
// the whole row, or each head of it when w is as long as a head.
func (c *CPU) RMSNorm(dst, x Matrix, w []float32, eps float32) {
	checkNorm("rms norm", dst, x, w)
	c.runRows(rowTask{op: opRMSNorm, dst: dst, x: x, w: w, number: eps})
}

func checkNorm(name string, dst, x Matrix, w []float32) {
	dst.checkView(name, "dst")
	x.check(name, "x", dst.Rows, dst.Cols)
	if len(w) == 0 || dst.Cols%len(w) != 0 {
		panic(fmt.Sprintf("tensor: %s: %d weights for %d columns", name, len(w), dst.Cols))
	}
}

// L2Norm computes dst = act(x / max(|x|, eps) * sqrt(n) * w) over groups of n = len(w)
// columns, |x| being the root of the sum of squares: the norm of the autoencoder.
func (c *CPU) L2Norm(dst, x Matrix, w []float32, eps float32, act tensor.Activation) {
	checkNorm("l2 norm", dst, x, w)
	c.runRows(rowTask{op: opL2Norm, dst: dst, x: x, w: w, number: eps, act: act})
}

// RopePairs rotates each head of each row of x, pairs (2j, 2j+1), the complex form:
//
//	dst[i,2j] = x[i,2j] cos[i,j] - x[i,2j+1] sin[i,j]
//	dst[i,2j+1] = x[i,2j+1] cos[i,j] + x[i,2j] sin[i,j]
//
// cos and sin are [L, D/2]; x is [L, heads*D]; dst may be x. rows gives the row of cos
// and sin of each row of x; nil is row i for row i.
func (c *CPU) RopePairs(dst, x, cos, sin Matrix, rows []int32) {
	c.rope(opRopePairs, dst, x, cos, sin, rows)
}

// RopeHalves is RopePairs with pairs (j, j+D/2), the half-split form.
func (c *CPU) RopeHalves(dst, x, cos, sin Matrix, rows []int32) {
	c.rope(opRopeHalves, dst, x, cos, sin, rows)
}

// rope checks the arguments of both forms of rotary embeddings (op) and computes them row by row: x
// and dst [M, heads*2h], cos and sin [rows, h]. rows[i] is the row of the angles of row i; nil
// means i. Arguments that do not fit panic.
func (c *CPU) rope(op rowOp, dst, x, cos, sin Matrix, rows []int32) {
	dst.checkView("rope", "dst")
	x.check("rope", "x", dst.Rows, dst.Cols)
	cos.checkView("rope", "cos")
	sin.check("rope", "sin", cos.Rows, cos.Cols)
	if cos.Cols == 0 || dst.Cols%(2*cos.Cols) != 0 {
		panic(fmt.Sprintf("tensor: rope: %d columns, %d angles", dst.Cols, cos.Cols))
	}
	if rows == nil {
		if cos.Rows < dst.Rows {
			panic(fmt.Sprintf("tensor: rope: %d rows, angles of %d", dst.Rows, cos.Rows))
		}
	} else {
		checkGroup(rows, dst.Rows, cos.Rows)
	}
	c.runRows(rowTask{op: op, dst: dst, x: x, scale: cos, shift: sin, group: rows})
}

// rotateRow rotates all heads of row r from x to dst by its angles, in the form that the task's op
// names.
func (t *rowTask) rotateRow(k *kernelSet, dst, x []float32, r int) {
	at := r
	if t.group != nil {
		at = int(t.group[r])
	}
	cos, sin := t.scale.Row(at), t.shift.Row(at)
	d := 2 * len(cos)
	for j := 0; j < len(x); j += d {
		if t.op == opRopePairs {
			k.ropePairs(dst[j:j+d], x[j:j+d], cos, sin)
		} else {
			k.ropeHalves(dst[j:j+d], x[j:j+d], cos, sin)
		}
	}
}
