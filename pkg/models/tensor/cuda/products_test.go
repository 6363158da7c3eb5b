package cuda_test

import (
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/tensortest"
)

// multiplier is a GPU with a library of products, which has those of every fourth k only.
type multiplier struct {
	driver.Driver
	calls, refused int
}

func (m *multiplier) Products() (driver.Products, error) { return &products{m}, nil }

type products struct{ m *multiplier }

func (p *products) Name() string { return "library-1" }
func (p *products) Close() error { return nil }

// row reads n numbers.
func (p *products) row(at driver.Pointer, n int, dtype tensor.DType) ([]float32, error) {
	b, x := make([]byte, n*dtype.Size()), make([]float32, n)
	if err := p.m.CopyOut(b, at); err != nil {
		return nil, err
	}
	return x, dtype.DecodeFloats(x, b)
}

func (p *products) Multiply(q driver.Product) error {
	if q.K%4 != 0 {
		p.m.refused++
		return driver.ErrUnsupported
	}
	p.m.calls++
	to := tensor.F32
	if q.BF16 {
		to = tensor.BF16
	}
	bias := make([]float32, q.N)
	var err error
	if q.Bias != 0 {
		if bias, err = p.row(q.Bias, q.N, to); err != nil {
			return err
		}
	}
	w := make([][]float32, q.N)
	for j := range w {
		if w[j], err = p.row(q.W+driver.Pointer(2*j*q.WStride), q.K, tensor.BF16); err != nil {
			return err
		}
	}
	for i := range q.M {
		x, err := p.row(q.X+driver.Pointer(2*i*q.XStride), q.K, tensor.BF16)
		if err != nil {
			return err
		}
		out := make([]float32, q.N)
		if q.Add {
			if out, err = p.row(q.Dst+driver.Pointer(i*q.DstStride*to.Size()), q.N, to); err != nil {
				return err
			}
		}
		for j := range out {
			y := float64(bias[j]) + float64(out[j])
			for c := range x {
				y += float64(x[c]) * float64(w[j][c])
			}
			if q.GELU {
				y = y / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(y+0.044715*y*y*y)))
			}
			out[j] = float32(y)
		}
		if err := p.m.CopyIn(q.Dst+driver.Pointer(i*q.DstStride*to.Size()), to.AppendFloats(nil, out)); err != nil {
			return err
		}
	}
	return nil
}

// With a library its products, and what the kernels add to them, are as good as the kernels'
// own; what it does not have they do. The device says that bits depend on the batch, and is
// without it where they must not.
func TestDevice_ProductsOfALibrary(t *testing.T) {
	m := &multiplier{Driver: ptxvm.New(ptxvm.Options{})}
	d, err := cuda.New(m, cuda.Options{Factors: tensor.BF16})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := d.Name(), "cuda/ptxvm/bf16/library-1/nondeterministic"; got != want {
		t.Errorf("the name is %s, want %s", got, want)
	}
	for _, cs := range tensortest.Cases() {
		if !strings.HasPrefix(cs.Name, "linear/") {
			continue
		}
		t.Run(cs.Name, func(t *testing.T) { closeInBF16(t, d, cs) })
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if m.calls < 30 || m.refused < 10 {
		t.Errorf("%d products of the library, %d that it does not have", m.calls, m.refused)
	}
	for _, o := range []cuda.Options{{}, {Factors: tensor.BF16, Deterministic: true}} {
		d, err := cuda.New(&multiplier{Driver: ptxvm.New(ptxvm.Options{})}, o)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(d.Name(), "library") {
			t.Errorf("%+v: the name is %s", o, d.Name())
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
