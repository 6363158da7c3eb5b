package tensortest

import (
	"math"

	"github.com/meander-rl/meander/pkg/tensor"
)

// want computes the reference unless only the bits of the result are asked for.
func (c *call) want(f func() ref) ref {
	if c.noRef {
		return ref{}
	}
	return f()
}

// Shapes m, n, k of products: single elements, odd sizes, the shipped model's, and
// sizes beyond the cache blocks in each direction.
var productShapes = [][3]int{
	{1, 1, 1},
	{1, 16, 3},
	{5, 3, 7},
	{2, 48, 33},
	{7, 17, 64},
	{13, 33, 100},
	{32, 96, 96},
	{44, 96, 96},
	{64, 384, 96},
	{9, 40, 900},
	{25, 1100, 20},
	{410, 24, 48},
	{50, 130, 400},
}

func productCases() []Case {
	var cases []Case
	add := func(name string, k int, run func(b Backend, c *call) (tensor.Matrix, ref)) {
		cases = append(cases, Case{name, "product", k, run})
	}
	linearCase := func(name string, m, n, k int, inPlace bool, make func(c *call) tensor.Epilogue) {
		add("linear/"+name, k, func(b Backend, c *call) (tensor.Matrix, ref) {
			x, w, e := c.in(m, k), c.in(n, k), make(c)
			dst := c.out(m, n)
			if inPlace {
				dst = c.inout(m, n)
				e.Residual = dst
			}
			want := c.want(func() ref { return linear(x, w, e) })
			b.Linear(dst, x, w, e)
			return dst, want
		})
	}
	for _, s := range productShapes {
		m, n, k := s[0], s[1], s[2]
		linearCase("plain/"+shape(m, n, k), m, n, k, false, func(*call) tensor.Epilogue { return tensor.Epilogue{} })
		linearCase("bias/"+shape(m, n, k), m, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{Bias: c.vector(n)} })
		linearCase("all in place/"+shape(m, n, k), m, n, k, true, func(c *call) tensor.Epilogue {
			return tensor.Epilogue{Bias: c.vector(n), Act: tensor.GELU, Gate: c.in(3, n), Group: c.groups(m, 3)}
		})
		add("matmul/"+shape(m, n, k), k, func(be Backend, c *call) (tensor.Matrix, ref) {
			a, b, dst := c.in(m, k), c.in(k, n), c.out(m, n)
			be.MatMul(dst, a, b)
			return dst, c.want(func() ref {
				return each(m, n, func(i, j int) float64 {
					s := 0.0
					for p := range k {
						s += get(a, i, p) * get(b, p, j)
					}
					return s
				})
			})
		})
		add("matmulT/"+shape(m, n, k), k, func(be Backend, c *call) (tensor.Matrix, ref) {
			a, b, dst := c.in(m, k), c.in(n, k), c.out(m, n)
			be.MatMulT(dst, a, b)
			return dst, c.want(func() ref { return linear(a, b, tensor.Epilogue{}) })
		})
	}
	const m, n, k = 23, 50, 70
	linearCase("silu", m, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{Act: tensor.SiLU} })
	linearCase("gelu", m, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{Act: tensor.GELU} })
	linearCase("gate", m, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{Gate: c.in(1, n)} })
	linearCase("gate by group", m, n, k, false, func(c *call) tensor.Epilogue {
		return tensor.Epilogue{Gate: c.in(4, n), Group: c.groups(m, 4)}
	})
	linearCase("residual", m, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{Residual: c.in(m, n)} })
	linearCase("residual in place", m, n, k, true, func(c *call) tensor.Epilogue { return tensor.Epilogue{} })
	linearCase("gated residual", m, n, k, false, func(c *call) tensor.Epilogue {
		return tensor.Epilogue{Bias: c.vector(n), Gate: c.in(2, n), Residual: c.in(m, n), Group: c.groups(m, 2)}
	})
	linearCase("no rows", 0, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{} })
	return cases
}

func attentionCases() []Case {
	var cases []Case
	type opts struct {
		lq, lk, heads, kv, d, dv int
		cfg                      func(c *call) tensor.Attention
	}
	add := func(name string, o opts) {
		cases = append(cases, Case{"attention/" + name, "attention", 0, func(b Backend, c *call) (tensor.Matrix, ref) {
			cfg := tensor.Attention{}
			if o.cfg != nil {
				cfg = o.cfg(c)
			}
			cfg.Heads, cfg.KVHeads = o.heads, o.kv
			kv := o.kv
			if kv == 0 {
				kv = o.heads
			}
			q, k, v := c.in(o.lq, o.heads*o.d), c.in(o.lk, kv*o.d), c.in(o.lk, kv*o.dv)
			dst := c.inout(o.lq, o.heads*o.dv) // rows outside of all sequences keep their values
			want := c.want(func() ref { return attention(dst, q, k, v, cfg) })
			b.Attention(dst, q, k, v, cfg)
			return dst, want
		}})
	}
	causal := func(*call) tensor.Attention { return tensor.Attention{Causal: true} }
	add("one", opts{1, 1, 1, 0, 1, 1, nil})
	add("joint", opts{62, 62, 3, 0, 32, 32, nil})
	add("odd", opts{19, 23, 2, 0, 20, 7, nil})
	add("single query", opts{1, 70, 4, 2, 16, 16, nil})
	add("long", opts{130, 700, 1, 0, 24, 24, nil})
	add("wide head", opts{37, 37, 1, 0, 130, 130, nil})
	add("grouped", opts{40, 40, 6, 2, 16, 16, nil})
	add("scale", opts{17, 17, 2, 0, 8, 8, func(*call) tensor.Attention { return tensor.Attention{Scale: 2.5} }})
	add("causal", opts{45, 45, 4, 2, 32, 32, causal})
	add("causal after a prefix", opts{11, 45, 2, 2, 16, 16, causal})
	add("causal, more queries than keys", opts{20, 13, 2, 2, 16, 16, causal})
	mask := func(n int) func(*call) tensor.Attention {
		return func(c *call) tensor.Attention {
			m := make([]bool, n)
			for i := range m {
				m[i] = c.r.IntN(3) > 0
			}
			return tensor.Attention{Mask: m}
		}
	}
	add("mask", opts{31, 50, 2, 0, 16, 16, mask(50)})
	add("mask, causal", opts{50, 50, 2, 1, 16, 16, func(c *call) tensor.Attention {
		cfg := mask(50)(c)
		cfg.Causal, cfg.Mask[0] = true, false
		return cfg
	}})
	add("mask of all", opts{9, 5, 2, 0, 8, 8, func(*call) tensor.Attention { return tensor.Attention{Mask: make([]bool, 5)} }})
	sequences := func(c *call) tensor.Attention {
		rows := upTo(70)
		c.r.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		return tensor.Attention{Sequences: [][]int32{rows[:1], rows[1:20], rows[20:20], rows[20:64]}}
	}
	add("sequences", opts{70, 70, 3, 0, 16, 16, sequences})
	add("sequences, causal, mask", opts{70, 70, 4, 2, 16, 16, func(c *call) tensor.Attention {
		cfg := sequences(c)
		cfg.Causal, cfg.Mask = true, mask(70)(c).Mask
		return cfg
	}})
	return cases
}

func rowCases() []Case {
	var cases []Case
	add := func(name, op string, run func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref)) {
		for _, s := range [][2]int{{1, 1}, {3, 16}, {7, 33}, {5, 96}, {300, 100}} {
			cases = append(cases, Case{name + "/" + shape(s[0], s[1]), op, 0, func(b Backend, c *call) (tensor.Matrix, ref) {
				got, want := run(b, c, s[0], s[1])
				return got, c.want(want)
			}})
		}
	}
	unary := func(name, op string, run func(b Backend, dst, x tensor.Matrix), f func(x float64) float64) {
		add(name, op, func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
			x, dst := c.in(m, n), c.out(m, n)
			run(b, dst, x)
			return dst, func() ref { return each(m, n, func(i, j int) float64 { return f(get(x, i, j)) }) }
		})
	}
	binary := func(name, op string, run func(b Backend, dst, x, y tensor.Matrix), f func(x, y float64) float64) {
		add(name, op, func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
			x, y, dst := c.in(m, n), c.in(m, n), c.out(m, n)
			run(b, dst, x, y)
			return dst, func() ref { return each(m, n, func(i, j int) float64 { return f(get(x, i, j), get(y, i, j)) }) }
		})
		add(name+" in place", op, func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
			x, y := c.inout(m, n), c.in(m, n)
			want := each(m, n, func(i, j int) float64 { return f(get(x, i, j), get(y, i, j)) })
			run(b, x, x, y)
			return x, func() ref { return want }
		})
	}
	binary("add", "elements", Backend.Add, func(x, y float64) float64 { return x + y })
	binary("mul", "elements", Backend.Mul, func(x, y float64) float64 { return x * y })
	binary("add scaled", "elements", func(b Backend, dst, x, y tensor.Matrix) { b.AddScaled(dst, x, y, -1.25) },
		func(x, y float64) float64 { return -1.25*x + y })
	unary("scale", "elements", func(b Backend, dst, x tensor.Matrix) { b.Scale(dst, x, 0.75) }, func(x float64) float64 { return 0.75 * x })
	unary("silu", "exp", Backend.SiLU, silu)
	unary("gelu", "exp", Backend.GELU, gelu)
	binary("silu mul", "exp", Backend.SiLUMul, func(x, y float64) float64 { return silu(x) * y })
	add("softmax", "exp", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
		x, dst := c.in(m, n), c.out(m, n)
		b.Softmax(dst, x)
		return dst, func() ref {
			r := each(m, n, func(i, j int) float64 { return math.Exp(get(x, i, j)) })
			for i := range m {
				s := 0.0
				for j := range n {
					s += *r.at(i, j)
				}
				for j := range n {
					*r.at(i, j) /= s
				}
			}
			return r
		}
	})
	add("gather", "copy", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
		table, ids, dst := c.in(11, n), c.groups(m, 11), c.out(m, n)
		b.Gather(dst, table, ids)
		return dst, func() ref { return each(m, n, func(i, j int) float64 { return get(table, int(ids[i]), j) }) }
	})
	const eps = 1e-6
	add("layer norm", "norm", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
		x, dst := c.matrix(m, n, false, func() float32 { return 3 + c.normal() }), c.out(m, n)
		b.LayerNorm(dst, x, eps)
		return dst, func() ref { return layerNorm(x, eps) }
	})
	add("layer norm and modulate", "norm", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
		x, dst, scale, shift, group := c.in(m, n), c.out(m, n), c.in(3, n), c.in(3, n), c.groups(m, 3)
		b.LayerNormModulate(dst, x, scale, shift, group, eps)
		return dst, func() ref { return modulate(layerNorm(x, eps), scale, shift, group) }
	})
	add("modulate", "elements", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
		x, dst, scale, shift := c.in(m, n), c.out(m, n), c.in(1, n), c.in(1, n)
		b.Modulate(dst, x, scale, shift, nil)
		return dst, func() ref { return modulate(toRef(x), scale, shift, nil) }
	})
	for _, heads := range []int{1, 3} {
		add("rms norm, heads "+shape(heads), "norm", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
			x, dst, w := c.in(m, heads*n), c.out(m, heads*n), c.vector(n)
			b.RMSNorm(dst, x, w, eps)
			return dst, func() ref {
				return groupNorm(x, w, func(s float64) float64 { return 1 / math.Sqrt(s/float64(n)+float64(float32(eps))) })
			}
		})
		add("l2 norm, heads "+shape(heads), "exp", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
			x, dst, w := c.in(m, heads*n), c.out(m, heads*n), c.vector(n)
			b.L2Norm(dst, x, w, 1e-12, tensor.SiLU)
			return dst, func() ref {
				r := groupNorm(x, w, func(s float64) float64 { return math.Sqrt(float64(n)) / max(math.Sqrt(s), 1e-12) })
				for i, v := range r.data {
					r.data[i] = silu(v)
				}
				return r
			}
		})
		ropeCase := func(name string, run func(b Backend, dst, x, cos, sin tensor.Matrix, rows []int32), pair func(j, half int) (int, int, float64)) {
			add(name+", heads "+shape(heads), "rope", func(b Backend, c *call, m, n int) (tensor.Matrix, func() ref) {
				x, cos, sin := c.inout(m, heads*2*n), c.in(m+2, n), c.in(m+2, n)
				var rows []int32
				if heads > 1 {
					rows = c.groups(m, m+2)
				}
				want := rope(x, cos, sin, rows, pair)
				run(b, x, x, cos, sin, rows)
				return x, func() ref { return want }
			})
		}
		ropeCase("rope pairs", Backend.RopePairs, func(j, _ int) (int, int, float64) { return j ^ 1, j / 2, float64(2*(j&1) - 1) })
		ropeCase("rope halves", Backend.RopeHalves, func(j, half int) (int, int, float64) {
			if j < half {
				return j + half, j, -1
			}
			return j - half, j - half, 1
		})
	}
	return cases
}

func convCases() []Case {
	var cases []Case
	type opts struct {
		n, h, w, in, out, kh, kw int
		v                        tensor.Conv
	}
	add := func(name string, o opts, epilogue func(c *call, rows int) tensor.Epilogue) {
		cases = append(cases, Case{"conv/" + name, "product", o.in * o.kh * o.kw, func(b Backend, c *call) (tensor.Matrix, ref) {
			oh := (o.h+o.v.Top+o.v.Bottom-o.kh)/max(1, o.v.Stride) + 1
			ow := (o.w+o.v.Left+o.v.Right-o.kw)/max(1, o.v.Stride) + 1
			x, w, dst := c.inImage(o.n, o.h, o.w, o.in), c.in(o.out, o.in*o.kh*o.kw), c.outImage(o.n, oh, ow, o.out)
			e := tensor.Epilogue{}
			if epilogue != nil {
				e = epilogue(c, o.n*oh*ow)
			}
			want := c.want(func() ref { return conv(dst, x, w, o.kh, o.kw, o.v, e) })
			b.Conv2D(dst, x, w, o.kh, o.kw, o.v, e)
			return dst.Matrix(), want
		}})
	}
	same := tensor.SamePad(3)
	add("1x1", opts{2, 3, 5, 7, 9, 1, 1, tensor.Conv{}}, nil)
	add("3x3", opts{2, 8, 16, 16, 16, 3, 3, same}, nil)
	add("3x3 to colours", opts{1, 9, 13, 16, 3, 3, 3, same}, nil)
	add("3x3 from colours", opts{1, 9, 40, 3, 24, 3, 3, same}, nil)
	add("3x3 wide", opts{1, 5, 3, 40, 70, 3, 3, same}, nil)
	add("3x3 unpadded", opts{2, 6, 7, 5, 17, 3, 3, tensor.Conv{}}, nil)
	add("3x3 down", opts{2, 8, 10, 16, 16, 3, 3, tensor.Conv{Stride: 2, Bottom: 1, Right: 1}}, nil)
	add("3x2, stride 3", opts{1, 11, 14, 4, 5, 3, 2, tensor.Conv{Stride: 3, Top: 1, Left: 2}}, nil)
	add("one pixel", opts{1, 1, 1, 4, 4, 3, 3, same}, nil)
	add("epilogue", opts{2, 6, 20, 16, 18, 3, 3, same}, func(c *call, rows int) tensor.Epilogue {
		return tensor.Epilogue{Bias: c.vector(18), Act: tensor.SiLU, Residual: c.in(rows, 18)}
	})
	add("gate", opts{2, 4, 6, 8, 16, 3, 3, same}, func(c *call, rows int) tensor.Epilogue {
		return tensor.Epilogue{Bias: c.vector(16), Gate: c.in(2, 16), Group: c.groups(rows, 2)}
	})
	cases = append(cases, Case{"upsample", "copy", 0, func(b Backend, c *call) (tensor.Matrix, ref) {
		x, dst := c.inImage(2, 3, 5, 7), c.outImage(2, 6, 10, 7)
		b.Upsample2(dst, x)
		return dst.Matrix(), each(2*6*10, 7, func(i, ch int) float64 {
			n, y, xx := i/60, i/10%6, i%10
			return float64(x.Data[((n*3+y/2)*5+xx/2)*7+ch])
		})
	}})
	return cases
}
