package cpu

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// These tests see the kernels themselves: every assembly kernel against its plain Go
// meaning, bit by bit, for every length around the vector widths.

const guard = float32(-12345.678)

// guarded returns n elements of src with guard values on both sides, and a check.
func guarded(t *testing.T, src []float32) (x []float32, check func(what string)) {
	t.Helper()
	const g = 20
	buf := alignedFloats(len(src) + 2*g)
	for i := range buf {
		buf[i] = guard
	}
	x = buf[g : g+len(src) : g+len(src)]
	copy(x, src)
	return x, func(what string) {
		t.Helper()
		for i := range g {
			if buf[i] != guard || buf[g+len(src)+i] != guard {
				t.Fatalf("%s: wrote outside of %d elements", what, len(src))
			}
		}
	}
}

func normals(r *rand.Rand, n int, scale float64) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64() * scale)
	}
	return x
}

// sameBits treats all NaN alike: which payload survives is not promised.
func sameBits(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

func wantSame(t *testing.T, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if !sameBits(got[i], want[i]) {
			t.Fatalf("%s: element %d of %d: got %v (%08x), want %v (%08x)", what, i, len(want),
				got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
		}
	}
}

func assemblySets(t *testing.T) []*kernelSet {
	t.Helper()
	var sets []*kernelSet
	for _, k := range kernelSets() {
		if k.name != KernelsGo {
			sets = append(sets, k)
		}
	}
	if len(sets) == 0 {
		t.Skip("this machine has the plain Go kernels only")
	}
	return sets
}

// special is what arithmetic gets wrong first: infinities, NaN, subnormals, the edges
// of exp.
var special = []float32{
	0, float32(math.Copysign(0, -1)), 1, -1, float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()),
	math.Float32frombits(0x7fc00001), math.Float32frombits(0xffc12345), 1e-40, -1e-40, math.SmallestNonzeroFloat32,
	math.MaxFloat32, -math.MaxFloat32, expMax, expMin, -expMin, -expMax,
	math.Nextafter32(expMin, -100), math.Nextafter32(expMax,
		100), 88, 89, -87, -88, 104, -104, 200, -200, 0.34657359, -0.34657359,
}

func rowInputs(r *rand.Rand, n int) [][]float32 {
	in := [][]float32{normals(r, n, 1), normals(r, n, 30), make([]float32, n)}
	for i := range in[2] {
		in[2][i] = special[r.IntN(len(special))]
	}
	return in
}

func TestKernels_RowsHaveTheBitsOfGo(t *testing.T) {
	type call struct {
		name string
		run  func(k *kernelSet, dst, x, y, z []float32)
	}
	n2 := func(x []float32) []float32 { return x[:len(x)/2] }
	calls := []call{
		{"silu", func(k *kernelSet, dst, x, _, _ []float32) { k.silu(dst, x) }},
		{"gelu", func(k *kernelSet, dst, x, _, _ []float32) { k.gelu(dst, x) }},
		{"siluMul", func(k *kernelSet, dst, x, y, _ []float32) { k.siluMul(dst, x, y) }},
		{"add", func(k *kernelSet, dst, x, y, _ []float32) { k.add(dst, x, y) }},
		{"mul", func(k *kernelSet, dst, x, y, _ []float32) { k.mul(dst, x, y) }},
		{"scale", func(k *kernelSet, dst, x, _, _ []float32) { k.scale(dst, x, 1.7) }},
		{"gate", func(k *kernelSet, dst, x, y, z []float32) { k.gate(dst, x, y, z) }},
		{"normMod", func(k *kernelSet, dst, x, y, z []float32) { k.normMod(dst, x, y, z, 0.1, 1.3) }},
		{"ropePairs", func(k *kernelSet, dst, x, y, z []float32) {
			k.ropePairs(dst[:len(x)&^1], x[:len(x)&^1], n2(y), n2(z))
		}},
		{"ropeHalves", func(k *kernelSet, dst, x, y, z []float32) {
			k.ropeHalves(dst[:len(x)&^1], x[:len(x)&^1], n2(y), n2(z))
		}},
		{"scaleNorm", func(k *kernelSet, dst, x, y, _ []float32) { k.scaleNorm(dst, x, y, float64(len(y)), 1e-6, 0, 1) }},
		{"scaleNorm in groups", func(k *kernelSet, dst, x, y, _ []float32) {
			g := max(1, len(x)/3)
			m := len(x) / g * g
			k.scaleNorm(dst[:m], x[:m], y[:g], 1, 0, 1e-12, 3.3)
		}},
		{"expSum", func(k *kernelSet, dst, x, _, _ []float32) {
			copy(dst, x)
			s := k.expSum(dst[:len(dst)-1], k.maxOf(x), 0.4)
			dst[len(dst)-1] = s
		}},
		{"expSum of the whole range", func(k *kernelSet, dst, x, _, _ []float32) {
			copy(dst, x)
			s := k.expSum(dst[:len(dst)-1], 0, 1)
			dst[len(dst)-1] = s
		}},
		{"maxOf", func(k *kernelSet, dst, x, _, _ []float32) { clear(dst); dst[0] = k.maxOf(x) + 0 }},
		{"sum64", func(k *kernelSet, dst, x, _, _ []float32) {
			clear(dst)
			putFloat64(dst, k.sum64(x))
		}},
		{"sumSq64", func(k *kernelSet, dst, x, _, _ []float32) {
			clear(dst)
			putFloat64(dst, k.sumSq64(x, 0.25))
		}},
	}
	for _, k := range assemblySets(t) {
		for _, c := range calls {
			t.Run(fmt.Sprintf("%s/%s", k.name, c.name), func(t *testing.T) {
				r := rand.New(rand.NewPCG(1, 2))
				for n := 2; n <= 70; n++ {
					for _, in := range rowInputs(r, n) {
						y, z := normals(r, n, 1), normals(r, n, 1)
						want := make([]float32, n)
						c.run(&goKernels, want, in, y, z)
						x, checkX := guarded(t, in)
						got, checkGot := guarded(t, make([]float32, n))
						c.run(k, got, x, y, z)
						what := fmt.Sprintf("n=%d", n)
						checkX(what)
						checkGot(what)
						wantSame(t, what+" input", x, in)
						wantSame(t, what, got, want)
					}
				}
			})
		}
	}
}

// Groups of whole vectors, more and fewer than are taken at a time.
func TestKernels_ScaleNormOfManyGroups(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 9))
	for _, k := range assemblySets(t) {
		for _, width := range []int{16, 32, 48} {
			for groups := range 20 {
				for _, in := range rowInputs(r, groups*width) {
					w := normals(r, width, 1)
					want := make([]float32, len(in))
					goScaleNorm(want, in, w, float64(width), 1e-6, 1e-12, 3.3)
					x, _ := guarded(t, in)
					got, check := guarded(t, make([]float32, len(in)))
					k.scaleNorm(got, x, w, float64(width), 1e-6, 1e-12, 3.3)
					what := fmt.Sprintf("%s, %d groups of %d", k.name, groups, width)
					check(what)
					wantSame(t, what, got, want)
					k.scaleNorm(x, x, w, float64(width), 1e-6, 1e-12, 3.3)
					wantSame(t, what+", in place", x, want)
				}
			}
		}
	}
}

// Patches of a row, and nothing around them.
func TestKernels_PatchesHaveTheBitsOfGo(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 1))
	for _, k := range assemblySets(t) {
		for _, c := range []int{16, 32, 48} {
			for n := 1; n < 5; n++ {
				pixels, plane := (patchOut*n+2)*c, n*c+5
				stride := pixels + 3
				for _, in := range rowInputs(r, (patchIn-1)*stride+pixels) {
					run := func(k *kernelSet, what string) (planes, out []float32) {
						planes, check := guarded(t, make([]float32, (patchTaps-1)*plane+n*c))
						a := patches{src: &in[0], dst: &planes[0], plane: plane, stride: stride, n: n, channels: c}
						k.patchIn(&a)
						check(what)
						bias := normals(rand.New(rand.NewPCG(1, 1)), c, 1)
						out, check = guarded(t, make([]float32, (patchOut-1)*stride+patchOut*n*c))
						a.src, a.dst, a.bias = &planes[0], &out[0], &bias[0]
						k.patchOut(&a)
						check(what)
						return planes, out
					}
					what := fmt.Sprintf("%s, %d patches of %d channels", k.name, n, c)
					planes, out := run(k, what)
					wantPlanes, wantOut := run(&goKernels, what)
					wantSame(t, what+", planes", planes, wantPlanes)
					wantSame(t, what+", pixels", out, wantOut)
				}
			}
		}
	}
}

// putFloat64 stores all bits of v in two elements that are not NaN.
func putFloat64(dst []float32, v float64) {
	u := math.Float64bits(v)
	if v != v {
		u = 0
	}
	dst[0], dst[1] = float32(u>>40), float32(u>>16&0xffffff)
	if len(dst) > 2 {
		dst[2] = float32(u & 0xffff)
	}
}

func TestKernels_PackPanel(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, k := range assemblySets(t) {
		for n := 1; n < 40; n++ {
			var rows [panelCols][]float32
			for i := range rows {
				rows[i] = normals(r, n, 1)
			}
			got, check := guarded(t, make([]float32, n*panelCols))
			k.packPanel(got, &rows)
			want := make([]float32, n*panelCols)
			goPackPanel(want, &rows)
			what := fmt.Sprintf("%s, n=%d", k.name, n)
			check(what)
			wantSame(t, what, got, want)
		}
	}
}

func TestKernels_TilesHaveTheBitsOfGo(t *testing.T) {
	for _, k := range assemblySets(t) {
		t.Run(string(k.name), func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, 4))
			for rows := 1; rows <= k.tileRows; rows++ {
				for panels := 1; panels <= k.tileCols; panels++ {
					for _, depth := range []int{1, 2, 3, 4, 5, 7, 8, 31} {
						for init := tileZero; init <= tileBias; init++ {
							testTile(t, r, k, rows, panels, depth, init)
						}
					}
				}
			}
		})
	}
}

func testTile(t *testing.T, r *rand.Rand, k *kernelSet, rows, panels, depth, init int) {
	t.Helper()
	width := panels * panelCols
	lda, ldc := depth+3, width+5
	a := normals(r, (rows-1)*lda+depth, 1)
	bstride := depth*panelCols + 32
	b := normals(r, (panels-1)*bstride+depth*panelCols, 1)
	bias := normals(r, width, 1)
	start := normals(r, (rows-1)*ldc+width, 1)
	want, _ := guarded(t, start)
	got, check := guarded(t, start)
	arg := tile{
		a: &a[0], lda: lda, b: &b[0], bstride: bstride, ldc: ldc, k: depth, bias: &bias[0], rows: rows,
		panels: panels, init: init,
	}
	arg.c = &want[0]
	goTile(&arg)
	arg.c = &got[0]
	k.tile(&arg)
	what := fmt.Sprintf("rows=%d panels=%d k=%d init=%d", rows, panels, depth, init)
	check(what)
	wantSame(t, what, got, want) // gaps between the rows included
}

// exactFMA is fma32 in exact arithmetic, rounded once.
func exactFMA(x, y, z float32) float32 {
	f := func(v float32) *big.Float { return new(big.Float).SetPrec(1000).SetFloat64(float64(v)) }
	s := f(x)
	s.Mul(s, f(y))
	s.Add(s, f(z))
	v, _ := s.Float32()
	return v
}

func TestFMA32_RoundsOnce(t *testing.T) {
	cases := [][3]float32{
		{0x1p-12, 0x1p-12, 1},              // a tie, even below
		{0x1p-12, 0x1p-12, 0x1.000002p0},   // a tie, even above
		{0x1.000002p0, 0x1p-24, 1},         // just above a tie
		{0x1.fffffep-1, 0x1p-24, 1},        // just below a tie
		{0x1.000002p-25, 0x1.000002p1, 1},  // above, by less than float64 keeps of 1
		{0x1.fffffep-25, 0x1.000002p0, 1},  // below, the same
		{-0x1.000002p-25, 0x1.000002p1, 1}, // and with the other signs
		{0x1.000002p-25, 0x1.000002p1, -1},
		{0x1.fffffep-25, -0x1.000002p0, -1},
		{0x1.fffffep-25, -0x1.000002p0, -0x1.000002p0},
		{0x1p-60, 0x1p-70, 0x1p-149},   // subnormal results
		{0x1p-75, 0x1p-75, 0x1p-149},   // half of the smallest number more
		{0x1p-75, 0x1.8p-76, 0x1p-149}, // less than half
		{-0x1p-75, 0x1p-75, 0x1p-148},  // half less
		{0x1.000002p-70, 0x1.fffffep-60, 0x1.fffffcp-127},
		{math.MaxFloat32, 2, -math.MaxFloat32},
		{math.MaxFloat32, 1, 0x1p103}, // rounds to infinity
	}
	r := rand.New(rand.NewPCG(5, 6))
	random := func(lo, hi int) float32 {
		// Few fraction bits, so that ties and exact sums come often.
		return float32(math.Ldexp(float64(1+2*r.IntN(1<<(1+r.IntN(23)))), lo+r.IntN(hi-lo))) * float32(1-2*r.IntN(2))
	}
	for range 150_000 {
		cases = append(cases, [3]float32{random(-40, 10), random(-40, 10), random(-40, 10)},
			[3]float32{random(-100, -40), random(-60, -30), random(-150, -120)})
	}
	for _, c := range cases {
		got, want := fma32(c[0], c[1], c[2]), exactFMA(c[0], c[1], c[2])
		if got != want {
			t.Fatalf("fma32(%x, %x, %x) = %x, want %x", c[0], c[1], c[2], got, want)
		}
	}
	inf := float32(math.Inf(1))
	if got := fma32(inf, 1, 2); got != inf {
		t.Errorf("fma32(inf, 1, 2) = %v", got)
	}
	if got := fma32(inf, 1, -inf); got == got {
		t.Errorf("fma32(inf, 1, -inf) = %v, want NaN", got)
	}
}

// The error bound is against float64, over the whole range of results.
func TestExp32_Accuracy(t *testing.T) {
	worst, at := 0.0, float32(0)
	for x := float32(-87.33); x < 88.37; x += 0.000731 {
		want := math.Exp(float64(x))
		if e := math.Abs(float64(exp32(x))-want) / want; e > worst {
			worst, at = e, x
		}
	}
	if worst > 1.2e-7 {
		t.Errorf("relative error %.3g at %v, want at most 1.2e-7", worst, at)
	}
	for _, c := range []struct{ x, want float32 }{
		{0, 1},
		{-88, 0},
		{float32(math.Inf(-1)), 0},
		{float32(math.Inf(1)), exp32(expMax)},
		{1000, exp32(expMax)},
	} {
		if got := exp32(c.x); got != c.want {
			t.Errorf("exp32(%v) = %v, want %v", c.x, got, c.want)
		}
	}
	if v := exp32(expMin); v < 0x1p-126 || v > 0x1.0001p-126 {
		t.Errorf("exp32(expMin) = %x, want about 2^-126", v)
	}
}
