package kernels_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
)

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
	if a.dv == 0 {
		a.dv = a.d
	}
	in := a.operands(g)
	in.list(a, kernel)
	c := &rowCall{g: g, inPlace: a.inPlace, wide: a.even}
	if a.half {
		c.types = 3
	}
	cols, scale := a.heads*a.dv, float32(1/math.Sqrt(float64(a.d)))
	args := c.out(len(in.q), cols)
	if a.inPlace {
		args = c.both(in.q, 0)
	} else {
		args = append(args, g.factors(kernel, in.q, a.heads*a.d+8)...)
	}
	args = append(args, g.factors(kernel, in.k, a.kv*a.d+8)...)
	args = append(args, g.factors(kernel, in.v, a.kv*a.dv+16)...)
	grid := driver.Grid{
		Blocks: driver.Dim{X: len(in.tiles) / 2, Y: a.heads * ceil(a.d, 128)}, Threads: driver.Dim{X: 256},
	}
	if kernel == "attention_f32" {
		grid = driver.Grid{
			Blocks: driver.Dim{X: ceil(len(in.wanted)*a.heads, 4), Y: ceil(a.dv, 128)}, Threads: driver.Dim{X: 128},
		}
		args = append(args, g.ints(in.queries), g.ints(in.keys), num(len(in.wanted)), num(a.heads), num(a.kv), num(a.d),
			num(a.dv), driver.Float(scale))
	} else {
		args = append(args, g.ints(in.tiles), g.ints(in.queries), g.ints(in.keys), num(a.heads), num(a.kv), num(a.d),
			driver.Float(scale), num(c.types&1))
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
	return in.compare(a, kernel, got, scale)
}

// operands are those of one call, and the lists that it is given.
type operands struct {
	q, k, v              [][]float64
	order, keyOrder      []int // of rows: those of the sequences first
	tiles, queries, keys []int32
	wanted               []query
}

// query is a row of q, and the rows of the keys that it sees.
type query struct {
	row  int
	seen []int
}

// operands draws the matrices of a call.
func (a attention) operands(g *gpu) *operands {
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
	in := &operands{order: g.r.Perm(rows), keyOrder: g.r.Perm(keyRows)}
	if a.keys == nil {
		in.keyOrder = in.order
	}
	in.q, in.k, in.v = g.matrix(rows, a.heads*a.d), g.matrix(keyRows, a.kv*a.d), g.matrix(keyRows, a.kv*a.dv)
	for _, row := range in.q {
		for c := range row {
			row[c] *= max(1, a.large)
		}
	}
	for _, list := range [][]int{in.order, in.keyOrder} { // a key that is masked is row 0, where one is
		i := slices.Index(list, 0)
		list[0], list[i] = list[i], list[0]
	}
	return in
}

// list makes the lists of a call, and sets the numbers of keys and queries that are to have large products.
func (in *operands) list(a attention, kernel string) {
	const nowhere = 1 << 24 // a row beyond all: lists of keys, and tiles, end with it
	order, keyOrder, listedRows := in.order, in.keyOrder, map[int]bool{}
	for s, n := range a.sequences {
		list, all := order[:n], order[:n]
		order = order[n:]
		if a.keys != nil {
			all, keyOrder = keyOrder[:a.keys[s]], keyOrder[a.keys[s]:]
		}
		first := len(in.keys)
		var listed, positions []int
		for i, row := range all {
			if a.mask != 0 && i%a.mask == 0 {
				continue
			}
			listed, positions, in.keys = append(listed, row), append(positions, i), append(in.keys, int32(row))
			listedRows[row] = true
			for h := range a.kv {
				if n, k := len(listed), in.k[row]; a.rising { // two numbers that bf16 has
					k[h*a.d], k[h*a.d+1] = float64(n&^15), float64(n&15)
				} else if a.peaked != 0 {
					peak(k[h*a.d:(h+1)*a.d], n-1, 16)
				}
			}
		}
		in.keys = append(in.keys, nowhere)
		seen := 0
		for i, row := range list {
			for h := range a.heads {
				if q := in.q[row][h*a.d : (h+1)*a.d]; a.peaked != 0 {
					peak(q, max(0, i+a.peaked-1), 128)
				}
			}
			for seen < len(listed) && (!a.causal || positions[seen] <= i+len(all)-n) {
				seen++
			}
			if i%128 == 0 {
				in.tiles = append(in.tiles, int32(len(in.queries)/3), int32(min(128, n-i)))
			}
			in.queries = append(in.queries, int32(row), int32(first), int32(seen))
			in.wanted = append(in.wanted, query{row, listed[:seen]})
		}
		if kernel != "attention_f32" && s+1 < len(a.sequences) { // which has no tiles
			in.queries = append(in.queries, nowhere, 0, 0)
		}
	}
	in.fill(a, listedRows)
}

// fill makes rows of keys that no list has NaN, since they may be anything, and the first numbers of queries large.
func (in *operands) fill(a attention, listed map[int]bool) {
	for row := range in.k {
		if !listed[row] {
			for _, x := range [][]float64{in.k[row], in.v[row]} {
				for c := range x {
					x[c] = math.NaN()
				}
			}
		}
	}
	for _, row := range in.q {
		for h := range a.heads {
			if a.rising {
				row[h*a.d], row[h*a.d+1] = 32, 32
			}
		}
	}
}

// compare holds a result to the formula.
func (in *operands) compare(a attention, kernel string, got [][]float64, scale float32) error {
	large := max(1, a.large)
	most := 0x1p-6 * math.Sqrt(large)
	if kernel == "attention_f32" {
		most = 0x1p-18 * large
		if a.rising { // errors are those of large scores
			most *= 64
		}
	}
	rest := in.order
	for _, n := range a.sequences {
		rest = rest[n:]
	}
	for _, row := range rest {
		for j := range got[row] {
			if a.inPlace && got[row][j] != in.q[row][j] || !a.inPlace && !math.IsNaN(got[row][j]) {
				return fmt.Errorf("row %d, of no sequence, was written", row)
			}
		}
	}
	for i, w := range in.wanted {
		for h := range a.heads {
			kv := h * a.kv / a.heads
			want := attend(in.q[w.row][h*a.d:(h+1)*a.d], in.k, in.v, w.seen, kv*a.d, kv*a.dv, a.dv, float64(scale))
			for c, x := range want {
				if d := math.Abs(got[w.row][h*a.dv+c] - x); !(d <= most) {
					return fmt.Errorf("query %d of %d, head %d, column %d is %v, want %v", i, len(in.wanted), h, c,
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
