package flow

import (
	"fmt"
	"slices"
)

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
