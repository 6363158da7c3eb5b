package kernels_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
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
	for j := range bias[0] {
		if j%4 == 0 {
			bias[0][j] *= 256 // beyond the ends of the exponential function
		}
	}
	tile, threads, factors, half := 64, 64, "linear_f32", 0
	if kernel == "conv_bf16" {
		tile, threads, factors, half = 128, 256, "linear_bf16", c.out%2 // of the result
	}
	dst := g.result(m, c.out, c.out, half == 1)
	a := args(dst.args()[:1], g.factors(factors, x, c.in)[:1], g.factors(factors, w, k)[:1],
		list(num(c.n), num(c.h), num(c.w), num(c.in), num(oh), num(ow), num(c.out), num(c.kh), num(c.kw), num(c.stride),
			num(c.top), num(c.left)),
		g.factors("float32", bias, c.out)[:1], list(num(act)), g.factors("float32", gate,
			c.out+1), list(g.ints(group)), g.factors("float32", residual, c.out))
	if kernel == "conv_bf16" {
		a = append(a, num(half))
	}
	if err := g.launch(kernel, driver.Grid{
		Blocks: driver.Dim{X: ceil(c.out, tile) * ceil(m, tile)}, Threads: driver.Dim{X: threads},
	}, a...); err != nil {
		return err
	}
	got, err := g.read(dst, c.out)
	if err != nil {
		return err
	}
	for i := range m {
		image, y0, x0 := i/(oh*ow), i/ow%oh*c.stride-c.top, i%ow*c.stride-c.left
		for o := range c.out {
			sum, size := bias[0][o], 1+math.Abs(bias[0][o])
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
			most := float64(k+16)*0x1p-23*size*max(1, math.Abs(factor)) + float64(half)*math.Abs(want)/256
			if d := math.Abs(got[i][o] - want); !(d <= most) {
				return fmt.Errorf("pixel %d, channel %d is %v, want %v", i, o, got[i][o], want)
			}
		}
	}
	return nil
}

// farConvolution takes the first column of a very wide image, for the first channels of very many: neither fits a
// GPU, and what lies between is not read.
func (g *gpu) farConvolution(kernel string) error {
	const lines, in, kh = 68, 8, 5
	const rows = lines - kh + 1
	tile, threads, factors := 64, 64, "linear_f32"
	if kernel == "conv_bf16" {
		tile, threads, factors = 128, 256, "linear_bf16"
	}
	x, w, residual, gate, group := g.matrix(lines, in), g.matrix(tile, kh*in), g.matrix(rows, tile), g.matrix(8,
		tile), g.indices(rows, 8)
	image, dst := g.factors(factors, x, in), g.result(rows, tile, tile, false)
	g.far = false // rows of w follow each other
	weights := g.factors(factors, w, kh*in)
	g.far = true
	width := int(image[1]) / in
	a := args(dst.args()[:1], image[:1], weights[:1],
		list(num(1), num(lines), num(width), num(in), num(rows), num(1), num(dst.stride), num(kh), num(1), num(1),
			num(0),
			num(0)),
		list(0, num(0)), g.factors("float32", gate, tile), list(g.ints(group)), g.factors("float32", residual, tile))
	if kernel == "conv_bf16" {
		a = append(a, num(0))
	}
	grid := driver.Grid{Blocks: driver.Dim{}, Threads: driver.Dim{X: threads}} // the first tile, of very many
	if err := g.launch(kernel, grid, a...); err != nil {
		return err
	}
	got, err := g.read(dst, tile)
	if err != nil {
		return err
	}
	for i := range rows {
		for o := range tile {
			sum := 0.0
			for j, factor := range w[o] {
				sum += x[i+j/in][j%in] * factor
			}
			want := residual[i][o] + gate[group[i]][o]*sum
			if d := math.Abs(got[i][o] - want); !(d <= 0x1p-14) {
				return fmt.Errorf("line %d, channel %d is %v, want %v", i, o, got[i][o], want)
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
		{4, 7, 3, 8, 6, 3, 3, 1, 1, 1},
		{1, 3, 20, 8, 79, 3, 3, 1, 1, 1},
		{2, 9, 4, 8, 6, 3, 1, 1, 1, 0},
		{1, 1, 2, 8, 70, 1, 1, 1, 0, 0},
		{1, 3, 11, 8, 33, 1, 1, 1, 0, 0},
		{1, 10, 18, 8, 141, 3, 3, 1, 1, 1},
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

// convChecks are the cases of a kernel.
func convChecks(kernel string) []check {
	var out []check
	for _, c := range convolutions() {
		out = append(out, check{
			name: fmt.Sprintf("%+v", c), weight: c.n * c.h * c.w * c.in * c.out,
			run: func(g *gpu) error { return g.convolution(kernel, c) },
		})
	}
	return append(out, check{
		name: "far", far: true, weight: 5000, run: func(g *gpu) error { return g.farConvolution(kernel) },
	})
}

func TestConv(t *testing.T) {
	runChecks(t, "chain", kernels.PTX, modes[0].o, convChecks("conv_f32"))
	inModes(t, kernels.PTX, convChecks("conv_bf16"))
}
