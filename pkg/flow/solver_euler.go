package flow

// euler is x' = x + (sigma'-sigma)*v, bit for bit the ode StepTransition's step.
type euler struct{}

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
