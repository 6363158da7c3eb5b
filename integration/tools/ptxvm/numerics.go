package ptxvm

import (
	"math"
	"math/bits"
)

// Numerics is how mma.sync adds its products, which PTX leaves open. The models of
// hardware add exact products and the accumulator as fixed-point numbers aligned to the
// largest exponent, each cut toward zero, and cut the sum to float32.
type Numerics int

// Ways to add.
const (
	// Chain adds one product after another to a float32, rounding to nearest: the fastest.
	Chain Numerics = iota
	// Ampere takes two steps of 8 products with 24 fractional bits.
	Ampere
	// Hopper takes one step of 16 products with 25 fractional bits.
	Hopper
)

// canonicalNaN is what a GPU's arithmetic gives.
const canonicalNaN = 0x7fffffff

func f32(x uint32) float32 { return math.Float32frombits(x) }
func b32(x float32) uint32 { return math.Float32bits(x) }

// fma rounds a*b + c once. The product is exact in float64; where the rounding of the sum
// to float64 could decide that to float32 (a tie, or a subnormal), fmaOdd does it again.
func fma(d, a, b, c *v32) {
	for i := range d {
		p, z := float64(f32(a[i]))*float64(f32(b[i])), float64(f32(c[i]))
		s := p + z
		if u := math.Float64bits(s); u&0x1fffffff == 0x10000000 || u<<1-1 < (1023-126)<<53-1 { // but not 0
			d[i] = fmaOdd(p, z, s)
			continue
		}
		d[i] = b32(float32(s))
	}
}

// fmaOdd rounds the sum p + c, which is about s, to odd, then to float32.
func fmaOdd(p, c, s float64) uint32 {
	if s == 0 || math.IsNaN(s) || math.IsInf(s, 0) {
		return b32(float32(s))
	}
	t := s - p
	rest := (p - (s - t)) + (c - t) // of Knuth's two-sum: s + rest is exact
	if rest != 0 && math.Float64bits(s)&1 == 0 {
		s = math.Nextafter(s, math.Inf(1-2*int(math.Float64bits(rest)>>63)))
	}
	return b32(float32(s))
}

func toBF16(x uint32) uint32 {
	if x&0x7fffffff > 0x7f800000 {
		return 0x7fff
	}
	return (x + 0x7fff + x>>16&1) >> 16
}

func maxF32(x, y uint32) uint32 {
	a, b := f32(x), f32(y)
	switch {
	case a != a:
		return y
	case b != b:
		return x
	case a == b:
		return x & y // +0 before -0
	case a > b:
		return x
	}
	return y
}

func minF32(x, y uint32) uint32 {
	const sign = 1 << 31
	return maxF32(x^sign, y^sign) ^ sign
}

// toInt converts with saturation, a NaN to 0.
func toInt(x float64, low, high float64) int64 {
	if x != x {
		return 0
	}
	return int64(min(max(x, low), high))
}

// exp2 is 2^x to about 1e-15.
func exp2(x float64) float64 {
	if !(math.Abs(x) < 1000) {
		return math.Exp2(x)
	}
	n := math.RoundToEven(x)
	y := (x - n) * math.Ln2
	sum := 1.0
	for k := 12.0; k > 0; k-- {
		sum = 1 + sum*y/k
	}
	return math.Ldexp(sum, int(n))
}

// flush sets a subnormal to a signed zero.
func flush(x uint32) uint32 {
	if x&0x7f800000 == 0 {
		return x & 0x80000000
	}
	return x
}

// jitter is noise of the .approx functions: a factor in 1 +- 2^-22 by a counter's hash.
func jitter(n uint64) float64 {
	n = (n ^ n>>31) * 0x9e3779b97f4a7c15
	n = (n ^ n>>29) * 0xbf58476d1ce4e5b9
	n ^= n >> 32
	return 1 + (float64(n>>11)*0x1p-52-1)*0x1p-22
}

// dot adds products of bf16 numbers (the upper half of each element) to c.
func (n Numerics) dot(c uint32, a, b *[16]uint32) uint32 {
	switch n {
	case Ampere:
		return fixedDot(fixedDot(c, a[:8], b[:8], 24), a[8:], b[8:], 24)
	case Hopper:
		return fixedDot(c, a[:], b[:], 25)
	}
	s := f32(c)
	for i := range a {
		s += float32(f32(a[i]) * f32(b[i]))
	}
	return b32(s)
}

// parts splits a finite number in significand and exponent: x = significand * 2^(exponent-23).
func parts(x uint32) (significand int64, exponent int) {
	significand, exponent = int64(x&0x7fffff), int(x>>23&0xff)
	if exponent == 0 {
		exponent = 1
	} else {
		significand |= 1 << 23
	}
	if x>>31 != 0 {
		significand = -significand
	}
	return significand, exponent - 127
}

// cut moves a significand with have fractional bits right, toward zero.
func cut(significand int64, right int) int64 {
	switch {
	case right <= 0:
		return significand << -right
	case right > 62:
		return 0
	case significand < 0:
		return -(-significand >> right)
	}
	return significand >> right
}

// fixedDot is one step of a tensor core.
func fixedDot(c uint32, a, b []uint32, fraction int) uint32 {
	var significand [17]int64 // of the products with 14 fractional bits, of c with 23
	var exponent [17]int
	largest := math.MinInt
	special := float64(0)
	for i := range a {
		if a[i]&0x7f800000 == 0x7f800000 || b[i]&0x7f800000 == 0x7f800000 {
			special += float64(f32(a[i])) * float64(f32(b[i]))
			continue
		}
		sa, ea := parts(a[i])
		sb, eb := parts(b[i])
		significand[i], exponent[i] = (sa>>16)*(sb>>16), ea+eb
		if significand[i] != 0 {
			largest = max(largest, exponent[i])
		}
	}
	if c&0x7f800000 == 0x7f800000 {
		special += float64(f32(c))
	}
	if special != 0 { // infinite or NaN
		if math.IsNaN(special) {
			return canonicalNaN
		}
		return b32(float32(special))
	}
	sc, ec := parts(c)
	if sc != 0 {
		largest = max(largest, ec)
	}
	if largest == math.MinInt {
		return c
	}
	sum := cut(sc, largest-ec+23-fraction)
	for i := range a {
		if significand[i] != 0 {
			sum += cut(significand[i], largest-exponent[i]+14-fraction)
		}
	}
	return truncate(sum, largest-fraction)
}

// truncate is sum * 2^exponent as a float32, cut toward zero.
func truncate(sum int64, exponent int) uint32 {
	if sum == 0 {
		return 0
	}
	sign, magnitude := uint32(0), uint64(sum)
	if sum < 0 {
		sign, magnitude = 1<<31, uint64(-sum)
	}
	top := bits.Len64(magnitude) - 1 + exponent // exponent of the leading bit
	right := max(top, -126) - 23 - exponent     // leaves 24 bits, or what a subnormal has
	m := uint32(cut(int64(magnitude), right))
	switch {
	case top > 127:
		return sign | 0x7f800000
	case top < -126:
		return sign | m
	}
	return sign | uint32(top+127)<<23 | m&0x7fffff
}
