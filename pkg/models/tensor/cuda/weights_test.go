package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// A weight with products beside it multiplies as their sum would, with every epilogue, by the kernels and by a library
// that adds, also where it has only some of the products; the weight itself stays.
func TestDevice_AddLowRank(t *testing.T) {
	for _, cs := range []struct {
		factors tensor.DType
		m, k    int
		ranks   [2]int
		most    float64
		library int // products of the library for one with low rank; -1: there is no library
	}{
		{tensor.F32, 9, 37, [2]int{8, 5}, 1e-6, -1},
		{tensor.BF16, 9, 37, [2]int{8, 5}, 5e-3, -1},
		{tensor.BF16, 1028, 4, [2]int{1, 2}, 5e-3, -1}, // more rows than are summed at once
		{tensor.BF16, 9, 36, [2]int{8, 4}, 5e-3, 3},
		{tensor.BF16, 9, 36, [2]int{8, 5}, 5e-3, 1}, // not that of the second factor
		{tensor.BF16, 9, 37, [2]int{8, 4}, 5e-3, 1}, // only that
	} {
		t.Run(fmt.Sprintf("%s, %d rows, k %d, ranks %v, library %d", cs.factors, cs.m, cs.k, cs.ranks, cs.library),
			func(t *testing.T) {
				gpu := driver.Driver(ptxvm.New(ptxvm.Options{}))
				library := &multiplier{Driver: gpu}
				if cs.library >= 0 {
					gpu = library
				}
				d, err := cuda.New(gpu, cuda.Options{Factors: cs.factors})
				if err != nil {
					t.Fatal(err)
				}
				defer d.Close()
				addsLowRank(t, d, cs.m, cs.k, cs.ranks, cs.most, library, max(0, cs.library))
			})
	}
}

// numbersOf are n random numbers.
func numbersOf(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64()) / 4
	}
	return x
}

// addsLowRank compares products of a weight and low-rank ones beside it with those of their sum. Of each, the library
// must make some products.
func addsLowRank(
	t *testing.T, d *cuda.Device, m, k int, ranks [2]int, most float64, library *multiplier, each int,
) {
	t.Helper()
	const n = 56
	r := rand.New(rand.NewPCG(1, 2))
	base := numbersOf(r, n*k)
	var products []tensor.LowRank
	sum := slices.Clone(base)
	for i, rank := range ranks {
		p := tensor.LowRank{
			From: 3 + 27*i, N: 20, R: rank, K: k, A: numbersOf(r, rank*k), B: numbersOf(r, 20*rank),
		}
		for row := range p.N {
			for j := range k {
				for l := range p.R {
					sum[(p.From+row)*k+j] += p.B[row*p.R+l] * p.A[l*k+j]
				}
			}
		}
		products = append(products, p)
	}
	w, err := d.Weight(tensor.Floats(base, n, k))
	if err != nil {
		t.Fatal(err)
	}
	whole, err := d.Weight(tensor.Floats(sum, n, k))
	if err != nil {
		t.Fatal(err)
	}
	linear := linears(t, d, r, m, n, k)
	before := linear(w, tensor.Identity, false, false)
	parts, err := d.AddLowRank(w, products)
	if err != nil {
		t.Fatal(err)
	}
	if extra := parts.Bytes() - w.Bytes(); extra <= 0 || extra > 4*(n+k)*16 {
		t.Errorf("%d bytes beside the weight", extra)
	}
	for _, act := range []tensor.Activation{tensor.Identity, tensor.SiLU, tensor.GELU} {
		for _, gated := range []bool{false, true} {
			for _, factors := range []bool{false, true} {
				want, made := linear(whole, act, gated, factors), library.calls
				got := linear(parts, act, gated, factors)
				if e := distance(got, want); !(e < most) {
					t.Errorf("activation %d, gated %v, factors %v: relative L2 distance %.3g", act, gated, factors, e)
				}
				if made = library.calls - made; made != each {
					t.Errorf("%d products of the library, want %d", made, each)
				}
			}
		}
	}
	if after := linear(w, tensor.Identity, false, false); !slices.Equal(after, before) {
		t.Error("the weight itself changed")
	}
	if err := d.Read(make([]float32, n*k), parts); err == nil {
		t.Error("a weight with products was read")
	}
}

// linears returns a function that gives what Linear computes of m rows: with an activation, with residual and a gate of
// two groups or not, into factors or into float32.
func linears(
	t *testing.T, d *cuda.Device, r *rand.Rand, m, n, k int,
) func(w tensor.Weight, act tensor.Activation, gated, factors bool) []float32 {
	x, bias, gate, residual := numbersOf(r, m*k), numbersOf(r, n), numbersOf(r, 2*n), numbersOf(r, m*n)
	group := make([]int32, m)
	for i := range group {
		group[i] = int32(i % 3 % 2)
	}
	v, err := d.Vector(tensor.Floats(bias, n))
	if err != nil {
		t.Fatal(err)
	}
	return func(w tensor.Weight, act tensor.Activation, gated, factors bool) []float32 {
		t.Helper()
		out := make([]float32, m*n)
		err := d.Run(t.Context(), false, func(s tensor.Session) error {
			in := func(x []float32, rows, cols int) tensor.Matrix {
				to := tensor.NewMatrix(s, rows, cols)
				s.CopyIn(to, x)
				return to
			}
			e, to := tensor.Epilogue{Bias: v, Act: act}, tensor.NewMatrix(s, m, n)
			if factors {
				to = tensor.NewFactors(s, m, n)
			}
			if gated {
				e.Gate, e.Residual, e.Group = in(gate, 2, n), in(residual, m, n), group
			}
			s.Linear(to, in(x, m, k), w, e)
			s.CopyOut(out, to)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
}

// Weights that nobody has any more make room for the next ones: memory for two is never needed.
func TestDevice_WeightsMakeRoom(t *testing.T) {
	const rows, cols = 64, 256
	d, err := cuda.New(ptxvm.New(ptxvm.Options{}), cuda.Options{Ceiling: rows * cols * 4 * 3 / 2})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	x := tensor.Floats(make([]float32, rows*cols), rows, cols)
	for i := range 20 {
		if _, err := d.Weight(x); err != nil {
			t.Fatalf("weight %d: %v", i, err)
		}
	}
}

// slowCopies is a GPU whose copies to the host take until leave is closed.
type slowCopies struct {
	driver.Driver
	entered, leave chan struct{}
}

func (d *slowCopies) CopyOut(dst []byte, src driver.Pointer) error {
	close(d.entered)
	<-d.leave
	return d.Driver.CopyOut(dst, src)
}

// Who asks for the memory in use does not wait for a pass.
func TestDevice_UsageDuringAPass(t *testing.T) {
	slow := &slowCopies{ptxvm.New(ptxvm.Options{}), make(chan struct{}), make(chan struct{})}
	d, err := cuda.New(slow, cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	passed := make(chan error, 1)
	go func() {
		passed <- d.Run(context.Background(), false, func(s tensor.Session) error {
			s.CopyOut(make([]float32, 1), tensor.NewMatrix(s, 1, 1))
			return nil
		})
	}()
	<-slow.entered
	used := make(chan tensor.Usage, 1)
	go func() { used <- d.Usage() }()
	select {
	case u := <-used:
		if u.Total != 1<<30 || u.Free == 0 || u.Free > u.Total {
			t.Errorf("%+v", u)
		}
	case <-time.After(time.Minute):
		t.Error("it waits for the pass")
	}
	close(slow.leave)
	if err := errors.Join(<-passed, d.Close()); err != nil {
		t.Fatal(err)
	}
}
