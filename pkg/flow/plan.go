// Package flow samples from flow-matching models and computes the log-probs of its steps.
//
// A model gives the velocity v(x, sigma) of the path x = (1-sigma)*data + sigma*noise,
// so v predicts noise - data. A rollout starts from noise at sigma = 1 and takes T
// steps down a list of T+1 sigmas to data at sigma = 0. Each step is one transition:
//
//	sde        Flow-GRPO's stochastic step         has a log-prob
//	cps        coefficients-preserving sampling    has a log-prob
//	dance_sde  DanceGRPO's stochastic step         has a log-prob
//	ddim       DDPO's stochastic step              has a log-prob
//	ode        deterministic, by a Solver          has none
//
// The main types:
//
//   - Plan says how to sample: sigmas, transitions, solver, storage type and seeds.
//   - Sample runs a Plan to its end. Rollout runs the same loop one velocity at a time,
//     for a service that evaluates many rollouts in one batch.
//   - StepTransition is one step. It draws the next latents and scores observed ones.
//   - Schedule computes the sigmas, Window chooses the stochastic steps.
//
// # Reproducibility
//
// Noise is counter based (StepNoise): a step's noise depends on the sample's seed
// and the step index alone, not on which other steps drew any. Latents are rounded to
// the plan's storage type before they are scored, and the chain goes on from the
// rounded value, so Score on stored latents returns the same float64 bits as the
// rollout did. Per-element arithmetic is float32, coefficients and reductions are
// float64, reductions have one fixed order.
//
// Every product that feeds a sum is converted explicitly, as in float32(a*x) + y.
// The conversion forbids the compiler a fused multiply-add, which some
// architectures would use and others not; with it all give the same bits. For the
// same reason logarithm, sine, cosine and exponential are the package's own.
package flow

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Plan is all that a rollout needs besides the model. Two rollouts with the same plan, initial state and velocities
// have the same bits.
type Plan struct {
	// Sigmas [T+1] are strictly decreasing from at most 1; the last is 0, or above it with OpenEnd.
	Sigmas  []float32
	OpenEnd bool
	// Transitions [T] say how each step moves to the next state.
	Transitions []Transition
	// NoiseLevel is a in the formulas of the transitions: at least 0, and at most 1 with cps.
	NoiseLevel float64
	// LogProb is the kind of log-prob that stochastic steps report.
	LogProb LogProbKind
	// Solver integrates the ode steps.
	Solver Solver
	// Storage is F32, F16 or BF16: latents are rounded to it after every step, before
	// they are scored.
	Storage tensor.DType
	// Seed keys the noise of the steps (StepNoise).
	Seed uint64
	// Seeds replace Seed from their step on; they are ascending by Step. In a tree of samples the path to a leaf
	// uses them: its first steps have the noise of the samples that it branched from.
	Seeds []StepSeed
	// Begin and End select a segment: only the steps Begin .. End-1 run, from the state before step Begin to the
	// state before step End. Schedule, noise and bits are those of the whole rollout (see CheckStart). End 0 stands for
	// T.
	Begin, End int
	// Tracks are how many elements of the state each of its parts has, in order, where each is scored for itself; nil:
	// it has one part.
	Tracks []int
}

// StepSeed is the seed of the noise of step Step and of the steps after it.
type StepSeed struct {
	Step int
	Seed uint64
}

// seed returns the seed of the noise of the step with this index: Seed, or the last of Seeds that
// begins at or before it, for a sample that branched from another.
func (p Plan) seed(index int) uint64 {
	seed := p.Seed
	for _, s := range p.Seeds {
		if s.Step <= index {
			seed = s.Seed
		}
	}
	return seed
}

// Steps returns T.
func (p Plan) Steps() int { return len(p.Transitions) }

// Segment returns the steps that run, [begin, end): [0, T) if Begin and End are not set.
func (p Plan) Segment() (begin, end int) {
	if p.End == 0 {
		return p.Begin, p.Steps()
	}
	return p.Begin, p.End
}

// Within returns the plan that goes over one step of p in so many ode steps, evenly spaced in sigma, of p's solver. Its
// states are not rounded.
func (p Plan) Within(step, steps int) Plan {
	begin, end := float64(p.Sigmas[step]), float64(p.Sigmas[step+1])
	within := Plan{
		OpenEnd: true, LogProb: p.LogProb, Solver: p.Solver, Storage: tensor.F32,
		Sigmas: make([]float32, steps+1), Transitions: slices.Repeat([]Transition{ODE}, steps),
	}
	for k := range within.Sigmas {
		within.Sigmas[k] = float32(begin + float64((end-begin)*float64(float64(k)/float64(steps))))
	}
	return within
}

// CheckStart returns nil if a rollout that starts with the stored state before step index has the
// same bits as one that computed this state itself; else the error says why not. The sampler asks
// before it resumes a sample, and intake before it plans checkpoints or a segment. A multistep
// solver uses the ode steps before, which a stored state does not hold. So a rollout can start only
// at the first of a run of its ode steps: step 0, or a step after a stochastic one.
func (p Plan) CheckStart(index int) error {
	if index <= 0 || index >= p.Steps() || !p.Solver.Multistep() ||
		p.Transitions[index].Stochastic() || p.Transitions[index-1].Stochastic() {
		return nil
	}
	first := index
	for first > 0 && !p.Transitions[first-1].Stochastic() {
		first--
	}
	return fmt.Errorf("start.step_index: %d; must be %d, or a solver without memory: %s looks back on the ode steps "+
		"%d to %d, which a stored state does not hold",
		index, first, string(p.Solver), first, index-1)
}

// checkSegment returns an error if Begin .. End is not a part of the steps of p, or if no rollout
// can start at Begin (see CheckStart). Validate calls it on a plan of at least one step.
func (p Plan) checkSegment() error {
	begin, end := p.Segment()
	switch {
	case begin < 0 || begin >= p.Steps():
		return fmt.Errorf("start.step_index: %d; must be 0 to %d", begin, p.Steps()-1)
	case end <= begin || end > p.Steps():
		return fmt.Errorf("stop.step_index: %d; must be %d to %d, after the start", end, begin+1, p.Steps())
	}
	return p.CheckStart(begin)
}

// Validate joins all faults of p: sigmas, transitions, log-prob kind, solver, storage type, noise
// level and segment. Each names the field as in the event contract, its value and the rule, because
// intake shows them to the author of a prompt. NewRollout and Score call it too.
func (p Plan) Validate() error {
	var faults []error
	add := func(err error) {
		if err != nil {
			faults = append(faults, err)
		}
	}
	sigmas := checkSigmas(p.Sigmas, p.OpenEnd)
	add(sigmas)
	if len(p.Transitions) != len(p.Sigmas)-1 {
		add(fmt.Errorf("transitions: %d values; must be one less than the %d sigmas", len(p.Transitions),
			len(p.Sigmas)))
	}
	if !p.LogProb.Valid() {
		add(fmt.Errorf("log_prob_kind: %q; must be density, scaled or squared", string(p.LogProb)))
	}
	if !p.Solver.Valid() {
		add(fmt.Errorf("solver: %q; must be one of %v", string(p.Solver), slices.Sorted(maps.Keys(methods))))
	}
	add(checkStorage(p.Storage))
	add(p.checkTransitions())
	if len(faults) == 0 {
		add(p.checkSegment())
		for i := range p.Transitions {
			if _, err := p.stepTransition(i); err != nil {
				add(fmt.Errorf("step %d: %w", i, err))
				break // steps that share a fault would repeat it
			}
		}
	}
	return errors.Join(faults...)
}

// checkTransitions joins the faults of the transitions and of the noise level that they share.
// Steps with the same fault report it once. A plan without transitions has its noise level checked
// nevertheless.
func (p Plan) checkTransitions() error {
	var faults []error
	seen := map[string]bool{}
	transitions := p.Transitions
	if len(transitions) == 0 {
		transitions = []Transition{ODE}
	}
	for _, t := range transitions {
		if err := checkNoise(t, p.NoiseLevel); err != nil && !seen[err.Error()] {
			seen[err.Error()] = true
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}

func checkStorage(d tensor.DType) error {
	if d != tensor.F32 && d != tensor.F16 && d != tensor.BF16 {
		return fmt.Errorf("latents_dtype: %q; must be F32, F16 or BF16", string(d))
	}
	return nil
}

// StepTransition returns the transition of the step with this index: what a trainer or a report computes with. Errors:
// an invalid plan, and an index outside it.
func (p Plan) StepTransition(index int) (StepTransition, error) {
	if err := p.Validate(); err != nil {
		return StepTransition{}, err
	}
	if index < 0 || index >= p.Steps() {
		return StepTransition{}, fmt.Errorf("step_index: %d; must be 0 to %d", index, p.Steps()-1)
	}
	return p.stepTransition(index)
}

// stepTransition returns the transition of the step with this index. All of p but its transitions
// must be valid. It is an error if the noise level is too large at the step's sigma, or if the step
// cannot have a log-prob of the plan's kind.
func (p Plan) stepTransition(index int) (StepTransition, error) {
	k, err := newStepTransition(p.Transitions[index], p.NoiseLevel, p.Sigmas, index)
	if err != nil {
		return StepTransition{}, err
	}
	if k.Transition.Stochastic() {
		err = k.checkKind(p.LogProb)
	}
	return k, err
}

// Score recomputes the log-prob of step index from the latents before it, the velocity there and
// the latents after it, each [S*C], as a trainer or an audit (meander verify) does. With the stored
// values of a rollout it returns the bits of that rollout. Errors: an invalid plan, an index
// outside it, and those of StepTransition.LogProb, such as for an ode step.
func Score(p Plan, index int, x, v, next []float32) (LogProb, error) {
	k, err := p.StepTransition(index)
	if err != nil {
		return LogProb{}, err
	}
	lp, err := p.logProb(k, x, v, next)
	if err != nil {
		return LogProb{}, fmt.Errorf("score step %d: %w", index, err)
	}
	return lp, nil
}

// Checkpoints returns the states to store besides those in kept, so that a rollout that breaks off
// can go on from the last stored state and repeats at most every steps. Intake calls it when a
// prompt sets checkpoint_every. State i is the latents before step i; both lists are ascending. A
// state is stored only if a rollout can start there with the same bits (see CheckStart). Inside a
// run of more than every ode steps of a multistep solver there is no such state: then the whole run
// is repeated. every below 1, and a long plan without any such state, are errors that name the
// setting.
func (p Plan) Checkpoints(every int, kept []int) ([]int, error) {
	if every < 1 {
		return nil, fmt.Errorf("checkpoint_every: %d; must be positive", every)
	}
	begin, end := p.Segment()
	var states []int // that can be entered, and the end
	for i := begin + 1; i < end; i++ {
		if p.CheckStart(i) == nil {
			states = append(states, i)
		}
	}
	if len(states) == 0 && end-begin > every {
		return nil, fmt.Errorf("checkpoint_every: %d; must be absent, or a solver without memory: %s looks back on "+
			"the ode steps %d to %d, which a stored state does not hold",
			every, string(p.Solver), begin, end-1)
	}
	var extra []int
	last := begin
	for i, state := range states {
		next := end
		if i+1 < len(states) {
			next = states[i+1]
		}
		switch {
		case slices.Contains(kept, state):
			last = state
		case next-last > every:
			extra, last = append(extra, state), state
		}
	}
	return extra, nil
}
