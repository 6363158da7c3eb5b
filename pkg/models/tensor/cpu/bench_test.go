package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// BenchmarkMatMul reports GFLOP/s and their share of the core's peak, both as the best
// of short rounds that take turns, since another process on the core slows single
// rounds down. Shapes: the shipped model's (width 96, 32 image tokens and some 12 to
// 40 text tokens) and larger ones.
func BenchmarkMatMul(b *testing.B) {
	shapes := [][3]int{
		{32, 96, 96},
		{44, 96, 96},
		{64, 96, 96},
		{64, 288, 96},
		{64, 384, 96},
		{64, 96, 384},
		{512, 384, 96},
		{64, 512, 512},
		{64, 1024, 1024},
		{256, 512, 512},
		{512, 512, 512},
		{512, 1024, 1024},
		{256, 1024, 256},
	}
	r := rand.New(rand.NewPCG(1, 1))
	for _, k := range cpu.AvailableKernels() {
		if k == cpu.KernelsGo {
			continue // see BenchmarkMatMulGo
		}
		for _, s := range shapes {
			b.Run(fmt.Sprintf("backend=%s/m=%d/n=%d/k=%d", k, s[0], s[1], s[2]), func(b *testing.B) {
				c := newCPU(b, nil, k)
				run := product(r, c, s)
				flops := 2 * float64(s[0]*s[1]*s[2])
				rounds := max(1, int(2e7/flops)) // a fraction of a millisecond
				best, peak := 0.0, 0.0
				for b.Loop() {
					start := time.Now()
					for range rounds {
						run()
					}
					best = max(best, flops*float64(rounds)/float64(time.Since(start).Nanoseconds()))
					peak = max(peak, c.MeasurePeak(time.Microsecond))
				}
				b.ReportMetric(best, "GFLOP/s")
				b.ReportMetric(100*best/peak, "%peak")
			})
		}
	}
}

func product(r *rand.Rand, c *cpu.CPU, s [3]int) func() {
	m, n, k := s[0], s[1], s[2]
	x, w := cpu.NewMatrix(random(r, m*k), m, k), cpu.Pack(random(r, n*k), n, k)
	y, bias := cpu.NewMatrix(make([]float32, m*n), m, n), random(r, n)
	return func() { c.Linear(y, x, w, cpu.Epilogue{Bias: bias}) }
}

// BenchmarkMatMulGo is the naive twin.
func BenchmarkMatMulGo(b *testing.B) {
	s := [3]int{44, 96, 96}
	run := product(rand.New(rand.NewPCG(1, 1)), newCPU(b, nil, cpu.KernelsGo), s)
	start := time.Now()
	n := 0
	for b.Loop() {
		run()
		n++
	}
	b.ReportMetric(2*float64(s[0]*s[1]*s[2]*n)/float64(time.Since(start).Nanoseconds()), "GFLOP/s")
}

// BenchmarkHalf reports how fast products with weights of bf16 are beside those of float32: the median ratio of calls
// side by side.
func BenchmarkHalf(b *testing.B) {
	const n, k = 1024, 1024 // larger than caches; smaller ones are float32 (leastHalf)
	r := rand.New(rand.NewPCG(1, 1))
	half := tensor.BF16.AppendFloats(nil, random(r, n*k))
	wide := make([]float32, n*k)
	if err := tensor.BF16.DecodeFloats(wide, half); err != nil {
		b.Fatal(err)
	}
	weights := []*cpu.Packed{cpu.Pack(wide, n, k), cpu.PackHalf(k, half)}
	for _, kernels := range cpu.AvailableKernels() {
		if kernels == cpu.KernelsGo {
			continue
		}
		for _, m := range []int{1, 12, 48, 49, 64, 192, 512} {
			b.Run(fmt.Sprintf("backend=%s/m=%d", kernels, m), func(b *testing.B) {
				c := newCPU(b, nil, kernels)
				x, y := cpu.NewMatrix(random(r, m*k), m, k), cpu.NewMatrix(make([]float32, m*n), m, n)
				var ratios []float64
				for b.Loop() {
					var took [2]time.Duration
					for i, w := range weights {
						start := time.Now()
						c.Linear(y, x, w, cpu.Epilogue{})
						took[i] = time.Since(start)
					}
					ratios = append(ratios, float64(took[0])/float64(took[1]))
				}
				slices.Sort(ratios)
				b.ReportMetric(ratios[len(ratios)/2], "float32/bf16")
			})
		}
	}
}

// BenchmarkBlock is the operations of one transformer block of the shipped model: rows
// tokens of width 96 in sequences of 62, 3 heads. It reports the best time of a call.
func BenchmarkBlock(b *testing.B) {
	const d, heads = 96, 3
	r := rand.New(rand.NewPCG(1, 1))
	for _, rows := range []int{62, 496} {
		m := func(cols int) cpu.Matrix { return cpu.NewMatrix(random(r, rows*cols), rows, cols) }
		x, y, qkv, hidden := m(d), m(d), m(3*d), m(4*d)
		pack := func(n, k int) *cpu.Packed { return cpu.Pack(random(r, n*k), n, k) }
		wqkv, wout, wup, wdown := pack(3*d, d), pack(d, d), pack(4*d, d), pack(d, 4*d)
		mod := cpu.NewMatrix(random(r, 6*d), 6, d)
		group := make([]int32, rows)
		cos, sin := m(d/heads/2), m(d/heads/2)
		norm, bias := random(r, d/heads), random(r, 4*d)
		var seqs [][]int32
		for i := range rows {
			if i%62 == 0 {
				seqs = append(seqs, nil)
			}
			seqs[i/62] = append(seqs[i/62], int32(i))
		}
		q, k, v := qkv.SliceCols(0, d), qkv.SliceCols(d, 2*d), qkv.SliceCols(2*d, 3*d)
		for _, op := range []struct {
			name string
			run  func(c *cpu.CPU)
		}{
			{"layernorm", func(c *cpu.CPU) {
				c.LayerNormModulate(y, x, mod.SliceRows(0, 1), mod.SliceRows(1, 2), group, 1e-6)
			}},
			{"qkv", func(c *cpu.CPU) { c.Linear(qkv, y, wqkv, cpu.Epilogue{Bias: bias[:3*d]}) }},
			{"rmsnorm", func(c *cpu.CPU) { c.RMSNorm(q, q, norm, 1e-6) }},
			{"rope", func(c *cpu.CPU) { c.RopePairs(q, q, cos, sin, nil) }},
			{"attention", func(c *cpu.CPU) {
				c.Attention(y, q, k, v, tensor.Attention{Heads: heads, Sequences: seqs})
			}},
			{"out", func(c *cpu.CPU) {
				c.Linear(x, y, wout, cpu.Epilogue{Bias: bias[:d], Gate: mod.SliceRows(2, 3), Residual: x, Group: group})
			}},
			{"up", func(c *cpu.CPU) { c.Linear(hidden, y, wup, cpu.Epilogue{Bias: bias, Act: tensor.GELU}) }},
			{"down", func(c *cpu.CPU) {
				c.Linear(x, hidden, wdown, cpu.Epilogue{
					Bias: bias[:d], Gate: mod.SliceRows(2, 3), Residual: x, Group: group,
				})
			}},
		} {
			b.Run(fmt.Sprintf("op=%s/rows=%d", op.name, rows), func(b *testing.B) {
				c := cpu.NewCPU(nil)
				bestOf(b, func() { op.run(c) })
			})
		}
	}
}

// BenchmarkConv is the widest layer of the shipped decoder at 64 x 128.
func BenchmarkConv(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, s := range []struct{ h, w, in, out int }{
		{64, 128, 16, 16},
		{64, 128, 16, 3},
		{32, 64, 32, 32},
		{16, 32, 64, 64},
	} {
		x := cpu.NewImage(random(r, s.h*s.w*s.in), 1, s.h, s.w, s.in)
		y := cpu.NewImage(make([]float32, s.h*s.w*s.out), 1, s.h, s.w, s.out)
		w, bias, norm := cpu.PackConv(random(r, s.out*s.in*9), s.out, s.in, 3, 3), random(r, s.out), random(r, s.in)
		c := cpu.NewCPU(nil)
		name := fmt.Sprintf("/h=%d/w=%d/in=%d/out=%d", s.h, s.w, s.in, s.out)
		b.Run("op=conv3x3"+name, func(b *testing.B) {
			best := bestOf(b, func() { c.Conv2D(y, x, w, tensor.SamePad(3), cpu.Epilogue{Bias: bias}) })
			b.ReportMetric(float64(2*9*s.h*s.w*s.in*s.out)/best, "GFLOP/s")
		})
		b.Run("op=l2norm"+name, func(b *testing.B) {
			z := cpu.NewImage(make([]float32, len(x.Data)), 1, s.h, s.w, s.in)
			bestOf(b, func() { c.L2Norm(z.Matrix(), x.Matrix(), norm, 1e-12, tensor.SiLU) })
		})
	}
}

// bestOf reports and returns the shortest time of a call, in ns.
func bestOf(b *testing.B, f func()) float64 {
	best := time.Hour
	for b.Loop() {
		start := time.Now()
		f()
		best = min(best, time.Since(start))
	}
	b.ReportMetric(float64(best.Nanoseconds()), "best-ns/op")
	return float64(best.Nanoseconds())
}
