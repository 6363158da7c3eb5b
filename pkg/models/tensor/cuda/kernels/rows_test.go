package kernels_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
)

// rowCall is one launch of a kernel over rows: x and y [rows, cols], dst of the same shape or
// another. Bits of types say which of dst, x and y are in bf16.
type rowCall struct {
	g                 *gpu
	rows, cols, types int
	inPlace           bool // dst is x
	wide              bool // rows begin at multiples of 8 elements
	absent            bool // lists of rows, and parts that may be absent, are
	x, y              [][]float64
	exact             [][]float64 // what dst has bit by bit, of float32; nil: rounding is not told
	dst               placed
}

// gap is what a row has between its end and the next.
func (c *rowCall) gap(n int) int {
	if c.wide {
		return 8 * n
	}
	return n
}

// put puts a matrix on the device in its type.
func (c *rowCall) put(x [][]float64, operand, stride int) []driver.Arg {
	if c.types>>operand&1 == 1 {
		return c.g.place(bf16s(x), stride, 2).args()
	}
	return c.g.place(float32s(x), stride, 4).args()
}

// out is the result, of NaN with guards between its rows, and its stride.
func (c *rowCall) out(rows, cols int) []driver.Arg {
	c.dst = c.g.result(rows, cols, cols+c.gap(3), c.types&1 == 1)
	return c.dst.args()
}

// both are the arguments of a result and of x, whose rows have a gap. In place they are one.
func (c *rowCall) both(x [][]float64, gap int) []driver.Arg {
	rows, cols := len(x), len(x[0])
	if !c.inPlace {
		return args(c.out(rows, cols), c.put(x, 1, cols+c.gap(gap)))
	}
	width := cols + c.gap(3)
	full := mapRows(rows, width, func(i, j int) float64 {
		if j < cols {
			return x[i][j]
		}
		return guard
	})
	if c.types&1 == 1 {
		c.dst = c.g.place(bf16s(full), width, 2)
	} else {
		c.dst = c.g.place(float32s(full), width, 4)
	}
	return args(c.dst.args(), c.dst.args())
}

// read returns the result, or what is wrong with its guards.
func (c *rowCall) read(cols int) ([][]float64, error) { return c.g.read(c.dst, cols) }

// some is the first arguments, or zeros where those that may be absent are.
func (c *rowCall) some(a ...driver.Arg) []driver.Arg {
	if c.absent {
		clear(a)
	}
	return a
}

// rowKernel is a kernel with its formula.
type rowKernel struct {
	name     string
	kernel   string
	operands int // that types tell of
	// launch runs it, and returns what is to be in dst.
	launch  func(c *rowCall) (want [][]float64, err error)
	shapes  func() [][2]int
	inPlace bool // x may be dst
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
		if g.far { // the last ones are the farthest
			x[i] = int32(below - 1 - i%below)
		}
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

// layerNorm is layer_norm_f32, or layer_norm_wide, which tells the order of its sums.
func layerNorm(kernel string) func(c *rowCall) ([][]float64, error) {
	return func(c *rowCall) ([][]float64, error) {
		g, n := c.g, float64(c.cols)
		scale, shift, group := g.matrix(8, c.cols), g.matrix(8, c.cols), g.indices(c.rows, 8)
		grid := warps(c.rows)
		if c.wide {
			grid.Blocks.X = c.rows
		}
		err := g.launch(kernel, grid, args(c.both(c.x, 2),
			g.factors("f", scale, c.cols), g.factors("f", shift, c.cols+c.gap(1)),
			c.some(g.ints(group)), list(num(c.rows), num(c.cols), driver.Float(rowEpsilon), num(c.types)))...)
		if c.absent {
			clear(group)
		}
		if c.wide {
			for i, x := range c.x {
				c.exact = append(c.exact, layerNormOf(x, scale[group[i]], shift[group[i]]))
			}
		}
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
}

// layerNormOf is a row of layer_norm_wide: thread t adds columns 8t to 8t+7, 8t+1024 to ..., then lanes are added, then
// warps.
func layerNormOf(x, scale, shift []float64) []float64 {
	cols := float32(len(x))
	sum := func(add func(sum, x float32) float32) float32 {
		var parts [128]float32
		for j, v := range x {
			parts[j/8%128] = add(parts[j/8%128], float32(v))
		}
		total := lanesOf(parts[:32])
		for w := 32; w < 128; w += 32 {
			total += lanesOf(parts[w : w+32])
		}
		return total
	}
	mean := sum(func(sum, x float32) float32 { return sum + x }) / cols
	squares := sum(func(sum, x float32) float32 { return fused(x-mean, x-mean, sum) })
	factor := 1 / root(squares/cols+rowEpsilon)
	out := make([]float64, len(x))
	for j, v := range x {
		out[j] = float64(fused((float32(v)-mean)*factor, 1+float32(scale[j]), float32(shift[j])))
	}
	return out
}

// lanesOf adds what lanes have as warp_sum does, of all 32 or a smaller power of 2.
func lanesOf(x []float32) float32 {
	x = append([]float32(nil), x...)
	for m := len(x) / 2; m > 0; m /= 2 {
		for l := range m {
			x[l] += x[l+m]
		}
	}
	return x[0]
}

func root(x float32) float32 { return float32(math.Sqrt(float64(x))) }

// fused is a b + c rounded once: the product is exact in float64, and the sum is rounded to odd before float32.
func fused(a, b, c float32) float32 {
	p, z := float64(a)*float64(b), float64(c)
	s := p + z
	t := s - p
	rest := (p - (s - t)) + (z - t)
	if bits := math.Float64bits(s); rest != 0 && bits&1 == 0 {
		if (rest > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

// norm is over two groups of columns a row.
func norm(length bool) func(c *rowCall) ([][]float64, error) {
	return func(c *rowCall) ([][]float64, error) {
		g, n := c.g, c.cols
		x, w, flag, act := g.matrix(c.rows, 2*n), g.matrix(1, n), 0, (c.rows+c.types)%3
		if length {
			flag = 1
		}
		for j := range w[0] {
			if j%3 == 0 {
				w[0][j] *= 128 // to the ends of the exponential function
			}
		}
		err := g.launch("norm_f32", warps(2*c.rows), args(c.both(x, 1), g.factors("f", w, n)[:1],
			list(num(c.rows), num(2), num(n), num(flag), driver.Float(rowEpsilon), num(act), num(c.types)))...)
		return mapRows(c.rows, 2*n, func(i, j int) float64 {
			squares := 0.0
			for _, v := range x[i][j/n*n : j/n*n+n] {
				squares += v * v
			}
			if length {
				return activate(act, w[0][j%n]*x[i][j]*math.Sqrt(float64(n))/max(math.Sqrt(squares), rowEpsilon))
			}
			return activate(act, x[i][j]/math.Sqrt(squares/float64(n)+rowEpsilon)*w[0][j%n])
		}), err
	}
}

// rotate is rope, of heads that a norm scales first where the kernel has it.
func rotate(kernel string, halves int) func(c *rowCall) ([][]float64, error) {
	return func(c *rowCall) ([][]float64, error) {
		g, half, norm := c.g, c.cols, strings.HasPrefix(kernel, "norm_rope")
		x, w, cos, sin, rows := g.matrix(c.rows, 4*half), g.matrix(1, 2*half), g.matrix(c.rows+2, half),
			g.matrix(c.rows+2,
				half), g.indices(c.rows, c.rows+2)
		a := c.both(x, 2)
		grid := threads(c.rows * 2 * half)
		tail := args(c.some(g.ints(rows)), list(num(c.rows), num(2*half), num(half), num(halves), num(c.types)))
		if norm {
			a, grid = append(a, g.factors("f", w, 2*half)[0]), warps(2*c.rows)
			tail = args(tail[:1], list(num(c.rows), num(2), num(half), driver.Float(rowEpsilon), num(c.types)))
		}
		if c.wide {
			grid = threads(c.rows * half / 2)
		}
		err := g.launch(kernel, grid, args(a, g.factors("f", cos, half+1), g.factors("f", sin, half), tail)...)
		if c.absent {
			for i := range rows {
				rows[i] = int32(i)
			}
		}
		scaled := func(i, j int) float64 {
			if !norm {
				return x[i][j]
			}
			squares, head := 0.0, j/(2*half)*2*half
			for _, v := range x[i][head : head+2*half] {
				squares += v * v
			}
			return x[i][j] / math.Sqrt(squares/float64(2*half)+rowEpsilon) * w[0][j-head]
		}
		if c.wide {
			for i := range x {
				at := rows[i]
				c.exact = append(c.exact, append(normRopeOf(x[i][:2*half], w[0], cos[at], sin[at]),
					normRopeOf(x[i][2*half:], w[0], cos[at], sin[at])...))
			}
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

// normRopeOf is a head of norm_rope_wide: a lane adds the squares of 8 columns, then the lanes of the head are added.
func normRopeOf(x, w, cos, sin []float64) []float64 {
	lanes := make([]float32, len(x)/8)
	for j, v := range x {
		lanes[j/8] = fused(float32(v), float32(v), lanes[j/8])
	}
	factor := 1 / root(lanesOf(lanes)/float32(len(x))+rowEpsilon)
	out := make([]float64, len(x))
	for j := 0; j < len(x); j += 2 {
		a, b := float32(x[j])*factor*float32(w[j]), float32(x[j+1])*factor*float32(w[j+1])
		c, s := float32(cos[j/2]), float32(sin[j/2])
		out[j], out[j+1] = float64(fused(-b, s, a*c)), float64(fused(a, s, b*c))
	}
	return out
}

func siluMul(c *rowCall) ([][]float64, error) {
	err := c.g.launch("silu_mul_f32", threads(c.rows*c.cols),
		args(c.both(c.x, 2), c.put(c.y, 2, c.cols+5),
			list(num(c.rows), num(c.cols), num(c.types)))...)
	return mapRows(c.rows, c.cols, func(i, j int) float64 { return activate(1, c.x[i][j]) * c.y[i][j] }), err
}

func gather(kernel string) func(c *rowCall) ([][]float64, error) {
	return func(c *rowCall) ([][]float64, error) {
		ids := c.g.indices(c.rows, c.rows)
		elements := c.rows * c.cols
		if c.wide {
			elements /= 8
		}
		err := c.g.launch(kernel, threads(elements), args(c.both(c.x, 2),
			c.some(c.g.ints(ids)), list(num(c.rows), num(c.cols), num(c.types)))...)
		return mapRows(c.rows, c.cols, func(i, j int) float64 {
			if c.absent {
				return c.x[i][j]
			}
			return c.x[ids[i]][j]
		}), err
	}
}

// upsample sees rows as the lines of two images of three columns.
func upsample(c *rowCall) ([][]float64, error) {
	const w = 3
	x := c.g.matrix(2*c.rows*w, c.cols)
	n := 8 * c.rows * w * c.cols
	c.dst = c.g.result(n, 1, 1, c.types&1 == 1) // images are dense
	err := c.g.launch("upsample2_f32", threads(n), args(c.dst.args()[:1], c.put(x, 1, c.cols)[:1],
		list(num(2), num(c.rows), num(w), num(c.cols), num(c.types)))...)
	return mapRows(n, 1, func(i, _ int) float64 {
		pixel := i / c.cols
		return x[pixel/(2*w)/2*w+pixel%(2*w)/2][i%c.cols]
	}), err
}

// finish is the epilogue; where parts are absent there is nothing but the activation.
func finish(kernel string) func(c *rowCall) ([][]float64, error) {
	return func(c *rowCall) ([][]float64, error) {
		g := c.g
		for i, row := range c.x {
			for j := range row {
				if (3*i+j)%5 == 0 {
					row[j] = math.Copysign(300, row[j]) // beyond what the exponential function takes
				}
			}
		}
		act, elements := (c.rows+c.cols/8+c.types)%3, c.rows*c.cols
		if c.wide {
			elements /= 8
		}
		bias, gate, residual := g.matrix(1, c.cols), g.matrix(8, c.cols), g.matrix(c.rows, c.cols)
		group := g.indices(c.rows, 8)
		gates, residuals := g.factors("f", gate, c.cols+c.gap(1)), g.factors("f", residual, c.cols)
		err := g.launch(kernel, threads(elements),
			args(c.out(c.rows, c.cols), g.factors("f", c.x, c.cols+c.gap(4)), list(num(c.rows), num(c.cols)),
				c.some(g.factors("f", bias, c.cols)[0]), list(num(act)), c.some(gates[0]), gates[1:],
				c.some(g.ints(group)),
				c.some(residuals[0]), residuals[1:], list(num(c.types)))...)
		return mapRows(c.rows, c.cols, func(i, j int) float64 {
			if c.absent {
				return activate(act, c.x[i][j])
			}
			return residual[i][j] + gate[group[i]][j]*activate(act, c.x[i][j]+bias[0][j])
		}), err
	}
}

var rowKernels = []rowKernel{
	{"layer norm", "layer_norm_f32", 2, layerNorm("layer_norm_f32"), rowShapes, true},
	{"root mean square", "norm_f32", 2, norm(false), rowShapes, true},
	{"length", "norm_f32", 2, norm(true), rowShapes, true},
	{"norm and rope", "norm_rope_f32", 2, rotate("norm_rope_f32", 0), rowShapes, true},
	{"rope of pairs", "rope_f32", 2, rotate("rope_f32", 0), rowShapes, true},
	{"rope of halves", "rope_f32", 2, rotate("rope_f32", 1), rowShapes, true},
	{"silu mul", "silu_mul_f32", 3, siluMul, rowShapes, true},
	{"gather", "copy_f32", 2, gather("copy_f32"), rowShapes, false},
	{"upsample", "upsample2_f32", 2, upsample, rowShapes, false},
	{"finish", "finish_f32", 1, finish("finish_f32"), rowShapes, false},
	{"wide layer norm", "layer_norm_wide", 2, layerNorm("layer_norm_wide"), longShapes, true},
	{"wide norm and rope", "norm_rope_wide", 2, rotate("norm_rope_wide", 0), headShapes, true},
	{"wide gather", "copy_wide", 2, gather("copy_wide"), wideShapes, false},
	{"wide finish", "finish_wide", 1, finish("finish_wide"), wideShapes, false},
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

// wideShapes are about a block of threads with 8 columns each.
func wideShapes() [][2]int {
	shapes := [][2]int{{1, 8}, {3, 16}, {5, 248}, {2, 512}, {1, 1032}}
	if soak() {
		for i := range 67 {
			shapes = append(shapes, [2]int{i%9 + 1, 8 * (i + 1)})
		}
	}
	return shapes
}

// longShapes end in each of the four rounds of a block, and where the last one does.
func longShapes() [][2]int {
	shapes := [][2]int{{1, 8}, {2, 264}, {3, 1024}, {2, 1032}, {1, 2088}, {1, 3080}, {2, 4096}}
	if soak() {
		for i := range 67 {
			shapes = append(shapes, [2]int{i%5 + 1, 8 * (i*7 + 1)})
		}
	}
	return shapes
}

// headShapes are halves of heads, with blocks that are full and that are not.
func headShapes() [][2]int {
	shapes := [][2]int{{1, 32}, {9, 32}, {3, 64}, {4, 64}, {1, 128}, {5, 128}}
	if soak() {
		for i := range 20 {
			shapes = append(shapes, [2]int{i + 1, 32 << (i % 3)})
		}
	}
	return shapes
}

// checks are the cases of a kernel: its shapes in all types, and one of far matrices.
func (k rowKernel) checks() []check {
	var out []check
	for types := range 1 << k.operands {
		for i, s := range k.shapes() {
			out = append(out, check{
				name: fmt.Sprintf("%s, %v, types %b", k.name, s, types), weight: s[0] * s[1],
				run: func(g *gpu) error { return k.check(g, rowCall{rows: s[0], cols: s[1], types: types, absent: i%2 == 1}) },
			})
			if i == len(k.shapes())/2 && types&3%3 == 0 && k.inPlace {
				out = append(out, check{
					name: fmt.Sprintf("%s, %v, types %b, in place", k.name, s, types), weight: s[0] * s[1],
					run: func(g *gpu) error { return k.check(g, rowCall{rows: s[0], cols: s[1], types: types, inPlace: true}) },
				})
			}
		}
		if k.kernel == "upsample2_f32" { // it has no strides
			continue
		}
		s := [2]int{8, 4}
		if strings.HasSuffix(k.kernel, "_wide") {
			s[1] = k.shapes()[0][1]
		}
		out = append(out, check{
			name: fmt.Sprintf("%s, far, types %b", k.name, types), far: true, weight: s[0] * s[1],
			run: func(g *gpu) error { return k.check(g, rowCall{rows: s[0], cols: s[1], types: types}) },
		})
	}
	return out
}

// check compares a kernel with its formula. What is stored in bf16 is off by half a unit of
// it, a 256th at most; float32 by some units, of all that was added up. Where a kernel tells its rounding, all bits are
// compared as well.
func (k rowKernel) check(g *gpu, c rowCall) error {
	c.g, c.x, c.y, c.wide = g, g.matrix(c.rows, c.cols), g.matrix(c.rows, c.cols), strings.HasSuffix(k.kernel, "_wide")
	c.x[0][0], c.x[c.rows-1][c.cols-1] = -300, 300 // beyond what the exponential function takes
	want, err := k.launch(&c)
	if err != nil {
		return err
	}
	got, err := c.read(len(want[0]))
	if err != nil {
		return err
	}
	for i := range want {
		for j, w := range want[i] {
			most := 0x1p-18 * (4 + math.Abs(w))
			if c.types&1 == 1 {
				most += math.Abs(w) / 256
			}
			if d := math.Abs(got[i][j] - w); !(d <= most) {
				return fmt.Errorf("element (%d, %d) is %v, want %v", i, j, got[i][j], w)
			}
			if c.exact == nil {
				continue
			}
			x := c.exact[i][j]
			if c.types&1 == 1 {
				x = toBF16(x)
			}
			if got[i][j] != x {
				return fmt.Errorf("element (%d, %d) is %v, want exactly %v", i, j, got[i][j], x)
			}
		}
	}
	return nil
}

// toBF16 rounds to nearest, ties to even.
func toBF16(x float64) float64 {
	bits := math.Float32bits(float32(x))
	return float64(math.Float32frombits((bits + 0x7fff + bits>>16&1) &^ 0xffff))
}

// No instruction of these kernels depends on the mode.
func TestRows(t *testing.T) {
	for _, k := range rowKernels {
		runChecks(t, "chain", kernels.PTX, modes[0].o, k.checks())
	}
}
