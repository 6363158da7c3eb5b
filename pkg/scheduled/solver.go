package scheduled

import "math"

// weights make one multistep update of a latent from data estimates m, m_1, m_2, .., newest
// first:
//
//	x' = ratio*x + c*m + sum_k history[k] (m_k - m)
//
// with ratio = u'/u and c = -a' (e^-h - 1), which is a' - a u'/u.
type weights struct {
	ratio, c float64
	history  []float64
}

// interval is a step between two levels, from here to next.
type interval struct {
	here, next Level
	h          float64 // |lambda' - lambda|
	expNegH    float64 // e^-h
}

// newInterval returns the step from here to next. Where noise rises, which only the public trainer's way lets happen,
// the multistep samplers use the size of the step as if noise fell; Euler (directed) does not.
func newInterval(here, next Level, directed bool) interval {
	expNegH := float64(here.A*next.U) / float64(next.A*here.U)
	if expNegH > 1 && !directed {
		expNegH = 1 / expNegH
	}
	return interval{here: here, next: next, h: math.Abs(next.lambda() - here.lambda()), expNegH: expNegH}
}

// firstOrder returns the weights of the first order, which is Euler's and DDIM's (Song et al. 2021).
func firstOrder(v interval, _ []Level) weights {
	return weights{ratio: v.next.U / v.here.U, c: float64(v.next.A * (1 - v.expNegH))}
}

// lambdaRatio returns (lambda of past - lambda)/h, negative for a past that is noisier.
func (v interval) lambdaRatio(past Level) float64 { return (past.lambda() - v.here.lambda()) / v.h }

// moments are b_n = n! phi_{n+1}(-h)/phi_1(-h), n = 1 .. count, with phi_k(g) = sum_j g^j/(j+k)!:
// the order conditions of UniPC (Zhao et al. 2023, eq. 5 and appendix A) for B(h) = e^-h - 1.
// dpmWeights and uniWeights need them. For an infinite step, the first from pure noise, it is only
// b_1.
func (v interval) moments(count int) []float64 {
	b := make([]float64, count)
	if math.IsInf(v.h, 1) {
		b[0] = 1 // -phi_2 g/B; the estimates before an infinite step are of no use
		return b[:1]
	}
	factorial := 1.0
	phi := v.phis(count + 1)
	for n := range b {
		factorial = float64(factorial * float64(n+1))
		b[n] = float64(factorial * phi[n+1] / phi[0])
	}
	return b
}

// phis returns phi_1(-h) .. phi_count(-h), of phi_k(z) = sum_j z^j/(j+k)!, for moments: by the
// series where h is small, else by recursion. h is finite.
func (v interval) phis(count int) []float64 {
	g := -v.h
	phi := make([]float64, count)
	if g > -2 {
		// Close to 0 the recursion below would cancel. The terms of the series after the first 32 are together less
		// than 2^-52 of the sum.
		for k := range phi {
			term := 1.0
			for j := 2; j <= k+1; j++ {
				term /= float64(j)
			}
			for j := range 32 {
				phi[k] += term
				term = float64(term * g / float64(j+k+2))
			}
		}
		return phi
	}
	// phi_1(g) = (e^g - 1)/g, and phi_{k+1}(g) = (phi_k(g) - 1/k!)/g.
	phi[0] = (v.expNegH - 1) / g
	factorial := 1.0
	for k := 1; k < count; k++ {
		factorial = float64(factorial * float64(k))
		phi[k] = (phi[k-1] - 1/factorial) / g
	}
	return phi
}

// dpmWeights returns the weights of a step of DPM-Solver++ multistep (Lu et al. 2022), of order 1 +
// len(past), at most 3. past are the levels of the earlier estimates, newest first. With D1 = (m -
// m1)/r, D1b = (m1 - m2)/r2 and F = D1 - D1b:
//
//	order 2   c/2 D1
//	order 3   c b1 (D1 + r/(r+r2) F) + c b2/2 F/(r+r2)
//
// where b are moments: (E/g - 1)/E = b1 and ((E-g)/g^2 - 1/2)/E = b2/2.
func dpmWeights(v interval, past []Level) weights {
	weights := firstOrder(v, nil)
	weights.history = make([]float64, len(past))
	if len(past) == 0 {
		return weights
	}
	r := -v.lambdaRatio(past[0])
	if len(past) == 1 {
		weights.history[0] = -weights.c / float64(2*r)
		return weights
	}
	r2 := v.lambdaRatio(past[0]) - v.lambdaRatio(past[1])
	moments := v.moments(2)
	// D1 = -(m1-m)/r and F = -(1/r + 1/r2)(m1-m) + (m2-m)/r2.
	factorOfF := float64(weights.c * (float64(moments[0]*r) + moments[1]/2) / (r + r2))
	weights.history[0] = -float64(weights.c*moments[0]/r) - float64(factorOfF*(1/r+1/r2))
	weights.history[1] = factorOfF / r2
	return weights
}

// uniWeights returns the weights of a step of UniP, the predictor of UniPC (Zhao et al. 2023), from
// the levels of the earlier estimates, newest first. With corrects it returns those of UniC, the
// corrector, whose last estimate is the one at the end of the step. The rho solve the Vandermonde
// system sum_k rho_k r_k^(n-1) = b_n, with r_k the lambdaRatio of a level and b the moments; the
// system is solved with one unknown, too.
func uniWeights(v interval, past []Level, corrects bool) weights {
	weights := firstOrder(v, nil)
	ratios := make([]float64, 0, len(past)+1)
	for _, l := range past {
		ratios = append(ratios, v.lambdaRatio(l))
	}
	if corrects {
		ratios = append(ratios, 1)
	}
	if len(ratios) == 0 {
		return weights
	}
	weights.history = vandermonde(ratios, v.moments(len(ratios)))
	for k, r := range ratios {
		weights.history[k] = float64(weights.c * weights.history[k] / r)
	}
	return weights
}

// unipWeights is uniWeights of the predictor.
func unipWeights(v interval, past []Level) weights { return uniWeights(v, past, false) }

// vandermonde solves sum_k rho_k r_k^(n-1) = b_n, n = 1 .. len(b), for the weights of uniWeights
// (Golub and Van Loan, algorithm 4.6.2). It returns rho in b. The r must be distinct, else it
// divides by 0; those of levels are.
func vandermonde(r, b []float64) []float64 {
	n := len(b)
	for k := range n - 1 {
		for i := n - 1; i > k; i-- {
			b[i] -= float64(r[k] * b[i-1])
		}
	}
	for k := n - 2; k >= 0; k-- {
		for i := k + 1; i < n; i++ {
			b[i] /= r[i] - r[i-k-1]
		}
		for i := k; i < n-1; i++ {
			b[i] -= b[i+1]
		}
	}
	return b
}

// runge is the state of an rk4 step between its evaluations.
type runge[T Float] struct {
	done  int     // evaluations of this step so far
	point []T     // the latent of the next evaluation
	time  float64 // its timestep
	slope []T
	sum   []T // k1 + 2 k2 + ..
}

// rungeKutta adds one evaluation of the classical Runge-Kutta method and reports whether it was the
// last, the fourth, of its step; Advance calls it for sampler rk4. A flow model is integrated as
// dx/du = v; the others as dy/ds = e with y = x/a and s = u/a (the probability flow of Song et al.
// 2021 in the variables of Karras et al. 2022), which loses digits where a is close to 0. The
// evaluations are at t, twice where u or s is half way, which is the timestep t - 1/2, and at t -
// 1.
func (r *Roller[T]) rungeKutta(prediction []T) bool {
	state, levels := &r.runge, r.r.Levels
	if state.sum == nil {
		state.point, state.slope, state.sum = make([]T, len(r.x)), make([]T, len(r.x)), make([]T, len(r.x))
	}
	x, timestep := r.Input()
	writeSlopes(state.slope, x, prediction, levels.At(timestep), levels.prediction)
	share := T([...]float64{1, 2, 2, 1}[state.done])
	for i, v := range state.slope {
		state.sum[i] += T(share * v)
	}
	here, next := r.levelAhead(0), r.levelAhead(1)
	_, from := levels.clock(here)
	_, to := levels.clock(next)
	step := to - from
	state.done++
	switch state.done {
	case 1, 2:
		state.time = float64(r.t) - 0.5
		moveAlong(state.point, r.x, state.slope, levels, here, levels.At(state.time), step/2)
	case 3:
		state.time = float64(r.t - 1)
		moveAlong(state.point, r.x, state.slope, levels, here, next, step)
	case 4:
		moveAlong(r.x, r.x, state.sum, levels, here, next, step/6)
		state.done = 0
		clear(state.sum)
	}
	return state.done == 0
}

// clock returns the integration variable s at a level, called the clock of a rollout: u of a flow model, u/a of the
// others. The latent is scale times the variable that is integrated: 1, or a.
func (l *Levels) clock(at Level) (scale, s float64) {
	if l.prediction == Flow {
		return 1, at.U
	}
	return at.A, at.U / at.A
}

// writeSlopes sets dst to the slope that rungeKutta integrates, the derivative of x (flow) or x/a
// (others) by the clock, from the model's output (prediction) for x at a level. p says what the
// model predicts.
func writeSlopes[T Float](dst, x, prediction []T, at Level, p Prediction) {
	if p != V {
		copy(dst, prediction)
		return
	}
	a, u := T(at.A), T(at.U)
	for i, v := range prediction {
		dst[i] = T(u*x[i]) + T(a*v)
	}
}

// moveAlong sets dst to the latent at goal: x moved by d of the clock along slope. dst may alias x.
func moveAlong[T Float](dst, x, slope []T, levels *Levels, here, goal Level, d float64) {
	scale, _ := levels.clock(here)
	to, _ := levels.clock(goal)
	a, b := T(to/scale), T(to*d)
	for i, v := range slope {
		dst[i] = T(a*x[i]) + T(b*v)
	}
}
