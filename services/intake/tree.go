package intake

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// checkTree refuses branch points that no sample reaches, and steps without noise: the children that start there would
// be equal. A tree is a group whose samples branch off from one another; nil: none.
func checkTree(tree *schemas.Tree, plan flow.Plan) error {
	if tree == nil {
		return nil
	}
	_, end := plan.Segment()
	for i, b := range tree.Branches {
		at := int(b.StepIndex)
		fault := func(rule string, args ...any) error {
			return fmt.Errorf("tree.branches[%d].step_index: %d; %s", i, at, fmt.Sprintf(rule, args...))
		}
		if at >= end {
			return fault("must be below %d, the steps that run", end)
		}
		k, err := plan.StepTransition(at)
		switch {
		case err != nil:
			return err
		case !k.Transition.Stochastic():
			return fault("must be a stochastic step, and this one is ode: its children would be equal")
		case k.NoiseStd == 0:
			return fault("must be a step with noise, and %s has none there: its children would be equal",
				string(k.Transition))
		}
	}
	return nil
}

// setTreeStarts sets where each sample of a tree starts: with the state of its parent at their branch point. If the
// prompt asks for one leaf alone, that request runs all steps, with the seeds of the leaf's path.
func setTreeStarts(requests []*schemas.Request, tree *schemas.Tree, base string) {
	if tree.Leaf != nil {
		for _, s := range tree.Path(*tree.Leaf)[1:] {
			seed := flow.SampleSeed(base, string(requests[0].UID), int(s.SampleIndex))
			requests[0].StepSeeds = append(requests[0].StepSeeds, schemas.StepSeed{StepIndex: s.Begin, Seed: seed})
		}
		return
	}
	for _, r := range requests {
		stages.StartAtParent(r, tree, 1)
	}
}
