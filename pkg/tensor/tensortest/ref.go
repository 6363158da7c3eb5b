package tensortest

import (
	"math"

	"github.com/meander-rl/meander/pkg/tensor"
)

// ref is a dense float64 matrix: the reference of a result.
type ref struct {
	rows, cols int
	data       []float64
}

func newRef(rows, cols int) ref { return ref{rows, cols, make([]float64, rows*cols)} }

func (r ref) at(i, j int) *float64 { return &r.data[i*r.cols+j] }

func get(m tensor.Matrix, i, j int) float64 { return float64(m.Data[i*m.Stride+j]) }

// each fills a reference element by element.
func each(rows, cols int, f func(i, j int) float64) ref {
	r := newRef(rows, cols)
	for i := range rows {
		for j := range cols {
			*r.at(i, j) = f(i, j)
		}
	}
	return r
}

func silu(x float64) float64 { return x / (1 + math.Exp(-x)) }

func gelu(x float64) float64 {
	return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
}

func activate(a tensor.Activation, x float64) float64 {
	switch a {
	case tensor.SiLU:
		return silu(x)
	case tensor.GELU:
		return gelu(x)
	}
	return x
}

// epilogue finishes y, the value of element (i, j) of a product; res is the residual
// as it was before the call.
func epilogue(e tensor.Epilogue, res ref, i, j int, y float64) float64 {
	if e.Bias != nil {
		y += float64(e.Bias[j])
	}
	y = activate(e.Act, y)
	if !e.Gate.IsZero() {
		g := 0
		if e.Group != nil {
			g = int(e.Group[i])
		}
		y *= get(e.Gate, g, j)
	}
	if !e.Residual.IsZero() {
		y += *res.at(i, j)
	}
	return y
}

func toRef(m tensor.Matrix) ref {
	return each(m.Rows, m.Cols, func(i, j int) float64 { return get(m, i, j) })
}

func linear(x, w tensor.Matrix, e tensor.Epilogue) ref {
	res := toRef(e.Residual)
	return each(x.Rows, w.Rows, func(i, j int) float64 {
		s := 0.0
		for k := range x.Cols {
			s += get(x, i, k) * get(w, j, k)
		}
		return epilogue(e, res, i, j, s)
	})
}

func attention(dst, q, k, v tensor.Matrix, cfg tensor.Attention) ref {
	out := toRef(dst)
	kv := cfg.KVHeads
	if kv == 0 {
		kv = cfg.Heads
	}
	d, dv := q.Cols/cfg.Heads, v.Cols/kv
	scale := float64(cfg.Scale)
	if scale == 0 {
		scale = 1 / math.Sqrt(float64(d))
	}
	seqs := cfg.Sequences
	queries, keys := seqs, seqs
	if seqs == nil {
		queries, keys = [][]int32{upTo(q.Rows)}, [][]int32{upTo(k.Rows)}
	}
	for s := range queries {
		for i, qi := range queries[s] {
			for h := range cfg.Heads {
				g := h * kv / cfg.Heads
				num, den := make([]float64, dv), 0.0
				for j, kj := range keys[s] {
					if cfg.Causal && j > i+len(keys[s])-len(queries[s]) || cfg.Mask != nil && !cfg.Mask[kj] {
						continue
					}
					dot := 0.0
					for c := range d {
						dot += get(q, int(qi), h*d+c) * get(k, int(kj), g*d+c)
					}
					p := math.Exp(scale * dot)
					den += p
					for c := range dv {
						num[c] += p * get(v, int(kj), g*dv+c)
					}
				}
				for c := range dv {
					*out.at(int(qi), h*dv+c) = 0
					if den > 0 {
						*out.at(int(qi), h*dv+c) = num[c] / den
					}
				}
			}
		}
	}
	return out
}

func upTo(n int) []int32 {
	x := make([]int32, n)
	for i := range x {
		x[i] = int32(i)
	}
	return x
}

func layerNorm(x tensor.Matrix, eps float32) ref {
	r := newRef(x.Rows, x.Cols)
	for i := range x.Rows {
		mean, variance := 0.0, 0.0
		for j := range x.Cols {
			mean += get(x, i, j) / float64(x.Cols)
		}
		for j := range x.Cols {
			variance += math.Pow(get(x, i, j)-mean, 2) / float64(x.Cols)
		}
		for j := range x.Cols {
			*r.at(i, j) = (get(x, i, j) - mean) / math.Sqrt(variance+float64(eps))
		}
	}
	return r
}

func modulate(x ref, scale, shift tensor.Matrix, group []int32) ref {
	return each(x.rows, x.cols, func(i, j int) float64 {
		g := 0
		if group != nil {
			g = int(group[i])
		}
		return *x.at(i, j)*(1+get(scale, g, j)) + get(shift, g, j)
	})
}

// groupNorm scales groups of len(w) columns by w times factor(sum of squares).
func groupNorm(x tensor.Matrix, w []float32, factor func(sum float64) float64) ref {
	return each(x.Rows, x.Cols, func(i, j int) float64 {
		g, sum := j/len(w)*len(w), 0.0
		for c := range w {
			sum += math.Pow(get(x, i, g+c), 2)
		}
		return get(x, i, j) * factor(sum) * float64(w[j%len(w)])
	})
}

// rope rotates; pair returns the partner of column j in a head, the angle's index, and
// the sign of the sine.
func rope(x, cos, sin tensor.Matrix, rows []int32, pair func(j, half int) (partner, angle int, sign float64)) ref {
	d := 2 * cos.Cols
	return each(x.Rows, x.Cols, func(i, j int) float64 {
		r := i
		if rows != nil {
			r = int(rows[i])
		}
		head := j / d * d
		p, a, sign := pair(j-head, cos.Cols)
		return get(x, i, j)*get(cos, r, a) + sign*get(x, i, head+p)*get(sin, r, a)
	})
}

func conv(dst, x tensor.Image, w tensor.Matrix, kh, kw int, v tensor.Conv, e tensor.Epilogue) ref {
	res := toRef(e.Residual)
	stride := max(1, v.Stride)
	return each(dst.N*dst.H*dst.W, dst.C, func(i, o int) float64 {
		n, y, xx := i/(dst.H*dst.W), i/dst.W%dst.H, i%dst.W
		s := 0.0
		for ky := range kh {
			for kx := range kw {
				iy, ix := y*stride+ky-v.Top, xx*stride+kx-v.Left
				if iy < 0 || iy >= x.H || ix < 0 || ix >= x.W {
					continue
				}
				for c := range x.C {
					s += float64(x.Data[((n*x.H+iy)*x.W+ix)*x.C+c]) * get(w, o, (c*kh+ky)*kw+kx)
				}
			}
		}
		return epilogue(e, res, i, o, s)
	})
}
