// Package portable has random words and elementary functions with the same bits on every machine and in every
// language: schemas/noise.md states them for re-implementation.
package portable

import "math"

// Elementary functions over IEEE +, -, *, / alone, so that they have the same bits
// on every architecture and in every language (math.Log and its relatives are assembly on
// some, and may be fused on others). All are Taylor series with correctly rounded
// coefficients, long enough for an error below 1e-15. schemas/noise.md states ln and
// sincos for re-implementation: change them together.

const (
	ln2    = 0x1.62e42fefa39efp-1
	sqrt2  = 0x1.6a09e667f3bcdp+0
	halfPi = 0x1.921fb54442d18p+0
)

// Ln is the natural logarithm of a positive normal x, in operations that round alike on every
// machine; math.Log may differ between them. Noise and log-probs use it. Other x (0, negative, NaN)
// give a number without meaning: callers rule them out.
//
//	x = 2^e * m, sqrt(1/2) <= m < sqrt(2);  s = (m-1)/(m+1)
//	ln x = e*ln 2 + 2*s*(1 + s^2/3 + s^4/5 + ... + s^20/21)
func Ln(x float64) float64 {
	const (
		fraction = 1<<52 - 1
		half     = 0x3fe6a09e667f3bcd // bits of sqrt(1/2)
		shift    = 0x3ff0000000000000 - half
	)
	bits := math.Float64bits(x) + shift
	e := int(bits>>52) - 1023
	m := math.Float64frombits(bits&fraction + half)
	s := (m - 1) / (m + 1)
	z := float64(s * s)
	p := 0x1.8618618618618p-5
	p = float64(p*z) + 0x1.af286bca1af28p-5
	p = float64(p*z) + 0x1.e1e1e1e1e1e1ep-5
	p = float64(p*z) + 0x1.1111111111111p-4
	p = float64(p*z) + 0x1.3b13b13b13b14p-4
	p = float64(p*z) + 0x1.745d1745d1746p-4
	p = float64(p*z) + 0x1.c71c71c71c71cp-4
	p = float64(p*z) + 0x1.2492492492492p-3
	p = float64(p*z) + 0x1.999999999999ap-3
	p = float64(p*z) + 0x1.5555555555555p-2
	t := s + s
	return float64(float64(e)*ln2) + (t + float64(t*float64(z*p)))
}

// Sincos returns sine and cosine of x, |x| <= pi/4, by their Taylor series, in operations that
// round alike on every machine. Callers reduce larger angles first; beyond pi/4 the results lose
// precision.
func Sincos(x float64) (sin, cos float64) {
	z := float64(x * x)
	p := -0x1.ae7f3e733b81fp-41
	p = float64(p*z) + 0x1.6124613a86d09p-33
	p = float64(p*z) - 0x1.ae64567f544e4p-26
	p = float64(p*z) + 0x1.71de3a556c734p-19
	p = float64(p*z) - 0x1.a01a01a01a01ap-13
	p = float64(p*z) + 0x1.1111111111111p-7
	p = float64(p*z) - 0x1.5555555555555p-3
	q := 0x1.ae7f3e733b81fp-45
	q = float64(q*z) - 0x1.93974a8c07c9dp-37
	q = float64(q*z) + 0x1.1eed8eff8d898p-29
	q = float64(q*z) - 0x1.27e4fb7789f5cp-22
	q = float64(q*z) + 0x1.a01a01a01a01ap-16
	q = float64(q*z) - 0x1.6c16c16c16c17p-10
	q = float64(q*z) + 0x1.5555555555555p-5
	q = float64(q*z) - 0x1.0000000000000p-1
	return x + float64(x*float64(z*p)), 1 + float64(z*q)
}

// SincosQuarter returns sine and cosine of a*pi/2, 0 <= a <= 1. Both are exact at
// the ends, where cps relies on cos = 0 and sin = 0.
func SincosQuarter(a float64) (sin, cos float64) {
	if a > 0.5 {
		cos, sin = Sincos(float64((1 - a) * halfPi))
		return sin, cos
	}
	return Sincos(float64(a * halfPi))
}

// Exp is e^x for |x| < 700, in operations that round alike on every machine. The dynamic shift of a
// schedule and the draw of tokens use it. Beyond 700 the result has no meaning: callers bound x.
//
//	x = k*ln 2 + r, |r| <= ln(2)/2;  e^x = 2^k * (1 + r + r^2/2! + ... + r^14/14!)
func Exp(x float64) float64 {
	const (
		hi = 0x1.62e42fee00000p-1 // upper bits of ln 2: k*hi is exact
		lo = 0x1.a39ef35793c76p-33
	)
	k := math.Floor(float64(x/ln2) + 0.5)
	r := (x - float64(k*hi)) - float64(k*lo)
	p := 0x1.93974a8c07c9dp-37
	p = float64(p*r) + 0x1.6124613a86d09p-33
	p = float64(p*r) + 0x1.1eed8eff8d898p-29
	p = float64(p*r) + 0x1.ae64567f544e4p-26
	p = float64(p*r) + 0x1.27e4fb7789f5cp-22
	p = float64(p*r) + 0x1.71de3a556c734p-19
	p = float64(p*r) + 0x1.a01a01a01a01ap-16
	p = float64(p*r) + 0x1.a01a01a01a01ap-13
	p = float64(p*r) + 0x1.6c16c16c16c17p-10
	p = float64(p*r) + 0x1.1111111111111p-7
	p = float64(p*r) + 0x1.5555555555555p-5
	p = float64(p*r) + 0x1.5555555555555p-3
	p = float64(p*r) + 0.5
	p = float64(p*r) + 1
	p = float64(p*r) + 1
	if math.Abs(k) < 1000 { // nothing is rounded: the same, without a call
		return float64(p * math.Float64frombits(uint64(1023+int(k))<<52))
	}
	return math.Ldexp(p, int(k))
}

// Philox4x32 returns the four words of Philox4x32-10 for a counter and a key (Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011). All random numbers of a sample come from
// it: noise, windows, tokens and scheduled sampling. A counter can be reached without drawing those
// before it.
func Philox4x32(counter [4]uint32, key [2]uint32) [4]uint32 {
	c0, c1, c2, c3 := counter[0], counter[1], counter[2], counter[3]
	k0, k1 := key[0], key[1]
	for range 10 {
		p0 := uint64(0xD2511F53) * uint64(c0)
		p1 := uint64(0xCD9E8D57) * uint64(c2)
		c0, c1, c2, c3 = uint32(p1>>32)^c1^k0, uint32(p1), uint32(p0>>32)^c3^k1, uint32(p0)
		k0 += 0x9E3779B9
		k1 += 0xBB67AE85
	}
	return [4]uint32{c0, c1, c2, c3}
}
