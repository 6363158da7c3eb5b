package intake

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
)

// Origin is what Resolve needs besides the prompt: from the prompt's message, and from the service's settings.
type Origin struct {
	// Seq is the stream sequence of the message, Created when it was stored.
	Seq     uint64
	Created time.Time
	// Reward are the functions if neither prompt nor model names any. ExternalWait is how long a group waits for
	// verdicts from outside.
	Reward       []string
	ExternalWait time.Duration
	// Unscored says that no function judges the samples, and none is a default: they are of an inner stage.
	Unscored bool
}

// Resolve turns a valid prompt into the requests of its group. Every request is complete: no later stage applies a
// default. All requests of a group have the same schedule, stochastic steps and returned latents. The result depends on
// the arguments alone, and Resolve changes none of them. An error means that the prompt cannot be served as it is.
func Resolve(run schemas.Run, prompt *schemas.Prompt, policy *schemas.Policy, o Origin) ([]*schemas.Request, error) {
	switch textual := prompt.Text != nil || len(prompt.Messages) > 0; {
	case policy.Text != nil:
		return resolveText(run, prompt, policy, o)
	case textual:
		return nil, fmt.Errorf("text: given, or messages; must be absent: model %q makes images", policy.Model)
	}
	p := new(*prompt)
	p.GroupSize = new(p.Samples())
	schemas.SetDefaults(p)
	p.Advantage, p.Start = prompt.Advantage, prompt.Start // whose defaults depend on more than the field
	common, err := resolveImageSettings(run, p, policy)
	if err != nil {
		return nil, err
	}
	base := flow.RunBase(string(run))
	if p.Seed != nil {
		base = flow.SeedBase(*p.Seed)
	}
	group, err := resolveGroup(p, policy, o, len(common.trainedSteps(schemas.MaxSteps)))
	if err != nil {
		return nil, err
	}
	if err := checkPrune(p.Prune, common, group); err != nil {
		return nil, err
	}
	if err := group.CheckJudgedSteps(common.sampling.Segment()); err != nil {
		return nil, err
	}
	request := newRequest(run, p, policy, group)
	request.Sampling, request.Outputs, request.Prune = common.sampling, common.outputs, p.Prune
	if err := setKeep(&request); err != nil {
		return nil, err
	}
	request.ScheduleDigest = request.ComputeScheduleDigest()

	requests := requestPerSample(request, base, p.InitialNoise == schemas.NoiseShared)
	if err := setSampleStarts(requests, base, p, policy); err != nil {
		return nil, err
	}
	// the last of a tree begins elsewhere
	for _, r := range []*schemas.Request{requests[0], requests[len(requests)-1]} {
		if err := r.Validate(); err != nil {
			return nil, fmt.Errorf("resolved request: %w", err)
		}
		if err := policy.Engine.Makes(r); err != nil {
			return nil, err
		}
	}
	return requests, nil
}

// newRequest returns a request with the fields that requests for images and texts have in common. p has its defaults.
func newRequest(run schemas.Run, p *schemas.Prompt, policy *schemas.Policy, group *schemas.Group) schemas.Request {
	tenant := policy.Tenant
	if tenant == schemas.TenantMain {
		tenant = ""
	}
	return schemas.Request{
		Identity: schemas.Identity{
			Run: run, UID: p.UID, Stage: schemas.StageMain, GroupSize: *p.GroupSize, Lane: policy.Lane, Tenant: tenant,
		},
		BaseDigest: cmp.Or(p.BaseDigest, policy.Checkpoint()),
		Sampling:   schemas.Sampling{Prompt: p.Prompt},
		Priority:   *p.Priority, MinPolicyVersion: *p.MinPolicyVersion, PolicyVersion: p.PolicyVersion, Group: *group,
	}
}

// PolicyPending returns what a prompt waits for if it asks for a newer policy version than the lane serves, and ""
// otherwise. A trainer may publish prompts ahead of its updates; they wait until it has pushed the weights.
func PolicyPending(p *schemas.Prompt, policy *schemas.Policy) string {
	for _, of := range []struct {
		field string
		asks  *int64
	}{{"policy_version", p.PolicyVersion}, {"min_policy_version", p.MinPolicyVersion}} {
		if of.asks != nil && *of.asks > policy.PolicyVersion {
			return fmt.Sprintf("%s: %d; lane %q serves version %d, push the next", of.field, *of.asks, policy.Lineage(),
				policy.PolicyVersion)
		}
	}
	return ""
}

// imageSettings is what all samples of a prompt for images have in common.
type imageSettings struct {
	sampling   schemas.Sampling
	outputs    schemas.Outputs
	stochastic []int // of the whole schedule
}

// trainedSteps returns the stochastic steps that the samples run, ascending, those below the given step only.
func (x *imageSettings) trainedSteps(below int) []int {
	begin, end := x.sampling.Segment()
	return stepsWithin(x.stochastic, int(begin), min(int(end), below))
}

// resolveImageSettings decides the settings of a prompt for images. Those that the prompt leaves out are the model's.
// The error names a field of the prompt that does not fit the model.
func resolveImageSettings(run schemas.Run, p *schemas.Prompt, policy *schemas.Policy) (*imageSettings, error) {
	x := &imageSettings{}
	s := &x.sampling
	if e := policy.Engine; e != nil && p.Sigmas != nil {
		return nil, fmt.Errorf("sigmas: given; must be absent: the lane's images are made by %s, which takes no "+
			"others than its own", e)
	}
	schemas.Fill(s, &p.Rollout, p, policy)
	schemas.Fill(&x.outputs, &p.Rollout, p)
	s.LatentsDType = cmp.Or(s.LatentsDType, "F32")
	if err := resolvePipeline(x, p, policy); err != nil {
		return nil, err
	}
	if err := resolveTexts(s, policy); err != nil {
		return nil, err
	}
	if p.ScheduledSampling != nil && policy.Grid == schemas.GridDiffusion {
		return nil, fmt.Errorf("scheduled_sampling: given; must be absent: model %q is a whole pipeline, which rolls "+
			"no training timesteps", policy.Model)
	}
	if p.ScheduledSampling != nil && (s.CFGFrom > 0 || s.CFGUntil > 0) {
		return nil, fmt.Errorf("cfg_from, cfg_until: %g, %g; must be absent with scheduled_sampling, whose steps are "+
			"single timesteps", s.CFGFrom, s.CFGUntil)
	}
	if s.Guidance != 0 && policy.Guidance == 0 {
		return nil, fmt.Errorf("guidance: %g; must be absent, the network of model %q has no such input; "+
			"true_cfg_scale is the scale of classifier-free guidance", s.Guidance, policy.Model)
	}
	if s.Frames == 1 {
		s.Frames = 0 // an image, as an absent one
	}
	tokens, err := Tokens(sampling.SizeOf(s), policy)
	if err != nil {
		return nil, err
	}
	if p.ScheduledSampling != nil {
		err = x.scheduleTraining(p, policy)
	} else {
		err = x.scheduleDenoising(run, p, policy, tokens)
	}
	if err != nil {
		return nil, err
	}
	if err := resolveGuidance(s, policy); err != nil {
		return nil, err
	}
	return x, checkStates(p.Start, *p.GroupSize, int64(tokens), policy)
}

// resolveGuidance refuses settings of classifier-free guidance that the model or the schedule leaves nothing to do, and
// drops those that say what an absent one means.
func resolveGuidance(s *schemas.Sampling, policy *schemas.Policy) error {
	if s.TrueCFGScale2 > 0 {
		if policy.BoundaryRatio == 0 {
			return fmt.Errorf("true_cfg_scale_2: %g; must be absent, model %q has no second network", s.TrueCFGScale2,
				policy.Model)
		}
		if s.TrueCFGScale <= 1 {
			return fmt.Errorf("true_cfg_scale_2: %g; must be absent with true_cfg_scale %g, which is without guidance",
				s.TrueCFGScale2, s.TrueCFGScale)
		}
	}
	if s.TrueCFGScale2 == 0 || s.TrueCFGScale2 == s.TrueCFGScale {
		s.TrueCFGScale2, s.BoundaryRatio = 0, 0
	}
	if s.TrueCFGScale <= 1 {
		if s.GuidanceRescale > 0 {
			return fmt.Errorf("guidance_rescale: %g; must be absent with true_cfg_scale %g, which is without guidance",
				s.GuidanceRescale, s.TrueCFGScale)
		}
		s.CFGFrom, s.CFGUntil = 0, 0 // without guidance they have no effect
		if len(policy.Pipeline) == 0 {
			s.NegativePrompt = "" // neither; a pipeline guides by arguments of its own
		}
		return nil
	}
	if s.CFGUntil == 1 {
		s.CFGUntil = 0
	}
	if s.CFGUntil > 0 && s.CFGFrom >= s.CFGUntil {
		return fmt.Errorf("cfg_from: %g; must be below cfg_until, %g", s.CFGFrom, s.CFGUntil)
	}
	if (s.CFGFrom > 0 || s.CFGUntil > 0) && s.GuidedSteps() == 0 {
		steps := len(s.Transitions)
		return fmt.Errorf("cfg_from, cfg_until: %g, %g; must have a whole one of the %d steps between them, %g of "+
			"all; true_cfg_scale 1 is without guidance", s.CFGFrom, cmp.Or(s.CFGUntil, 1), steps, 1/float64(steps))
	}
	return nil
}

// resolveTexts refuses texts for encoders that the model does not have (prompt_2, prompt_3), and drops those that say
// what an absent one means: the prompt.
func resolveTexts(s *schemas.Sampling, policy *schemas.Policy) error {
	most := max(policy.Prompts, 1)
	for i, text := range []*string{&s.Prompt2, &s.Prompt3} {
		if n := int64(i + 2); *text != "" && n > most {
			return fmt.Errorf("prompt_%d: given; must be absent, model %q takes %d of the texts prompt, prompt_2 and "+
				"prompt_3", n, policy.Model, most)
		}
		if *text == s.Prompt {
			*text = ""
		}
	}
	return nil
}

// scheduleDenoising decides the schedule, the transition of each step, the segment that the samples run, and which
// states they keep. tokens is the number of latent tokens of an image. The error names a field of the prompt that
// does not fit the schedule.
func (x *imageSettings) scheduleDenoising(run schemas.Run, p *schemas.Prompt, policy *schemas.Policy,
	tokens int,
) (err error) {
	s := &x.sampling
	if err := x.setSigmas(p, policy, tokens); err != nil {
		return err
	}
	steps := len(s.Sigmas) - 1
	if !p.Validation { // a validation has no stochastic steps, whatever it names
		if err := p.Rollout.ValidateSteps(int64(steps)); err != nil {
			return err
		}
	}
	begin, end, err := segmentOf(p, s.Sigmas)
	if err != nil {
		return err
	}
	if p.Start != nil {
		s.Start = &schemas.SegmentStart{
			StepIndex: int64(begin), Latents: p.Start.Latents,
			Branch: branchOf(run, p.Start),
		}
	}
	if p.Stop != nil && end < steps {
		s.Stop = &schemas.SegmentStop{StepIndex: int64(end), Decode: p.Stop.Decode}
	}
	if x.stochastic, x.outputs.ReturnStepIndices, err = chooseSteps(run, p, steps, begin, end); err != nil {
		return err
	}
	if p.Prune.BranchesOff() {
		x.outputs.KeepState(p.Prune.StepIndex)
	}
	s.Transitions = wireNames(flow.Transitions(flow.Transition(p.Rollout.SDEType), x.stochastic, steps))
	plan := sampling.Plan(s)
	if err := plan.Validate(); err != nil {
		return err
	}
	if err := checkTree(p.Tree, plan); err != nil {
		return err
	}
	x.outputs.CheckpointStepIndices, err = checkpointSteps(p, plan, x.outputs.ReturnStepIndices)
	return err
}

// checkPrune refuses a prune rule whose step the samples never reach, or that has no log-prob before it, or no reward
// there, to decide by.
func checkPrune(rule *schemas.Prune, x *imageSettings, g *schemas.Group) error {
	if rule == nil {
		return nil
	}
	if rule.ByLogProb() && len(x.trainedSteps(int(rule.StepIndex))) == 0 {
		return fmt.Errorf("prune.step_index: %d; must be behind a stochastic step: there are no log-probs to judge by",
			rule.StepIndex)
	}
	if rule.ByReward() && !slices.Contains(g.JudgedSteps(), rule.StepIndex) {
		return fmt.Errorf("prune.step_index: %d; must be in at_steps of a reward function, for rewards to judge by",
			rule.StepIndex)
	}
	if _, end := x.sampling.Segment(); rule.StepIndex >= end {
		return fmt.Errorf("prune.step_index: %d; must be below %d, where the sample ends", rule.StepIndex, end)
	}
	if rule.BranchesOff() {
		return checkBranchStep(int(rule.StepIndex), sampling.Plan(&x.sampling))
	}
	return nil
}

// checkBranchStep refuses a step from which on no step adds noise: samples that go on from one state would be equal. Or
// one that no sample can begin at.
func checkBranchStep(step int, plan flow.Plan) error {
	if err := plan.CheckStart(step); err != nil {
		return fmt.Errorf("prune.then: branch; must be end at step %d: %w", step, err)
	}
	_, end := plan.Segment()
	for k := step; k < end; k++ {
		if t, err := plan.StepTransition(k); err != nil || t.Transition.Stochastic() && t.NoiseStd > 0 {
			return err
		}
	}
	return fmt.Errorf("prune.then: branch; must be end: no step from %d to %d has noise, so samples that go on from "+
		"one state would be equal", step, end-1)
}

// setKeep turns the evaluations that a group may take into the number of its samples that go on.
func setKeep(r *schemas.Request) error {
	rule := r.Prune
	if rule == nil || rule.Evaluations == nil {
		return nil
	}
	begin, end := r.Segment()
	before := r.GroupSize * sampling.Evaluations(&r.Sampling, begin, rule.StepIndex)
	after := sampling.Evaluations(&r.Sampling, rule.StepIndex, end)
	keep := (*rule.Evaluations - before) / after
	if *rule.Evaluations < before+after {
		return fmt.Errorf("prune.evaluations: %d; must be at least %d: %d samples take %d before step %d, and one "+
			"that goes on %d more", *rule.Evaluations, before+after, r.GroupSize, before, rule.StepIndex, after)
	}
	r.Prune = new(*rule)
	if keep = min(keep, r.GroupSize); rule.Keep == nil || keep < *rule.Keep {
		r.Prune.Keep = &keep
	}
	return nil
}

// setSampleStarts sets what differs between the requests of a group: the data that a sample starts with, and its place
// in a tree or in the plan of scheduled sampling. base is the start of all seeds. The error is that of the plan.
func setSampleStarts(requests []*schemas.Request, base string, p *schemas.Prompt, policy *schemas.Policy) error {
	if p.Start != nil && p.Start.Data != nil {
		for i, r := range requests {
			r.Start = &schemas.SegmentStart{StepIndex: r.Start.StepIndex, Data: p.Start.Data.Of(int64(i))}
		}
	}
	if p.Tree != nil {
		setTreeStarts(requests, p.Tree, base)
	}
	if p.ScheduledSampling == nil {
		return nil
	}
	plan, err := Plan(requests[0].Run, p, policy)
	if err != nil {
		return err
	}
	return applyPlan(requests, plan)
}

// requestPerSample copies a request for each sample of its group and sets index and seeds. base is the start of all
// seeds; shared: all samples begin with the same noise.
func requestPerSample(of schemas.Request, base string, shared bool) []*schemas.Request {
	requests := make([]*schemas.Request, of.GroupSize)
	for i := range of.GroupSize {
		r := of
		r.SampleIndex = i
		r.SampleSeed = flow.SampleSeed(base, string(of.UID), int(i))
		r.NoiseSeed = r.SampleSeed
		if shared {
			r.NoiseSeed = flow.GroupSeed(base, string(of.UID))
		}
		requests[i] = &r
	}
	return requests
}

// Tokens returns S, the number of latent tokens of a sample of that size. A token covers a square, of which
// policy.PixelsPerToken is the side in pixels, and policy.FramesPerToken frames. It refuses a height or width that is
// not a multiple of that (diffusers would round it down), more pixels than the model serves, frames that the model does
// not make, and sizes that no event or store could hold.
func Tokens(size media.Size, policy *schemas.Policy) (int, error) {
	edge, frames, height, width := policy.PixelsPerToken, int64(size.Frames), int64(size.Height), int64(size.Width)
	var errs []error
	side := func(field string, n int64) {
		if n <= 0 || n%edge != 0 {
			near := fmt.Sprint(max(n/edge, 1) * edge)
			if n > edge {
				near += fmt.Sprintf(" or %d", (n/edge+1)*edge)
			}
			errs = append(errs, fmt.Errorf("%s: %d; must be a multiple of %d for model %q, such as %s", field, n, edge,
				policy.Model, near))
		}
	}
	side("height", height)
	side("width", width)
	if policy.MaxPixels > 0 && height*width > policy.MaxPixels {
		errs = append(errs, fmt.Errorf("height x width: %d x %d; model %q serves at most %d pixels", height, width,
			policy.Model, policy.MaxPixels))
	}
	if err := media.CheckFrames(size.Frames, int(policy.FramesPerToken), int(policy.MaxFrames)); err != nil {
		errs = append(errs, fmt.Errorf("%w, for model %q", err, policy.Model))
	}
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	if n := frames * height * width; n > schemas.MaxVideoPixels {
		return 0, fmt.Errorf("frames x height x width: %d x %d x %d; must be at most %d pixels", frames, height, width,
			int64(schemas.MaxVideoPixels))
	}
	elements := policy.StateElements(frames, height, width)
	if elements > schemas.MaxTensorBytes/4 {
		return 0, fmt.Errorf("frames x height x width: %d x %d x %d; a state of %d MiB must be at most %d", frames,
			height, width, elements>>18, schemas.MaxTensorBytes>>20)
	}
	return int(elements / max(1, policy.LatentChannels)), nil
}

// setSigmas sets the sigmas [T+1] of a prompt: the model's schedule, or the prompt's own sigmas, to which the
// model's shift is applied. It fails if the model has no such schedule, or the numbers of steps differ.
func (x *imageSettings) setSigmas(p *schemas.Prompt, policy *schemas.Policy, tokens int) error {
	noise, err := scheduled.ParseNoise(policy.SchedulerConfig)
	if err == nil && noise.Prediction != string(scheduled.Flow) && policy.Grid != schemas.GridDiffusion {
		return fmt.Errorf("scheduled_sampling: null; must be there for model %q, which predicts %s: only flow "+
			"models make images", policy.Model, noise.Prediction)
	}
	schedule, err := sampling.Schedule(policy)
	if err != nil {
		return fmt.Errorf("schedule of model %q: %w", policy.Model, err)
	}
	s := &x.sampling
	if p.Sigmas != nil {
		if t := valueOr(p.NumInferenceSteps, int64(len(p.Sigmas))); t != int64(len(p.Sigmas)) {
			return fmt.Errorf("sigmas: %d values; num_inference_steps is %d, one value per step is needed",
				len(p.Sigmas), t)
		}
		s.Sigmas, err = schedule.Shifted(p.Sigmas, tokens)
		return err
	}
	steps := int(valueOr(p.NumInferenceSteps, policy.NumInferenceSteps))
	if s.Sigmas, err = schedule.Sigmas(steps, tokens); err != nil || schedule.Diffusion == nil {
		return err
	}
	if n := flow.Solver(s.Solver).Evaluations(); n > 1 {
		return fmt.Errorf("solver: %s; must be one of an evaluation for each step: the network of model %q knows its "+
			"own timesteps alone", s.Solver, policy.Model)
	}
	s.NetworkTimesteps, s.InitialStd, err = schedule.Timesteps(steps)
	return err
}

// stochasticSteps returns the steps of a schedule that add noise, ascending: those that the prompt names, all of
// them, or a window that is drawn from a seed. A validation has none. It fails if a step or the window is not within
// the schedule.
func stochasticSteps(run schemas.Run, p *schemas.Prompt, steps int) ([]int, error) {
	r := p.Rollout
	switch {
	case p.Validation || !schemas.TransitionNamed(r.SDEType).Stochastic:
		return nil, nil
	case r.SDEWindow == nil:
		return flow.StepIndices(toInts(r.SDEStepIndices), steps)
	}
	w := flow.Window{
		Size: int(r.SDEWindow.Size), Lo: 0, Hi: max(steps-1, 1), Strategy: flow.Strategy(r.SDEWindow.Strategy),
		Iteration: int(r.SDEWindow.Iteration), ItersPerGroup: int(r.SDEWindow.ItersPerGroup),
	}
	if len(r.SDEWindow.Range) == 2 {
		w.Lo, w.Hi = int(r.SDEWindow.Range[0]), int(r.SDEWindow.Range[1])
	}
	return w.Indices(steps, windowSeed(run, p))
}

// windowSeed returns the seed of the window of stochastic steps. All groups of a batch have the same, whatever their
// own seeds: otherwise a trainer would compare samples that had noise at different steps. All prompts of a run that
// have no batch share one too.
func windowSeed(run schemas.Run, p *schemas.Prompt) uint64 {
	base, batch := flow.RunBase(string(run)), ""
	if p.Rollout.SDEWindow.Seed != nil {
		base = flow.SeedBase(*p.Rollout.SDEWindow.Seed)
	}
	if p.Batch != nil {
		batch = p.Batch.ID
	}
	return flow.GroupSeed(base, batch)
}

// toInts converts a list to int. nil stays nil, as no list means something else than an empty list.
func toInts(list []int64) []int {
	if list == nil {
		return nil
	}
	out := make([]int, len(list))
	for i, v := range list {
		out[i] = int(v)
	}
	return out
}

// wireNames returns the names of transitions as events have them.
func wireNames(ts []flow.Transition) []string {
	out := make([]string, len(ts))
	for i, t := range ts {
		out[i] = string(t)
	}
	return out
}

// valueOr returns *p, or def if p is nil.
func valueOr[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}
