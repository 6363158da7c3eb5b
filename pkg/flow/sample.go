package flow

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// MaxElements bounds the latents of one sample, S*C.
const MaxElements = 1 << 30

// Step is what one denoising step did. Its slices [S*C] are valid until the next
// call of Advance and must not be changed.
type Step struct {
	Index            int
	Transition       Transition
	Sigma, SigmaNext float32
	Timestep         float32 // 1000*Sigma
	StdDevT          float64 // StepTransition.StdDevT
	NoiseStd         float64 // StepTransition.NoiseStd
	// LogProb is nil on an ode step, which has no density.
	LogProb *LogProb
	// X and Next are the latents before and after, as stored.
	X, Next []float32
	// Mean is the transition's mean; on an ode step Next before rounding.
	Mean []float32
	// Noise is the standard normal draw; nil on an ode step.
	Noise []float32
	// Velocity is the model's output at (X, Sigma). After a step of one evaluation it
	// is the slice handed to Advance.
	Velocity []float32
}

// Rollout is one sample on its way through a plan. It does not call the model: it says at which point it needs the
// next velocity, so that a service can evaluate many rollouts in one batch:
//
//	for !r.Done() {
//		x, sigma := r.Point()
//		// v = velocity at x, sigma
//		step, err := r.Advance(v)
//	}
//
// Rollouts share nothing: their bits do not depend on other rollouts in the batch. A Rollout is for one goroutine
// at a time.
type Rollout struct {
	plan  Plan
	index int   // the step that is next
	end   int   // where it ends, T or less
	err   error // sticky: a failed rollout does not go on

	x, next, mean []float32
	noise         []float32 // allocated by the first stochastic step

	ode        integrator // nil if no step is ode
	point      []float32  // where an ode step wants its next velocity
	pointSigma float32
	velocity   []float32 // the first of an ode step of several evaluations
	midStep    bool      // inside such a step
}

// NewRollout starts a rollout of p at x [S*C]: the initial noise, or the state before step Begin.
// The image engine calls it when it takes a sample. It copies x and rounds the copy to the storage
// type. The slices of the plan must not change until the rollout ends. Errors: an invalid plan, no
// or too many latents, latents that are not finite.
func NewRollout(p Plan, x []float32) (*Rollout, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	n := len(x)
	if n == 0 || n > MaxElements {
		return nil, fmt.Errorf("initial latents: %d elements; must be 1 to %d", n, MaxElements)
	}
	if err := p.checkTracks(n); err != nil {
		return nil, err
	}
	begin, end := p.Segment()
	r := &Rollout{
		plan: p, index: begin, end: end, x: slices.Clone(x), next: make([]float32, n),
		mean: make([]float32, n),
	}
	p.Storage.Round(r.x)
	if i := firstNonFinite(r.x); i >= 0 {
		return nil, fmt.Errorf("initial latents: element %d is %v as %s", i, x[i], string(p.Storage))
	}
	if slices.Contains(p.Transitions[begin:end], ODE) {
		r.ode = methods[p.Solver].integrator(n)
		if p.Solver.Evaluations() > 1 {
			r.point, r.velocity = make([]float32, n), make([]float32, n)
		}
	}
	return r, nil
}

// Point returns the latents [S*C] and their sigma in [0, 1] at which the next velocity is needed. The latents are
// valid until the next call of Advance and must not be changed. Solvers with several evaluations per step ask for
// sigma 0 on the last step.
func (r *Rollout) Point() (x []float32, sigma float32) {
	if r.midStep {
		return r.point, r.pointSigma
	}
	return r.x, r.plan.Sigmas[r.index]
}

// Advance accepts the velocity [S*C] at Point; the caller has evaluated the model there. It returns
// the completed step, or nil if the step needs another evaluation. Its slices are valid until the
// next Advance. An error names the step and ends the rollout, and every later call repeats it: a
// velocity of another length, NaN or Inf in the velocity or the latents, a call after the end.
func (r *Rollout) Advance(v []float32) (*Step, error) {
	if r.err != nil {
		return nil, r.err
	}
	if r.Done() {
		return nil, errors.New("advance a rollout that is done")
	}
	step, err := r.advance(v)
	if err != nil {
		r.err = fmt.Errorf("step %d: %w", r.index, err)
		return nil, r.err
	}
	if step != nil {
		r.x, r.next = r.next, r.x
		r.index++
	}
	return step, nil
}

// advance is Advance without the bookkeeping of rollouts that failed or are done: it checks v,
// computes the step into r.next and, if the step is stochastic, its log-prob. It returns nil and no
// error if the step needs another velocity. Errors are those of Advance; the caller adds the step's
// index and keeps them.
func (r *Rollout) advance(v []float32) (*Step, error) {
	if len(v) != len(r.x) {
		return nil, fmt.Errorf("velocity of %d elements for latents of %d", len(v), len(r.x))
	}
	if i := firstNonFinite(v); i >= 0 {
		return nil, fmt.Errorf("velocity: element %d is %v", i, v[i])
	}
	k, err := r.plan.stepTransition(r.index)
	if err != nil {
		return nil, err
	}
	step := k.Step(r.index, r.x, r.next)
	step.Mean, step.Velocity = r.mean, v
	if k.Transition.Stochastic() {
		err = r.stochasticStep(k, step)
	} else if !r.odeStep(step) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if i := firstNonFinite(r.next); i >= 0 {
		return nil, fmt.Errorf("latents: element %d is %v, from %v before rounding to %s", i, r.next[i], r.mean[i],
			string(r.plan.Storage))
	}
	if k.Transition.Stochastic() {
		lp, err := r.plan.logProb(k, r.x, v, r.next)
		if err != nil {
			return nil, err
		}
		step.LogProb = &lp
	}
	return step, nil
}

// stochasticStep computes step with transition k: it draws the noise of the step and sets r.next
// and r.mean. The integrator forgets the ode steps before, which are not on the path that goes on
// from here. An error (slices that do not fit) is a defect of the caller.
func (r *Rollout) stochasticStep(k StepTransition, step *Step) error {
	if r.noise == nil {
		r.noise = make([]float32, len(r.x))
	}
	if r.ode != nil {
		r.ode.reset()
	}
	StepNoise(r.noise, r.plan.seed(r.index), r.index)
	step.Noise = r.noise
	return k.Draw(r.next, r.mean, r.x, step.Velocity, r.noise, r.plan.Storage)
}

// odeStep gives the velocity of step, which advance has just received, to the integrator. It
// reports whether the step is complete; then it has set r.next and r.mean, and step.Velocity is the
// one at the step's start. Else the integrator has set r.point, where it wants the next velocity.
func (r *Rollout) odeStep(step *Step) bool {
	in := interval{x: r.x, sigma: step.Sigma, next: step.SigmaNext, stepsLeft: r.plan.Steps() - r.index}
	sigma, done := r.ode.advance(in, step.Velocity, r.point, r.mean)
	if !done {
		if !r.midStep {
			copy(r.velocity, step.Velocity)
		}
		r.midStep, r.pointSigma = true, sigma
		return false
	}
	if r.midStep {
		step.Velocity = r.velocity
	}
	r.midStep = false
	copy(r.next, r.mean)
	r.plan.Storage.Round(r.next)
	return true
}

// Index returns the next step, 0 .. T. It is also the index of the state that Latents returns.
func (r *Rollout) Index() int { return r.index }

// Done reports whether all steps of the segment are complete.
func (r *Rollout) Done() bool { return r.index == r.end }

// Latents returns the latents after the last complete step [S*C]; once Done, the
// final ones. They are valid until the next call of Advance.
func (r *Rollout) Latents() []float32 { return r.x }

// firstNonFinite returns the index of the first NaN or Inf in x, or -1. A rollout checks each
// velocity and its own latents with it.
func firstNonFinite(x []float32) int {
	const exponent = 0x7f800000
	for i, xi := range x {
		if math.Float32bits(xi)&exponent == exponent {
			return i
		}
	}
	return -1
}
