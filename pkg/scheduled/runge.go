package scheduled

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
