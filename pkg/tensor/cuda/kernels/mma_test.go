package kernels_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/tensor/cuda/kernels"
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
	grid := driver.Grid{Blocks: driver.Dim{X: ceil(n, tile), Y: ceil(m, tile)}, Threads: driver.Dim{X: threads}}
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

// attention is one call of a kernel: lists of rows for each sequence.
type attention struct {
	heads, kv, d int
	dv           int // columns of a value; 0: d
	of           int // columns that the kernel is for, if not the fewest
	causal       bool
	sequences    []int   // lengths
	keys         []int   // of each sequence; nil: its rows are keys and queries
	mask         int     // every so many-th key is not listed
	large        float64 // factor of the queries, a power of 2; 0 is 1
	half         bool    // dst is bf16
	even         bool    // rows of dst are even many elements apart
	inPlace      bool    // dst is q
	rising       bool    // each key has a much higher score than those before
	peaked       int     // query i has a score at key i - 1 + peaked beyond what a wrong maximum stands; 0: not
}

// attention compares with float64. In bf16 the weights of keys are rounded once: an element
// is off by 2^-8 of the largest value, which is about 4, at most. Errors of scores grow
// with them.
func (g *gpu) attention(kernel string, a attention) error {
	rows, keyRows := 3, 2 // that belong to no sequence
	for i, n := range a.sequences {
		rows += n
		if a.keys != nil {
			keyRows += a.keys[i]
		}
	}
	if a.keys == nil {
		keyRows = rows
	}
	if a.dv == 0 {
		a.dv = a.d
	}
	order, keyOrder := g.r.Perm(rows), g.r.Perm(keyRows)
	if a.keys == nil {
		keyOrder = order
	}
	q, k, v := g.matrix(rows, a.heads*a.d), g.matrix(keyRows, a.kv*a.d), g.matrix(keyRows, a.kv*a.dv)
	large := max(1, a.large)
	for _, row := range q {
		for c := range row {
			row[c] *= large
		}
	}
	for _, list := range [][]int{order, keyOrder} { // a key that is masked is row 0, where one is
		i := slices.Index(list, 0)
		list[0], list[i] = list[i], list[0]
	}
	const nowhere = 1 << 24 // a row beyond all: lists of keys, and tiles, end with it
	listedRows := map[int]bool{}
	var tiles, queries, keys []int32
	type query struct {
		row  int
		seen []int
	}
	var wanted []query
	for s, n := range a.sequences {
		list, all := order[:n], order[:n]
		order = order[n:]
		if a.keys != nil {
			all, keyOrder = keyOrder[:a.keys[s]], keyOrder[a.keys[s]:]
		}
		first := len(keys)
		var listed, positions []int
		for i, row := range all {
			if a.mask == 0 || i%a.mask != 0 {
				listed, positions, keys = append(listed, row), append(positions, i), append(keys, int32(row))
				listedRows[row] = true
				for h := range a.kv {
					if n := len(listed); a.rising { // two numbers that bf16 has
						k[row][h*a.d], k[row][h*a.d+1] = float64(n&^15), float64(n&15)
					} else if a.peaked != 0 {
						peak(k[row][h*a.d:(h+1)*a.d], n-1, 16)
					}
				}
			}
		}
		keys = append(keys, nowhere)
		seen := 0
		for i, row := range list {
			for h := range a.heads {
				if a.peaked != 0 {
					peak(q[row][h*a.d:(h+1)*a.d], max(0, i+a.peaked-1), 128)
				}
			}
			for seen < len(listed) && (!a.causal || positions[seen] <= i+len(all)-n) {
				seen++
			}
			if i%128 == 0 {
				tiles = append(tiles, int32(len(queries)/3), int32(min(128, n-i)))
			}
			queries = append(queries, int32(row), int32(first), int32(seen))
			wanted = append(wanted, query{row, listed[:seen]})
		}
		if kernel != "attention_f32" && s+1 < len(a.sequences) { // which has no tiles
			queries = append(queries, nowhere, 0, 0)
		}
	}
	for row := range k { // what is not listed may be anything
		if !listedRows[row] {
			for c := range k[row] {
				k[row][c] = math.NaN()
			}
			for c := range v[row] {
				v[row][c] = math.NaN()
			}
		}
	}
	for _, row := range q {
		for h := range a.heads {
			if a.rising {
				row[h*a.d], row[h*a.d+1] = 32, 32
			}
		}
	}
	cols, most := a.heads*a.dv, 0x1p-6*math.Sqrt(large)
	c := &rowCall{g: g, inPlace: a.inPlace, wide: a.even}
	if a.half {
		c.types = 3
	}
	scale := float32(1 / math.Sqrt(float64(a.d)))
	args := c.out(rows, cols)
	if a.inPlace {
		args = c.both(q, 0)
	} else {
		args = append(args, g.factors(kernel, q, a.heads*a.d+8)...)
	}
	args = append(args, g.factors(kernel, k, a.kv*a.d+8)...)
	args = append(args, g.factors(kernel, v, a.kv*a.dv+16)...)
	grid := driver.Grid{Blocks: driver.Dim{X: len(tiles) / 2, Y: a.heads * ceil(a.d, 128)}, Threads: driver.Dim{X: 256}}
	if kernel == "attention_f32" {
		most = 0x1p-18 * large
		grid = driver.Grid{
			Blocks: driver.Dim{X: ceil(len(wanted)*a.heads, 4), Y: ceil(a.dv, 128)}, Threads: driver.Dim{X: 128},
		}
		args = append(args, g.ints(queries), g.ints(keys), num(len(wanted)), num(a.heads), num(a.kv), num(a.d), num(a.dv),
			driver.Float(scale))
	} else {
		args = append(args, g.ints(tiles), g.ints(queries), g.ints(keys), num(a.heads), num(a.kv), num(a.d),
			driver.Float(scale), num(c.types&1))
	}
	if a.rising && kernel == "attention_f32" { // errors are those of large scores
		most *= 64
	}
	switch kernel {
	case "attention_wgmma_64":
		grid.Threads.X, grid.Shared = 384, 7*128*64*2
	case "attention_wgmma_128":
		grid.Threads.X, grid.Shared = 384, 7*128*128*2
	}
	if err := g.launch(kernel, grid, args...); err != nil {
		return err
	}
	got, err := c.read(cols)
	if err != nil {
		return err
	}
	for _, row := range order {
		for j := range cols {
			if a.inPlace && got[row][j] != q[row][j] || !a.inPlace && !math.IsNaN(got[row][j]) {
				return fmt.Errorf("row %d, of no sequence, was written", row)
			}
		}
	}
	for i, w := range wanted {
		for h := range a.heads {
			kv := h * a.kv / a.heads
			want := attend(q[w.row][h*a.d:(h+1)*a.d], k, v, w.seen, kv*a.d, kv*a.dv, a.dv, float64(scale))
			for c, x := range want {
				if d := math.Abs(got[w.row][h*a.dv+c] - x); !(d <= most) {
					return fmt.Errorf("query %d of %d, head %d, column %d is %v, want %v", i, len(wanted), h, c,
						got[w.row][h*a.dv+c], x)
				}
			}
		}
	}
	return nil
}

// kernel is the one in bf16 for the size of the heads, where there is one.
func (a attention) kernel() string {
	switch {
	case a.d > 384 || a.d%8 != 0 || a.inPlace || a.dv > 0:
		return "attention_f32"
	case max(a.d, a.of) > 128:
		return "attention_bf16_384"
	}
	size := 32
	for size < max(a.d, a.of) {
		size *= 2
	}
	return fmt.Sprintf("attention_bf16_%d", size)
}

// peak makes a vector that has a large product with that of the same number, half of it with some others.
func peak(x []float64, i int, height float64) {
	clear(x)
	x[i%8], x[8+i/8%(len(x)-8)] = height, height
}

// attend is the formula, for one query and the keys that it sees: zeros without one.
func attend(q []float64, k, v [][]float64, seen []int, firstKey, firstValue, dv int, scale float64) []float64 {
	out, total, weights, most := make([]float64, dv), 0.0, make([]float64, len(seen)), math.Inf(-1)
	for i, row := range seen {
		for c := range q {
			weights[i] += q[c] * k[row][firstKey+c]
		}
		most = max(most, weights[i])
	}
	for i, row := range seen {
		p := math.Exp((weights[i] - most) * scale)
		total += p
		for c := range out {
			out[c] += p * v[row][firstValue+c]
		}
	}
	for c := range out {
		out[c] /= max(total, 1e-300)
	}
	return out
}

func attentions() []attention {
	cases := []attention{
		{heads: 2, kv: 2, d: 8, sequences: []int{1}, half: true},
		{heads: 1, kv: 1, d: 32, causal: true, sequences: []int{70}, large: 64},
		{heads: 2, kv: 1, d: 32, sequences: []int{33, 31}, large: 64, half: true},
		{heads: 4, kv: 2, d: 40, causal: true, sequences: []int{17, 70}, half: true},
		{heads: 1, kv: 1, d: 64, causal: true, sequences: []int{65, 1, 2}, half: true},
		{heads: 1, kv: 1, d: 64, sequences: []int{3}, keys: []int{71}, mask: 5, large: 64},
		{heads: 1, kv: 1, d: 128, sequences: []int{64, 96}},
		{heads: 3, kv: 3, d: 120, causal: true, sequences: []int{40}},
		{heads: 2, kv: 1, d: 72, causal: true, sequences: []int{20}, keys: []int{18}, large: 64, half: true},
		{heads: 1, kv: 1, d: 24, sequences: []int{130}, keys: []int{33}, mask: 2},
		{heads: 2, kv: 2, d: 7, sequences: []int{9}},
		{heads: 4, kv: 2, d: 5, dv: 33, causal: true, sequences: []int{40, 3}, keys: []int{38, 70}, mask: 3, large: 4},
		{heads: 2, kv: 2, d: 7, dv: 130, sequences: []int{3}},
		{heads: 2, kv: 1, d: 1, dv: 3, sequences: []int{2}},
		{heads: 1, kv: 1, d: 8, sequences: []int{9}, inPlace: true},
		{heads: 1, kv: 1, d: 9, dv: 100, sequences: []int{2}, keys: []int{32}},
		{heads: 2, kv: 1, d: 65, sequences: []int{9, 4}, inPlace: true},
		{heads: 1, kv: 1, d: 130, causal: true, sequences: []int{35}},
		{heads: 1, kv: 1, d: 8, sequences: []int{9}},
		{heads: 1, kv: 1, d: 8, sequences: []int{9}, half: true},
		{heads: 1, kv: 1, d: 8, of: 64, sequences: []int{9}},
		{heads: 1, kv: 1, d: 8, of: 64, sequences: []int{9}, half: true},
		{heads: 1, kv: 1, d: 8, of: 128, sequences: []int{9}},
		{heads: 1, kv: 1, d: 8, of: 128, sequences: []int{9}, half: true},
		{heads: 1, kv: 1, d: 8, of: 384, sequences: []int{9}},
		{heads: 1, kv: 1, d: 8, of: 384, sequences: []int{9}, half: true},
		{heads: 1, kv: 1, d: 384, sequences: []int{40}},
		{heads: 1, kv: 1, d: 24, causal: true, sequences: []int{64}, keys: []int{60}, rising: true},
		{heads: 1, kv: 1, d: 40, causal: true, sequences: []int{130}, rising: true},
		{heads: 1, kv: 1, d: 72, causal: true, sequences: []int{50}, keys: []int{46}, rising: true},
		{heads: 1, kv: 1, d: 144, causal: true, sequences: []int{50}, rising: true},
		{heads: 2, kv: 2, d: 136, causal: true, sequences: []int{17, 16}, large: 64, half: true},
		{heads: 1, kv: 1, d: 264, causal: true, sequences: []int{33}, half: true},
	}
	for _, d := range []int{24, 40, 72, 144} { // see wgmmaAttentions
		cases = append(cases,
			attention{heads: 1, kv: 1, d: d, causal: true, sequences: []int{40}, keys: []int{48}, rising: true},
			attention{heads: 1, kv: 1, d: d, causal: true, sequences: []int{40}, keys: []int{32}, rising: true},
			attention{heads: 1, kv: 1, d: d, sequences: []int{64}, peaked: 1},
			attention{heads: 1, kv: 1, d: d, sequences: []int{64}, peaked: 9})
	}
	if soak() {
		for n := 1; n <= 130; n += 1 + n/70*8 {
			cases = append(cases,
				attention{
					heads: 2, kv: 1, d: 8 * (1 + n%16), causal: n%2 == 0, sequences: []int{n, (n*7)%64 + 1},
					large: float64(n & 64), half: n%2 == 1,
				},
				attention{
					heads: 1, kv: 1, d: 8 * (17 + n*5%32), causal: n%2 == 1, sequences: []int{n, n % 33},
					large: float64(n & 64), half: n%2 == 1,
				})
		}
	}
	return cases
}

// weight is that of its check, in pieces of queries and keys.
func (a attention) weight() int {
	sum := 0
	for i, n := range a.sequences {
		keys := n
		if a.keys != nil {
			keys = a.keys[i]
		}
		sum += ceil(n, 64) * (1 + ceil(keys, 32))
	}
	return sum * a.heads * ceil(max(a.d, a.of), 32)
}

// farAttention has rows beyond 2^32 elements.
func farAttention(d int, half bool) attention {
	return attention{heads: 1, kv: 1, d: d, sequences: []int{63}, half: half}
}

// attentionChecks are the cases of a kernel. attention_f32 has those of the others as well.
func attentionChecks(kernel string) []check {
	var out []check
	add := func(a attention, far bool) {
		out = append(out, check{
			name: fmt.Sprintf("%+v", a), far: far, weight: a.weight(), run: func(g *gpu) error { return g.attention(kernel, a) },
		})
	}
	for _, a := range attentions() {
		if kernel == a.kernel() || kernel == "attention_f32" && a.weight() <= 12 && a.of == 0 {
			a.half = a.half && kernel != "attention_f32"
			add(a, false)
		}
	}
	for _, half := range []bool{false, true} {
		for _, d := range []int{32, 64, 128, 272} {
			if a := farAttention(d, half); a.kernel() == kernel || kernel == "attention_f32" && d == 32 && !half {
				add(a, true)
			}
		}
	}
	return out
}

func TestAttention(t *testing.T) {
	for _, kernel := range []string{
		"attention_bf16_32", "attention_bf16_64", "attention_bf16_128", "attention_bf16_384",
	} {
		inModes(t, kernels.PTX, attentionChecks(kernel))
	}
	runChecks(t, "chain", kernels.PTX, modes[0].o, attentionChecks("attention_f32"))
}
