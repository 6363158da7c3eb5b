package cuda_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cuda"
	"github.com/meander-rl/meander/pkg/tensor/cuda/driver"
)

// Products are added where the weight is, in float32, and rounded once; the weight that they are added to stays.
func TestDevice_Merge(t *testing.T) {
	const n, k = 50, 33 // rows of bf16 have gaps
	r := rand.New(rand.NewPCG(1, 2))
	numbers := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return x
	}
	base, products := numbers(n*k), []tensor.LowRank{
		{From: 3, N: 20, R: 5, K: k, A: numbers(5 * k), B: numbers(20 * 5)},
		{From: 30, N: 20, R: 1, K: k, A: numbers(k), B: numbers(20)},
	}
	for factors, most := range map[tensor.DType]float64{tensor.F32: 1e-6, tensor.BF16: 3e-3} {
		d, err := cuda.New(ptxvm.New(ptxvm.Options{}), cuda.Options{Factors: factors})
		if err != nil {
			t.Fatal(err)
		}
		w, err := d.Weight(tensor.Floats(base, n, k))
		if err != nil {
			t.Fatal(err)
		}
		before, got := make([]float32, n*k), make([]float32, n*k)
		merged, err := d.Merge(w, products)
		if err = errors.Join(err, d.Read(before, w)); err == nil {
			err = d.Read(got, merged)
		}
		if err != nil {
			t.Fatal(err)
		}
		want := slices.Clone(before) // as the device keeps it
		for _, p := range products {
			for i := range p.N {
				for j := range k {
					sum := float64(want[(p.From+i)*k+j])
					for rank := range p.R {
						sum += float64(p.B[i*p.R+rank]) * float64(p.A[rank*k+j])
					}
					want[(p.From+i)*k+j] = float32(sum)
				}
			}
		}
		for row := range n {
			at := func(x []float32) []float32 { return x[row*k : (row+1)*k] }
			changed := row >= 3 && row < 23 || row >= 30
			if e := distance(at(got), at(want)); !(e < most) || !changed && !slices.Equal(at(got), at(before)) {
				t.Errorf("%s, row %d: relative L2 distance %.3g, want less than %g", factors, row, e, most)
			}
		}
		if e := distance(before, base); !(e < most) {
			t.Errorf("%s: the weight itself changed: %.3g", factors, e)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
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
