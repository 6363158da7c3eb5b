package flow

// Solver names how an ode step is integrated.
type Solver string

// The solvers. Order is the convergence order of a run of ode steps.
const (
	Euler Solver = "euler" // order 1
	Heun  Solver = "heun"  // order 2
	RK4   Solver = "rk4"   // order 4
	DPM   Solver = "dpm"   // DPM-Solver++(2M), midpoint: order 2
	UniPC Solver = "unipc" // UniPC-2, bh2, data prediction: order 3 with its corrector
)

// method is what is true of a solver.
type method struct {
	evaluations int  // velocities that a step takes
	multistep   bool // a step uses the ode steps before it
	transition  bool // its step is that of StepTransition
	// integrator returns one that has seen no step, for latents of so many elements.
	integrator func(elements int) integrator
}

var methods = map[Solver]method{
	Euler: {evaluations: 1, transition: true, integrator: func(int) integrator { return euler{} }},
	Heun:  {evaluations: 2, integrator: func(n int) integrator { return &heun{k1: make([]float32, n)} }},
	RK4:   {evaluations: 4, integrator: func(n int) integrator { return &rk4{sum: make([]float32, n)} }},
	DPM: {evaluations: 1, multistep: true, integrator: func(n int) integrator {
		return &dpm{m0: make([]float32, n), m1: make([]float32, n)}
	}},
	UniPC: {evaluations: 1, multistep: true, integrator: newUniPC},
}

// Valid reports whether s is one of the solvers.
func (s Solver) Valid() bool { return s.Evaluations() > 0 }

// Evaluations returns how many velocities one ode step needs with this solver, which is its cost in
// forward passes, or 0 for an unknown solver. A stochastic step always needs one.
func (s Solver) Evaluations() int { return methods[s].evaluations }

// ByTransition reports whether an ode step is that of its StepTransition, which takes nothing but state and velocity.
func (s Solver) ByTransition() bool { return methods[s].transition }

// Evaluations returns how many velocities a rollout with these transitions needs, with s for its
// ode steps. Estimates of the cost of prompts multiply by it. Unknown transitions count as ode
// steps.
func Evaluations[T ~string](s Solver, transitions []T) (n int64) {
	for _, t := range transitions {
		if Transition(t).Stochastic() {
			n++
		} else {
			n += int64(s.Evaluations())
		}
	}
	return n
}

// Multistep reports whether an ode step uses the ode steps before it. The first of a run of ode steps has none
// before it and is of order 1.
func (s Solver) Multistep() bool { return methods[s].multistep }

// interval is one ode step: from latents x at sigma to next.
type interval struct {
	x           []float32
	sigma, next float32
	stepsLeft   int // including this one
}

// integrator advances ode steps. It keeps what it needs between the evaluations of
// a step and, for multistep solvers, between steps.
type integrator interface {
	// advance accepts the velocity at the point that it asked for last; at the start of a step that is (in.x,
	// in.sigma). If it needs another velocity, it writes the latents to point and returns their sigma and false.
	// Else it writes the state at in.next to dst and returns true. It keeps no reference to its arguments.
	advance(in interval, v, point, dst []float32) (sigma float32, done bool)
	// reset forgets earlier steps. It is called after a stochastic step: the steps before it are not on the path
	// that goes on from there.
	reset()
}

// linear2 sets dst[i] = a*x[i] + b*y[i]. dst may alias x or y.
func linear2(dst []float32, a float64, x []float32, b float64, y []float32) {
	a32, b32 := float32(a), float32(b)
	x, y = x[:len(dst)], y[:len(dst)]
	for i := range dst {
		dst[i] = float32(a32*x[i]) + float32(b32*y[i])
	}
}

// addScaled adds a*x[i] to dst[i].
func addScaled(dst []float32, a float64, x []float32) {
	a32 := float32(a)
	x = x[:len(dst)]
	for i := range dst {
		dst[i] += float32(a32 * x[i])
	}
}

// dataEstimate sets dst[i] = x[i] - sigma*v[i], the model's estimate of the data.
func dataEstimate(dst, x, v []float32, sigma float32) {
	x, v = x[:len(dst)], v[:len(dst)]
	for i := range dst {
		dst[i] = x[i] - float32(sigma*v[i])
	}
}
