package flow

// rk4 is the classical Runge-Kutta method: k1 at sigma, k2 and k3 in the middle, k4
// at sigma', x' = x + d/6*(k1 + 2*k2 + 2*k3 + k4). Its last step evaluates the model
// at sigma = 0.
type rk4 struct {
	sum   []float32 // k1 + 2*k2 + ..
	stage int
}

// advance implements integrator by the classical Runge-Kutta method, of order 4. The four
// velocities of a step are k1 to k4; the first three ask for another at point, the last completes
// the step in dst.
func (r *rk4) advance(in interval, v, point, dst []float32) (float32, bool) {
	d := float64(in.next) - float64(in.sigma)
	middle := float32((float64(in.sigma) + float64(in.next)) / 2)
	r.stage++
	switch r.stage {
	case 1:
		copy(r.sum, v)
		linear2(point, 1, in.x, d/2, v)
		return middle, false
	case 2:
		addScaled(r.sum, 2, v)
		linear2(point, 1, in.x, d/2, v)
		return middle, false
	case 3:
		addScaled(r.sum, 2, v)
		linear2(point, 1, in.x, d, v)
		return in.next, false
	}
	r.stage = 0
	addScaled(r.sum, 1, v)
	linear2(dst, 1, in.x, d/6, r.sum)
	return 0, true
}

func (r *rk4) reset() { r.stage = 0 }
