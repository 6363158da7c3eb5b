package scheduled

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// Float is an element of a latent: a sampler runs float32, float64 is the reference.
type Float interface{ float32 | float64 }

// Rollout is one sample's way from its source down to its target, 0 <= Target <= Source < N.
type Rollout struct {
	Levels         *Levels
	Sampler        Sampler
	Order          int // 0 is the sampler's usual one
	Compat         Compat
	Source, Target int
}

// Step is one step of a rollout.
type Step struct {
	From, To int // timesteps: To = From - 1
	// Here is the level of From, Next that of the new latent. Its U is smaller, except in
	// the public trainer's way with epsilon and v.
	Here, Next Level
	Order      int // that was used
}

// Roller takes one sample from its source to its target without ever calling the model: the caller evaluates the model
// at Input and gives the output to Advance. It is for one goroutine.
type Roller[T Float] struct {
	r     Rollout
	order int
	by    method        // the sampler's
	t     int           // current timestep
	x     []T           // latent at t
	past  []estimate[T] // newest first
	spare []estimate[T] // memory of estimates that were dropped
	runge runge[T]
}

// estimate is what a multistep sampler keeps of an earlier step.
type estimate[T Float] struct {
	m []T // the data x0 that the model's output for x points at
	x []T // the latent, corrected
}

// NewRoller returns a Roller that starts at x, the latent at the source timestep, which it copies.
// The image engine makes one for each sample that rolls. A sampler that cannot run with these
// levels, and a source or target out of range, are errors.
func NewRoller[T Float](r Rollout, x []T) (*Roller[T], error) {
	err := checkSampler(r.Sampler, r.Order, r.Levels.prediction, r.Compat)
	if err = errors.Join(err, r.Levels.CheckSampler(r.Sampler)); err != nil {
		return nil, err
	}
	if n := r.Levels.Timesteps(); r.Source < 0 || r.Source >= n {
		return nil, fmt.Errorf("source: %d; must be 0 to %d", r.Source, n-1)
	}
	if r.Target < 0 || r.Target > r.Source {
		return nil, fmt.Errorf("target: %d; must be 0 to %d, the source", r.Target, r.Source)
	}
	out := &Roller[T]{r: r, t: r.Source, x: slices.Clone(x)}
	out.r.Sampler, out.order = effectiveSampler(r.Sampler, r.Order, r.Levels.prediction, r.Compat)
	out.by = methods[out.r.Sampler]
	return out, nil
}

// Done reports whether the target is reached.
func (r *Roller[T]) Done() bool { return r.t <= r.r.Target }

// Latent returns the current latent, valid until the next Advance.
func (r *Roller[T]) Latent() []T { return r.x }

// Input returns the latent and the timestep to evaluate the model at, valid until the next Advance. The timestep of
// the middle evaluations of rk4 ends in a half.
func (r *Roller[T]) Input() (x []T, timestep float64) {
	if r.runge.done > 0 {
		return r.runge.point, r.runge.time
	}
	return r.x, float64(r.t)
}

// Advance takes the model's output at Input and moves on. It returns the step that this completes,
// or false where the step needs another evaluation, of an rk4 step. It is an error to call it after
// the end, or with a prediction of another length than the latent.
func (r *Roller[T]) Advance(prediction []T) (step Step, complete bool, err error) {
	if r.Done() {
		return Step{}, false, fmt.Errorf("rollout: at its target %d; must not go on", r.r.Target)
	}
	if len(prediction) != len(r.x) {
		return Step{}, false, fmt.Errorf("prediction: %d elements; must be %d, as the latent has", len(prediction),
			len(r.x))
	}
	step = Step{From: r.t, To: r.t - 1, Here: r.r.Levels.levels[r.t], Next: r.levelAhead(1), Order: 1}
	switch {
	case r.by.fixed:
		step.Order = r.order
		if !r.rungeKutta(prediction) {
			return Step{}, false, nil
		}
	case r.by.directed && r.r.Levels.prediction == Flow:
		d := T(step.Next.U - step.Here.U)
		for i, v := range prediction {
			r.x[i] += T(d * v)
		}
	default:
		step.Order = r.multistep(prediction)
	}
	r.t--
	return step, true, nil
}

// multistep makes one step of euler, dpm, unip or unipc with the model's output for the latent, and
// returns the order that it used: lower at the start, where there are no earlier estimates, and at
// the end, where lambda is infinite. unipc first corrects the latent (see uniWeights).
func (r *Roller[T]) multistep(prediction []T) int {
	now := r.newEstimate()
	here := r.levelAhead(0)
	dataEstimate(now.m, r.x, prediction, here, r.r.Levels.prediction)
	copy(now.x, r.x)
	if r.by.corrects && len(r.past) > 0 {
		// UniC: the step that led here once more, now that its end is known.
		past := r.levelsPast(2, r.orderAt(-1, len(r.past)-1)-1)
		weights := uniWeights(newInterval(r.levelAhead(-1), here, false), past, true)
		last := r.past[0]
		combine(now.x, last.x, last.m, weights, r.estimateList(r.past[1:], len(past), now.m))
	}
	order := r.orderAt(0, len(r.past))
	next := r.levelAhead(1)
	past := r.levelsPast(1, order-1)
	if next.U == 0 {
		past = nil // lambda is infinite there; the latent is the estimate itself
	}
	weights := r.by.weights(newInterval(here, next, r.by.directed), past)
	combine(r.x, now.x, now.m, weights, r.estimateList(r.past, len(past), nil))
	r.keepEstimate(now)
	return 1 + len(past)
}

// noiseRises reports whether steps go through the table of levels the wrong way: see Compat.
func (r *Roller[T]) noiseRises() bool {
	return r.r.Compat == SimpleTuner && r.r.Levels.prediction != Flow
}

// tableIndex returns the index in the table of levels that is ahead steps after the current one; before it where ahead
// is negative. Where noise rises, the public trainer computes its own index from the timestep as a share of N, and is
// off by one for some (29 of 100, for one).
func (r *Roller[T]) tableIndex(ahead int) int {
	if r.noiseRises() {
		n := float64(r.r.Levels.Timesteps())
		return int(float64(float64(r.t)/n)*n) + ahead
	}
	return r.t - ahead
}

// levelAhead returns the level that is ahead steps after the current one; negative means before.
// Past the end of a table that rises, which only compat simpletuner has, there is no noise; its
// index -1 is its last.
func (r *Roller[T]) levelAhead(ahead int) Level {
	levels := r.r.Levels.levels
	i := r.tableIndex(ahead)
	if i >= len(levels) {
		return Level{A: 1}
	}
	l := levels[(i+len(levels))%len(levels)]
	if l.A == 0 && r.noiseRises() {
		l.U, l.A = math.Sincos(math.Atan(pureNoise))
	}
	return l
}

// pureNoise is what the public trainer has for U/A where there is no data: sqrt(1/1e-12).
const pureNoise = 1e6

// orderAt returns the order of the step that begins ahead steps later, with known estimates: one more than those, and
// less near the table's first entry.
func (r *Roller[T]) orderAt(ahead, known int) int {
	return max(1, min(r.order, known+1, r.tableIndex(ahead)+1))
}

// levelsPast returns up to count levels before the current one, newest first, beginning first steps
// before: where the estimates were made that multistep extrapolates from. It stops at a level
// without data, where lambda is infinite.
func (r *Roller[T]) levelsPast(first, count int) []Level {
	past := make([]Level, 0, max(count, 0))
	for n := first; n < first+count; n++ {
		l := r.levelAhead(-n)
		if l.A == 0 {
			break
		}
		past = append(past, l)
	}
	return past
}

// estimateList returns the data estimates of the newest count of past, and then last unless it is
// nil, in the order of the weights that combine takes.
func (r *Roller[T]) estimateList(past []estimate[T], count int, last []T) [][]T {
	out := make([][]T, 0, count+1)
	for _, p := range past[:count] {
		out = append(out, p.m)
	}
	if last != nil {
		out = append(out, last)
	}
	return out
}

// newEstimate returns memory for an estimate, reused if there is some.
func (r *Roller[T]) newEstimate() estimate[T] {
	if n := len(r.spare); n > 0 {
		e := r.spare[n-1]
		r.spare = r.spare[:n-1]
		return e
	}
	return estimate[T]{m: make([]T, len(r.x)), x: make([]T, len(r.x))}
}

// keepEstimate puts an estimate before the others after each multistep step, and drops those that
// no later step needs: a corrector needs one more than a predictor. The memory of dropped ones is
// used again.
func (r *Roller[T]) keepEstimate(e estimate[T]) {
	r.past = slices.Insert(r.past, 0, e)
	keep := r.order - 1
	if r.by.corrects {
		keep = r.order
	}
	if len(r.past) > keep {
		r.spare = append(r.spare, r.past[keep:]...)
		r.past = r.past[:keep]
	}
}

// combine makes one multistep update, whose formula is at weights: it sets dst from the latent x,
// its data estimate m and the earlier estimates (history, newest first). All have one length; dst
// may alias x.
func combine[T Float](dst, x, m []T, w weights, history [][]T) {
	ratio, c := T(w.ratio), T(w.c)
	for i := range dst {
		dst[i] = T(ratio*x[i]) + T(c*m[i])
	}
	for k, mk := range history {
		weight := T(w.history[k])
		for i := range dst {
			dst[i] += T(weight * (mk[i] - m[i]))
		}
	}
}

// dataEstimate sets dst to the data that the model's prediction for latent x at level l points at.
// p says what the model predicts: velocity, epsilon or v. For epsilon a level without data (A = 0)
// gives no finite number.
func dataEstimate[T Float](dst, x, prediction []T, l Level, p Prediction) {
	signal, noise := T(l.A), T(l.U)
	switch p {
	case Flow:
		for i, v := range prediction {
			dst[i] = x[i] - T(noise*v)
		}
	case Epsilon:
		for i, e := range prediction {
			dst[i] = (x[i] - T(noise*e)) / signal
		}
	case V:
		for i, v := range prediction {
			dst[i] = T(signal*x[i]) - T(noise*v)
		}
	}
}
