package flow

import (
	"math"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// dpm is DPM-Solver++(2M) with the midpoint rule (Lu et al. 2022), on the data
// estimates m = x - sigma*v. With alpha = 1-sigma and lambda = ln(alpha/sigma), h the
// step in lambda and q = e^-h - 1:
//
//	x' = (sigma'/sigma)*x - alpha'*q*m0 - alpha'*q/2*D1
//	D1 = (m0-m1)/r,  r = (lambda - lambda_previous)/h
//
// The D1 term is left out without history, and on the step to sigma' = 0, where
// lambda is infinite: x' is then the data estimate itself.
type dpm struct {
	m0, m1   []float32 // data estimates of this and the previous step
	previous float64   // lambda of m1
	history  bool
}

// advance implements integrator by DPM-Solver++ 2M: it extrapolates the data estimate of this step
// from that of the step before, if there is one. Every step needs one velocity, so it always writes
// dst and returns true.
func (s *dpm) advance(in interval, v, _, dst []float32) (float32, bool) {
	sigma, next := float64(in.sigma), float64(in.next)
	dataEstimate(s.m0, in.x, v, in.sigma)
	step := alphaQ(sigma, next)
	linear2(dst, next/sigma, in.x, -step, s.m0)
	now := lambda(sigma)
	if s.history && next > 0 {
		if r := (now - s.previous) / (lambda(next) - now); !math.IsInf(r, 0) {
			addDifference(dst, -step/float64(2*r), s.m0, s.m1)
		}
	}
	s.m0, s.m1 = s.m1, s.m0
	s.previous, s.history = now, true
	return 0, true
}

func (s *dpm) reset() { s.history = false }

// lambda is half the log signal-to-noise ratio ln((1-sigma)/sigma): -Inf at 1.
func lambda(sigma float64) float64 {
	if sigma >= 1 {
		return math.Inf(-1)
	}
	return portable.Ln((1 - sigma) / sigma)
}

// alphaQ is alpha'*(e^-h - 1) for the step sigma to next. With e^-h written as
// (1-sigma)*next / (sigma*(1-next)) it is (next-sigma)/sigma, regular at both ends.
func alphaQ(sigma, next float64) float64 { return (next - sigma) / sigma }

// addDifference adds a*(x[i]-y[i]) to dst[i].
func addDifference(dst []float32, a float64, x, y []float32) {
	a32 := float32(a)
	x, y = x[:len(dst)], y[:len(dst)]
	for i := range dst {
		dst[i] += float32(a32 * (x[i] - y[i]))
	}
}
