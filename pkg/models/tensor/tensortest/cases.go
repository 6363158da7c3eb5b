package tensortest

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

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

// productCases are cases of Linear: shapes around the block sizes of devices, with all parts of an epilogue.
func productCases() []Case {
	var cases []Case
	add := func(name string, m, n, k int, inPlace bool, make func(c *call) tensor.Epilogue) {
		cases = append(cases, Case{"linear/" + name, "product", k, func(c *call) tensor.Matrix {
			x, w, e := c.in(m, k), c.weight(c.array(n, k)), make(c)
			dst := c.out(m, n)
			if inPlace {
				dst = c.inout(m, n)
				e.Residual = dst
			}
			c.s.Linear(dst, x, w, e)
			return dst
		}})
	}
	plain := func(*call) tensor.Epilogue { return tensor.Epilogue{} }
	for _, s := range productShapes {
		m, n, k := s[0], s[1], s[2]
		add("plain/"+shape(m, n, k), m, n, k, false, plain)
		add("bias/"+shape(m, n, k), m, n, k, false,
			func(c *call) tensor.Epilogue { return tensor.Epilogue{Bias: c.vector(n)} })
		add("all in place/"+shape(m, n, k), m, n, k, true, func(c *call) tensor.Epilogue {
			return tensor.Epilogue{Bias: c.vector(n), Act: tensor.GELU, Gate: c.in(3, n), Group: c.groups(m, 3)}
		})
	}
	const m, n, k = 23, 50, 70
	add("silu", m, n, k, false, func(*call) tensor.Epilogue { return tensor.Epilogue{Act: tensor.SiLU} })
	add("gelu", m, n, k, false, func(*call) tensor.Epilogue { return tensor.Epilogue{Act: tensor.GELU} })
	add("gate", m, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{Gate: c.in(1, n)} })
	add("gate by group", m, n, k, false, func(c *call) tensor.Epilogue {
		return tensor.Epilogue{Gate: c.in(4, n), Group: c.groups(m, 4)}
	})
	add("residual", m, n, k, false, func(c *call) tensor.Epilogue { return tensor.Epilogue{Residual: c.in(m, n)} })
	add("residual in place", m, n, k, true, plain)
	add("gated residual", m, n, k, false, func(c *call) tensor.Epilogue {
		return tensor.Epilogue{Bias: c.vector(n), Gate: c.in(2, n), Residual: c.in(m, n), Group: c.groups(m, 2)}
	})
	add("no rows", 0, n, k, false, plain)
	for _, d := range []tensor.DType{tensor.F64, tensor.F16, tensor.BF16} {
		cases = append(cases, Case{"linear/stacked, of " + string(d), "product", k, func(c *call) tensor.Matrix {
			part := func(n int) tensor.Array {
				a := c.array(n, k)
				return tensor.Array{DType: d, Shape: a.Shape, Data: d.AppendFloats(nil, a.Decode())}
			}
			w := c.weight(part(7), part(20), part(1))
			x, dst := c.in(m, k), c.out(m, 28)
			c.s.Linear(dst, x, w, tensor.Epilogue{})
			return dst
		}})
	}
	cases = append(cases, Case{"weights read back", "copy", 0, func(c *call) tensor.Matrix {
		w := c.weight(c.array(19, 33), c.array(5, 33))
		x := make([]float32, w.N()*w.K())
		must(0, c.d.Read(x, w))
		dst := c.out(w.N(), w.K())
		c.s.CopyIn(dst, x)
		return dst
	}})
	return cases
}

// attentionCases are cases of Attention: heads, masks, causal attention, sequences and caches.
func attentionCases() (cases []Case) {
	type opts struct {
		lq, lk, heads, kv, d, dv int
		cfg                      func(c *call) tensor.Attention
	}
	add := func(name string, o opts) {
		cases = append(cases, Case{"attention/" + name, "attention", 0, func(c *call) tensor.Matrix {
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
			c.s.Attention(dst, q, k, v, cfg)
			return dst
		}})
	}
	causal := func(*call) tensor.Attention { return tensor.Attention{Causal: true} }
	add("one", opts{1, 1, 1, 0, 1, 1, nil})
	add("joint", opts{62, 62, 3, 0, 32, 32, nil})
	add("odd", opts{19, 23, 2, 0, 20, 7, nil})
	add("single query", opts{1, 70, 4, 2, 16, 16, nil})
	add("long", opts{130, 700, 1, 0, 24, 24, nil})
	add("wide head", opts{37, 37, 1, 0, 130, 130, nil})
	add("wide heads", opts{9, 20, 2, 1, 136, 136, nil})
	// Heads of the sizes that models have, and beside them: tails of columns, of queries and of keys.
	add("heads of 40", opts{17, 75, 2, 0, 40, 40, nil})
	add("heads of 64", opts{20, 90, 2, 0, 64, 64, nil})
	add("heads of 64, causal", opts{70, 70, 2, 1, 64, 64, causal})
	add("heads of 72", opts{17, 75, 1, 0, 72, 72, nil})
	add("heads of 120", opts{33, 70, 2, 1, 120, 120, nil})
	add("heads of 128", opts{20, 131, 2, 0, 128, 128, nil})
	add("heads of 128, more than a tile of queries", opts{140, 65, 1, 0, 128, 128, nil})
	add("heads of 256", opts{12, 40, 2, 1, 256, 256, nil})
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
	none := func(*call) tensor.Attention { return tensor.Attention{Mask: make([]bool, 5)} }
	add("mask of all", opts{9, 5, 2, 0, 8, 8, none})
	sequences := func(c *call) tensor.Attention {
		rows := make([]int32, 70)
		for i := range rows {
			rows[i] = int32(i)
		}
		c.r.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		return tensor.Attention{Sequences: [][]int32{rows[:1], rows[1:20], rows[20:20], rows[20:64]}}
	}
	add("sequences", opts{70, 70, 3, 0, 16, 16, sequences})
	add("sequences, causal, mask", opts{70, 70, 4, 2, 16, 16, func(c *call) tensor.Attention {
		cfg := sequences(c)
		cfg.Causal, cfg.Mask = true, mask(70)(c).Mask
		return cfg
	}})
	for _, causal := range []bool{false, true} {
		cases = append(cases, Case{"attention/cache, causal " + fmt.Sprint(causal), "attention", 0, cacheCase(causal)})
	}
	return cases
}

// cacheCase is a case of attention over rows of a cache that lie anywhere, some of them shared by
// several sequences.
func cacheCase(causal bool) func(c *call) tensor.Matrix {
	return func(c *call) tensor.Matrix {
		const heads, kv, d, rows = 4, 2, 16, 90
		cache := must(c.d.Cache(rows, 2*kv*d))
		order := make([]int32, rows)
		for i, r := range c.r.Perm(rows) {
			order[i] = int32(r)
		}
		for from := 0; from < rows; from += 30 { // what a session finds, others left there
			c.s.Scatter(cache, c.in(30, 2*kv*d), order[from:from+30])
		}
		q, dst := c.in(9, heads*d), c.inout(9, heads*d)
		c.s.Attention(dst, q, cache.SliceCols(0, kv*d), cache.SliceCols(kv*d, 2*kv*d), tensor.Attention{
			Heads: heads, KVHeads: kv, Causal: causal,
			Sequences: [][]int32{{4}, {0, 1, 2}, {8, 3}, {}}, Keys: [][]int32{order[:70], order[5:8], order[20:41], order[:3]},
		})
		return dst
	}
}

// rowShapes are those of rowCases: rows and columns.
var rowShapes = [][2]int{
	{1, 1}, {3, 16}, {7, 33}, {5, 96}, {300, 100}, {7, 32}, {5, 64}, {3, 128}, {2, 2112},
}

// rowCases are cases of the operations on rows: norms, rotary embeddings, Gather and Scatter.
func rowCases() (cases []Case) {
	add := func(name, op string, run func(c *call, m, n int) tensor.Matrix) {
		for _, s := range rowShapes {
			made := func(c *call) tensor.Matrix { return run(c, s[0], s[1]) }
			cases = append(cases, Case{name + "/" + shape(s[0], s[1]), op, 0, made})
		}
	}
	add("silu mul", "exp", func(c *call, m, n int) tensor.Matrix {
		x, y, dst := c.in(m, n), c.in(m, n), c.out(m, n)
		c.s.SiLUMul(dst, x, y)
		return dst
	})
	add("silu mul in place", "exp", func(c *call, m, n int) tensor.Matrix {
		x, y := c.inout(m, n), c.in(m, n)
		c.s.SiLUMul(x, x, y)
		return x
	})
	add("gather", "copy", func(c *call, m, n int) tensor.Matrix {
		table, ids, dst := c.table(c.array(11, n)), c.groups(m, 11), c.out(m, n)
		c.s.Gather(dst, table, ids)
		return dst
	})
	add("scatter", "copy", func(c *call, m, n int) tensor.Matrix {
		x, dst, rows := c.in(m, n), c.inout(m+3, n), make([]int32, m)
		for i, r := range c.r.Perm(m + 3)[:m] {
			rows[i] = int32(r)
		}
		c.s.Scatter(dst, x, rows)
		return dst
	})
	const eps = 1e-6
	add("layer norm and modulate", "norm", func(c *call, m, n int) tensor.Matrix {
		x, dst, scale, shift, group := c.in(m, n), c.out(m, n), c.in(3, n), c.in(3, n), c.groups(m, 3)
		c.s.LayerNormModulate(dst, x, scale, shift, group, eps)
		return dst
	})
	add("layer norm of an offset", "norm", func(c *call, m, n int) tensor.Matrix {
		x := c.matrix(m, n, false, func() float32 { return 3 + c.normal() })
		dst, scale, shift := c.out(m, n), c.in(1, n), c.in(1, n)
		c.s.LayerNormModulate(dst, x, scale, shift, nil, eps)
		return dst
	})
	for _, heads := range []int{1, 3} {
		add("rms norm, heads "+shape(heads), "norm", func(c *call, m, n int) tensor.Matrix {
			x, dst, w := c.in(m, heads*n), c.out(m, heads*n), c.vector(n)
			c.s.RMSNorm(dst, x, w, eps)
			return dst
		})
		for _, act := range []tensor.Activation{tensor.Identity, tensor.SiLU} {
			add("l2 norm, heads "+shape(heads, int(act)), "exp", func(c *call, m, n int) tensor.Matrix {
				x, w := c.inout(m, heads*n), c.vector(n)
				c.s.L2Norm(x, x, w, 1e-12, act)
				return x
			})
		}
		add("rms norm and rope pairs, heads "+shape(heads), "norm", func(c *call, m, n int) tensor.Matrix {
			x, w, cos, sin := c.inout(m, heads*2*n), c.vector(2*n), c.in(m+2, n), c.in(m+2, n)
			var rows []int32
			if heads > 1 {
				rows = c.groups(m, m+2)
			}
			c.s.RMSNormRopePairs(x, x, w, eps, cos, sin, rows)
			return x
		})
		rope := func(name string, run func(s tensor.Session, dst, x, cos, sin tensor.Matrix, rows []int32)) {
			add(name+", heads "+shape(heads), "rope", func(c *call, m, n int) tensor.Matrix {
				x, cos, sin := c.inout(m, heads*2*n), c.in(m+2, n), c.in(m+2, n)
				var rows []int32
				if heads > 1 {
					rows = c.groups(m, m+2)
				}
				run(c.s, x, x, cos, sin, rows)
				return x
			})
		}
		rope("rope pairs", tensor.Session.RopePairs)
		rope("rope halves", tensor.Session.RopeHalves)
	}
	return cases
}

// convCases are cases of Conv2D and Upsample2: sizes of filters, strides and paddings, and parts of
// an epilogue.
func convCases() []Case {
	var cases []Case
	type opts struct {
		n, h, w, in, out, kh, kw int
		v                        tensor.Conv
	}
	add := func(name string, o opts, epilogue func(c *call, rows int) tensor.Epilogue) {
		cases = append(cases, Case{"conv/" + name, "product", o.in * o.kh * o.kw, func(c *call) tensor.Matrix {
			oh, ow := o.v.OutSize(o.kh, o.kw, o.h, o.w)
			x, w, dst := c.inImage(o.n, o.h, o.w, o.in), c.filter(c.array(o.out, o.in, o.kh, o.kw)),
				c.outImage(o.n, oh, ow, o.out)
			e := tensor.Epilogue{}
			if epilogue != nil {
				e = epilogue(c, o.n*oh*ow)
			}
			c.s.Conv2D(dst, x, w, o.v, e)
			return dst.Matrix()
		}})
	}
	same := tensor.SamePad(3)
	add("1x1", opts{2, 3, 5, 7, 9, 1, 1, tensor.Conv{}}, nil)
	add("3x3", opts{2, 8, 16, 16, 16, 3, 3, same}, nil)
	add("3x3 to colours", opts{1, 9, 13, 16, 3, 3, 3, same}, nil)
	add("3x3 from colours", opts{1, 9, 40, 3, 24, 3, 3, same}, nil)
	add("3x3 of panels", opts{2, 9, 31, 32, 48, 3, 3, same}, func(c *call, rows int) tensor.Epilogue {
		return tensor.Epilogue{Bias: c.vector(48), Residual: c.in(rows, 48)}
	})
	add("3x3 of panels, unpadded", opts{2, 4, 9, 16, 16, 3, 3, tensor.Conv{Left: 2}}, nil)
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
	for _, channels := range [][2]int{{32, 16}, {5, 17}} {
		in, out := channels[0], channels[1]
		cases = append(cases, Case{"conv/doubled, to " + shape(out), "product", in * 9, func(c *call) tensor.Matrix {
			x, dst := c.inImage(2, 7, 5, in), c.outImage(2, 14, 10, out)
			w := c.filter(c.array(out, in, 3, 3))
			e := tensor.Epilogue{Bias: c.vector(out), Act: tensor.SiLU, Residual: c.in(2*14*10, out)}
			if double, ok := c.s.(tensor.Doubler); ok {
				double.DoubledConv2D(dst, x, w, e)
				return dst.Matrix()
			}
			up := c.s.Factors(2*14*10*in).Image(2, 14, 10, in)
			c.s.Upsample2(up, x)
			c.s.Conv2D(dst, up, w, same, e)
			return dst.Matrix()
		}})
	}
	cases = append(cases, Case{"upsample", "copy", 0, func(c *call) tensor.Matrix {
		x, dst := c.inImage(2, 3, 5, 7), c.outImage(2, 6, 10, 7)
		c.s.Upsample2(dst, x)
		return dst.Matrix()
	}})
	return cases
}
