// Package torchrandom draws the numbers of torch's generator of the CPU, torch.Generator("cpu"), bit for bit: those
// that torch.randn gives in float32 on a processor with AVX2. With the seed of a server's request it draws again what
// the server drew.
//
// The generator is MT19937 (Matsumoto and Nishimura, 1998) with the 32 low bits of the seed. Two ways lead from its
// words to normal numbers (aten/src/ATen/native/cpu/DistributionTemplates.h, normal_fill and normal_distribution):
//
//   - 16 numbers and more: each number first gets a word, of which the 24 low bits are a uniform u of [0, 1). Of each
//     block of 16, number i < 8 and number i+8 are one Box-Muller pair: r cos(t) and r sin(t) with
//     r = sqrt(-2 ln(1-u_i)) and t = 2 pi u_(i+8), all in float32. If the length is no multiple of 16, the last 16
//     numbers are drawn once more, from the words that follow. Logarithm, sine and cosine are those of the Cephes
//     library, as avx_mathfun.h has them for eight lanes (elementary.go).
//   - Fewer: pairs in float64 of two uniforms of 53 bits each, of two words: r = sqrt(-2 ln(1-u_1)), t = 2 pi u_0. The
//     second number of a pair is kept for the next draw of this way, also by another call.
//
// A processor without AVX2 gives other last bits in the first way: it calls the C library.
package torchrandom

import "math"

// Sizes of MT19937.
const (
	stateWords = 624
	shiftWords = 397
)

// Generator is torch.Generator("cpu"). One goroutine at a time may use it.
type Generator struct {
	state [stateWords]uint32
	next  int // of state; stateWords: the state is used up

	kept    float64 // the second number of the last pair of the short way
	hasKept bool
}

// New returns a generator as Generator.manual_seed(seed) leaves it. torch uses the 32 low bits of the seed alone.
func New(seed uint64) *Generator {
	g := &Generator{next: stateWords}
	g.state[0] = uint32(seed)
	for i := 1; i < stateWords; i++ {
		before := g.state[i-1]
		g.state[i] = 1812433253*(before^before>>30) + uint32(i)
	}
	return g
}

// word returns the next 32 random bits.
func (g *Generator) word() uint32 {
	if g.next == stateWords {
		for i := range g.state {
			y := g.state[i]&(1<<31) | g.state[(i+1)%stateWords]&(1<<31-1)
			g.state[i] = g.state[(i+shiftWords)%stateWords] ^ y>>1 ^ -(y&1)&0x9908b0df
		}
		g.next = 0
	}
	y := g.state[g.next]
	g.next++
	y ^= y >> 11
	y ^= y << 7 & 0x9d2c5680
	y ^= y << 15 & 0xefc60000
	return y ^ y>>18
}

const (
	// block is how many numbers the long way makes at once, of half as many pairs.
	block = 16
	lanes = block / 2
)

// Randn fills dst with standard normal numbers, as torch.randn(len(dst), generator=g) does. Each call goes on where the
// last one ended.
func (g *Generator) Randn(dst []float32) {
	if len(dst) < block {
		for i := range dst {
			dst[i] = float32(g.normal())
		}
		return
	}
	g.uniforms(dst)
	for i := 0; i+block <= len(dst); i += block {
		transform((*[block]float32)(dst[i:]))
	}
	if len(dst)%block != 0 {
		last := dst[len(dst)-block:]
		g.uniforms(last)
		transform((*[block]float32)(last))
	}
}

// uniforms fills dst with uniform numbers of [0, 1).
func (g *Generator) uniforms(dst []float32) {
	for i := range dst {
		dst[i] = float32(g.word()&(1<<24-1)) * 0x1p-24
	}
}

// transform turns 16 uniform numbers into 8 pairs of normal numbers.
func transform(x *[block]float32) {
	for i := range lanes {
		r := sqrt(-2 * log(1-x[i]))
		sin, cos := sincos(twoPi * x[i+lanes])
		x[i], x[i+lanes] = r*cos+0, r*sin+0 // times a standard deviation, plus a mean: no zero stays negative
	}
}

// normal returns the next number of the short way.
func (g *Generator) normal() float64 {
	if g.hasKept {
		g.hasKept = false
		return g.kept
	}
	turn := g.uniform()
	r := math.Sqrt(-2 * math.Log1p(-g.uniform()))
	sin, cos := math.Sincos(2 * math.Pi * turn)
	g.kept, g.hasKept = r*sin, true
	return r * cos
}

// uniform returns a number of [0, 1) of 53 bits.
func (g *Generator) uniform() float64 {
	high := uint64(g.word())
	return float64((high<<32|uint64(g.word()))&(1<<53-1)) * 0x1p-53
}

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
