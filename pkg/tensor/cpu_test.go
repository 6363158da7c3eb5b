package tensor_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/tensortest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newCPU(t testing.TB, pool *tensor.Pool, k tensor.Kernels) *tensor.CPU {
	t.Helper()
	c, err := tensor.NewCPUWith(pool, k)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// One set of kernels is enough here: TestCPU_SameBits ties the others to it.
func TestCPU_Conformance(t *testing.T) {
	tensortest.Run(t, tensortest.OnCPU(tensor.NewCPU(nil)))
}

// The bits of every case are those of the plain Go kernels on one thread.
func TestCPU_SameBits(t *testing.T) {
	pool := tensor.NewPool(3)
	defer pool.Close()
	want := tensortest.OnCPU(newCPU(t, nil, tensor.KernelsGo))
	type variant struct {
		name string
		b    tensortest.Backend
	}
	var variants []variant
	for _, k := range tensor.AvailableKernels() {
		for _, p := range []*tensor.Pool{nil, pool} {
			if k != tensor.KernelsGo { // threads do not care about kernels
				variants = append(variants, variant{fmt.Sprintf("%s, %d threads", k, p.Threads()), tensortest.OnCPU(newCPU(t, p, k))})
			}
		}
	}
	for _, cs := range tensortest.Cases() {
		w := cs.Output(t, want)
		for _, v := range variants {
			wantBits(t, cs.Name+" on "+v.name, cs.Output(t, v.b), w)
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
	x, w, bias := tensor.NewMatrix(random(r, m*k), m, k), tensor.Pack(random(r, n*k), n, k), random(r, n)
	image, kernel := tensor.NewImage(random(r, 2*40*48*32), 2, 40, 48, 32), tensor.PackConv(random(r, 32*32*9), 32, 32, 3, 3)
	const l, heads, d = 400, 4, 32
	qkv := tensor.NewMatrix(random(r, l*3*heads*d), l, 3*heads*d)
	run := func(c *tensor.CPU) []float32 {
		y := tensor.NewMatrix(make([]float32, m*n), m, n)
		c.Linear(y, x, w, tensor.Epilogue{Bias: bias, Act: tensor.GELU})
		im := tensor.NewImage(make([]float32, 2*40*48*32), 2, 40, 48, 32)
		c.Conv2D(im, image, kernel, tensor.SamePad(3), tensor.Epilogue{Act: tensor.SiLU})
		a := tensor.NewMatrix(make([]float32, l*heads*d), l, heads*d)
		c.Attention(a, qkv.SliceCols(0, heads*d), qkv.SliceCols(heads*d, 2*heads*d), qkv.SliceCols(2*heads*d, 3*heads*d), tensor.Attention{Heads: heads})
		z := tensor.NewMatrix(make([]float32, l*3*heads*d), l, 3*heads*d)
		c.LayerNorm(z, qkv, 1e-6)
		return append(append(append(y.Data, im.Data...), a.Data...), z.Data...)
	}
	want := run(tensor.NewCPU(nil))
	for threads := 2; threads <= 5; threads++ {
		pool := tensor.NewPool(threads)
		c := tensor.NewCPU(pool)
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
	x, w := tensor.NewMatrix(random(r, rows*k), rows, k), tensor.Pack(random(r, n*k), n, k)
	for _, name := range tensor.AvailableKernels() {
		c := newCPU(t, nil, name)
		want := tensor.NewMatrix(make([]float32, rows*n), rows, n)
		for i := range rows {
			c.Linear(want.SliceRows(i, i+1), x.SliceRows(i, i+1), w, tensor.Epilogue{Act: tensor.SiLU})
		}
		got := tensor.NewMatrix(make([]float32, rows*n), rows, n)
		for _, cut := range []int{0, 1, 5, 6, 12, 31} {
			c.Linear(got.SliceRows(0, cut), x.SliceRows(0, cut), w, tensor.Epilogue{Act: tensor.SiLU})
			c.Linear(got.SliceRows(cut, rows), x.SliceRows(cut, rows), w, tensor.Epilogue{Act: tensor.SiLU})
			wantBits(t, fmt.Sprintf("%s, cut at %d", name, cut), got.Data, want.Data)
		}
	}
}

// Sequences of one call, and keys left out by a mask, give the bits of calls on the
// rows alone.
func TestCPU_AttentionPackingDoesNotChangeBits(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	const heads, d = 3, 24
	for _, name := range tensor.AvailableKernels() {
		for _, causal := range []bool{false, true} {
			c := newCPU(t, nil, name)
			rows := r.Perm(90)
			q, k, v := tensor.NewMatrix(random(r, 90*heads*d), 90, heads*d), tensor.NewMatrix(random(r, 90*heads*d), 90, heads*d), tensor.NewMatrix(random(r, 90*heads*d), 90, heads*d)
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
			got := tensor.NewMatrix(make([]float32, 90*heads*d), 90, heads*d)
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
				pick := func(m tensor.Matrix) tensor.Matrix {
					p := tensor.NewMatrix(make([]float32, l*heads*d), l, heads*d)
					c.Gather(p, m, kept)
					return p
				}
				want := tensor.NewMatrix(make([]float32, l*heads*d), l, heads*d)
				c.Attention(want, pick(q), pick(k), pick(v), tensor.Attention{Heads: heads, Causal: causal})
				wantBits(t, fmt.Sprintf("%s, causal %v, %d of %d rows", name, causal, l, len(s)), pick(got).Data, want.Data)
			}
		}
	}
}
