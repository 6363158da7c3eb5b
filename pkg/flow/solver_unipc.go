package flow

// unipc is UniPC of order 2 (Zhao et al. 2023) with B(h) = e^-h - 1 ("bh2") on data
// estimates. Each evaluation first corrects the state it was made at, then predicts
// the next one from the corrected state; the estimate is not evaluated again. With
// the notation of dpm, m0 at this step and m1 at the previous one:
//
//	predict  x' = (sigma'/sigma)*x - alpha'*q*m0 - alpha'*q/2*(m1-m0)/r
//	correct  x = (sigma/sigma_0)*x_0 - alpha*q*m0 - alpha*q*(rho1*(m1-m0)/r + rho2*(m-m0))
//
// where correcting goes from the previous step (x_0, m0, with m1 one before) to this
// one (m), r = (lambda of m1 - lambda of m0)/h, and rho is 1/2 at order 1 or solves
// [[1, 1], [r, 1]] rho = b at order 2.
//
// At sigma = 1, where lambda is infinite, it is that of lastBefore1, as in diffusers.
//
// The predictor's state is what the network sees and what a step reports; the
// corrected one stays inside and is not rounded to the storage type.
type unipc struct {
	m, m0, m1        []float32 // data estimates: this step, the previous, the one before
	x                []float32 // corrected state at the previous step
	lambda0, lambda1 float64   // lambda of m0 and m1
	sigma0           float64   // sigma of m0
	known            int       // how many of m0, m1 are there
	order            int       // of the predictor that led here
}

// lastBefore1 is the sigma that diffusers has in the place of a first one of 1.
const lastBefore1 = float64(float32(1 - 1e-6))

// newUniPC returns a unipc without history. Its buffers share one allocation.
func newUniPC(elements int) integrator {
	b := make([]float32, 4*elements)
	at := func(i int) []float32 { return b[i*elements : (i+1)*elements : (i+1)*elements] }
	return &unipc{m: at(0), m0: at(1), m1: at(2), x: at(3)}
}

// advance implements integrator: with the velocity at in.sigma it first corrects the state there,
// then predicts the state at in.next into dst. One velocity completes a step, so it always returns
// true. The formulas are at unipc.
func (s *unipc) advance(in interval, v, _, dst []float32) (float32, bool) {
	sigma, next := float64(in.sigma), float64(in.next)
	dataEstimate(s.m, in.x, v, in.sigma)
	if s.known == 0 {
		copy(s.x, in.x)
	} else {
		s.correct(sigma)
	}
	s.m, s.m0, s.m1 = s.m1, s.m, s.m0
	s.lambda1, s.lambda0, s.sigma0 = s.lambda0, lambda(min(sigma, lastBefore1)), sigma
	s.known = min(s.known+1, 2)

	// The last step is of order 1: lambda is infinite at its end.
	s.order = min(s.known, in.stepsLeft)
	step := alphaQ(sigma, next)
	linear2(dst, next/sigma, s.x, -step, s.m0)
	if s.order == 2 {
		r := (s.lambda1 - s.lambda0) / (lambda(next) - s.lambda0)
		addDifference(dst, -step/float64(2*r), s.m1, s.m0)
	}
	return 0, true
}

// correct moves s.x, the corrected state at sigma0, to sigma, now that the data estimate m at sigma
// is known. advance calls it at every step but the first. The formula is at unipc.
func (s *unipc) correct(sigma float64) {
	step := alphaQ(s.sigma0, sigma)
	rho1, rho2 := 0.0, 0.5
	if s.order == 2 {
		rho1, rho2 = s.correctorWeights(sigma)
	}
	linear2(s.x, sigma/s.sigma0, s.x, -step, s.m0)
	if rho1 != 0 {
		addDifference(s.x, -float64(step*rho1), s.m1, s.m0)
	}
	addDifference(s.x, -float64(step*rho2), s.m, s.m0)
}

// correctorWeights returns the rho of unipc's formula at order 2: it solves the order conditions
// for the weights of correct. rho1 includes the factor 1/r.
func (s *unipc) correctorWeights(sigma float64) (rho1, rho2 float64) {
	h := lambda(sigma) - s.lambda0
	q := (sigma - s.sigma0) / float64(s.sigma0*(1-sigma))
	u := -q/h - 1
	b1 := u / q
	b2 := float64(2*(-u/h-0.5)) / q
	r := (s.lambda1 - s.lambda0) / h
	rho := (b1 - b2) / (1 - r)
	return rho / r, b1 - rho
}

func (s *unipc) reset() { s.known, s.order = 0, 0 }
