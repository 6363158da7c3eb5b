package nn

import "github.com/meander-rl/meander/pkg/models/tensor"

// Linear is y = x w^T + bias.
type Linear struct {
	W    tensor.Weight
	Bias tensor.Vector // nil if there is none
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
	s.Linear(dst, x, l.W, e)
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
