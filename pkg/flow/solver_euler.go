package flow

// euler is x' = x + (sigma'-sigma)*v, bit for bit the ode StepTransition's step.
type euler struct{}

// advance implements integrator by Euler's method, dst = x + (sigma' - sigma)*v in float32. Every
// step needs one velocity, so it always returns true.
func (euler) advance(in interval, v, _, dst []float32) (float32, bool) {
	d := in.next - in.sigma
	x := in.x[:len(dst)]
	v = v[:len(dst)]
	for i := range dst {
		dst[i] = x[i] + float32(d*v[i])
	}
	return 0, true
}

func (euler) reset() {}
