package flow

import (
	"fmt"
	"slices"
)

// Checkpoints returns the states, ascending, to store beside those that are kept (ascending), so
// that a rollout which was cut off goes on from the last stored one and takes at most every steps again.
// States that cannot be entered are of no use to it (Enter): where a multistep solver
// has more than that many ode steps in a row, it takes all of these again. A plan that
// cannot be entered anywhere is an error.
func (p Plan) Checkpoints(every int, kept []int) ([]int, error) {
	if every < 1 {
		return nil, fmt.Errorf("checkpoint_every: %d; must be positive", every)
	}
	begin, end := p.Segment()
	var states []int // that can be entered, and the end
	for i := begin + 1; i < end; i++ {
		if p.Enter(i) == nil {
			states = append(states, i)
		}
	}
	if len(states) == 0 && end-begin > every {
		return nil, fmt.Errorf("checkpoint_every: %d; must be absent, or a solver without memory: %s looks back on the ode steps %d to %d, which a stored state does not hold",
			every, string(p.Solver), begin, end-1)
	}
	var more []int
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
			more, last = append(more, state), state
		}
	}
	return more, nil
}
