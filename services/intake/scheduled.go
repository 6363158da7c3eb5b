package intake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
)

// Plan is who rolls in the group of a valid prompt, and from where: nil without
// scheduled_sampling. It depends on its arguments alone.
func Plan(run schemas.Run, prompt *schemas.Prompt, policy *schemas.Policy) (*schemas.Plan, error) {
	if prompt.ScheduledSampling == nil {
		return nil, nil
	}
	p := new(*prompt)
	schemas.SetDefaults(p)
	s := p.ScheduledSampling
	settings, err := settingsOf(s, policy)
	if err != nil {
		return nil, err
	}
	base := flow.RunBase(string(run))
	for _, seed := range []*int64{p.Seed, s.Seed} {
		if seed != nil {
			base = flow.SeedBase(*seed)
		}
	}
	seed, step, n := flow.GroupSeed(base, string(p.UID)), int(*s.TrainStep), int(*p.GroupSize)
	timesteps := make([]float64, n)
	for i := range timesteps {
		switch k := len(s.BaseTimesteps); {
		case k == 0:
			timesteps[i] = float64(scheduled.DrawTimestep(seed, step, i, settings.Timesteps))
		case k == 1:
			timesteps[i] = s.BaseTimesteps[0]
		case k == n:
			timesteps[i] = s.BaseTimesteps[i]
		default:
			return nil, fmt.Errorf("scheduled_sampling.base_timesteps: %d items; must be %d, the group_size, or 1 for all", k, n)
		}
		if t := timesteps[i]; settings.Prediction != scheduled.Flow && t != float64(int(t)) {
			return nil, fmt.Errorf("scheduled_sampling.base_timesteps[%d]: %v; must be whole for a model that predicts %s", i, t, settings.Prediction)
		}
	}
	drawn, err := settings.Draw(seed, step, timesteps)
	if err != nil { // of the timesteps: the settings are valid
		return nil, fmt.Errorf("scheduled_sampling.base_%w", err)
	}
	sampler, order := settings.Steps()
	plan := &schemas.Plan{
		Run: run, UID: p.UID, Lane: policy.Lane, Seed: seed, TrainStep: int64(step), MaxStepOffset: *s.MaxStepOffset, Strategy: s.Strategy,
		Probability: drawn.Probability,
		RollSettings: schemas.RollSettings{
			Timesteps: int64(settings.Timesteps), Prediction: string(settings.Prediction), Sampler: string(sampler), Order: int64(order),
			Compat: s.Compat, Decode: s.Decode,
		},
	}
	if settings.ReflexOn() {
		r := &settings.ReflexFlow
		plan.RollSettings.ReflexFlow = &schemas.ReflexFlow{
			Mode: schemas.ReflexOn, Alpha: &r.Alpha, Beta1: &r.Beta1, Beta2: &r.Beta2, Keep: schemas.KeepDigests,
		}
		if s.ReflexFlow != nil {
			plan.RollSettings.ReflexFlow.Keep = s.ReflexFlow.Keep
		}
	}
	for _, x := range drawn.Samples {
		plan.Samples = append(plan.Samples, schemas.Roll{
			Timestep: x.Timestep, Base: int64(x.Base), Source: int64(x.Source), Offset: int64(x.Offset), Reason: string(x.Reason),
		})
	}
	metrics := drawn.Metrics(nil)
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		plan.Metrics = append(plan.Metrics, schemas.Metric{Name: name, Value: metrics[name]})
	}
	return plan, nil
}

// settingsOf are those of a prompt with its defaults, for the model of a policy.
func settingsOf(s *schemas.ScheduledSampling, policy *schemas.Policy) (scheduled.Settings, error) {
	noise, err := scheduled.ParseNoise(policy.SchedulerConfig)
	if err != nil {
		return scheduled.Settings{}, fmt.Errorf("model %q: %w", policy.Model, err)
	}
	out := scheduled.Settings{
		Timesteps: int(value(s.Timesteps, int64(noise.Timesteps))), MaxStepOffset: int(*s.MaxStepOffset), Strategy: scheduled.Strategy(s.Strategy),
		Ramp: scheduled.Ramp{Probability: *s.Probability, Shape: scheduled.Linear}, Prediction: scheduled.Prediction(noise.Prediction),
		Sampler: scheduled.Sampler(s.Sampler), Order: int(value(s.Order, 0)), Compat: scheduled.Compat(s.Compat),
		Switch: scheduled.Auto, ReflexFlow: scheduled.DefaultReflexFlow(),
	}
	if r := s.Ramp; r != nil {
		out.Ramp.StartStep, out.Ramp.RampSteps, out.Ramp.Shape = int(*r.StartStep), int(*r.RampSteps), scheduled.Shape(r.Shape)
		out.Ramp.Start, out.Ramp.End = r.ProbStart, r.ProbEnd
	}
	if r := s.ReflexFlow; r != nil {
		out.Switch = scheduled.Switch(r.Mode)
		out.ReflexFlow = scheduled.ReflexFlow{Alpha: *r.Alpha, Beta1: *r.Beta1, Beta2: *r.Beta2}
	}
	if out.Timesteps > schemas.MaxSteps {
		return out, fmt.Errorf("scheduled_sampling.timesteps: %d; must be between 2 and %d", out.Timesteps, schemas.MaxSteps)
	}
	if err := out.Validate(); err != nil {
		return out, ofScheduled(err)
	}
	levels, err := noise.Levels(out.Timesteps)
	if err == nil {
		err = levels.Takes(out.Sampler)
	}
	if err != nil {
		return out, ofScheduled(err)
	}
	return out, nil
}

// ofScheduled puts the path of the prompt's field before each fault.
func ofScheduled(err error) error {
	return fmt.Errorf("scheduled_sampling.%s", strings.ReplaceAll(err.Error(), "\n", "\nscheduled_sampling."))
}

// trainingPart is the whole schedule of the training timesteps: each sample runs its own part.
func trainingPart(p *schemas.Prompt, policy *schemas.Policy) (*part, error) {
	settings, err := settingsOf(p.ScheduledSampling, policy)
	if err != nil {
		return nil, err
	}
	noise, err := scheduled.ParseNoise(policy.SchedulerConfig)
	if err != nil {
		return nil, err
	}
	levels, err := noise.Levels(settings.Timesteps)
	if err != nil {
		return nil, ofScheduled(err)
	}
	sigmas := levels.Sigmas()
	x := &part{end: len(sigmas) - 1, scale: 1, plan: planOf(p, sigmas, nil, 0, len(sigmas)-1), returned: p.Rollout.ReturnStepIndices}
	return x, nil
}

// roll gives each request its place in the plan, and of the states to keep those it has.
func roll(requests []*schemas.Request, plan *schemas.Plan) error {
	digest, err := plan.Digest()
	if err != nil {
		return err
	}
	for i, r := range requests {
		r.ScheduledSampling = &schemas.ScheduledSample{RollSettings: plan.RollSettings, Roll: plan.Samples[i], PlanDigest: digest}
		begin, end := r.Segment()
		asked := r.ReturnStepIndices
		r.Start.StepIndex, r.ReturnStepIndices = begin, []int64{}
		for k := begin; k <= end && begin < end; k++ {
			if asked == nil || slices.Contains(asked, k) {
				r.ReturnStepIndices = append(r.ReturnStepIndices, k)
			}
		}
		if err := r.Validate(); err != nil {
			return fmt.Errorf("resolved request %d: %w", i, err)
		}
	}
	return nil
}

// Warnings says what scheduled sampling does that is hardly meant.
func Warnings(p *schemas.Prompt, policy *schemas.Policy) []string {
	if p.ScheduledSampling == nil {
		return nil
	}
	p = new(*p)
	schemas.SetDefaults(p)
	settings, err := settingsOf(p.ScheduledSampling, policy)
	if err != nil {
		return nil // it is refused
	}
	var out []string
	for _, w := range settings.Warnings() {
		out = append(out, "scheduled_sampling."+w)
	}
	return out
}

// plan stores the plan of a group that has one, before anybody asks for its samples.
func (s *service) plan(ctx context.Context, run schemas.Run, p *schemas.Prompt, policy *schemas.Policy) error {
	plan, err := Plan(run, p, policy)
	if err != nil || plan == nil {
		return err
	}
	mine := bus.Against(func(stored *schemas.Plan) (fault, err error) { return plan.SamePlan(stored), nil })
	if _, err := s.bus.Publish(ctx, plan, mine, bus.WaitForSpace()); err != nil {
		return fmt.Errorf("store the plan of %s: %w", p.UID, err)
	}
	s.metrics.probability.Set(plan.Probability)
	return nil
}
