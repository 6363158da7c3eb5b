package flow

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"strconv"

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

// groupIndex replaces the sample index in GroupSeed. No sample has this index.
const groupIndex = ^uint64(0)

// SampleSeed derives the seed of one sample, sampleIndex >= 0: the first 8 bytes, little-endian, of
//
//	SHA-256(le64(len(base)) base le64(len(uid)) uid le64(sampleIndex))
//
// where le64 is 8 bytes little-endian and lengths count bytes. base is SeedBase of
// the prompt's seed or RunBase of its run. schemas/noise.md has vectors.
func SampleSeed(base, uid string, sampleIndex int) uint64 {
	return deriveSeed(base, uid, uint64(sampleIndex))
}

// GroupSeed derives the seed that all samples of a group share, for shared initial noise: SampleSeed with 2^64-1 as
// the index. With the id of a batch as uid it gives the seed of the window draws of that batch.
func GroupSeed(base, uid string) uint64 { return deriveSeed(base, uid, groupIndex) }

// SeedBase is the base of a prompt with a seed of its own: "seed:" and the decimal
// number. The prefix keeps seed 7 apart from a run named "7".
func SeedBase(seed int64) string { return "seed:" + strconv.FormatInt(seed, 10) }

// RunBase is the base of a prompt without a seed: "run:" and the run's name.
func RunBase(run string) string { return "run:" + run }

// deriveSeed is the formula of SampleSeed and GroupSeed: the first 8 bytes, little-endian, of the
// SHA-256 of base, uid and index, with the lengths of both strings, so that no two triples have the
// same bytes. index is that of the sample, or groupIndex for the group.
func deriveSeed(base, uid string, index uint64) uint64 {
	b := make([]byte, 0, 24+len(base)+len(uid))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(base)))
	b = append(b, base...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(uid)))
	b = append(b, uid...)
	b = binary.LittleEndian.AppendUint64(b, index)
	sum := sha256.Sum256(b)
	return binary.LittleEndian.Uint64(sum[:])
}
