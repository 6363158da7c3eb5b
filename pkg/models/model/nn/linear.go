package nn

import (
	"context"
	"sync"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Linear is y = x w^T + bias.
type Linear struct {
	W    tensor.Weight
	Bias tensor.Vector   // nil if there is none
	rows []tensor.RowsOf // of a pass with several weights; nil: W is that of all
}

// Mix makes each of ls the Linear for a pass in which rows up to ends[i] are of the one in its place in of[i]; these
// differ in their weights alone.
func Mix(ls []*Linear, of [][]*Linear, ends []int) {
	for j, l := range ls {
		l.rows = nil
		for i := range of {
			if w, n := of[i][j].W, len(l.rows); n > 0 && l.rows[n-1].W == w {
				l.rows[n-1].To = ends[i]
			} else {
				l.rows = append(l.rows, tensor.RowsOf{W: w, To: ends[i]})
			}
		}
		if len(l.rows) == 1 {
			l.rows = nil
		}
	}
}

// Bytes returns the memory of the weights; 0 if there are none.
func (l *Linear) Bytes() int {
	if l.W == nil {
		return 0
	}
	return l.W.Bytes() + VectorBytes(l.Bias)
}

// VectorBytes returns the memory of vectors that may be absent.
func VectorBytes(vs ...tensor.Vector) int {
	n := 0
	for _, v := range vs {
		if v != nil {
			n += v.Bytes()
		}
	}
	return n
}

// Apply computes dst = x w^T + bias, and then the epilogue e.
func (l *Linear) Apply(s tensor.Session, dst, x tensor.Matrix, e tensor.Epilogue) {
	e.Bias = l.Bias
	if l.rows == nil {
		s.Linear(dst, x, l.W, e)
		return
	}
	if m, ok := s.(tensor.RowsMultiplier); ok {
		m.LinearOf(dst, x, l.rows, e)
		return
	}
	from := 0
	for _, r := range l.rows {
		if r.To > from {
			s.Linear(dst.SliceRows(from, r.To), x.SliceRows(from, r.To), r.W, e.Rows(from, r.To))
		}
		from = r.To
	}
}

// Output is one of the projections that are stacked in a Linear.
type Output struct {
	Name string // without .weight
	N    int
}

// Out returns an Output.
func Out(name string, n int) Output { return Output{Name: name, N: n} }

// Linear reads projections that share one input of k columns, as q, k and v do, and stacks them. Where a tensor is
// missing or has another shape, the result is empty, and Finish returns the error.
func (l *Loader) Linear(k int, withBias bool, outs ...Output) Linear {
	var ws []tensor.Array
	var bias []float32
	whole := true
	for _, o := range outs {
		w, ok := l.factor(o.Name+".weight", o.N, k)
		whole = whole && ok
		ws = append(ws, w)
		if withBias {
			b, ok := l.Array(o.Name+".bias", o.N)
			if whole = whole && ok; ok {
				bias = append(bias, b.Decode()...)
			}
		}
	}
	if !whole {
		return Linear{}
	}
	out := Linear{W: l.weight(ws...)}
	if withBias {
		out.Bias = l.vector(tensor.Floats(bias, len(bias)))
	}
	return out
}

// Conv is a convolution with bias. Images are channels last.
type Conv struct {
	W    tensor.Filter
	Bias tensor.Vector
}

// Bytes returns the memory of the weights; 0 if there are none.
func (c *Conv) Bytes() int {
	if c == nil || c.W == nil {
		return 0
	}
	return c.W.Bytes() + VectorBytes(c.Bias)
}

// Conv reads a [out, in, k, k] filter.
func (l *Loader) Conv(name string, out, in, k int) Conv {
	w, ok := l.Array(name+".weight", out, in, k, k)
	bias := l.Vector(name+".bias", out)
	if !ok || bias == nil {
		return Conv{}
	}
	return Conv{W: l.filter(w), Bias: bias}
}

// CausalConv reads a [out, in, k, k, k] filter that is causal over time, and keeps only its last
// temporal slice: for a single frame the other slices are multiplied by zeros.
func (l *Loader) CausalConv(name string, out, in, k int) Conv {
	before := l.kept
	w, ok := l.Array(name+".weight", out, in, k, k, k)
	l.kept = before + (l.kept-before)/k
	bias := l.Vector(name+".bias", out)
	if !ok || bias == nil {
		return Conv{}
	}
	slice := k * k * w.DType.Size()
	last := make([]byte, 0, out*in*slice)
	for i := range out * in {
		last = append(last, w.Data[(i*k+k-1)*slice:(i+1)*k*slice]...)
	}
	return Conv{W: l.filter(tensor.Array{DType: w.DType, Shape: []int{out, in, k, k}, Data: last}), Bias: bias}
}

// Pointwise reads a filter of one tap as a projection; ones is the number of its trailing dimensions of 1.
func (l *Loader) Pointwise(name string, out, in, ones int) Linear {
	shape := []int{out, in}
	for range ones {
		shape = append(shape, 1)
	}
	w, ok := l.factor(name+".weight", shape...)
	bias := l.Vector(name+".bias", out)
	if !ok || bias == nil {
		return Linear{}
	}
	w.Shape = shape[:2]
	return Linear{W: l.weight(w), Bias: bias}
}

// Split splits 0..n into as many parts as the device runs in parallel and runs f for each, in a session of its own.
// A panic of f is raised again in the caller.
func Split(ctx context.Context, d tensor.Device, n int, f func(s tensor.Session, from, to int) error) error {
	parts := min(n, d.Parallel())
	if parts <= 1 {
		return d.Run(ctx, false, func(s tensor.Session) error { return f(s, 0, n) })
	}
	errs, faults := make([]error, parts), make([]any, parts)
	var group sync.WaitGroup
	for i := range parts {
		from, to := i*n/parts, (i+1)*n/parts
		run := func() {
			defer func() { faults[i] = recover() }()
			errs[i] = d.Run(ctx, false, func(s tensor.Session) error { return f(s, from, to) })
		}
		if i == parts-1 {
			run()
			break
		}
		group.Go(run)
	}
	group.Wait()
	for _, f := range faults {
		if f != nil {
			panic(f)
		}
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Indices is reusable memory for the lists of a pass. It grows to the largest pass and is kept.
type Indices struct {
	ints []int32
	used int
	// Sequences is a reusable list of lists.
	Sequences [][]int32
}

// Reset makes all memory free for the next pass.
func (x *Indices) Reset() { x.used, x.Sequences = 0, x.Sequences[:0] }

// Take returns n elements that are valid until Reset. They are not cleared.
func (x *Indices) Take(n int) []int32 {
	if x.used+n > len(x.ints) {
		// Earlier slices keep the old block alive.
		x.ints, x.used = make([]int32, max(2*len(x.ints), n, 256)), 0
	}
	s := x.ints[x.used : x.used+n : x.used+n]
	x.used += n
	return s
}
