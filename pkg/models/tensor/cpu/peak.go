package cpu

import "time"

// MeasurePeak returns the multiply-add peak of one core with c's instruction set in
// GFLOP/s (a multiply-add is two operations): the best of many short loops of
// independent multiply-adds within d, at least one. It is 0 for the plain Go kernels.
func (c *CPU) MeasurePeak(d time.Duration) float64 {
	if c.k.peak == nil {
		return 0
	}
	const rounds = 200_000 // about a millisecond, shorter than a scheduler's slice
	best := 0.0
	for start := time.Now(); ; {
		t := time.Now()
		c.k.peak(rounds)
		best = max(best, float64(rounds*c.k.peakFlops)/float64(time.Since(t).Nanoseconds()))
		if time.Since(start) >= d {
			return best
		}
	}
}
