package kernels_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/tensor/cuda/kernels"
)

// convolution is one of n images of h x w pixels of in channels.
type convolution struct {
	n, h, w, in, out, kh, kw, stride, top, left int
}

// size is that of the result, with as many zeros below and on the right as above and left.
func (c convolution) size() (oh, ow int) {
	return (c.h+2*c.top-c.kh)/c.stride + 1, (c.w+2*c.left-c.kw)/c.stride + 1
}

// convolution checks a kernel against float64, as product does.
func (g *gpu) convolution(kernel string, c convolution) error {
	oh, ow := c.size()
	m, k := c.n*oh*ow, c.kh*c.kw*c.in
	x, w, bias, residual := g.matrix(c.n*c.h*c.w, c.in), g.matrix(c.out, k), g.matrix(1, c.out), g.matrix(m, c.out)
	act, gate, group := (c.in/8+c.out)%3, g.matrix(2, c.out), g.indices(m, 2)
	dst := g.result(m, c.out, c.out)
	tile, threads, factors := 64, 64, "linear_f32"
	if kernel == "conv_bf16" {
		tile, threads, factors = 128, 256, "linear_bf16"
	}
	a := args(list(dst), g.factors(factors, x, c.in)[:1], g.factors(factors, w, k)[:1],
		list(num(c.n), num(c.h), num(c.w), num(c.in), num(oh), num(ow), num(c.out), num(c.kh), num(c.kw), num(c.stride),
			num(c.top), num(c.left)),
		g.factors("float32", bias, c.out)[:1], list(num(act)), g.factors("float32", gate,
			c.out+1), list(g.ints(group)), g.factors("float32", residual, c.out))
	if kernel == "conv_bf16" {
		a = append(a, num(0))
	}
	if err := g.launch(kernel, driver.Grid{
		Blocks:  driver.Dim{X: ceil(c.out, tile), Y: ceil(m, tile)},
		Threads: driver.Dim{X: threads},
	}, a...); err != nil {
		return err
	}
	got, err := g.read(dst, m, c.out, c.out)
	if err != nil {
		return err
	}
	for i := range m {
		image, y0, x0 := i/(oh*ow), i/ow%oh*c.stride-c.top, i%ow*c.stride-c.left
		for o := range c.out {
			sum, size := bias[0][o], 1.0
			for dy := range c.kh {
				for dx := range c.kw {
					if y, x0 := y0+dy, x0+dx; y < 0 || y >= c.h || x0 < 0 || x0 >= c.w {
						continue
					}
					pixel := x[(image*c.h+y0+dy)*c.w+x0+dx]
					for ch, v := range pixel {
						p := v * w[o][(dy*c.kw+dx)*c.in+ch]
						sum, size = sum+p, size+math.Abs(p)
					}
				}
			}
			factor := gate[group[i]][o]
			want := residual[i][o] + factor*activate(act, sum)
			if d := math.Abs(got[i][o] - want); !(d <= float64(k+16)*0x1p-23*size*max(1, math.Abs(factor))) {
				return fmt.Errorf("pixel %d, channel %d is %v, want %v", i, o, got[i][o], want)
			}
		}
	}
	return nil
}

// convolutions have channels of every residue of a slab that tensor cores take, and sizes
// about those of a tile; the long form has more of both.
func convolutions() []convolution {
	cases := []convolution{
		{1, 1, 1, 8, 1, 1, 1, 1, 0, 0},
		{2, 3, 5, 16, 9, 3, 3, 1, 1, 1},
		{1, 5, 4, 24, 17, 3, 3, 2, 0, 0},
		{1, 9, 15, 8, 3, 3, 2, 1, 1, 0},
		{1, 7, 6, 40, 130, 1, 3, 3, 0, 1},
	}
	if soak() {
		for i := range 16 {
			cases = append(cases, convolution{
				1 + i%2, 3 + i, 18 - i, 8 * (1 + i%5), 1 + 9*i, 1 + i%3, 3 - i%3, 1 + i%2, i % 2,
				i / 2 % 2,
			})
		}
	}
	return cases
}

func TestConv(t *testing.T) {
	for name, o := range modes {
		g, err := newGPU(t, kernels.PTX, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range convolutions() {
			for _, kernel := range []string{"conv_f32", "conv_bf16"} {
				if err := g.convolution(kernel, c); err != nil {
					t.Fatalf("%s: %s: %+v: %v", kernel, name, c, err)
				}
			}
		}
	}
}
