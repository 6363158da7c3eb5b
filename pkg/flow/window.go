package flow

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// Strategy says how a Window chooses its steps.
type Strategy string

// The strategies.
const (
	// RandomWindow is Size consecutive steps; their start is uniform over Lo .. Hi-Size.
	RandomWindow Strategy = "random"
	// ProgressiveWindow is Size consecutive steps, first from Lo. Every ItersPerGroup iterations it moves on by
	// Size, until it ends at Hi, where it stays.
	ProgressiveWindow Strategy = "progressive"
	// NoncontiguousWindow is a uniformly random subset of Size steps.
	NoncontiguousWindow Strategy = "noncontiguous"
)

// Valid reports whether s is one of the strategies.
func (s Strategy) Valid() bool {
	return s == RandomWindow || s == ProgressiveWindow || s == NoncontiguousWindow
}

// Window chooses the stochastic steps of the groups of a batch. All their samples get the same steps.
type Window struct {
	Size     int // steps to choose
	Lo, Hi   int // from Lo, Lo+1, .. Hi-1
	Strategy Strategy
	// Iteration is the training step. Progressive windows move with it, the others make a new draw for each.
	Iteration int
	// ItersPerGroup is for how many iterations a progressive window stays in one place; others ignore it.
	ItersPerGroup int
}

// Validate joins all faults of w for a rollout of numInferenceSteps. Each names the field of the
// prompt, the value and the rule, for intake's reply to its author.
func (w Window) Validate(numInferenceSteps int) error {
	if err := checkSteps(numInferenceSteps); err != nil {
		return err
	}
	var faults []error
	if w.Lo < 0 || w.Hi > numInferenceSteps || w.Lo >= w.Hi {
		faults = append(faults, fmt.Errorf("sde_window.range: [%d, %d); must be a part of [0, %d) that is not empty",
			w.Lo, w.Hi, numInferenceSteps))
	} else if w.Size < 1 || w.Size > w.Hi-w.Lo {
		faults = append(faults, fmt.Errorf("sde_window.size: %d; must be 1 to %d, the length of its range", w.Size,
			w.Hi-w.Lo))
	}
	if !w.Strategy.Valid() {
		faults = append(faults, fmt.Errorf("sde_window.strategy: %q; must be random, progressive or noncontiguous",
			string(w.Strategy)))
	}
	if w.Iteration < 0 || int64(w.Iteration) > 1<<32-1 {
		faults = append(faults, fmt.Errorf("sde_window.iteration: %d; must be 0 to 2^32-1", w.Iteration))
	}
	if w.Strategy == ProgressiveWindow && w.ItersPerGroup < 1 {
		faults = append(faults, fmt.Errorf("sde_window.iters_per_group: %d; must be at least 1", w.ItersPerGroup))
	}
	return errors.Join(faults...)
}

// Indices returns the stochastic steps that the window chooses, ascending; intake calls it once for
// a group. seed is the GroupSeed of the batch: groups that are trained together must use the same.
// Draw j is the 64-bit number of the first two words (low, high) of Philox with key seed and
// counter (j, Iteration, StreamWindow, 0). The choice among n is the upper half of the draw's
// product with n. Errors are those of Validate.
func (w Window) Indices(numInferenceSteps int, seed uint64) ([]int, error) {
	if err := w.Validate(numInferenceSteps); err != nil {
		return nil, err
	}
	choose := func(draw, n int) int {
		r := portable.Philox4x32([4]uint32{uint32(draw), uint32(w.Iteration), StreamWindow, 0},
			[2]uint32{uint32(seed), uint32(seed >> 32)})
		hi, _ := bits.Mul64(uint64(r[1])<<32|uint64(r[0]), uint64(n))
		return int(hi)
	}
	start := w.Lo
	switch w.Strategy {
	case RandomWindow:
		start += choose(0, w.Hi-w.Size-w.Lo+1)
	case ProgressiveWindow:
		// Compared before multiplying: a huge iteration must not overflow.
		if moves := w.Iteration / w.ItersPerGroup; moves < (w.Hi-w.Size-w.Lo)/w.Size+1 {
			start += moves * w.Size
		} else {
			start = w.Hi - w.Size
		}
	case NoncontiguousWindow:
		return w.chooseScattered(choose), nil
	}
	return sequence(start, w.Size), nil
}

// chooseScattered returns the steps of a noncontiguous window, ascending: the first Size elements
// of a Fisher-Yates shuffle of Lo .. Hi-1. choose(j, n) is draw j of a number below n.
func (w Window) chooseScattered(choose func(draw, n int) int) []int {
	steps := sequence(w.Lo, w.Hi-w.Lo)
	for i := range w.Size {
		j := i + choose(i, len(steps)-i)
		steps[i], steps[j] = steps[j], steps[i]
	}
	steps = steps[:w.Size:w.Size]
	slices.Sort(steps)
	return steps
}

// StepIndices checks the sde_step_indices of a prompt, 0 .. T-1 without repeats, and returns them
// ascending. nil stands for all steps, an empty list for no step. An error names the field and the
// index.
func StepIndices(indices []int, numInferenceSteps int) ([]int, error) {
	if err := checkSteps(numInferenceSteps); err != nil {
		return nil, err
	}
	if indices == nil {
		return sequence(0, numInferenceSteps), nil
	}
	return checkIndices("sde_step_indices", indices, numInferenceSteps-1)
}

// ReturnIndices checks the return_step_indices of a prompt, 0 .. T without repeats, and returns
// them ascending: the states that are stored. Index i means the latents before step i, T the final
// latents. nil stands for the latents before and after each step in sde: what a trainer of these
// steps needs. An error names the field and the index.
func ReturnIndices(indices, sde []int, numInferenceSteps int) ([]int, error) {
	if err := checkSteps(numInferenceSteps); err != nil {
		return nil, err
	}
	if indices != nil {
		return checkIndices("return_step_indices", indices, numInferenceSteps)
	}
	both := make([]int, 0, 2*len(sde))
	for _, i := range sde {
		both = append(both, i, i+1)
	}
	slices.Sort(both)
	return slices.Compact(both), nil
}

// Transitions returns the transition of each of T = numInferenceSteps steps: t at the indices, ode
// elsewhere. It ignores indices out of range; StepIndices refuses them before.
func Transitions(t Transition, indices []int, numInferenceSteps int) []Transition {
	all := make([]Transition, max(numInferenceSteps, 0))
	for i := range all {
		all[i] = ODE
		if slices.Contains(indices, i) {
			all[i] = t
		}
	}
	return all
}

// checkIndices returns a sorted copy of indices. An index outside 0 .. last, or one that comes
// twice, is an error that names field, the prompt's field that they come from.
func checkIndices(field string, indices []int, last int) ([]int, error) {
	sorted := slices.Clone(indices)
	slices.Sort(sorted)
	for i, index := range sorted {
		if index < 0 || index > last {
			return nil, fmt.Errorf("%s: %d; must be a step from 0 to %d", field, index, last)
		}
		if i > 0 && index == sorted[i-1] {
			return nil, fmt.Errorf("%s: %d; must come at most once", field, index)
		}
	}
	return sorted, nil
}

// sequence returns start, start+1, .. of n numbers.
func sequence(start, n int) []int {
	steps := make([]int, n)
	for i := range steps {
		steps[i] = start + i
	}
	return steps
}
