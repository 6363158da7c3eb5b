// Package tensortest is the conformance suite of tensor backends: one table of cases
// that every backend has to pass, on the CPU or on a device.
//
// Results are compared with a float64 reference. Around every matrix lie guard values
// that must survive, and inputs must come back unmodified.
package tensortest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/tensor"
)

// Backend is what a case calls: the operations of tensor.CPU, with weights as plain
// float32 in the checkpoint's layout.
type Backend interface {
	// Linear takes w [N, K].
	Linear(dst, x, w tensor.Matrix, e tensor.Epilogue)
	MatMul(dst, a, b tensor.Matrix)
	MatMulT(dst, a, b tensor.Matrix)
	Attention(dst, q, k, v tensor.Matrix, cfg tensor.Attention)

	LayerNorm(dst, x tensor.Matrix, eps float32)
	LayerNormModulate(dst, x, scale, shift tensor.Matrix, group []int32, eps float32)
	Modulate(dst, x, scale, shift tensor.Matrix, group []int32)
	RMSNorm(dst, x tensor.Matrix, w []float32, eps float32)
	L2Norm(dst, x tensor.Matrix, w []float32, eps float32, act tensor.Activation)
	RopePairs(dst, x, cos, sin tensor.Matrix, rows []int32)
	RopeHalves(dst, x, cos, sin tensor.Matrix, rows []int32)

	Add(dst, x, y tensor.Matrix)
	Mul(dst, x, y tensor.Matrix)
	Scale(dst, x tensor.Matrix, a float32)
	AddScaled(dst, x, y tensor.Matrix, a float32)
	SiLU(dst, x tensor.Matrix)
	GELU(dst, x tensor.Matrix)
	SiLUMul(dst, x, y tensor.Matrix)
	Softmax(dst, x tensor.Matrix)
	Gather(dst, table tensor.Matrix, ids []int32)

	// Conv2D takes w [out, in, kh, kw] as a matrix [out, in*kh*kw].
	Conv2D(dst, x tensor.Image, w tensor.Matrix, kh, kw int, v tensor.Conv, e tensor.Epilogue)
	Upsample2(dst, x tensor.Image)
}

// OnCPU adapts a CPU, which takes packed weights.
func OnCPU(c *tensor.CPU) Backend { return cpuBackend{c} }

type cpuBackend struct{ *tensor.CPU }

func (b cpuBackend) Linear(dst, x, w tensor.Matrix, e tensor.Epilogue) {
	b.CPU.Linear(dst, x, tensor.Pack(dense(w), w.Rows, w.Cols), e)
}

func (b cpuBackend) Conv2D(dst, x tensor.Image, w tensor.Matrix, kh, kw int, v tensor.Conv, e tensor.Epilogue) {
	b.CPU.Conv2D(dst, x, tensor.PackConv(dense(w), w.Rows, w.Cols/kh/kw, kh, kw), v, e)
}

func dense(m tensor.Matrix) []float32 {
	var d []float32
	for i := range m.Rows {
		d = append(d, m.Row(i)...)
	}
	return d
}

// tolerance bounds the error of an operation against float64.
type tolerance struct {
	// l2 bounds |got - want| / |want|, root of sums of squares.
	l2 float64
	// max bounds the largest |got - want|, relative to the largest |want|.
	max float64
}

// tolerances is per operation, for float32, whose unit is 2^-24 = 6e-8.
var tolerances = map[string]tolerance{
	"product":   {9e-8, 3e-7},
	"attention": {1e-6, 4e-6},
	"norm":      {2e-7, 4e-7},
	"rope":      {1e-7, 3e-7},
	"elements":  {1e-7, 3e-7},
	"exp":       {2e-7, 4e-7}, // silu, gelu, softmax
	"copy":      {0, 0},
}

// perTerm is added per root of the number of terms of a product: a chain of n terms
// rounds n times, each time by at most half a unit of a partial sum that grows as the
// root of the terms so far; independent roundings add as squares.
var perTerm = tolerance{3e-8, 6e-8}

func (cs Case) tolerance() tolerance {
	tol := tolerances[cs.op]
	root := math.Sqrt(float64(cs.terms))
	return tolerance{tol.l2 + root*perTerm.l2, tol.max + root*perTerm.max}
}

// Case is one entry of the table.
type Case struct {
	Name  string
	op    string // key of tolerances
	terms int    // of a sum of products
	run   func(b Backend, c *call) (got tensor.Matrix, want ref)
}

// Cases returns the table.
func Cases() []Case {
	return slices.Concat(productCases(), attentionCases(), rowCases(), convCases())
}

// Run checks a backend on every case.
func Run(t *testing.T, b Backend) {
	for _, cs := range Cases() {
		t.Run(cs.Name, func(t *testing.T) {
			c := &call{t: t, r: rand.New(rand.NewPCG(1, uint64(len(cs.Name))))}
			got, want := cs.run(b, c)
			c.verify()
			compare(t, got, want, cs.tolerance())
		})
	}
}

// Output runs one case and returns its result, row by row, for comparing bits.
func (cs Case) Output(t *testing.T, b Backend) []float32 {
	c := &call{t: t, r: rand.New(rand.NewPCG(1, uint64(len(cs.Name)))), noRef: true}
	got, _ := cs.run(b, c)
	c.verify()
	return dense(got)
}

func compare(t *testing.T, got tensor.Matrix, want ref, tol tolerance) {
	t.Helper()
	if got.Rows != want.rows || got.Cols != want.cols {
		t.Fatalf("result is %d x %d, want %d x %d", got.Rows, got.Cols, want.rows, want.cols)
	}
	var diff2, want2, diffMax, wantMax float64
	at := 0
	for i, w := range want.data {
		g := float64(got.Row(i / want.cols)[i%want.cols])
		d := math.Abs(g - w)
		if math.IsNaN(d) {
			t.Fatalf("row %d, column %d: got %v, want %v", i/want.cols, i%want.cols, g, w)
		}
		diff2 += d * d
		want2 += w * w
		wantMax = max(wantMax, math.Abs(w))
		if d > diffMax {
			diffMax, at = d, i
		}
	}
	if diff2 == 0 {
		return
	}
	if l2 := math.Sqrt(diff2 / want2); l2 > tol.l2 {
		t.Errorf("relative L2 error %.3g, want at most %.3g", l2, tol.l2)
	}
	if m := diffMax / wantMax; m > tol.max {
		t.Errorf("row %d, column %d: got %v, want %v: %.3g of the largest, want at most %.3g", at/want.cols, at%want.cols,
			got.Row(at / want.cols)[at%want.cols], want.data[at], m, tol.max)
	}
}

// call makes the operands of one case and watches over their memory.
type call struct {
	t     *testing.T
	r     *rand.Rand
	held  []held
	noRef bool // the caller does not want the reference
}

// held is a buffer with the cells that an operation may change.
type held struct {
	buf, copy []float32
	free      func(i int) bool // may cell i change?
}

const (
	margin = 24
	guard  = float32(-54321.125)
)

// matrix allocates a matrix with a wider stride and guard values all around.
func (c *call) matrix(rows, cols int, output bool, value func() float32) tensor.Matrix {
	stride := cols + c.r.IntN(2)*5
	n := max(0, (rows-1)*stride+cols)
	buf := make([]float32, n+2*margin)
	for i := range buf {
		buf[i] = guard
	}
	m := tensor.Matrix{Data: buf[margin : margin+n : margin+n], Rows: rows, Cols: cols, Stride: stride}
	for i := range rows {
		for j := range cols {
			m.Data[i*stride+j] = value()
		}
	}
	c.held = append(c.held, held{buf, slices.Clone(buf), func(i int) bool {
		i -= margin
		return output && i >= 0 && i < n && i%stride < cols
	}})
	return m
}

func (c *call) normal() float32 { return float32(c.r.NormFloat64()) }

// in is an operand of standard normal numbers.
func (c *call) in(rows, cols int) tensor.Matrix { return c.matrix(rows, cols, false, c.normal) }

// out is a result, full of NaN.
func (c *call) out(rows, cols int) tensor.Matrix {
	return c.matrix(rows, cols, true, func() float32 { return float32(math.NaN()) })
}

// inout is an operand that becomes the result.
func (c *call) inout(rows, cols int) tensor.Matrix { return c.matrix(rows, cols, true, c.normal) }

// vector is a dense operand.
func (c *call) vector(n int) []float32 { return c.in(1, n).Data }

func (c *call) groups(rows, groups int) []int32 {
	g := make([]int32, rows)
	for i := range g {
		g[i] = int32(c.r.IntN(groups))
	}
	return g
}

func (c *call) inImage(n, h, w, ch int) tensor.Image {
	return tensor.NewImage(c.vector(n*h*w*ch), n, h, w, ch)
}

func (c *call) outImage(n, h, w, ch int) tensor.Image {
	return tensor.NewImage(c.out(1, n*h*w*ch).Data, n, h, w, ch)
}

// verify fails when a cell changed that had to stay.
func (c *call) verify() {
	c.t.Helper()
	for n, h := range c.held {
		for i := range h.buf {
			if h.buf[i] != h.copy[i] && !h.free(i) && !(h.buf[i] != h.buf[i] && h.copy[i] != h.copy[i]) {
				c.t.Fatalf("operand %d: cell %d changed from %v to %v: written outside of dst", n, i-margin, h.copy[i], h.buf[i])
			}
		}
	}
}

// shape prints dimensions in a case's name.
func shape(dims ...int) string { return fmt.Sprint(dims) }
