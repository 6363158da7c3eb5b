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

// Plan returns the plan of a group with scheduled sampling, nil for any other: the timestep that each sample is trained
// at, and whether the sample rolls there, that is, whether the model denoises it from a noisier timestep down to it.
// The draws depend on the arguments alone.
func Plan(run schemas.Run, prompt *schemas.Prompt, policy *schemas.Policy) (*schemas.Plan, error) {
	if prompt.ScheduledSampling == nil {
		return nil, nil
	}
	p := new(*prompt)
	schemas.SetDefaults(p)
	s := p.ScheduledSampling
	settings, err := rollSettings(s, policy)
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
			return nil, fmt.Errorf("scheduled_sampling.base_timesteps: %d items; must be %d, the group_size, or 1 "+
				"for all", k, n)
		}
		if t := timesteps[i]; settings.Prediction != scheduled.Flow && t != float64(int(t)) {
			return nil, fmt.Errorf("scheduled_sampling.base_timesteps[%d]: %v; must be whole for a model that "+
				"predicts %s", i, t, settings.Prediction)
		}
	}
	drawn, err := settings.Draw(seed, step, timesteps)
	if err != nil { // a fault of the timesteps, as the settings are valid
		return nil, fmt.Errorf("scheduled_sampling.base_%w", err)
	}
	sampler, order := settings.Steps()
	plan := &schemas.Plan{
		Run: run, UID: p.UID, Lane: policy.Lane, Seed: seed, TrainStep: int64(step), MaxStepOffset: *s.MaxStepOffset,
		Strategy:    s.Strategy,
		Probability: drawn.Probability,
		RollSettings: schemas.RollSettings{
			Timesteps: int64(settings.Timesteps), Prediction: string(settings.Prediction), Sampler: string(sampler),
			Order:  int64(order),
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
			Timestep: x.Timestep, Base: int64(x.Base), Source: int64(x.Source), Offset: int64(x.Offset),
			Reason: string(x.Reason),
		})
	}
	metrics := drawn.Metrics(nil)
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		plan.Metrics = append(plan.Metrics, schemas.Metric{Name: name, Value: metrics[name]})
	}
	return plan, nil
}

// rollSettings returns the settings of scheduled sampling for the model of a policy; s has its defaults. The error
// names a setting that is not valid or does not fit the model.
func rollSettings(s *schemas.ScheduledSampling, policy *schemas.Policy) (scheduled.Settings, error) {
	noise, err := scheduled.ParseNoise(policy.SchedulerConfig)
	if err != nil {
		return scheduled.Settings{}, fmt.Errorf("model %q: %w", policy.Model, err)
	}
	out := scheduled.Settings{
		Timesteps: int(valueOr(s.Timesteps, int64(noise.Timesteps))), MaxStepOffset: int(*s.MaxStepOffset),
		Strategy:   scheduled.Strategy(s.Strategy),
		Ramp:       scheduled.Ramp{Probability: *s.Probability, Shape: scheduled.Linear},
		Prediction: scheduled.Prediction(noise.Prediction),
		Sampler:    scheduled.Sampler(s.Sampler), Order: int(valueOr(s.Order, 0)), Compat: scheduled.Compat(s.Compat),
		Switch: scheduled.Auto, ReflexFlow: scheduled.DefaultReflexFlow(),
	}
	if r := s.Ramp; r != nil {
		out.Ramp.StartStep, out.Ramp.RampSteps, out.Ramp.Shape = int(*r.StartStep), int(*r.RampSteps),
			scheduled.Shape(r.Shape)
		out.Ramp.Start, out.Ramp.End = r.ProbStart, r.ProbEnd
	}
	if r := s.ReflexFlow; r != nil {
		out.Switch = scheduled.Switch(r.Mode)
		out.ReflexFlow = scheduled.ReflexFlow{Alpha: *r.Alpha, Beta1: *r.Beta1, Beta2: *r.Beta2}
	}
	if out.Timesteps > schemas.MaxSteps {
		return out, fmt.Errorf("scheduled_sampling.timesteps: %d; must be between 2 and %d", out.Timesteps,
			schemas.MaxSteps)
	}
	if err := out.Validate(); err != nil {
		return out, scheduledError(err)
	}
	levels, err := noise.Levels(out.Timesteps)
	if err == nil {
		err = levels.CheckSampler(out.Sampler)
	}
	if err != nil {
		return out, scheduledError(err)
	}
	return out, nil
}

// scheduledError puts the path of the prompt's field, "scheduled_sampling.", before each line of an error.
func scheduledError(err error) error {
	return fmt.Errorf("scheduled_sampling.%s", strings.ReplaceAll(err.Error(), "\n", "\nscheduled_sampling."))
}

// scheduleTraining sets the schedule of all training timesteps, without stochastic steps. Each sample of scheduled
// sampling runs its own part of it; applyPlan sets which.
func (x *imageSettings) scheduleTraining(p *schemas.Prompt, policy *schemas.Policy) error {
	settings, err := rollSettings(p.ScheduledSampling, policy)
	if err != nil {
		return err
	}
	noise, err := scheduled.ParseNoise(policy.SchedulerConfig)
	if err != nil {
		return err
	}
	levels, err := noise.Levels(settings.Timesteps)
	if err != nil {
		return scheduledError(err)
	}
	s := &x.sampling
	s.Sigmas = levels.Sigmas()
	s.Transitions = wireNames(flow.Transitions(flow.ODE, nil, len(s.Sigmas)-1))
	s.TrueCFGScale = valueOr(p.TrueCFGScale, 1)
	s.Start = &schemas.SegmentStart{} // each sample has its own step and data
	return nil
}

// applyPlan sets in each request of a group its place in the plan of scheduled sampling: where the sample starts, and
// which of the states that the prompt asks for the sample has. Resolve calls it last. It fails if a request is not
// valid then.
func applyPlan(requests []*schemas.Request, plan *schemas.Plan) error {
	digest, err := plan.Digest()
	if err != nil {
		return err
	}
	for i, r := range requests {
		r.ScheduledSampling = &schemas.ScheduledSample{
			RollSettings: plan.RollSettings, Roll: plan.Samples[i],
			PlanDigest: digest,
		}
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

// Warnings returns remarks on settings of scheduled sampling that are valid but probably a mistake, for the client's
// receipt.
func Warnings(p *schemas.Prompt, policy *schemas.Policy) []string {
	if p.ScheduledSampling == nil {
		return nil
	}
	p = new(*p)
	schemas.SetDefaults(p)
	settings, err := rollSettings(p.ScheduledSampling, policy)
	if err != nil {
		return nil // it is refused elsewhere
	}
	var out []string
	for _, w := range settings.Warnings() {
		out = append(out, "scheduled_sampling."+w)
	}
	return out
}

// storePlan stores the plan of a group with scheduled sampling, before its requests are published, so that readers
// can check each roll against it; other groups have none. An error is of the server.
func (s *service) storePlan(ctx context.Context, run schemas.Run, p *schemas.Prompt, policy *schemas.Policy) error {
	plan, err := Plan(run, p, policy)
	if err != nil || plan == nil {
		return err
	}
	mine := bus.Against(func(stored *schemas.Plan) (fault, err error) { return plan.SamePlan(stored), nil })
	if _, err := s.bus.Publish(ctx, plan, mine, bus.WaitForSpace()); err != nil {
		return fmt.Errorf("store the plan of %s: %w", p.UID, err)
	}
	s.metrics.Probability.Set(plan.Probability)
	return nil
}
