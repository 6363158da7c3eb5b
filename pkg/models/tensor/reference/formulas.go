package reference

import (
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// session has no state: memory comes from the heap.
type session struct{}

func (session) Block(n int) tensor.Block { return block(make([]float64, n)) }

func (s session) Factors(n int) tensor.Block { return s.Block(n) }

func (session) CopyIn(dst tensor.Matrix, src []float32) {
	if len(src) != dst.Rows*dst.Cols {
		panic(fmt.Sprintf("tensor: copy %d elements to %d x %d", len(src), dst.Rows, dst.Cols))
	}
	setEach(dst, func(i, j int) float64 { return float64(src[i*dst.Cols+j]) })
}

func (session) CopyOut(dst []float32, src tensor.Matrix) {
	if len(dst) != src.Rows*src.Cols {
		panic(fmt.Sprintf("tensor: copy %d x %d to %d elements", src.Rows, src.Cols, len(dst)))
	}
	for i, v := range Float64s(src) {
		dst[i] = float32(v)
	}
}

func (s session) CopyOutLater(dst []float32, src tensor.Matrix) { s.CopyOut(dst, src) }

// activate returns activation a of x: SiLU, GELU (tanh form), or x itself.
func activate(a tensor.Activation, x float64) float64 {
	switch a {
	case tensor.SiLU:
		return x / (1 + math.Exp(-x))
	case tensor.GELU:
		return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
	}
	return x
}

// applyEpilogue returns what is stored of y, element (i, j) of a product: with bias, activation,
// gate and residual, in this order.
func applyEpilogue(e tensor.Epilogue, i, j int, y float64) float64 {
	if e.Bias != nil {
		y += e.Bias.(*array).data[j]
	}
	y = activate(e.Act, y)
	if !e.Gate.IsZero() {
		y *= get(e.Gate, groupOf(e.Group, i), j)
	}
	if !e.Residual.IsZero() {
		y += get(e.Residual, i, j)
	}
	return y
}

func groupOf(group []int32, i int) int {
	if group == nil {
		return 0
	}
	return int(group[i])
}

// Linear implements tensor.Session by its formula, in float64. Shapes that do not fit panic.
func (session) Linear(dst, x tensor.Matrix, w tensor.Weight, e tensor.Epilogue) {
	weights, k := w.(*array).data, w.K()
	want("linear", "x", x, x.Rows, k)
	want("linear", "dst", dst, x.Rows, w.N())
	setEach(dst, func(i, j int) float64 {
		sum, w := 0.0, weights[j*k:(j+1)*k]
		for c, v := range row(x, i) {
			sum += v * w[c]
		}
		return applyEpilogue(e, i, j, sum)
	})
}

// Attention implements tensor.Session by its formula, in float64.
func (session) Attention(dst, q, k, v tensor.Matrix, a tensor.Attention) {
	kv := a.KVHeads
	if kv == 0 {
		kv = a.Heads
	}
	d, dv := q.Cols/a.Heads, v.Cols/kv
	scale := float64(a.Scale)
	if scale == 0 {
		scale = 1 / math.Sqrt(float64(d))
	}
	queries, keys := a.Sequences, a.Sequences
	if a.Keys != nil {
		keys = a.Keys
	}
	if a.Sequences == nil {
		queries, keys = [][]int32{upTo(q.Rows)}, [][]int32{upTo(k.Rows)}
	}
	out := make([]float64, 0, dst.Rows*dst.Cols)
	out = append(out, Float64s(dst)...) // rows of no sequence stay
	for s := range queries {
		for i, query := range queries[s] {
			seen := func(j int) bool {
				return !(a.Causal && j > i+len(keys[s])-len(queries[s])) && (a.Mask == nil || a.Mask[keys[s][j]])
			}
			for h := range a.Heads {
				g := h * kv / a.Heads
				score := func(j int) float64 {
					dot, qs, ks := 0.0, row(q, int(query))[h*d:], row(k, int(keys[s][j]))[g*d:]
					for c := range d {
						dot += qs[c] * ks[c]
					}
					return scale * dot
				}
				largest := math.Inf(-1)
				for j := range keys[s] {
					if seen(j) {
						largest = max(largest, score(j))
					}
				}
				sum, mean := 0.0, make([]float64, dv)
				for j := range keys[s] {
					if !seen(j) {
						continue
					}
					p := math.Exp(score(j) - largest)
					sum += p
					for c := range dv {
						mean[c] += p * get(v, int(keys[s][j]), g*dv+c)
					}
				}
				for c := range dv {
					out[int(query)*dst.Cols+h*dv+c] = 0
					if sum > 0 {
						out[int(query)*dst.Cols+h*dv+c] = mean[c] / sum
					}
				}
			}
		}
	}
	setEach(dst, func(i, j int) float64 { return out[i*dst.Cols+j] })
}

func upTo(n int) []int32 {
	x := make([]int32, n)
	for i := range x {
		x[i] = int32(i)
	}
	return x
}

// LayerNormModulate implements tensor.Session by its formula, in float64.
func (session) LayerNormModulate(dst, x, scale, shift tensor.Matrix, group []int32, eps float32) {
	want("layer norm", "x", x, dst.Rows, dst.Cols)
	n := float64(x.Cols)
	means, stds := make([]float64, x.Rows), make([]float64, x.Rows)
	for i := range x.Rows {
		for j := range x.Cols {
			means[i] += get(x, i, j) / n
		}
		variance := 0.0
		for j := range x.Cols {
			d := get(x, i, j) - means[i]
			variance += d * d / n
		}
		stds[i] = math.Sqrt(variance + float64(eps))
	}
	setEach(dst, func(i, j int) float64 {
		g := groupOf(group, i)
		return (get(x, i, j)-means[i])/stds[i]*(1+get(scale, g, j)) + get(shift, g, j)
	})
}

// groupNorm is the form that RMS and L2 norms share: it multiplies each group of len(w) columns of
// x by w and by factor of the group's sum of squares, and then applies act.
func groupNorm(dst, x tensor.Matrix, w tensor.Vector, factor func(sum float64) float64, act tensor.Activation) {
	weights := w.(*array).data
	n := len(weights)
	want("norm", "x", x, dst.Rows, dst.Cols)
	setEach(dst, func(i, j int) float64 {
		first, sum := j/n*n, 0.0
		for c := range n {
			v := get(x, i, first+c)
			sum += v * v
		}
		return activate(act, get(x, i, j)*factor(sum)*weights[j%n])
	})
}

func (session) RMSNorm(dst, x tensor.Matrix, w tensor.Vector, eps float32) {
	n := float64(w.Len())
	groupNorm(dst, x, w, func(sum float64) float64 { return 1 / math.Sqrt(sum/n+float64(eps)) }, tensor.Identity)
}

func (session) L2Norm(dst, x tensor.Matrix, w tensor.Vector, eps float32, act tensor.Activation) {
	n := float64(w.Len())
	groupNorm(dst, x, w, func(sum float64) float64 { return math.Sqrt(n) / max(math.Sqrt(sum), float64(eps)) }, act)
}

// rotate is the form that both rotary embeddings share. pair returns, for column j of a head of
// 2*half columns, the column that it is rotated with, the column of its angle, and the sign of the
// sine. rows[i] is the row of the angles of row i; nil means i.
func rotate(dst, x, cos, sin tensor.Matrix, rows []int32, pair func(j, half int) (partner, angle int, sign float64)) {
	want("rope", "x", x, dst.Rows, dst.Cols)
	half := cos.Cols
	setEach(dst, func(i, j int) float64 {
		r := i
		if rows != nil {
			r = int(rows[i])
		}
		head := j / (2 * half) * 2 * half
		partner, angle, sign := pair(j-head, half)
		return get(x, i, j)*get(cos, r, angle) + sign*get(x, i, head+partner)*get(sin, r, angle)
	})
}

func (session) RopePairs(dst, x, cos, sin tensor.Matrix, rows []int32) {
	rotate(dst, x, cos, sin, rows, func(j, _ int) (int, int, float64) { return j ^ 1, j / 2, float64(2*(j&1) - 1) })
}

func (s session) RMSNormRopePairs(dst, x tensor.Matrix, w tensor.Vector, eps float32, cos, sin tensor.Matrix,
	rows []int32,
) {
	s.RMSNorm(dst, x, w, eps)
	s.RopePairs(dst, dst, cos, sin, rows)
}

func (session) RopeHalves(dst, x, cos, sin tensor.Matrix, rows []int32) {
	rotate(dst, x, cos, sin, rows, func(j, half int) (int, int, float64) {
		if j < half {
			return j + half, j, -1
		}
		return j - half, j - half, 1
	})
}

func (session) SiLUMul(dst, x, y tensor.Matrix) {
	want("silu mul", "x", x, dst.Rows, dst.Cols)
	want("silu mul", "y", y, dst.Rows, dst.Cols)
	setEach(dst, func(i, j int) float64 { return activate(tensor.SiLU, get(x, i, j)) * get(y, i, j) })
}

func (session) Gather(dst, table tensor.Matrix, ids []int32) {
	want("gather", "dst", dst, len(ids), table.Cols)
	setEach(dst, func(i, j int) float64 { return get(table, int(ids[i]), j) })
}

func (session) Scatter(dst, x tensor.Matrix, rows []int32) {
	want("scatter", "x", x, len(rows), dst.Cols)
	for i, r := range rows {
		setEach(dst.SliceRows(int(r), int(r)+1), func(_, j int) float64 { return get(x, i, j) })
	}
}

// Conv2D implements tensor.Session by its formula, in float64.
func (session) Conv2D(dst, x tensor.Image, w tensor.Filter, c tensor.Conv, e tensor.Epilogue) {
	kh, kw := w.Size()
	in, out := w.Channels()
	weights, pixels := w.(*array).data, x.Matrix()
	oh, ow := c.OutSize(kh, kw, x.H, x.W)
	if x.C != in || dst.N != x.N || dst.H != oh || dst.W != ow || dst.C != out {
		panic(fmt.Sprintf("tensor: convolution of %d x %d x %d x %d to %d x %d x %d x %d", x.N, x.H, x.W, x.C, dst.N,
			dst.H, dst.W, dst.C))
	}
	stride := max(1, c.Stride)
	setEach(dst.Matrix(), func(i, o int) float64 {
		n, y, xx := i/(oh*ow), i/ow%oh, i%ow
		sum := 0.0
		for ky := range kh {
			for kx := range kw {
				iy, ix := y*stride+ky-c.Top, xx*stride+kx-c.Left
				if iy < 0 || iy >= x.H || ix < 0 || ix >= x.W {
					continue
				}
				for ch, v := range row(pixels, (n*x.H+iy)*x.W+ix) {
					sum += v * weights[((o*in+ch)*kh+ky)*kw+kx]
				}
			}
		}
		return applyEpilogue(e, i, o, sum)
	})
}

// Upsample2 implements tensor.Session by its formula. Shapes that do not fit panic.
func (session) Upsample2(dst, x tensor.Image) {
	if dst.N != x.N || dst.H != 2*x.H || dst.W != 2*x.W || dst.C != x.C {
		panic(fmt.Sprintf("tensor: upsample %d x %d x %d x %d to %d x %d x %d x %d", x.N, x.H, x.W, x.C, dst.N, dst.H,
			dst.W, dst.C))
	}
	pixels := x.Matrix()
	setEach(dst.Matrix(), func(i, c int) float64 {
		n, y, xx := i/(dst.H*dst.W), i/dst.W%dst.H, i%dst.W
		return get(pixels, (n*x.H+y/2)*x.W+xx/2, c)
	})
}
