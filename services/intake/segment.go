package intake

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// checkStates checks what a group of n samples starts with: the shape of given latents must be [n, tokens, channels],
// or [1, ...] for all samples, and images must be one, or one for each sample.
func checkStates(start *schemas.Start, n, tokens int64, policy *schemas.Policy) error {
	field, states := "start.latents", (*schemas.Tensor)(nil)
	switch {
	case start == nil:
	case start.Data != nil:
		field, states = "start.data.latents", start.Data.Latents
		if k := int64(len(start.Data.Images)); k > 1 && k != n {
			return fmt.Errorf("start.data.images: %d; must be %d, the group_size, or 1 for all", k, n)
		}
	default:
		states = start.Latents
	}
	if states == nil {
		return nil
	}
	if pipeline, err := pipelineOf(policy); err == nil && pipeline != nil && pipeline.RandomAccess == "" {
		return nil // its tokens are known once a sampler has tested it
	}
	got, want := states.Shape, []int64{n, tokens, policy.LatentChannels}
	if slices.Equal(got, want) || got[0] == 1 && slices.Equal(got[1:], want[1:]) {
		return nil
	}
	return fmt.Errorf(field+".shape: %v; must be %v: samples (or 1 for all), tokens, channels", got, want)
}

// branchOf returns the stored state that samples start with, nil if they do not start with one. Without a run of its
// own the branch is of the prompt's run.
func branchOf(run schemas.Run, start *schemas.Start) *schemas.Branch {
	if start.Branch == nil {
		return nil
	}
	b := *start.Branch
	b.Run = schemas.Run(cmp.Or(string(b.Run), string(run)))
	return &b
}

// segmentOf returns the steps [begin, end) that the samples of a valid prompt run, of a schedule with sigmas [T+1].
// The error names start or stop if it is not within the schedule.
func segmentOf(p *schemas.Prompt, sigmas []float32) (begin, end int, err error) {
	end = len(sigmas) - 1
	var errs []error
	first := "start.step_index"
	if s := p.Start; s != nil && s.Branch != nil {
		begin, first = int(s.Branch.StepIndex), "start.branch.step_index"
	} else if s != nil {
		begin, err = stepAt("start", s.StepIndex, s.Sigma, sigmas, begin)
		errs = append(errs, err)
	}
	if p.Stop != nil {
		end, err = stepAt("stop", p.Stop.StepIndex, p.Stop.Sigma, sigmas, end)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return 0, 0, err
	}
	if begin >= len(sigmas)-1 {
		return 0, 0, fmt.Errorf("%s: %d; must be between 0 and %d", first, begin, len(sigmas)-2)
	}
	if end <= begin || end >= len(sigmas) {
		return 0, 0, fmt.Errorf("stop.step_index: %d; must be between %d and %d", end, begin+1, len(sigmas)-1)
	}
	return begin, end, nil
}

// stepAt returns the step that the prompt names by index or by sigma; def if it names none. A sigma must be one of the
// schedule exactly. field is for the error.
func stepAt(field string, index *int64, sigma *float64, sigmas []float32, def int) (int, error) {
	if sigma == nil {
		return int(valueOr(index, int64(def))), nil
	}
	want := float32(*sigma)
	near := 0
	for i, s := range sigmas {
		if s == want {
			return i, nil
		}
		if math.Abs(float64(s-want)) < math.Abs(float64(sigmas[near]-want)) {
			near = i
		}
	}
	return 0, fmt.Errorf("%s.sigma: %v; must be one of the schedule, to the bit of a float32, such as %v of step %d",
		field, *sigma, sigmas[near], near)
}

// chooseSteps returns two ascending lists: the stochastic steps of the whole schedule, and the indices of the latents
// that are stored of samples that run [begin, end) of it. The run seeds a random window without a seed of its own.
// The error names a field of the prompt.
func chooseSteps(run schemas.Run, p *schemas.Prompt,
	steps, begin, end int,
) (stochastic []int, returned []int64, err error) {
	if stochastic, err = stochasticSteps(run, p, steps); err != nil {
		return nil, nil, err
	}
	returned, err = returnedSteps(p, steps, begin, end, stepsWithin(stochastic, begin, end))
	return stochastic, returned, err
}

// stepsWithin returns the part of an ascending list that is in [begin, end).
func stepsWithin(steps []int, begin, end int) []int {
	first, _ := slices.BinarySearch(steps, begin)
	last, _ := slices.BinarySearch(steps, end)
	return steps[first:last]
}

// returnedSteps returns the indices of the latents to store, from begin to end. If the prompt lists some, it is those.
// Otherwise it is those that training on the stochastic steps needs, and the last one of a sample that stops early; or
// all, if the prompt chooses no stochastic steps.
func returnedSteps(p *schemas.Prompt, steps, begin, end int, stochastic []int) ([]int64, error) {
	r := p.Rollout
	asked := toInts(r.ReturnStepIndices)
	for i, index := range asked {
		if index < begin || index > end {
			return nil, fmt.Errorf("rollout.return_step_indices[%d]: %d; must be between %d and %d, the states of "+
				"the steps that run", i, index, begin, end)
		}
	}
	if asked == nil && ((r.SDEStepIndices == nil && r.SDEWindow == nil) || len(stochastic) == 0) {
		for i := begin; i <= end; i++ {
			asked = append(asked, i)
		}
	}
	kept, err := flow.ReturnIndices(asked, stochastic, steps)
	if err != nil {
		return nil, err
	}
	if asked == nil && end < steps && !slices.Contains(kept, end) {
		kept = append(kept, end)
	}
	return toInt64s(kept), nil
}

// checkpointSteps returns the indices of the states that are stored besides the returned ones, so that another attempt
// can go on from them; nil if the prompt asks for none.
func checkpointSteps(p *schemas.Prompt, plan flow.Plan, returned []int64) ([]int64, error) {
	every := p.Rollout.CheckpointEvery
	if every == nil {
		return nil, nil
	}
	states, err := plan.Checkpoints(int(*every), toInts(returned))
	if err != nil {
		return nil, fmt.Errorf("rollout.%w", err)
	}
	return toInt64s(states), nil
}

func toInt64s(list []int) []int64 {
	out := make([]int64, len(list))
	for i, v := range list {
		out[i] = int64(v)
	}
	return out
}

// Unscored returns a warning for each reward function of a request that will fail because the sample has no image: it
// stops early, or scheduled sampling does not decode it; or because an interaction may end it before its stage. And one
// if the samples of its group cannot differ, so that no reward tells them apart.
func Unscored(r *schemas.Request) []string {
	if s := r.ScheduledSampling; s != nil && !s.RollSettings.Decode && len(r.Group.Reward) > 0 {
		return []string{"reward: will fail: there are no images unless scheduled_sampling.decode is true"}
	}
	var warnings []string
	if r.Text == nil && r.Start == nil && r.GroupSize > 1 && r.NoiseSeed != r.SampleSeed &&
		len(r.StochasticSteps()) == 0 {
		warnings = append(warnings,
			"initial_noise: shared, and no step is stochastic: the samples of a group are equal")
	}
	for _, spec := range r.Group.Reward {
		for _, s := range r.Group.Stages[:max(r.Group.StageIndex(spec.Stage), 0)] {
			if s.Kind == schemas.StageInteraction {
				warnings = append(warnings, fmt.Sprintf("reward: %s will fail where %s ends the sample before %s; "+
					"without stage it judges the newest output", spec.Name, s.Name, spec.Stage))
			}
		}
	}
	if r.Stop == nil || r.Stop.Decode {
		return warnings
	}
	for _, spec := range r.Group.Reward {
		if scorer.VerdictName(spec.Name) == "" {
			warnings = append(warnings, fmt.Sprintf("reward: %s will fail: it looks at images, and a sample that "+
				"stops at step %d of %d has none; stop.decode makes one", spec.Name, r.Stop.StepIndex,
				len(r.Transitions)))
		}
	}
	return warnings
}

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
