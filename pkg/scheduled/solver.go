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

// weights returns the weights of the first order, which is Euler's and DDIM's (Song et al. 2021).
func (v interval) weights() weights {
	return weights{ratio: v.next.U / v.here.U, c: float64(v.next.A * (1 - v.expNegH))}
}

// reach returns (lambda of past - lambda)/h, negative for a past that is noisier.
func (v interval) reach(past Level) float64 { return (past.lambda() - v.here.lambda()) / v.h }

// moments are b_n = n! phi_{n+1}(-h)/phi_1(-h), n = 1 .. count, with
// phi_k(g) = sum_j g^j/(j+k)!: the order conditions of UniPC (Zhao et al. 2023, eq. 5 and
// appendix A) for B(h) = e^-h - 1.
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

// phis returns phi_1(-h) .. phi_count(-h), of phi_k(z) = sum_j z^j/(j+k)!.
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

// dpmWeights are those of DPM-Solver++ multistep (Lu et al. 2022), orders 1 to 3, with
// past [order-1] newest first. With D1 = (m - m1)/r, D1b = (m1 - m2)/r2 and
// F = D1 - D1b:
//
//	order 2   c/2 D1
//	order 3   c b1 (D1 + r/(r+r2) F) + c b2/2 F/(r+r2)
//
// where b are moments: (E/g - 1)/E = b1 and ((E-g)/g^2 - 1/2)/E = b2/2.
func dpmWeights(v interval, past []Level) weights {
	w := v.weights()
	w.history = make([]float64, len(past))
	if len(past) == 0 {
		return w
	}
	r := -v.reach(past[0])
	if len(past) == 1 {
		w.history[0] = -w.c / float64(2*r)
		return w
	}
	r2 := v.reach(past[0]) - v.reach(past[1])
	b := v.moments(2)
	// D1 = -(m1-m)/r and F = -(1/r + 1/r2)(m1-m) + (m2-m)/r2.
	ofF := float64(w.c * (float64(b[0]*r) + b[1]/2) / (r + r2))
	w.history[0] = -float64(w.c*b[0]/r) - float64(ofF*(1/r+1/r2))
	w.history[1] = ofF / r2
	return w
}

// uniWeights are those of UniP, and of UniC where the last of ahead is the new estimate:
// reaches r_k and the rho of the Vandermonde system sum_k rho_k r_k^(n-1) = b_n, which is
// solved with one unknown, too.
func uniWeights(v interval, past []Level, corrects bool) weights {
	w := v.weights()
	reaches := make([]float64, 0, len(past)+1)
	for _, l := range past {
		reaches = append(reaches, v.reach(l))
	}
	if corrects {
		reaches = append(reaches, 1)
	}
	if len(reaches) == 0 {
		return w
	}
	w.history = vandermonde(reaches, v.moments(len(reaches)))
	for k, r := range reaches {
		w.history[k] = float64(w.c * w.history[k] / r)
	}
	return w
}

// vandermonde solves sum_k rho_k r_k^(n-1) = b_n for distinct r (Golub and Van Loan,
// algorithm 4.6.2). It returns rho in b.
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
