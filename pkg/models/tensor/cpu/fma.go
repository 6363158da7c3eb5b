package cpu

import "math"

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
