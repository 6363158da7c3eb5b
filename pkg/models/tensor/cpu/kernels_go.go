package cpu

import (
	"math"
	"unsafe"
)

// goKernels is the definition of every kernel. Conversions float32(x*y) forbid the
// compiler to fuse, fma32 fuses explicitly.
var goKernels = kernelSet{
	name:       KernelsGo,
	tileRows:   4,
	tileCols:   1,
	tile:       goTile,
	maxOf:      goMaxOf,
	expSum:     goExpSum,
	sum64:      goSum64,
	sumSq64:    goSumSq64,
	silu:       goSiLU,
	gelu:       goGELU,
	siluMul:    goSiLUMul,
	add:        goAdd,
	mul:        goMul,
	scale:      goScale,
	gate:       goGate,
	normMod:    goNormMod,
	scaleNorm:  goScaleNorm,
	ropePairs:  goRopePairs,
	ropeHalves: goRopeHalves,
	patchIn:    goPatchIn,
	patchOut:   goPatchOut,
	packPanel:  goPackPanel,
}

// goTile is the plain Go form of the kernel tile, which the assembly must equal in every bit. It
// computes, for each row i and column j of the tile,
//
//	acc = 0, c[i,j] or bias[j]; for p < k: acc = fma(a[i,p], b[p,j], acc); c[i,j] = acc.
func goTile(t *tile) {
	a := unsafe.Slice(t.a, (t.rows-1)*t.lda+t.k)
	b := unsafe.Slice(t.b, (t.panels-1)*t.bstride+t.k*panelCols)
	c := unsafe.Slice(t.c, (t.rows-1)*t.ldc+t.panels*panelCols)
	for q := range t.panels {
		for i := range t.rows {
			ci := c[i*t.ldc+q*panelCols:][:panelCols]
			var acc [panelCols]float32
			switch t.init {
			case tileLoad:
				copy(acc[:], ci)
			case tileBias:
				copy(acc[:], unsafe.Slice(t.bias, t.panels*panelCols)[q*panelCols:])
			}
			for p, x := range a[i*t.lda : i*t.lda+t.k] {
				bp := b[q*t.bstride+p*panelCols:][:panelCols]
				for j := range acc {
					acc[j] = fma32(x, bp[j], acc[j])
				}
			}
			copy(ci, acc[:])
		}
	}
}

// lanes is the number of partial sums of a row sum.
const lanes = 16

// goMaxOf is the plain Go form of the kernel maxOf: the largest of x, -Inf for none. Softmax
// subtracts it.
func goMaxOf(x []float32) float32 {
	m := float32(math.Inf(-1))
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	return m
}

// goExpSum is the plain Go form of the kernel expSum: it replaces each x[i] by exp((x[i]-m)*scale)
// and returns their sum, in the order of lanes that the package comment defines. It is the softmax
// of attention before the division.
func goExpSum(x []float32, m, scale float32) float32 {
	var s [lanes]float32
	for i, v := range x {
		v = exp32(float32((v - m) * scale))
		x[i] = v
		s[i%lanes] += v
	}
	return sumLanes32(&s)
}

func sumLanes32(s *[lanes]float32) float32 {
	for w := lanes / 2; w > 0; w /= 2 {
		for l := range w {
			s[l] += s[l+w]
		}
	}
	return s[0]
}

func goSum64(x []float32) float64 {
	var s [lanes]float64
	for i, v := range x {
		s[i%lanes] += float64(v)
	}
	return sumLanes(&s)
}

func goSumSq64(x []float32, mean float64) float64 {
	var s [lanes]float64
	for i, v := range x {
		d := float64(v) - mean
		s[i%lanes] += float64(d * d)
	}
	return sumLanes(&s)
}

func sumLanes(s *[lanes]float64) float64 {
	for w := lanes / 2; w > 0; w /= 2 {
		for l := range w {
			s[l] += s[l+w]
		}
	}
	return s[0]
}

// Constants of exp32. ln2Hi has nine trailing zero bits, so that n*ln2Hi is exact for
// |n| <= 128; the polynomial is the Taylor series of (e^r - 1 - r)/r^2, accurate to
// 2^-25 on |r| <= ln2/2.
const (
	expMax  = 88.37626  // below 128*ln2 - ln2/2: 2^n stays finite
	expMin  = -87.33654 // e^expMin is the smallest normal number
	log2e   = 1.44269504088896341
	expBias = 12582912 // 1.5 * 2^23: adding it rounds to an integer, ties to even
	ln2Hi   = 0.693359375
	ln2Lo   = -2.12194440e-4
	exp7    = 1.0 / 5040
	exp6    = 1.0 / 720
	exp5    = 1.0 / 120
	exp4    = 1.0 / 24
	exp3    = 1.0 / 6
	exp2    = 0.5
)

// exp32 returns e^x with a relative error below 2e-7: x = n ln2 + r, e^x = 2^n e^r. All kernels
// with an exponential have these bits. Above expMax it stays at e^expMax, below expMin it is 0; NaN
// stays NaN.
func exp32(x float32) float32 {
	if x != x {
		return x
	}
	if x < expMin {
		return 0
	}
	if x > expMax {
		x = expMax
	}
	t := fma32(x, log2e, expBias)
	n := t - expBias
	r := fma32(n, -ln2Hi, x)
	r = fma32(n, -ln2Lo, r)
	p := fma32(exp7, r, exp6)
	p = fma32(p, r, exp5)
	p = fma32(p, r, exp4)
	p = fma32(p, r, exp3)
	p = fma32(p, r, exp2)
	p = fma32(p, r, 1)
	p = fma32(p, r, 1)
	return math.Float32frombits(math.Float32bits(p) + math.Float32bits(t)<<23)
}

func silu32(x float32) float32 { return x / (1 + exp32(-x)) }

func goSiLU(dst, x []float32) {
	for i, v := range x {
		dst[i] = silu32(v)
	}
}

// Constants of gelu32: 2*sqrt(2/pi) and 0.044715 times that.
const (
	gelu1 = 1.5957691216057308
	gelu3 = 0.071354816272600248
)

// gelu32 is the tanh form of GELU, written with exp:
// x/2*(1+tanh(u)) = x/(1+exp(-2u)), u = sqrt(2/pi)*(x + 0.044715 x^3).
func gelu32(x float32) float32 {
	u := float32(x * fma32(float32(x*x), -gelu3, -gelu1))
	return x / (1 + exp32(u))
}

func goGELU(dst, x []float32) {
	for i, v := range x {
		dst[i] = gelu32(v)
	}
}

func goSiLUMul(dst, x, y []float32) {
	for i, v := range x {
		dst[i] = float32(silu32(v) * y[i])
	}
}

func goAdd(dst, x, y []float32) {
	for i, v := range x {
		dst[i] = v + y[i]
	}
}

func goMul(dst, x, y []float32) {
	for i, v := range x {
		dst[i] = v * y[i]
	}
}

func goScale(dst, x []float32, a float32) {
	for i, v := range x {
		dst[i] = v * a
	}
}

func goGate(dst, g, x, y []float32) {
	for i, v := range x {
		dst[i] = fma32(g[i], v, y[i])
	}
}

func goNormMod(dst, x, scale, shift []float32, mean, rstd float32) {
	for i, v := range x {
		dst[i] = fma32(float32((v-mean)*rstd), 1+scale[i], shift[i])
	}
}

// goScaleNorm is the plain Go form of the kernel scaleNorm, with which RMS and L2 norms are
// computed: each group of len(w) elements of x is multiplied by w and by num/max(sqrt(sum of
// squares/n + eps), floor).
func goScaleNorm(dst, x, w []float32, n, eps, floor, num float64) {
	for len(x) > 0 {
		g := x[:len(w)]
		root := math.Sqrt(goSumSq64(g, 0)/n + eps)
		if floor > root {
			root = floor
		}
		a := float32(num / root)
		for i, v := range g {
			dst[i] = float32(float32(v*a) * w[i])
		}
		dst, x = dst[len(w):], x[len(w):]
	}
}

func goRopePairs(dst, x, cos, sin []float32) {
	for i, c := range cos {
		a, b, s := x[2*i], x[2*i+1], sin[i]
		dst[2*i] = float32(a*c) - float32(b*s)
		dst[2*i+1] = float32(b*c) + float32(a*s)
	}
}

func goRopeHalves(dst, x, cos, sin []float32) {
	h := len(cos)
	for i, c := range cos {
		a, b, s := x[i], x[h+i], sin[i]
		dst[i] = float32(a*c) - float32(b*s)
		dst[h+i] = float32(b*c) + float32(a*s)
	}
}

func goPackPanel(panel []float32, rows *[panelCols][]float32) {
	for r, row := range rows {
		for p, v := range row {
			panel[p*panelCols+r] = v
		}
	}
}

// fma32 returns x*y + z rounded once to float32. The product of two float32 is exact
// in float64, the sum is not: rounding it to float64 and then to float32 goes wrong
// when the first rounding lands on a tie of the second. In that case the neighbour on
// the side of the lost part is rounded instead (round to odd), as it is for every sum below the normal numbers.
func fma32(x, y, z float32) float32 {
	p := float64(x) * float64(y)
	c := float64(z)
	s := p + c
	u := math.Float64bits(s)
	const (
		tie     = 1 << 28            // half a unit of float32 in a float64 fraction
		dropped = 1<<29 - 1          // the fraction bits that float32 drops
		normal  = (1023 - 126) << 52 // the smallest normal float32
	)
	if u&dropped != tie && u&^(1<<63) >= normal {
		return float32(s)
	}
	// Exact error of s = p + c (Knuth's two-sum); NaN and Inf have returned.
	v := s - p
	e := (p - (s - v)) + (c - v)
	if u&1 == 0 {
		switch {
		case e > 0 && s > 0, e < 0 && s < 0:
			s = math.Float64frombits(u + 1)
		case e < 0 && s > 0, e > 0 && s < 0:
			s = math.Float64frombits(u - 1)
		}
	}
	return float32(s)
}
