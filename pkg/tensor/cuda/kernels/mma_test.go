package kernels_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/tensor/cuda/kernels"
)

// gpu is an interpreter with the module that ships.
type gpu struct {
	t  *testing.T
	vm *ptxvm.VM
	m  driver.Module
	r  *rand.Rand
}

func newGPU(t *testing.T, ptx []byte, o ptxvm.Options) (*gpu, error) {
	t.Helper()
	vm := ptxvm.New(o)
	m, err := vm.LoadModule(ptx)
	return &gpu{t: t, vm: vm, m: m, r: rand.New(rand.NewPCG(1, 2))}, err
}

// modes are the ways in which hardware may differ.
var modes = map[string]ptxvm.Options{
	"chain":         {Numerics: ptxvm.Chain, Budget: 1 << 24},
	"ampere":        {Numerics: ptxvm.Ampere, Budget: 1 << 24},
	"hopper":        {Numerics: ptxvm.Hopper, Budget: 1 << 24},
	"hopper jitter": {Numerics: ptxvm.Hopper, Jitter: true, Budget: 1 << 24},
}

func (g *gpu) put(b []byte) driver.Arg {
	g.t.Helper()
	p, err := g.vm.Alloc(max(len(b), 4))
	if err != nil {
		g.t.Fatal(err)
	}
	if err := g.vm.CopyIn(p, b); err != nil {
		g.t.Fatal(err)
	}
	return driver.Address(p)
}

func (g *gpu) floats(x []float32) driver.Arg {
	var b []byte
	for _, v := range x {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return g.put(b)
}

func (g *gpu) ints(x []int32) driver.Arg {
	var b []byte
	for _, v := range x {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	return g.put(b)
}

// bf16 puts a matrix with padded rows on the device. What lies between them is never
// written: reading it is a fault.
func (g *gpu) bf16(x [][]float64, stride int) driver.Arg {
	g.t.Helper()
	p, err := g.vm.Alloc(max(2*len(x)*stride, 16))
	if err != nil {
		g.t.Fatal(err)
	}
	for i, row := range x {
		var b []byte
		for _, v := range row {
			b = binary.LittleEndian.AppendUint16(b, uint16(math.Float32bits(float32(v))>>16))
		}
		if err := g.vm.CopyIn(p+driver.Pointer(2*i*stride), b); err != nil {
			g.t.Fatal(err)
		}
	}
	return driver.Address(p)
}

// matrix is numbers that bf16 has.
func (g *gpu) matrix(rows, cols int) [][]float64 {
	x := make([][]float64, rows)
	for i := range x {
		x[i] = make([]float64, cols)
		for j := range x[i] {
			x[i][j] = float64(math.Float32frombits(math.Float32bits(float32(g.r.NormFloat64())) &^ 0xffff))
		}
	}
	return x
}

const guard = -54321.125

// result is a matrix of NaN with guards between its rows.
func (g *gpu) result(rows, cols, stride int) driver.Arg {
	x := make([]float32, rows*stride)
	for i := range x {
		x[i] = guard
		if i%stride < cols {
			x[i] = float32(math.NaN())
		}
	}
	return g.floats(x)
}

func (g *gpu) launch(name string, grid driver.Grid, args ...driver.Arg) error {
	f, err := g.m.Function(name)
	if err != nil {
		return err
	}
	return g.vm.Launch(f, grid, args...)
}

// read returns a result, or what is wrong with its guards.
func (g *gpu) read(at driver.Arg, rows, cols, stride int) ([][]float64, error) {
	b := make([]byte, 4*rows*stride)
	if err := g.vm.CopyOut(b, driver.Pointer(at)); err != nil {
		return nil, err
	}
	out := make([][]float64, rows)
	for i := range out {
		for j := range stride {
			v := math.Float32frombits(binary.LittleEndian.Uint32(b[4*(i*stride+j):]))
			if j < cols {
				out[i] = append(out[i], float64(v))
			} else if v != guard {
				return nil, fmt.Errorf("row %d: the guard in column %d of %d is %v", i, j, cols, v)
			}
		}
	}
	return out, nil
}

func num(n int) driver.Arg { return driver.Int(n) }

func ceil(n, by int) int { return (n + by - 1) / by }

// soak reports whether tests run in their long form.
func soak() bool { return os.Getenv("MEANDER_SOAK") != "" }

// factors puts a matrix on the device in the type of a kernel, with a stride of its own.
func (g *gpu) factors(kernel string, x [][]float64, stride int) []driver.Arg {
	if strings.HasPrefix(kernel, "linear_bf16") || strings.HasPrefix(kernel, "attention_bf16") {
		stride = ceil(stride, 8) * 8
		return []driver.Arg{g.bf16(x, stride), num(stride)}
	}
	flat := make([]float32, len(x)*stride)
	for i, row := range x {
		for j, v := range row {
			flat[i*stride+j] = float32(v)
		}
	}
	return []driver.Arg{g.floats(flat), num(stride)}
}

// product checks a linear kernel against float64: an element is off by less than a cut in
// the 24th bit of every step. The epilogue is another one for each shape.
func (g *gpu) product(kernel string, m, n, k int) error {
	x, w, residual, gate := g.matrix(m, k), g.matrix(n, k), g.matrix(m, n), g.matrix(3, n)
	bias, group := g.matrix(1, n), make([]int32, m)
	for i := range group {
		group[i] = int32(g.r.IntN(3))
	}
	act, tile, threads := (m+n+k)%3, 128, 256
	c := &rowCall{g: g}
	if kernel == "linear_bf16" {
		c.types = (m + n) % 2 // of the result
	}
	args := append(c.out(m, n), g.factors(kernel, x, k+8)...)
	if kernel == "linear_f32" {
		tile, threads = 64, 64
		args = append(args, g.factors(kernel, w, k)[:1]...)
	} else {
		args = append(args, g.factors(kernel, w, k)...)
	}
	const float32s = "linear_f32" // of the epilogue's matrices
	args = append(args, num(m), num(n), num(k), g.factors(float32s, bias, n)[0], num(act))
	args = append(args, g.factors(float32s, gate, n+1)...)
	args = append(args, g.ints(group))
	args = append(args, g.factors(float32s, residual, n+2)...)
	if kernel == "linear_bf16" {
		args = append(args, num(c.types))
	}
	err := g.launch(kernel, driver.Grid{Blocks: driver.Dim{X: ceil(n, tile), Y: ceil(m, tile)}, Threads: driver.Dim{X: threads}}, args...)
	if err != nil {
		return err
	}
	got, err := c.read(m, n)
	if err != nil {
		return err
	}
	for i := range m {
		for j := range n {
			sum, size := bias[0][j], 1.0
			for c := range k {
				sum += x[i][c] * w[j][c]
				size += math.Abs(x[i][c] * w[j][c])
			}
			factor := gate[group[i]][j]
			want := residual[i][j] + factor*activate(act, sum)
			most := float64(k+16)*0x1p-23*size*max(1, math.Abs(factor)) + float64(c.types)*math.Abs(want)/256
			if d := math.Abs(got[i][j] - want); !(d <= most) {
				return fmt.Errorf("element (%d, %d) is %v, want %v", i, j, got[i][j], want)
			}
		}
	}
	return nil
}

// activate is none, SiLU or GELU.
func activate(act int, x float64) float64 {
	switch act {
	case 1:
		return x / (1 + math.Exp(-x))
	case 2:
		return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
	}
	return x
}

// productShapes have every residue of rows and columns in a tile of 16 x 8, and of k in a
// slab, in the long form; in the short one the ends.
func productShapes() [][3]int {
	shapes := [][3]int{{1, 1, 1}, {15, 9, 7}, {16, 8, 8}, {17, 33, 31}, {64, 31, 33}, {65, 128, 40}, {130, 129, 16}, {3, 5, 200}, {5, 4, 0}}
	if soak() {
		for i := range 67 {
			shapes = append(shapes, [3]int{i + 1, (i*29)%67 + 1, (i*13)%67 + 1}, [3]int{64 + i, 128 - i, 8 * i})
		}
	}
	return shapes
}

func TestLinear(t *testing.T) {
	for name, o := range modes {
		g, err := newGPU(t, kernels.PTX, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range productShapes() {
			for _, kernel := range []string{"linear_f32", "linear_bf16"} {
				if err := g.product(kernel, s[0], s[1], s[2]); err != nil {
					t.Fatalf("%s: %s: %v: %v", kernel, name, s, err)
				}
			}
		}
	}
}

// attention is one call of attention_bf16: lists of rows for each sequence.
type attention struct {
	heads, kv, d int
	causal       bool
	sequences    []int   // lengths
	large        float64 // factor of the queries, a power of 2; 0 is 1
}

// attention compares with float64. In bf16 the weights of keys are rounded once: an element
// is off by 2^-8 of the largest value, which is about 4, at most. Errors of scores grow
// with them.
func (g *gpu) attention(kernel string, a attention) error {
	rows := 3 // that belong to no sequence
	for _, n := range a.sequences {
		rows += n
	}
	order := g.r.Perm(rows)
	q, k, v := g.matrix(rows, a.heads*a.d), g.matrix(rows, a.kv*a.d), g.matrix(rows, a.kv*a.d)
	large := max(1, a.large)
	for _, row := range q {
		for c := range row {
			row[c] *= large
		}
	}
	var tiles, queries, keys []int32
	var lists [][]int
	for _, n := range a.sequences {
		list := order[:n]
		order = order[n:]
		lists = append(lists, list)
		first := len(keys)
		for i, row := range list {
			seen := n
			if a.causal {
				seen = i + 1
			}
			if i%128 == 0 {
				tiles = append(tiles, int32(len(queries)/3), int32(min(128, n-i)))
			}
			queries, keys = append(queries, int32(row), int32(first), int32(seen)), append(keys, int32(row))
		}
	}
	cols, kvCols := a.heads*a.d, a.kv*a.d
	most, c := 0x1p-6*math.Sqrt(large), &rowCall{g: g}
	if kernel != "attention_f32" {
		c.types = a.sequences[0] % 2 // of the result
	}
	scale := float32(1 / math.Sqrt(float64(a.d)))
	args := append(c.out(rows, cols), g.factors(kernel, q, cols+8)...)
	args = append(args, g.factors(kernel, k, kvCols)...)
	args = append(args, g.factors(kernel, v, kvCols+16)...)
	grid := driver.Grid{Blocks: driver.Dim{X: len(tiles) / 2, Y: a.heads * ceil(a.d, 128)}, Threads: driver.Dim{X: 256}}
	if kernel == "attention_f32" {
		most = 0x1p-18 * large
		grid = driver.Grid{Blocks: driver.Dim{X: ceil(len(queries)/3*a.heads, 4), Y: ceil(a.d, 128)}, Threads: driver.Dim{X: 128}}
		args = append(args, g.ints(queries), g.ints(keys), num(len(queries)/3), num(a.heads), num(a.kv), num(a.d), num(a.d), driver.Float(scale))
	} else {
		args = append(args, g.ints(tiles), g.ints(queries), g.ints(keys), num(a.heads), num(a.kv), num(a.d), driver.Float(scale), num(c.types))
	}
	if err := g.launch(kernel, grid, args...); err != nil {
		return err
	}
	got, err := c.read(rows, cols)
	if err != nil {
		return err
	}
	for _, row := range order {
		for j := range cols {
			if !math.IsNaN(got[row][j]) {
				return fmt.Errorf("row %d, of no sequence, was written", row)
			}
		}
	}
	for _, list := range lists {
		for i, row := range list {
			seen := list
			if a.causal {
				seen = list[:i+1]
			}
			for h := range a.heads {
				want := attend(q[row][h*a.d:(h+1)*a.d], k, v, seen, h*a.kv/a.heads*a.d, float64(scale))
				for c, x := range want {
					if d := math.Abs(got[row][h*a.d+c] - x); !(d <= most) {
						return fmt.Errorf("row %d of %d, head %d, column %d is %v, want %v", i, len(list), h, c, got[row][h*a.d+c], x)
					}
				}
			}
		}
	}
	return nil
}

// kernel is the one in bf16 for the size of the heads, where there is one.
func (a attention) kernel() string {
	switch {
	case a.d > 384 || a.d%8 != 0:
		return "attention_f32"
	case a.d > 128:
		return "attention_bf16_384"
	}
	size := 32
	for size < a.d {
		size *= 2
	}
	return fmt.Sprintf("attention_bf16_%d", size)
}

// attend is the formula, for one query and the keys that it sees.
func attend(q []float64, k, v [][]float64, seen []int, first int, scale float64) []float64 {
	out, total := make([]float64, len(q)), 0.0
	for _, row := range seen {
		dot := 0.0
		for c := range q {
			dot += q[c] * k[row][first+c]
		}
		p := math.Exp(dot * scale)
		total += p
		for c := range out {
			out[c] += p * v[row][first+c]
		}
	}
	for c := range out {
		out[c] /= total
	}
	return out
}

func attentions() []attention {
	cases := []attention{
		{1, 1, 8, false, []int{1}, 0},
		{1, 1, 32, true, []int{70}, 64},
		{2, 1, 32, false, []int{33, 31}, 64},
		{4, 2, 40, true, []int{17, 70}, 0},
		{1, 1, 64, true, []int{65, 1, 2}, 0},
		{1, 1, 128, false, []int{64, 96}, 0},
		{3, 3, 120, true, []int{40}, 0},
		{2, 2, 7, false, []int{9}, 0},
		{1, 1, 130, true, []int{35}, 0},
		{1, 1, 384, false, []int{40}, 0},
		{2, 1, 136, true, []int{17, 16}, 64},
		{1, 1, 264, true, []int{33}, 0},
	}
	if soak() {
		for n := 1; n <= 130; n += 1 + n/70*8 {
			cases = append(cases, attention{2, 1, 8 * (1 + n%16), n%2 == 0, []int{n, (n*7)%64 + 1}, float64(n & 64)},
				attention{1, 1, 8 * (17 + n*5%32), n%2 == 1, []int{n, n % 33}, float64(n & 64)})
		}
	}
	return cases
}

func TestAttention(t *testing.T) {
	for name, o := range modes {
		g, err := newGPU(t, kernels.PTX, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range attentions() {
			if err := g.attention(a.kernel(), a); err != nil {
				t.Fatalf("%s: %+v: %v", name, a, err)
			}
		}
	}
}
