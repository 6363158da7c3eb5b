package schemas

import "fmt"

// Prune ends a sample in the middle if, at a step, its log-probs so far are out of bounds. The group closes without
// them, as without samples that failed.
type Prune struct {
	// StepIndex is the boundary at which samples are judged: the steps before it have run.
	StepIndex int64 `msgpack:"step_index" range:"1..MaxSteps-1" flag:"prune-step"`
	// LogProbBelow prunes samples whose stochastic steps so far have a mean log-prob below this.
	LogProbBelow *float64 `msgpack:"log_prob_below,omitempty" flag:"prune-log-prob-below"`
	// LogProbAbove prunes those with one above this.
	LogProbAbove *float64 `msgpack:"log_prob_above,omitempty" flag:"prune-log-prob-above"`
}

func (p *Prune) checkRules(f *faults) {
	if p.LogProbBelow == nil && p.LogProbAbove == nil {
		f.add("log_prob_below", "null", "must be there, or log_prob_above: no sample would be pruned")
	}
}

// Judge returns why a sample must end before step StepIndex, or "" if it goes on. logProbs [T] are the log-probs of its
// steps, nil for a step that did not run or is ode.
func (p *Prune) Judge(logProbs []*float64) string {
	sum, n := 0.0, 0
	for _, l := range logProbs[:min(int(p.StepIndex), len(logProbs))] {
		if l != nil {
			sum, n = sum+*l, n+1
		}
	}
	mean := sum / float64(n)
	switch {
	case n == 0:
	case p.LogProbBelow != nil && mean < *p.LogProbBelow:
		return fmt.Sprintf("step %d: mean log-prob %.6g of %d steps; must not be below %.6g", p.StepIndex, mean, n,
			*p.LogProbBelow)
	case p.LogProbAbove != nil && mean > *p.LogProbAbove:
		return fmt.Sprintf("step %d: mean log-prob %.6g of %d steps; must not be above %.6g", p.StepIndex, mean, n,
			*p.LogProbAbove)
	}
	return ""
}
