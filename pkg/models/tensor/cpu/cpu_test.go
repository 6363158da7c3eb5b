package cpu_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
	"github.com/meander-rl/meander/pkg/models/tensor/tensortest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newCPU(t testing.TB, pool *cpu.Pool, k cpu.Kernels) *cpu.CPU {
	t.Helper()
	c, err := cpu.NewCPUWith(pool, k)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newDevice(t testing.TB, o cpu.Options) *cpu.Device {
	t.Helper()
	d, err := cpu.NewDevice(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() }) // it cannot fail
	return d
}

// One set of kernels is enough here: TestDevice_SameBits ties the others to it.
func TestDevice_Conformance(t *testing.T) {
	tensortest.Run(t, newDevice(t, cpu.Options{Threads: 2}))
}

// The bits of every case are those of the plain Go kernels on one thread.
func TestDevice_SameBits(t *testing.T) {
	want := newDevice(t, cpu.Options{Threads: 1, Kernels: cpu.KernelsGo})
	type variant struct {
		name string
		d    *cpu.Device
		wide bool
	}
	var variants []variant
	for _, k := range cpu.AvailableKernels() {
		if k != cpu.KernelsGo { // threads do not care about kernels
			d := newDevice(t, cpu.Options{Threads: 3, Kernels: k})
			variants = append(variants, variant{string(k) + ", one thread", d, false},
				variant{string(k) + ", 3 threads", d, true})
		}
	}
	for _, cs := range tensortest.Cases() {
		w := cs.Output(t, want, false, false)
		for _, v := range variants {
			wantBits(t, cs.Name+" on "+v.name, cs.Output(t, v.d, v.wide, false), w)
		}
	}
}

func wantBits(t *testing.T, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: element %d: got %v, want %v", what, i, got[i], want[i])
		}
	}
}

func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// Large enough that the threads really share the work, in every kind of task.
func TestCPU_ThreadsDoNotChangeBits(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	const m, n, k = 300, 200, 450
	x, w, bias := cpu.NewMatrix(random(r, m*k), m, k), cpu.Pack(random(r, n*k), n, k), random(r, n)
	image, kernel := cpu.NewImage(random(r, 2*40*48*32), 2, 40, 48, 32), cpu.PackConv(random(r, 32*32*9), 32, 32, 3, 3)
	const l, heads, d = 400, 4, 32
	qkv := cpu.NewMatrix(random(r, l*3*heads*d), l, 3*heads*d)
	run := func(c *cpu.CPU) []float32 {
		y := cpu.NewMatrix(make([]float32, m*n), m, n)
		c.Linear(y, x, w, cpu.Epilogue{Bias: bias, Act: tensor.GELU})
		im := cpu.NewImage(make([]float32, 2*40*48*32), 2, 40, 48, 32)
		c.Conv2D(im, image, kernel, tensor.SamePad(3), cpu.Epilogue{Act: tensor.SiLU})
		a := cpu.NewMatrix(make([]float32, l*heads*d), l, heads*d)
		c.Attention(a, qkv.SliceCols(0, heads*d), qkv.SliceCols(heads*d, 2*heads*d),
			qkv.SliceCols(2*heads*d, 3*heads*d),
			tensor.Attention{Heads: heads})
		z := cpu.NewMatrix(make([]float32, l*3*heads*d), l, 3*heads*d)
		c.LayerNormModulate(z, qkv, qkv.SliceRows(0, 1), qkv.SliceRows(1, 2), nil, 1e-6)
		return append(append(append(y.Data, im.Data...), a.Data...), z.Data...)
	}
	want := run(cpu.NewCPU(nil))
	for threads := 2; threads <= 5; threads++ {
		pool := cpu.NewPool(threads)
		c := cpu.NewCPU(pool)
		for range 3 {
			wantBits(t, fmt.Sprintf("%d threads", threads), run(c), want)
		}
		pool.Close()
	}
}

// A row gives the same bits alone, in a batch, and wherever it stands in it.
func TestCPU_BatchDoesNotChangeBits(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	const n, k, rows = 70, 90, 61
	x, w := cpu.NewMatrix(random(r, rows*k), rows, k), cpu.Pack(random(r, n*k), n, k)
	for _, name := range cpu.AvailableKernels() {
		c := newCPU(t, nil, name)
		want := cpu.NewMatrix(make([]float32, rows*n), rows, n)
		for i := range rows {
			c.Linear(want.SliceRows(i, i+1), x.SliceRows(i, i+1), w, cpu.Epilogue{Act: tensor.SiLU})
		}
		got := cpu.NewMatrix(make([]float32, rows*n), rows, n)
		for _, cut := range []int{0, 1, 5, 6, 12, 31} {
			c.Linear(got.SliceRows(0, cut), x.SliceRows(0, cut), w, cpu.Epilogue{Act: tensor.SiLU})
			c.Linear(got.SliceRows(cut, rows), x.SliceRows(cut, rows), w, cpu.Epilogue{Act: tensor.SiLU})
			wantBits(t, fmt.Sprintf("%s, cut at %d", name, cut), got.Data, want.Data)
		}
	}
}

// Sequences of one call, and keys left out by a mask, give the bits of calls on the
// rows alone.
func TestCPU_AttentionPackingDoesNotChangeBits(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	const heads, d = 3, 24
	for _, name := range cpu.AvailableKernels() {
		for _, causal := range []bool{false, true} {
			c := newCPU(t, nil, name)
			rows := r.Perm(90)
			q, k, v := cpu.NewMatrix(random(r, 90*heads*d), 90, heads*d), cpu.NewMatrix(random(r, 90*heads*d), 90,
				heads*d), cpu.NewMatrix(random(r, 90*heads*d), 90, heads*d)
			var seqs [][]int32
			mask := make([]bool, 90)
			for at := 0; at < 90; {
				n := min(1+r.IntN(40), 90-at)
				var s []int32
				for _, i := range rows[at : at+n] {
					s = append(s, int32(i))
					mask[i] = r.IntN(4) > 0
				}
				seqs = append(seqs, s)
				at += n
			}
			got := cpu.NewMatrix(make([]float32, 90*heads*d), 90, heads*d)
			c.Attention(got, q, k, v, tensor.Attention{Heads: heads, Sequences: seqs, Mask: mask, Causal: causal})
			for _, s := range seqs {
				// The sequence without the masked rows, in memory of its own. Masked rows
				// are left out as queries too, so that causal positions agree.
				var kept []int32
				for _, i := range s {
					if mask[i] {
						kept = append(kept, i)
					}
				}
				l := len(kept)
				pick := func(m cpu.Matrix) cpu.Matrix {
					p := cpu.NewMatrix(make([]float32, l*heads*d), l, heads*d)
					c.Gather(p, m, kept)
					return p
				}
				want := cpu.NewMatrix(make([]float32, l*heads*d), l, heads*d)
				c.Attention(want, pick(q), pick(k), pick(v), tensor.Attention{Heads: heads, Causal: causal})
				wantBits(t, fmt.Sprintf("%s, causal %v, %d of %d rows", name, causal, l, len(s)), pick(got).Data,
					want.Data)
			}
		}
	}
}
