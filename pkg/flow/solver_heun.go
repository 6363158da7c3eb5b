package flow

// heun is the explicit trapezoidal rule: k1 = v(x, sigma), k2 = v(x + d*k1, sigma'),
// x' = x + d/2*(k1 + k2). Its last step evaluates the model at sigma = 0.
type heun struct {
	k1   []float32
	half bool // k1 is known
}

// advance implements integrator by Heun's method, of order 2. The first velocity of a step is k1;
// it then asks for one at the Euler step's end (point). The second completes the step with the mean
// of both.
func (h *heun) advance(in interval, v, point, dst []float32) (float32, bool) {
	d := float64(in.next) - float64(in.sigma)
	if !h.half {
		h.half = true
		copy(h.k1, v)
		linear2(point, 1, in.x, d, v)
		return in.next, false
	}
	h.half = false
	linear2(dst, 1, in.x, d/2, h.k1)
	addScaled(dst, d/2, v)
	return 0, true
}

func (h *heun) reset() { h.half = false }
