package flow

import (
	"math"

	"github.com/meander-rl/meander/pkg/models/portable"
)

const (
	pi2n32    = 0x1.921fb54442d18p-31 // pi * 2^-32
	halfLn2Pi = 0x1.d67f1c864beb4p-1  // ln(2 pi) / 2
)

// The second counter word of noise is a step index, or InitialStep for the initial
// latents. The third is a stream: it keeps draws for different purposes from one seed independent.
const (
	InitialStep   = 0xFFFFFFFF
	StreamLatents = 0 // noise of the latents
	StreamWindow  = 1 // draws of Window.Indices
)

// Normal fills dst with standard normal numbers. Each number depends only on (seed, step, stream)
// and its position, so a longer dst starts with the numbers of a shorter one. InitialNoise and
// StepNoise call it for latents, with a stream for each use. dst has at most 2^34 elements: then
// the counter wraps. schemas/noise.md specifies every bit.
func Normal(dst []float32, seed uint64, step, stream uint32) {
	goNormal(dst, fillNormal(dst, seed, step, stream), seed, step, stream)
}

// goNormal fills dst from a multiple of 4 on: the definition, and what no assembly fills.
func goNormal(dst []float32, from int, seed uint64, step, stream uint32) {
	key := [2]uint32{uint32(seed), uint32(seed >> 32)}
	counter := [4]uint32{uint32(from / 4), step, stream, 0}
	n := len(dst) &^ 3
	for i := from; i < n; i += 4 {
		w := portable.Philox4x32(counter, key)
		d := dst[i : i+4 : i+4]
		d[0], d[1] = boxMuller(w[0], w[1])
		d[2], d[3] = boxMuller(w[2], w[3])
		counter[0]++
	}
	if n == len(dst) {
		return
	}
	w := portable.Philox4x32(counter, key)
	var d [4]float32
	d[0], d[1] = boxMuller(w[0], w[1])
	d[2], d[3] = boxMuller(w[2], w[3])
	copy(dst[n:], d[:])
}

// InitialNoise fills dst with the x_T of a sample: standard normal latents [S*C].
func InitialNoise(dst []float32, seed uint64) { Normal(dst, seed, InitialStep, StreamLatents) }

// StepNoise fills dst with the noise of one step. It does not depend on which other steps draw noise.
func StepNoise(dst []float32, seed uint64, step int) {
	Normal(dst, seed, uint32(step), StreamLatents)
}

// boxMuller turns two random words into two independent standard normals
// r*cos(t), r*sin(t) with r = sqrt(-2 ln u), u = (w0 + 1/2)/2^32 and
// t = 2 pi (w1 + 1/2)/2^32 (Box and Muller, 1958).
func boxMuller(w0, w1 uint32) (float32, float32) {
	u := float64((float64(w0) + 0.5) * 0x1p-32)
	r := math.Sqrt(float64(-2 * portable.Ln(u)))
	// t = q*pi/2 + x with |x| <= pi/4, split in integers and so without error.
	q := (w1 + 1<<29) >> 30
	d := int32(w1 - q<<30)
	sin, cos := portable.Sincos(float64(float64(2*int64(d)+1) * pi2n32))
	a, b := math.Float64bits(cos), math.Float64bits(sin)
	if q&1 != 0 {
		a, b = b, a
	}
	a ^= uint64((q+1)&2) << 62
	b ^= uint64(q&2) << 62
	return float32(r * math.Float64frombits(a)), float32(r * math.Float64frombits(b))
}
