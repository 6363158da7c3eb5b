package nn

import "github.com/meander-rl/meander/pkg/models/tensor"

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
