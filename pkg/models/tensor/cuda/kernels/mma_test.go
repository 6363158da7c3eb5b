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
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
)

// gpu is an interpreter with one of the modules that ship.
type gpu struct {
	t   *testing.T
	vm  *ptxvm.VM
	m   driver.Module
	r   *rand.Rand
	far bool // rows of matrices lie apart
}

// apart is the bytes between rows of far matrices: the third row in bf16, the sixth in float32, begins beyond 2^32
// elements, and strides fit 32 bits.
const apart = 3 << 30

func newGPU(t *testing.T, ptx []byte, o ptxvm.Options) (*gpu, error) {
	t.Helper()
	o.Capability = 90
	vm := ptxvm.New(o)
	m, err := vm.LoadModule(ptx)
	return &gpu{t: t, vm: vm, m: m, r: rand.New(rand.NewPCG(1, 2)), far: o.Gap == apart}, err
}

// modes are the ways in which hardware may differ.
var modes = []struct {
	name string
	o    ptxvm.Options
}{
	{"chain", ptxvm.Options{Numerics: ptxvm.Chain, Budget: budget()}},
	{"hopper jitter", ptxvm.Options{Numerics: ptxvm.Hopper, Jitter: true, Budget: budget()}},
	{"ampere", ptxvm.Options{Numerics: ptxvm.Ampere, Budget: budget()}},
	{"hopper", ptxvm.Options{Numerics: ptxvm.Hopper, Budget: budget()}},
}

// budget is the instructions that a launch of a case may take: a kernel that does not end costs as many.
func budget() int {
	if soak() {
		return 1 << 24
	}
	return 1 << 19
}

// inModes runs checks in all modes, in the short form each in one.
func inModes(t *testing.T, ptx []byte, checks []check) {
	t.Helper()
	for i, m := range modes {
		some := checks
		if !soak() {
			some = nil
			for j := i; j < len(checks); j += len(modes) {
				some = append(some, checks[j])
			}
		}
		runChecks(t, m.name, ptx, m.o, some)
	}
}

func (g *gpu) alloc(n int) driver.Pointer {
	g.t.Helper()
	p, err := g.vm.Alloc(n)
	if err != nil {
		g.t.Fatal(err)
	}
	return p
}

// placed is a matrix on the device, of rows of width elements of size bytes.
type placed struct {
	at                        driver.Pointer
	rows, width, stride, size int
}

func (p placed) args() []driver.Arg { return list(driver.Address(p.at), num(p.stride)) }

// place puts rows on the device. What lies between them is never written: reading it is a fault. On a far device each
// is an allocation.
func (g *gpu) place(rows [][]byte, width, size int) placed {
	g.t.Helper()
	p := placed{rows: len(rows), width: width, stride: width, size: size}
	if !g.far {
		p.at = g.alloc(max(len(rows)*width*size, 16))
	}
	for i, row := range rows {
		at := p.at + driver.Pointer(i*width*size)
		if g.far {
			at = g.alloc(width * size)
		}
		if i == 0 {
			p.at = at
		} else if i == 1 {
			p.stride = int(at-p.at) / size
		}
		if err := g.vm.CopyIn(at, row); err != nil {
			g.t.Fatal(err)
		}
	}
	return p
}

// float32s and bf16s are rows as they lie in memory.
func float32s(x [][]float64) [][]byte {
	rows := make([][]byte, len(x))
	for i, row := range x {
		for _, v := range row {
			rows[i] = binary.LittleEndian.AppendUint32(rows[i], math.Float32bits(float32(v)))
		}
	}
	return rows
}

func bf16s(x [][]float64) [][]byte {
	rows := make([][]byte, len(x))
	for i, row := range x {
		for _, v := range row {
			rows[i] = binary.LittleEndian.AppendUint16(rows[i], uint16(math.Float32bits(float32(v))>>16))
		}
	}
	return rows
}

func (g *gpu) ints(x []int32) driver.Arg {
	var b []byte
	for _, v := range x {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	p := g.alloc(max(len(b), 4))
	if err := g.vm.CopyIn(p, b); err != nil {
		g.t.Fatal(err)
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

const guard = -54272.0 // which bf16 has

// result is a matrix of NaN with guards between its rows.
func (g *gpu) result(rows, cols, width int, half bool) placed {
	x := mapRows(rows, width, func(_, j int) float64 {
		if j < cols {
			return math.NaN()
		}
		return guard
	})
	if half {
		return g.place(bf16s(x), width, 2)
	}
	return g.place(float32s(x), width, 4)
}

func (g *gpu) launch(name string, grid driver.Grid, args ...driver.Arg) error {
	f, err := g.m.Function(name)
	if err != nil {
		return err
	}
	return g.vm.Launch(f, grid, args...)
}

// read returns a result, or what is wrong with its guards.
func (g *gpu) read(p placed, cols int) ([][]float64, error) {
	out := make([][]float64, p.rows)
	b := make([]byte, p.width*p.size)
	for i := range out {
		if err := g.vm.CopyOut(b, p.at+driver.Pointer(i*p.stride*p.size)); err != nil {
			return nil, err
		}
		for j := range p.width {
			bits := uint32(binary.LittleEndian.Uint16(b[p.size*j:]))
			if p.size == 4 {
				bits |= uint32(binary.LittleEndian.Uint16(b[4*j+2:])) << 16
			} else {
				bits <<= 16
			}
			v := float64(math.Float32frombits(bits))
			if j < cols {
				out[i] = append(out[i], v)
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
	if strings.HasPrefix(kernel, "linear_bf16") || strings.HasPrefix(kernel, "attention_bf16") ||
		strings.HasPrefix(kernel, "attention_wgmma") {
		return g.place(bf16s(x), ceil(stride, 8)*8, 2).args()
	}
	return g.place(float32s(x), stride, 4).args()
}

// product checks a linear kernel against float64: an element is off by less than a cut in
// the 24th bit of every step. The epilogue is another one for each shape.
func (g *gpu) product(kernel string, m, n, k int) error {
	x, w, residual, gate := g.matrix(m, k), g.matrix(n, k), g.matrix(m, n), g.matrix(8, n)
	bias, group := g.matrix(1, n), g.indices(m, 8)
	for j := range bias[0] {
		if j%4 == 0 {
			bias[0][j] *= 256 // beyond the ends of the exponential function
		}
	}
	act, tile, threads := (m+n+k)%3, 128, 256
	c := &rowCall{g: g}
	if kernel == "linear_bf16" {
		c.types = (m + n) % 2 // of the result
	}
	args := append(c.out(m, n), g.factors(kernel, x, k+8)...)
	if kernel == "linear_f32" {
		tile, threads = 64, 64
		far := g.far
		g.far = false // rows of w follow each other
		args = append(args, g.factors(kernel, w, k)[:1]...)
		g.far = far
	} else {
		args = append(args, g.factors(kernel, w, k)...)
	}
	const plain = "linear_f32" // of the epilogue's matrices
	args = append(args, num(m), num(n), num(k), g.factors(plain, bias, n)[0], num(act))
	args = append(args, g.factors(plain, gate, n+1)...)
	args = append(args, g.ints(group))
	args = append(args, g.factors(plain, residual, n+2)...)
	if kernel == "linear_bf16" {
		args = append(args, num(c.types))
	}
	grid := driver.Grid{Blocks: driver.Dim{X: ceil(n, tile) * ceil(m, tile)}, Threads: driver.Dim{X: threads}}
	err := g.launch(kernel, grid, args...)
	if err != nil {
		return err
	}
	got, err := c.read(n)
	if err != nil {
		return err
	}
	for i := range m {
		for j := range n {
			sum, size := bias[0][j], 1+math.Abs(bias[0][j])
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
	shapes := [][3]int{
		{1, 1, 1},
		{15, 9, 7},
		{16, 8, 8},
		{17, 33, 31},
		{64, 31, 33},
		{65, 128, 40},
		{130, 129, 16},
		{3, 5, 200},
		{5, 4, 0},
		{11, 70, 42},
		{10, 7, 20},
		{66, 67, 13},
		{33, 33, 6},
		{22, 6, 5},
		{180, 4, 8},
		{40, 14, 9},
	}
	if soak() {
		for i := range 67 {
			shapes = append(shapes, [3]int{i + 1, (i*29)%67 + 1, (i*13)%67 + 1}, [3]int{64 + i, 128 - i, 8 * i})
		}
	}
	return shapes
}

// productChecks are the cases of a linear kernel.
func productChecks(kernel string) []check {
	var out []check
	for _, s := range [][3]int{{16, 9, 8}, {70, 70, 42}, {71, 70, 43}} {
		if kernel == "linear_bf16" || s[0] == 16 {
			out = append(out, check{
				name: fmt.Sprint("far ", s), far: true, weight: 40 * s[0], run: func(g *gpu) error {
					return g.product(kernel, s[0], s[1], s[2])
				},
			})
		}
	}
	for _, s := range productShapes() {
		out = append(out, check{
			name: fmt.Sprint(s), weight: s[0] * s[1] * (s[2] + 1),
			run: func(g *gpu) error { return g.product(kernel, s[0], s[1], s[2]) },
		})
	}
	return out
}

func TestLinear(t *testing.T) {
	runChecks(t, "chain", kernels.PTX, modes[0].o, productChecks("linear_f32"))
	inModes(t, kernels.PTX, productChecks("linear_bf16"))
}
