// Package tensortest is the conformance suite of tensor.Device: one table of cases that
// every device has to pass. Results are compared with package reference. Around every
// matrix lie guard values that must survive, and inputs must come back unmodified.
package tensortest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/reference"
)

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
	"exp":       {2e-7, 4e-7}, // silu
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
	run   func(c *call) (result tensor.Matrix)
}

// Cases returns the table.
func Cases() []Case {
	return slices.Concat(productCases(), attentionCases(), rowCases(), convCases())
}

// Run is the conformance test of a device: it runs every case with a narrow session, and with a
// wide one whose operands are factors, and whose result comes later, and compares with package
// reference. The device's own tests call it.
func Run(t *testing.T, d tensor.Device) {
	for _, cs := range Cases() {
		t.Run(cs.Name, func(t *testing.T) {
			var want []float64
			cs.runOn(t, reference.Device{}, false, false, func(_ tensor.Session,
				m tensor.Matrix,
			) {
				want = reference.Float64s(m)
			})
			for _, other := range []bool{false, true} {
				compare(t, cs.Output(t, d, other, other), want, cs.tolerance())
			}
		})
	}
}

// Output runs one case on d and returns its result, row by row, for comparison. With factors all
// operands, and the result, are what Session.Factors takes. A device that fails ends the test.
func (cs Case) Output(t *testing.T, d tensor.Device, wide, factors bool) []float32 {
	t.Helper()
	var out []float32
	cs.runOn(t, d, wide, factors, func(s tensor.Session, m tensor.Matrix) {
		out = make([]float32, m.Rows*m.Cols)
		if !wide {
			s.CopyOut(out, m)
			return
		}
		s.CopyOutLater(out, m)
		s.CopyIn(m, make([]float32, len(out))) // which out is not to have
	})
	return out
}

// runOn runs the case on d, checks that it wrote nothing else, and calls see with its result while
// the session lasts. An error of the device ends the test.
func (cs Case) runOn(t *testing.T, d tensor.Device, wide, factors bool, see func(tensor.Session, tensor.Matrix)) {
	t.Helper()
	err := d.Run(t.Context(), wide, func(s tensor.Session) error {
		c := &call{t: t, r: rand.New(rand.NewPCG(1, uint64(len(cs.Name)))), d: d, s: s, factors: factors}
		m := cs.run(c)
		c.checkGuards()
		see(s, m)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// compare fails the test if got differs from want by more than the tolerance.
func compare(t *testing.T, got []float32, want []float64, tol tolerance) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("result has %d elements, want %d", len(got), len(want))
	}
	var diff2, want2, diffMax, wantMax float64
	at := 0
	for i, w := range want {
		g := float64(got[i])
		d := math.Abs(g - w)
		if math.IsNaN(d) {
			t.Fatalf("element %d: got %v, want %v", i, g, w)
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
		t.Errorf("element %d: got %v, want %v: %.3g of the largest, want at most %.3g", at, got[at], want[at], m,
			tol.max)
	}
}

// call makes the operands of one case and watches over their memory.
type call struct {
	t       *testing.T
	r       *rand.Rand
	d       tensor.Device
	s       tensor.Session
	guarded []guardedMemory

	factors bool // operands are
}

// guarded is a piece of memory with the cells that an operation may change.
type guardedMemory struct {
	all  tensor.Matrix
	copy []float32
	free func(i int) bool // may cell i change?
}

const (
	margin = 24
	guard  = float32(-54272) // bf16 has it too
)

// matrix allocates a matrix with a wider stride and guard values all around.
func (c *call) matrix(rows, cols int, output bool, value func() float32) tensor.Matrix {
	gap := c.r.IntN(2) * 5
	if cols%64 == 0 { // as models have them: devices are faster there
		gap = 0
	}
	return c.strided(rows, cols, cols+gap, output, value)
}

// strided returns a matrix with gaps of stride-cols between rows. Guard values around it and in the gaps reveal
// wrong writes.
func (c *call) strided(rows, cols, stride int, output bool, value func() float32) tensor.Matrix {
	n := max(0, (rows-1)*stride+cols)
	buf := make([]float32, n+2*margin)
	for i := range buf {
		buf[i] = guard
	}
	for i := range rows {
		for j := range cols {
			buf[margin+i*stride+j] = value()
		}
	}
	take := c.s.Block
	if c.factors {
		take = c.s.Factors
	}
	all := take(len(buf)).Matrix(1, len(buf))
	c.s.CopyIn(all, buf)
	c.s.CopyOut(buf, all) // as the device has them
	if buf[0] != guard {
		c.t.Fatalf("guards of %v are %v on the device", guard, buf[0])
	}
	c.guarded = append(c.guarded, guardedMemory{all, buf, func(i int) bool {
		i -= margin
		return output && i >= 0 && i < n && i%stride < cols
	}})
	return tensor.Matrix{Memory: all.Memory, Offset: all.Offset + margin, Rows: rows, Cols: cols, Stride: stride}
}

func (c *call) normal() float32 { return float32(c.r.NormFloat64()) }

func nan() float32 { return float32(math.NaN()) }

// in is an operand of standard normal numbers.
func (c *call) in(rows, cols int) tensor.Matrix { return c.matrix(rows, cols, false, c.normal) }

// out is a result, full of NaN.
func (c *call) out(rows, cols int) tensor.Matrix { return c.matrix(rows, cols, true, nan) }

// inout is an operand that becomes the result.
func (c *call) inout(rows, cols int) tensor.Matrix { return c.matrix(rows, cols, true, c.normal) }

func (c *call) array(shape ...int) tensor.Array {
	a := tensor.Array{Shape: shape}
	x := make([]float32, a.Len())
	for i := range x {
		x[i] = c.normal()
	}
	return tensor.Floats(x, shape...)
}

func (c *call) vector(n int) tensor.Vector { return must(c.d.Vector(c.array(n))) }

func (c *call) weight(parts ...tensor.Array) tensor.Weight { return must(c.d.Weight(parts...)) }

func (c *call) filter(a tensor.Array) tensor.Filter { return must(c.d.Filter(a)) }

func (c *call) table(a tensor.Array) tensor.Matrix { return must(c.d.Table(a)) }

// must panics on an error: devices have memory for every case.
func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}

func (c *call) groups(rows, groups int) []int32 {
	g := make([]int32, rows)
	for i := range g {
		g[i] = int32(c.r.IntN(groups))
	}
	return g
}

func (c *call) inImage(n, h, w, ch int) tensor.Image { return c.image(n, h, w, ch, false, c.normal) }

func (c *call) outImage(n, h, w, ch int) tensor.Image { return c.image(n, h, w, ch, true, nan) }

func (c *call) image(n, h, w, ch int, output bool, value func() float32) tensor.Image {
	m := c.strided(n*h*w, ch, ch, output, value)
	return tensor.Image{Memory: m.Memory, Offset: m.Offset, N: n, H: h, W: w, C: ch}
}

// checkGuards fails the test when an operation changed memory that it had to leave: the guard
// values around all operands, the gaps between rows, and the inputs.
func (c *call) checkGuards() {
	c.t.Helper()
	for n, h := range c.guarded {
		now := make([]float32, len(h.copy))
		c.s.CopyOut(now, h.all)
		for i, was := range h.copy {
			if now[i] != was && !h.free(i) && !(now[i] != now[i] && was != was) {
				c.t.Fatalf("operand %d: cell %d changed from %v to %v: written outside of dst", n, i-margin, was,
					now[i])
			}
		}
	}
}

// shape prints dimensions in a case's name.
func shape(dims ...int) string { return fmt.Sprint(dims) }
