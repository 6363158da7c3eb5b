package kernels_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/tensor/cuda/kernels"
)

// rowCall is one launch of a kernel over rows: x and y [rows, cols], dst of the same shape or
// another. Bits of types say which of dst, x and y are in bf16.
type rowCall struct {
	g                 *gpu
	rows, cols, types int
	x, y              [][]float64
	dst               driver.Arg
	stride            int
}

// put puts a matrix on the device in its type.
func (c *rowCall) put(x [][]float64, operand, stride int) []driver.Arg {
	if c.types>>operand&1 == 1 {
		return []driver.Arg{c.g.bf16(x, stride), num(stride)}
	}
	return c.g.factors("float32", x, stride)
}

// out is the result, of NaN with guards between its rows, and its stride.
func (c *rowCall) out(rows, cols int) []driver.Arg {
	c.stride = cols + 3
	if c.types&1 == 0 {
		c.dst = c.g.result(rows, cols, c.stride)
		return []driver.Arg{c.dst, num(c.stride)}
	}
	x := make([][]float64, rows)
	for i := range x {
		x[i] = make([]float64, c.stride)
		for j := range x[i] {
			x[i][j] = bf16Guard
			if j < cols {
				x[i][j] = math.NaN()
			}
		}
	}
	c.dst = c.g.bf16(x, c.stride)
	return []driver.Arg{c.dst, num(c.stride)}
}

const bf16Guard = -54272.0

// read returns the result, or what is wrong with its guards.
func (c *rowCall) read(rows, cols int) ([][]float64, error) {
	if c.types&1 == 0 {
		return c.g.read(c.dst, rows, cols, c.stride)
	}
	b := make([]byte, 2*rows*c.stride)
	if err := c.g.vm.CopyOut(b, driver.Pointer(c.dst)); err != nil {
		return nil, err
	}
	out := make([][]float64, rows)
	for i := range out {
		for j := range c.stride {
			v := float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*(i*c.stride+j):])) << 16))
			if j < cols {
				out[i] = append(out[i], v)
			} else if v != bf16Guard {
				return nil, fmt.Errorf("row %d: the guard in column %d of %d is %v", i, j, cols, v)
			}
		}
	}
	return out, nil
}

// rowKernel is a kernel with its formula.
type rowKernel struct {
	name     string
	kernel   string
	operands int // that types tell of
	// launch runs it, and returns what is to be in dst.
	launch func(c *rowCall) (want [][]float64, err error)
}

const rowEpsilon = 1e-3

func warps(items int) driver.Grid {
	return driver.Grid{Blocks: driver.Dim{X: ceil(items, 4)}, Threads: driver.Dim{X: 128}}
}

func threads(elements int) driver.Grid {
	return driver.Grid{Blocks: driver.Dim{X: ceil(elements, 128)}, Threads: driver.Dim{X: 128}}
}

// mapRows is f of every element.
func mapRows(rows, cols int, f func(i, j int) float64) [][]float64 {
	out := make([][]float64, rows)
	for i := range out {
		for j := range cols {
			out[i] = append(out[i], f(i, j))
		}
	}
	return out
}

// indices draws row numbers.
func (g *gpu) indices(n, below int) []int32 {
	x := make([]int32, n)
	for i := range x {
		x[i] = int32(g.r.IntN(below))
	}
	return x
}

func args(lists ...[]driver.Arg) (all []driver.Arg) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

func list(a ...driver.Arg) []driver.Arg { return a }

func layerNorm(c *rowCall) ([][]float64, error) {
	g, n := c.g, float64(c.cols)
	scale, shift, group := g.matrix(3, c.cols), g.matrix(3, c.cols), g.indices(c.rows, 3)
	err := g.launch("layer_norm_f32", warps(c.rows), args(c.out(c.rows, c.cols), c.put(c.x, 1, c.cols+2),
		g.factors("f", scale, c.cols), g.factors("f", shift, c.cols+1),
		list(g.ints(group), num(c.rows), num(c.cols), driver.Float(rowEpsilon), num(c.types)))...)
	return mapRows(c.rows, c.cols, func(i, j int) float64 {
		mean, squares := 0.0, 0.0
		for _, v := range c.x[i] {
			mean += v / n
		}
		for _, v := range c.x[i] {
			squares += (v - mean) * (v - mean) / n
		}
		return (c.x[i][j]-mean)/math.Sqrt(squares+rowEpsilon)*(1+scale[group[i]][j]) + shift[group[i]][j]
	}), err
}

// norm is over two groups of columns a row.
func norm(length bool) func(c *rowCall) ([][]float64, error) {
	return func(c *rowCall) ([][]float64, error) {
		g, n := c.g, c.cols
		x, w, flag, act := g.matrix(c.rows, 2*n), g.matrix(1, n), 0, 0
		if length {
			flag, act = 1, 1
		}
		err := g.launch("norm_f32", warps(2*c.rows), args(c.out(c.rows, 2*n), c.put(x, 1, 2*n+1), g.factors("f", w, n)[:1],
			list(num(c.rows), num(2), num(n), num(flag), driver.Float(rowEpsilon), num(act), num(c.types)))...)
		return mapRows(c.rows, 2*n, func(i, j int) float64 {
			squares := 0.0
			for _, v := range x[i][j/n*n : j/n*n+n] {
				squares += v * v
			}
			if length {
				return activate(1, w[0][j%n]*x[i][j]*math.Sqrt(float64(n))/max(math.Sqrt(squares), rowEpsilon))
			}
			return x[i][j] / math.Sqrt(squares/float64(n)+rowEpsilon) * w[0][j%n]
		}), err
	}
}

// rotate is rope, of heads that a norm scales first where there is a w.
func rotate(kernel string, halves int) func(c *rowCall) ([][]float64, error) {
	return func(c *rowCall) ([][]float64, error) {
		g, half := c.g, c.cols
		x, w, cos, sin, rows := g.matrix(c.rows, 4*half), g.matrix(1, 2*half), g.matrix(c.rows+2, half), g.matrix(c.rows+2,
			half), g.indices(c.rows, c.rows+2)
		a := args(c.out(c.rows, 4*half), c.put(x, 1, 4*half+2))
		grid := threads(c.rows * 2 * half)
		tail := list(g.ints(rows), num(c.rows), num(2*half), num(half), num(halves), num(c.types))
		if kernel == "norm_rope_f32" {
			a, grid = append(a, g.factors("f", w, 2*half)[0]), warps(2*c.rows)
			tail = list(g.ints(rows), num(c.rows), num(2), num(half), driver.Float(rowEpsilon), num(c.types))
		}
		err := g.launch(kernel, grid, args(a, g.factors("f", cos, half+1), g.factors("f", sin, half), tail)...)
		scaled := func(i, j int) float64 {
			if kernel != "norm_rope_f32" {
				return x[i][j]
			}
			squares, head := 0.0, j/(2*half)*2*half
			for _, v := range x[i][head : head+2*half] {
				squares += v * v
			}
			return x[i][j] / math.Sqrt(squares/float64(2*half)+rowEpsilon) * w[0][j-head]
		}
		return mapRows(c.rows, 4*half, func(i, j int) float64 {
			head, in := j/(2*half)*2*half, j%(2*half)
			pair, second, distance := in/2, in%2 == 1, 1
			if halves == 1 {
				pair, second, distance = in%half, in >= half, half
			}
			c, s := cos[rows[i]][pair], sin[rows[i]][pair]
			if second {
				return scaled(i, head+in-distance)*s + scaled(i, head+in)*c
			}
			return scaled(i, head+in)*c - scaled(i, head+in+distance)*s
		}), err
	}
}

func siluMul(c *rowCall) ([][]float64, error) {
	err := c.g.launch("silu_mul_f32", threads(c.rows*c.cols),
		args(c.out(c.rows, c.cols), c.put(c.x, 1, c.cols+2), c.put(c.y, 2, c.cols+5),
			list(num(c.rows), num(c.cols), num(c.types)))...)
	return mapRows(c.rows, c.cols, func(i, j int) float64 { return activate(1, c.x[i][j]) * c.y[i][j] }), err
}

func gather(c *rowCall) ([][]float64, error) {
	ids := c.g.indices(c.rows, c.rows)
	err := c.g.launch("copy_f32", threads(c.rows*c.cols), args(c.out(c.rows, c.cols), c.put(c.x, 1, c.cols+2),
		list(c.g.ints(ids), num(c.rows), num(c.cols), num(c.types)))...)
	return mapRows(c.rows, c.cols, func(i, j int) float64 { return c.x[ids[i]][j] }), err
}

// upsample sees rows as the pixels of two images of one column.
func upsample(c *rowCall) ([][]float64, error) {
	x := c.g.matrix(2*c.rows, c.cols)
	out := c.out(8*c.rows*c.cols, 1)[:1]
	c.stride = 1 // images are dense
	err := c.g.launch("upsample2_f32", threads(8*c.rows*c.cols),
		args(out, c.put(x, 1, c.cols)[:1], list(num(2), num(c.rows), num(1), num(c.cols), num(c.types)))...)
	return mapRows(8*c.rows*c.cols, 1, func(i, _ int) float64 { return x[i/c.cols/4][i%c.cols] }), err
}

func finish(c *rowCall) ([][]float64, error) {
	g := c.g
	act := c.cols % 3
	bias, gate, residual, group := g.matrix(1, c.cols), g.matrix(3, c.cols), g.matrix(c.rows, c.cols), g.indices(c.rows, 3)
	err := g.launch("finish_f32", threads(c.rows*c.cols),
		args(c.out(c.rows, c.cols), g.factors("f", c.x, c.cols+4), list(num(c.rows), num(c.cols)),
			g.factors("f", bias, c.cols)[:1], list(num(act)), g.factors("f", gate, c.cols+1), list(g.ints(group)), g.factors("f",
				residual, c.cols), list(num(c.types)))...)
	return mapRows(c.rows, c.cols, func(i, j int) float64 {
		return residual[i][j] + gate[group[i]][j]*activate(act, c.x[i][j]+bias[0][j])
	}), err
}

var rowKernels = []rowKernel{
	{"layer norm", "layer_norm_f32", 2, layerNorm},
	{"root mean square", "norm_f32", 2, norm(false)},
	{"length", "norm_f32", 2, norm(true)},
	{"norm and rope", "norm_rope_f32", 2, rotate("norm_rope_f32", 0)},
	{"rope of pairs", "rope_f32", 2, rotate("rope_f32", 0)},
	{"rope of halves", "rope_f32", 2, rotate("rope_f32", 1)},
	{"silu mul", "silu_mul_f32", 3, siluMul},
	{"gather", "copy_f32", 2, gather},
	{"upsample", "upsample2_f32", 2, upsample},
	{"finish", "finish_f32", 1, finish},
}

// rowShapes are every residue of columns in a warp and of rows in a block, in the long form;
// in the short one the ends.
func rowShapes() [][2]int {
	shapes := [][2]int{{1, 1}, {3, 2}, {4, 31}, {5, 32}, {2, 33}, {1, 64}, {7, 65}}
	if soak() {
		for i := range 67 {
			shapes = append(shapes, [2]int{i%9 + 1, i + 1})
		}
	}
	return shapes
}

// check compares a kernel with its formula. What is stored in bf16 is off by half a unit of
// it, a 256th at most; float32 by some units, of all that was added up.
func (k rowKernel) check(g *gpu) error {
	for types := range 1 << k.operands {
		for _, s := range rowShapes() {
			c := &rowCall{g: g, rows: s[0], cols: s[1], types: types, x: g.matrix(s[0], s[1]), y: g.matrix(s[0], s[1])}
			c.x[0][0], c.x[s[0]-1][s[1]-1] = -300, 300 // beyond what the exponential function takes
			want, err := k.launch(c)
			if err != nil {
				return fmt.Errorf("%v, types %b: %w", s, types, err)
			}
			got, err := c.read(len(want), len(want[0]))
			if err != nil {
				return fmt.Errorf("%v, types %b: %w", s, types, err)
			}
			for i := range want {
				for j, w := range want[i] {
					most := 0x1p-18 * (4 + math.Abs(w))
					if types&1 == 1 {
						most += math.Abs(w) / 256
					}
					if d := math.Abs(got[i][j] - w); !(d <= most) {
						return fmt.Errorf("%v, types %b: element (%d, %d) is %v, want %v", s, types, i, j, got[i][j], w)
					}
				}
			}
		}
	}
	return nil
}

func TestRows(t *testing.T) {
	for name, o := range modes {
		g, err := newGPU(t, kernels.PTX, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range rowKernels {
			if err := k.check(g); err != nil {
				t.Errorf("%s: %s: %v", k.name, name, err)
			}
		}
	}
}
