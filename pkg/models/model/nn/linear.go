package nn

import "github.com/meander-rl/meander/pkg/models/tensor"

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
