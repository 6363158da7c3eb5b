package torchrandom

import "math"

// The elementary functions are those of the Cephes library in float32, in the order of operations of avx_mathfun.h.
// torch's compiler joins a product and the sum after it into one operation with one rounding: fma stands for these.
const (
	twoPi      = float32(2 * math.Pi)
	fourOverPi = float32(4 / math.Pi)
	sqrtHalf   = float32(math.Sqrt2 / 2)
	// ln 2 and pi/4 as sums of parts, of which the first have few bits.
	ln2High, ln2Low            = 0.693359375, -2.12194440e-4
	pi4High, pi4Middle, pi4Low = 0.78515625, 2.4187564849853515625e-4, 3.77489497744594108e-8
	sin0, sin1, sin2           = -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1
	cos0, cos1, cos2           = 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2
)

// logTerms are the coefficients of the polynomial of the logarithm, the highest first.
var logTerms = [...]float32{
	7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
	2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
}

// fma returns a*b + c with one rounding. The product is exact in float64. The sum is rounded to odd there, so that the
// second rounding, to float32, gives what one would (Boldo and Melquiond, 2008).
func fma(a, b, c float32) float32 {
	p, q := float64(a)*float64(b), float64(c)
	sum := p + q
	back := sum - p
	if rest := (p - (sum - back)) + (q - back); rest != 0 {
		if bits := math.Float64bits(sum); bits&1 == 0 {
			if bits++; (rest > 0) != (sum > 0) {
				bits -= 2
			}
			sum = math.Float64frombits(bits)
		}
	}
	return float32(sum)
}

// sqrt is correctly rounded: float64 has more than twice the bits.
func sqrt(x float32) float32 { return float32(math.Sqrt(float64(x))) }

// log returns the natural logarithm of a normal number x > 0.
func log(x float32) float32 {
	bits := math.Float32bits(x)
	e := float32(int32(bits>>23) - 126)
	m := math.Float32frombits(bits&(1<<23-1) | 0x3f000000) // x = m 2^e, 1/2 <= m < 1
	if m < sqrtHalf {
		e, m = e-1, m-1+m
	} else {
		m--
	}
	z := m * m
	y := logTerms[0]
	for _, term := range logTerms[1:] {
		y = fma(y, m, term)
	}
	y = fma(y*m, z, float32(e*ln2Low))
	y = fma(z, -0.5, y)
	return fma(e, ln2High, m+y)
}

// sincos returns sine and cosine of x >= 0.
func sincos(x float32) (sin, cos float32) {
	octant := (int32(x*fourOverPi) + 1) &^ 1
	y := float32(octant)
	x = fma(y, -pi4High, x)
	x = fma(y, -pi4Middle, x)
	x = fma(y, -pi4Low, x)
	z := x * x
	cos = float32(fma(fma(cos0, z, cos1), z, cos2) * z)
	cos = fma(cos, z, -float32(z*0.5)) + 1
	sin = float32(fma(fma(sin0, z, sin1), z, sin2) * z)
	sin = fma(sin, x, x)
	if octant&2 != 0 {
		sin, cos = cos, sin
	}
	if octant&4 != 0 {
		sin = -sin
	}
	if (octant-2)&4 == 0 {
		cos = -cos
	}
	return sin, cos
}
