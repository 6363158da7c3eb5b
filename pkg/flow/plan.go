package flow

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/tensor"
)

// Plan is all that a rollout needs besides the model: two rollouts of one plan from
// one state and the same velocities are the same bits.
type Plan struct {
	// Sigmas [T+1] are strictly decreasing from at most 1; the last is 0.
	Sigmas []float32
	// Transitions [T] are what each step runs.
	Transitions []Transition
	// NoiseLevel is a, at least 0; at most 1 where cps runs.
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
	// Seeds take over from Seed, each at its step, in the order of their steps: the path to a leaf
	// of a tree, whose steps have the noise of the samples that it parted from.
	Seeds []StepSeed
	// Begin and End make a segment: only the steps Begin, Begin+1, .. End-1 run, from the
	// state before step Begin to the one before step End. Schedule and noise are those of the
	// whole rollout, and so are the bits (see Enter). End 0 stands for T.
	Begin, End int
}

// StepSeed keys the noise of the steps from Step on.
type StepSeed struct {
	Step int
	Seed uint64
}

// seed keys the noise of a step.
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

// Segment returns the steps that run, [begin, end): all of 0 .. T where Begin and End are
// not set.
func (p Plan) Segment() (begin, end int) {
	if p.End == 0 {
		return p.Begin, p.Steps()
	}
	return p.Begin, p.End
}

// Enter says why a rollout that begins with the stored state before step index would not
// go on with the bits of one that came there by itself; nil: it would. A multistep solver
// looks back on the ode steps before, which a state does not hold: a run of its ode steps
// can be entered only at its first, which is step 0 or follows a stochastic step.
func (p Plan) Enter(index int) error {
	if index <= 0 || index >= p.Steps() || !p.Solver.Multistep() ||
		p.Transitions[index].Stochastic() || p.Transitions[index-1].Stochastic() {
		return nil
	}
	first := index
	for first > 0 && !p.Transitions[first-1].Stochastic() {
		first--
	}
	return fmt.Errorf("start.step_index: %d; must be %d, or a solver without memory: %s looks back on the ode steps %d to %d, which a stored state does not hold",
		index, first, string(p.Solver), first, index-1)
}

// checkSegment holds for a plan of at least one step.
func (p Plan) checkSegment() error {
	begin, end := p.Segment()
	switch {
	case begin < 0 || begin >= p.Steps():
		return fmt.Errorf("start.step_index: %d; must be 0 to %d", begin, p.Steps()-1)
	case end <= begin || end > p.Steps():
		return fmt.Errorf("stop.step_index: %d; must be %d to %d, after the start", end, begin+1, p.Steps())
	}
	return p.Enter(begin)
}

// Validate joins all faults of p, each naming the field as the event contract spells
// it, its value and the rule.
func (p Plan) Validate() error {
	var faults []error
	add := func(err error) {
		if err != nil {
			faults = append(faults, err)
		}
	}
	sigmas := checkSigmas(p.Sigmas)
	add(sigmas)
	if len(p.Transitions) != len(p.Sigmas)-1 {
		add(fmt.Errorf("transitions: %d values; must be one less than the %d sigmas", len(p.Transitions), len(p.Sigmas)))
	}
	if !p.LogProb.Valid() {
		add(fmt.Errorf("log_prob_kind: %q; must be density, scaled or squared", string(p.LogProb)))
	}
	if !p.Solver.Valid() {
		add(solverFault(p.Solver))
	}
	add(checkStorage(p.Storage))
	add(p.checkNoise())
	if len(faults) == 0 {
		add(p.checkSegment())
		for i := range p.Transitions {
			if _, err := p.kernel(i); err != nil {
				add(fmt.Errorf("step %d: %w", i, err))
				break // steps that share a fault would repeat it
			}
		}
	}
	return errors.Join(faults...)
}

// checkNoise reports each faulty transition name and each fault of the noise level
// once, however many steps share it.
func (p Plan) checkNoise() error {
	var faults []error
	seen := map[string]bool{}
	noise := p.Transitions
	if len(noise) == 0 {
		noise = []Transition{ODE}
	}
	for _, t := range noise {
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

// kernel builds the kernel of a step of a plan that is valid but for its kernels.
func (p Plan) kernel(index int) (Kernel, error) {
	k, err := newKernel(p.Transitions[index], p.NoiseLevel, p.Sigmas, index)
	if err != nil {
		return Kernel{}, err
	}
	if k.Transition.Stochastic() {
		err = k.checkKind(p.LogProb)
	}
	return k, err
}

// Score returns the log-prob of step index given the latents before it, the velocity
// there and the latents after it, each [S*C]: what a trainer or an audit recomputes.
// On the values a rollout stored it returns that rollout's bits.
func Score(p Plan, index int, x, v, next []float32) (LogProb, error) {
	if err := p.Validate(); err != nil {
		return LogProb{}, err
	}
	if index < 0 || index >= p.Steps() {
		return LogProb{}, fmt.Errorf("step_index: %d; must be 0 to %d", index, p.Steps()-1)
	}
	k, err := p.kernel(index)
	if err != nil {
		return LogProb{}, err
	}
	lp, err := k.LogProb(p.LogProb, x, v, next)
	if err != nil {
		return LogProb{}, fmt.Errorf("score step %d: %w", index, err)
	}
	return lp, nil
}
