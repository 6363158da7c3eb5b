package kernels_test

import (
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
)

// wgmmaAttentions have keys of less than a chunk of 128, of chunks that end within it or with it, and of so many that
// all stages are used again; heads that end within a panel of 64 columns or with it; rows that see no key.
func wgmmaAttentions() []attention {
	cases := []attention{
		{heads: 1, kv: 1, d: 64, sequences: []int{1}},
		{heads: 1, kv: 1, d: 64, sequences: []int{3}, keys: []int{0}, half: true},
		{heads: 2, kv: 1, d: 64, sequences: []int{3, 5}, keys: []int{128, 0}, half: true, even: true},
		{heads: 4, kv: 2, d: 40, causal: true, sequences: []int{70}, large: 64, even: true},
		{heads: 2, kv: 1, d: 64, sequences: []int{12}, keys: []int{512}, large: 64, even: true},
		{heads: 1, kv: 1, d: 40, sequences: []int{20}, keys: []int{450}, mask: 7, half: true},
		{heads: 1, kv: 1, d: 48, causal: true, sequences: []int{140}, keys: []int{138}, large: 16, half: true, even: true},
		{heads: 1, kv: 1, d: 128, sequences: []int{1}, half: true, even: true},
		{heads: 1, kv: 1, d: 8, of: 64, sequences: []int{9}, even: true},
		{heads: 1, kv: 1, d: 8, of: 128, sequences: []int{9}, even: true},
		{heads: 2, kv: 2, d: 120, causal: true, sequences: []int{33, 2}, even: true},
		{heads: 2, kv: 1, d: 72, sequences: []int{65}, keys: []int{129}, mask: 2, large: 64, half: true},
		{heads: 2, kv: 1, d: 128, sequences: []int{12}, keys: []int{512}, even: true},
		{heads: 1, kv: 1, d: 120, sequences: []int{4}, keys: []int{450}, mask: 7, large: 64},
		{heads: 1, kv: 1, d: 128, causal: true, sequences: []int{140}, keys: []int{138}, large: 16, half: true},
	}
	for _, d := range []int{64, 128} { // a key more than the chunks before
		cases = append(cases, attention{
			heads: 1, kv: 1, d: d, sequences: []int{12, 1}, keys: []int{129, 257},
			half: true,
		})
	}
	// With as many keys, 8 more or 8 less each of a thread's scores is that of the first key that a query does not see,
	// in the first chunk and in another.
	for _, d := range []int{56, 80} {
		cases = append(cases, attention{heads: 1, kv: 1, d: d, causal: true, sequences: []int{256}, rising: true},
			attention{heads: 1, kv: 1, d: d, causal: true, sequences: []int{256}, keys: []int{264}, rising: true},
			attention{heads: 1, kv: 1, d: d, causal: true, sequences: []int{256}, keys: []int{248}, rising: true},
			attention{heads: 1, kv: 1, d: d, sequences: []int{256}, peaked: 1},
			attention{heads: 1, kv: 1, d: d, sequences: []int{264}, keys: []int{256}, peaked: -7})
	}
	// Lists of queries and keys end at each row that a loader has.
	for _, d := range []int{64, 128} {
		ends := attention{heads: 1, kv: 1, d: d}
		for n := 5; n < 128; n += 1024 / d {
			ends.sequences, ends.keys = append(ends.sequences, n-1), append(ends.keys, n)
		}
		cases = append(cases, ends)
	}
	if soak() {
		for n := 1; n <= 520; n += 37 {
			cases = append(cases, attention{
				heads: 2, kv: 1 + n%2, d: 40 + 8*(n%12), causal: n%3 == 0, sequences: []int{n, n % 64}, mask: n % 5,
				large: float64(n & 64), half: n%2 == 1, even: n%4 < 2,
			})
		}
	}
	return cases
}

// wgmmaChecks are those of a kernel.
func wgmmaChecks(kernel string) []check {
	var out []check
	add := func(a attention, far bool) {
		if (max(a.d, a.of) <= 64) == (kernel == "attention_wgmma_64") {
			out = append(out, check{
				name: fmt.Sprintf("%+v", a), far: far, weight: a.weight(),
				run: func(g *gpu) error { return g.attention(kernel, a) },
			})
		}
	}
	for _, a := range wgmmaAttentions() {
		add(a, false)
	}
	for _, d := range []int{64, 128} {
		a := farAttention(d, false)
		a.keys = []int{127} // each of a loader's rows
		add(a, true)
		a.keys, a.half, a.even = []int{128}, true, true // as a whole chunk
		add(a, true)
	}
	return out
}

func TestAttention_Warpgroups(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long: make integration")
	}
	for _, kernel := range []string{"attention_wgmma_64", "attention_wgmma_128"} {
		inModes(t, kernels.Hopper, wgmmaChecks(kernel))
	}
}
