package intake

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Origin is what a request keeps of its prompt's message, and what the service adds.
type Origin struct {
	// Seq is the sequence of the message, Created when it was stored.
	Seq     uint64
	Created time.Time
	// Reward are the functions where neither prompt nor model names some, ExternalWait is the
	// time that a verdict from outside has.
	Reward       []string
	ExternalWait time.Duration
}

// Resolve turns a valid prompt into the requests of its group. Every request is
// complete: no later stage applies a default. The schedule, the stochastic steps
// and the returned latents are decided once, so they are equal in the group. It
// depends on its arguments alone and changes none of them.
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
	height, width := value(p.Height, policy.Height), value(p.Width, policy.Width)
	tokens, err := Tokens(height, width, policy)
	if err != nil {
		return nil, err
	}
	base := flow.RunBase(string(run))
	if p.Seed != nil {
		base = flow.SeedBase(*p.Seed)
	}
	part, err := partOf(run, p, policy, tokens)
	if err != nil {
		return nil, err
	}

	n := *p.GroupSize
	if err := checkStates(p.Start, n, int64(tokens), policy); err != nil {
		return nil, err
	}
	group, err := resolveGroup(p, policy, o, len(within(part.stochastic, part.begin, part.end)))
	if err != nil {
		return nil, err
	}
	request := requestOf(run, p, policy, group)
	request.TruncatePrompt, request.Height, request.Width = p.TruncatePrompt, height, width
	request.TrueCFGScale = value(p.TrueCFGScale, part.scale)
	request.Sigmas, request.Transitions, request.NoiseLevel = part.plan.Sigmas, names(part.plan.Transitions), part.plan.NoiseLevel
	request.LogProbKind, request.Solver, request.LatentsDType = string(part.plan.LogProb), string(part.plan.Solver), string(part.plan.Storage)
	request.ReturnStepIndices, request.CheckpointStepIndices, request.Debug = part.returned, part.checkpoints, slices.Clone(p.Rollout.Debug)
	request.ReturnConditioning, request.Prune = p.Rollout.ReturnConditioning, p.Prune
	if p.Prune != nil && len(within(part.stochastic, part.begin, min(part.end, int(p.Prune.StepIndex)))) == 0 {
		return nil, fmt.Errorf("prune.step_index: %d; must be behind a stochastic step: there are no log-probs to judge by", p.Prune.StepIndex)
	}
	if p.Prune != nil && int(p.Prune.StepIndex) >= part.end {
		return nil, fmt.Errorf("prune.step_index: %d; must be below %d, where the sample ends", p.Prune.StepIndex, part.end)
	}
	if p.Start != nil {
		request.Start = &schemas.SegmentStart{StepIndex: int64(part.begin), Latents: p.Start.Latents, Branch: branchOf(run, p.Start)}
	}
	if p.Stop != nil && part.end < len(part.plan.Transitions) {
		request.Stop = &schemas.SegmentStop{StepIndex: int64(part.end), Decode: p.Stop.Decode}
	}
	if request.TrueCFGScale > 1 {
		request.NegativePrompt = value(p.NegativePrompt, policy.NegativePrompt)
	}
	request.ScheduleDigest = request.ComputeScheduleDigest()

	requests := samples(request, base, p.InitialNoise == schemas.NoiseShared)
	if err := own(requests, base, p, policy); err != nil {
		return nil, err
	}
	for _, r := range []*schemas.Request{requests[0], requests[n-1]} { // the last of a tree begins elsewhere
		if err := r.Validate(); err != nil {
			return nil, fmt.Errorf("resolved request: %w", err)
		}
	}
	return requests, nil
}

// requestOf is what the requests of a prompt with its defaults have, whatever the model makes.
func requestOf(run schemas.Run, p *schemas.Prompt, policy *schemas.Policy, group *schemas.Group) schemas.Request {
	return schemas.Request{
		Run: run, UID: p.UID, GroupSize: *p.GroupSize, Lane: policy.Lane, BaseDigest: policy.Checkpoint(), Prompt: p.Prompt,
		Priority: *p.Priority, MinPolicyVersion: *p.MinPolicyVersion, Group: *group,
	}
}

// versionWait begins what a prompt waits for that is for weights to come.
const versionWait = "min_policy_version: "

// Young says what a prompt waits for whose weights the lane does not serve yet: a trainer publishes
// ahead of its updates, and the prompts are held back until it has made them.
func Young(p *schemas.Prompt, policy *schemas.Policy) string {
	if p.MinPolicyVersion == nil || *p.MinPolicyVersion <= policy.PolicyVersion {
		return ""
	}
	return fmt.Sprintf(versionWait+"%d; lane %q serves version %d, push the next", *p.MinPolicyVersion, policy.Lane, policy.PolicyVersion)
}

// part is what the samples of a prompt run of a schedule: the steps [begin, end) of a plan.
type part struct {
	plan       flow.Plan
	begin, end int
	stochastic []int // of the whole plan
	returned   []int64
	// checkpoints are states that are stored for another attempt to go on from.
	checkpoints []int64
	scale       float64 // of guidance, where the prompt names none
}

// partOf is the part of a prompt with its defaults, whose images have that many tokens.
func partOf(run schemas.Run, p *schemas.Prompt, policy *schemas.Policy, tokens int) (*part, error) {
	if p.ScheduledSampling != nil {
		return trainingPart(p, policy)
	}
	sigmas, err := sigmasOf(p, policy, tokens)
	if err != nil {
		return nil, err
	}
	x := &part{scale: policy.TrueCFGScale}
	steps := len(sigmas) - 1
	if !p.Validation { // which has no stochastic steps, whatever it names
		if err := p.Rollout.ValidateSteps(int64(steps)); err != nil {
			return nil, err
		}
	}
	if x.begin, x.end, err = segment(p, sigmas); err != nil {
		return nil, err
	}
	if x.stochastic, x.returned, err = chooseSteps(run, p, steps, x.begin, x.end); err != nil {
		return nil, err
	}
	x.plan = planOf(p, sigmas, x.stochastic, x.begin, x.end)
	if err := x.plan.Validate(); err != nil {
		return nil, err
	}
	if err := checkTree(p.Tree, x.plan); err != nil {
		return nil, err
	}
	x.checkpoints, err = checkpointSteps(p, x.plan, x.returned)
	return x, err
}

// own gives each request what it has alone: the data that its sample begins with, and its place
// in a tree or in the group's plan.
func own(requests []*schemas.Request, base string, p *schemas.Prompt, policy *schemas.Policy) error {
	if p.Start != nil && p.Start.Data != nil {
		for i, r := range requests {
			r.Start = &schemas.SegmentStart{StepIndex: r.Start.StepIndex, Data: p.Start.Data.Of(int64(i))}
		}
	}
	if p.Tree != nil {
		plant(requests, p.Tree, base)
	}
	if p.ScheduledSampling == nil {
		return nil
	}
	plan, err := Plan(requests[0].Run, p, policy)
	if err != nil {
		return err
	}
	return roll(requests, plan)
}

// samples are the requests of a group, each with its seeds; shared says that all begin
// with the same noise.
func samples(of schemas.Request, base string, shared bool) []*schemas.Request {
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

// planOf is the plan of a prompt with its defaults, whose stochastic steps were chosen.
func planOf(p *schemas.Prompt, sigmas []float32, chosen []int, begin, end int) flow.Plan {
	r := p.Rollout
	return flow.Plan{
		Sigmas: sigmas, Transitions: flow.Transitions(flow.Transition(r.SDEType), chosen, len(sigmas)-1), NoiseLevel: *r.NoiseLevel,
		LogProb: flow.LogProbKind(r.LogProbKind), Solver: flow.Solver(r.Solver), Storage: tensor.DType(r.LatentsDType), Begin: begin, End: end,
	}
}

// Tokens is S, the latent tokens of an image. Sizes are multiples of what one token covers,
// which is twice the autoencoder's scale; diffusers would round others down.
func Tokens(height, width int64, policy *schemas.Policy) (int, error) {
	edge := policy.PixelsPerToken
	var errs []error
	side := func(field string, n int64) {
		if n <= 0 || n%edge != 0 {
			near := fmt.Sprint(max(n/edge, 1) * edge)
			if n > edge {
				near += fmt.Sprintf(" or %d", (n/edge+1)*edge)
			}
			errs = append(errs, fmt.Errorf("%s: %d; must be a multiple of %d for model %q, such as %s", field, n, edge, policy.Model, near))
		}
	}
	side("height", height)
	side("width", width)
	if policy.MaxPixels > 0 && height*width > policy.MaxPixels {
		errs = append(errs, fmt.Errorf("height x width: %d x %d; model %q serves at most %d pixels", height, width, policy.Model, policy.MaxPixels))
	}
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	return int(height / edge * (width / edge)), nil
}

// sigmasOf is the model's schedule, or the caller's pre-shift sigmas shifted by it. [T+1]
func sigmasOf(p *schemas.Prompt, policy *schemas.Policy, tokens int) ([]float32, error) {
	noise, err := scheduled.ParseNoise(policy.SchedulerConfig)
	if err == nil && noise.Prediction != string(scheduled.Flow) {
		return nil, fmt.Errorf("scheduled_sampling: null; must be there for model %q, which predicts %s: only flow models make images", policy.Model, noise.Prediction)
	}
	schedule, err := flow.ParseSchedule(policy.SchedulerConfig)
	if err != nil {
		return nil, fmt.Errorf("scheduler config of model %q: %w", policy.Model, err)
	}
	if p.Sigmas != nil {
		if t := value(p.NumInferenceSteps, int64(len(p.Sigmas))); t != int64(len(p.Sigmas)) {
			return nil, fmt.Errorf("sigmas: %d values; num_inference_steps is %d, one value per step is needed", len(p.Sigmas), t)
		}
		return schedule.Shifted(p.Sigmas, tokens)
	}
	return schedule.Sigmas(int(value(p.NumInferenceSteps, policy.NumInferenceSteps)), tokens)
}

func stochasticSteps(run schemas.Run, p *schemas.Prompt, steps int) ([]int, error) {
	r := p.Rollout
	switch {
	case p.Validation || r.SDEType == string(flow.ODE):
		return nil, nil
	case r.SDEWindow == nil:
		return flow.StepIndices(narrow(r.SDEStepIndices), steps)
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

// windowSeed is one for all groups of a batch, whatever their own seeds: a trainer whose
// batch mixes windows compares samples that had noise at different steps. Prompts without
// a batch are as if all of their run were in one.
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

// narrow keeps nil apart from empty: no list is not an empty list.
func narrow(list []int64) []int {
	if list == nil {
		return nil
	}
	out := make([]int, len(list))
	for i, v := range list {
		out[i] = int(v)
	}
	return out
}

func names(ts []flow.Transition) []string {
	out := make([]string, len(ts))
	for i, t := range ts {
		out[i] = string(t)
	}
	return out
}

func value[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

func or(s, def string) string {
	if s == "" {
		return def
	}
	return s
}
