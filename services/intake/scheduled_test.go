package intake

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
	"github.com/meander-rl/meander/schemas"
)

// policyFor is what a sampler of one of the synthetic models announces.
func policyFor(t *testing.T, f model.Family) *schemas.Policy {
	t.Helper()
	info, err := f.Inspect("")
	if err != nil {
		t.Fatal(err)
	}
	c := info.Card
	return &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   schemas.Lane(c.Name), Model: c.Name, SchedulerConfig: c.SchedulerConfig,
		LatentChannels: int64(c.LatentChannels), PixelsPerToken: int64(c.PixelsPerToken),
		Height: 32, Width: 32, NumInferenceSteps: 10, TrueCFGScale: 4, MaxPixels: int64(c.MaxPixels),
		Reward: []string{"synthetic"},
	}
}

func rolls(change func(p *schemas.Prompt, s *schemas.ScheduledSampling)) *schemas.Prompt {
	s := &schemas.ScheduledSampling{
		MaxStepOffset: new(int64(10)), Probability: new(1.0),
		BaseTimesteps: []float64{0, 500.5, 990, 999},
	}
	p := &schemas.Prompt{
		UID: "u", Prompt: "x", Seed: new(int64(7)), GroupSize: new(int64(4)),
		ImageSettings: schemas.ImageSettings{
			ScheduledSampling: s,
			Start: &schemas.Start{Data: &schemas.Data{Latents: &schemas.Tensor{
				DType: "F32",
				Shape: []int64{1, 4, 64}, Ref: &schemas.Ref{
					Bucket: schemas.BlobBucket, Digest: strings.Repeat("0", 64),
					Size: 1024,
				},
			}}},
		},
	}
	if change != nil {
		change(p, s)
	}
	return p
}

// The plan of a prompt is a function of it, each sample's request has its place in it, and the
// edges are what they should be: nothing noisier than N-1, and timestep 0 as a target.
func TestResolve_ScheduledSampling(t *testing.T) {
	policy := policyFor(t, synthetic.Family())
	p := rolls(nil)
	plan, err := Plan("r", p, policy)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Plan("r", p, policy); err != nil || !reflect.DeepEqual(plan, again) ||
		plan.SamePlan(again) != nil {
		t.Errorf("planned again: %+v, %v", again, err)
	}
	if other, err := Plan("r", rolls(func(_ *schemas.Prompt,
		s *schemas.ScheduledSampling,
	) {
		s.TrainStep = new(int64(1))
	}), policy); err != nil ||
		plan.SamePlan(other) == nil {
		t.Errorf("at another training step: the same plan, %v", err)
	}
	requests, err := Resolve("r", p, policy, Origin{Created: time.Unix(1, 0)})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range requests {
		roll := plan.Samples[i]
		begin, end := r.Segment()
		if r.ScheduledSampling.Roll != roll || begin != 999-roll.Source || end != 999-roll.Base ||
			r.Start.StepIndex != begin || r.TrueCFGScale != 1 || len(r.Group.Reward) > 0 {
			t.Errorf("sample %d: steps %d to %d of %+v", i, begin, end, roll)
		}
		if steps := end - begin; roll.IsRolled() && int64(len(r.ReturnStepIndices)) != steps+1 || !roll.IsRolled() &&
			len(r.ReturnStepIndices) != 0 {
			t.Errorf("sample %d: keeps %v of %d steps", i, r.ReturnStepIndices, steps)
		}
	}
	if top := plan.Samples[3]; top.Source != 999 || top.IsRolled() ||
		(top.Reason != "clipped" && top.Reason != "zero_offset") {
		t.Errorf("base N-1: %+v", top)
	}
	if plan.Samples[1].Base != 500 || plan.Samples[1].Timestep != 500.5 {
		t.Errorf("base of 500.5: %+v", plan.Samples[1])
	}
	for name, change := range map[string]func(*schemas.Prompt, *schemas.ScheduledSampling){
		"masked":   func(_ *schemas.Prompt, s *schemas.ScheduledSampling) { s.Probability = new(0.0) },
		"disabled": func(_ *schemas.Prompt, s *schemas.ScheduledSampling) { s.MaxStepOffset = new(int64(0)) },
	} {
		plan, err := Plan("r", rolls(change), policy)
		if err != nil {
			t.Fatal(err)
		}
		for i, x := range plan.Samples {
			if x.Reason != name || x.Source != x.Base || x.Offset != 0 {
				t.Errorf("%s: sample %d: %+v", name, i, x)
			}
		}
		if on := plan.RollSettings.ReflexFlow != nil; on != (name == "masked") {
			t.Errorf("%s: reflexflow %v", name, on)
		}
	}
}

// Nonsense that only the model can tell is refused by the name of the field.
func TestResolve_ScheduledSamplingRefuses(t *testing.T) {
	flow, epsilon := policyFor(t, synthetic.Family()), policyFor(t, synthetic.VarianceFamilies()[0])
	for _, tt := range []struct {
		name   string
		policy *schemas.Policy
		change func(p *schemas.Prompt, s *schemas.ScheduledSampling)
		want   string
	}{
		{"an order of dpm", flow, func(_ *schemas.Prompt, s *schemas.ScheduledSampling) {
			s.Sampler, s.Order = "dpm",
				new(int64(4))
		}, "scheduled_sampling.order: 4; must be at most 3 with dpm"},
		{"rk4 of the public trainer", flow, func(_ *schemas.Prompt, s *schemas.ScheduledSampling) {
			s.Sampler,
				s.Compat = "rk4", "simpletuner"
		}, "scheduled_sampling.sampler: rk4; must be euler, dpm, unipc or unip"},
		{"M of N", flow, func(_ *schemas.Prompt, s *schemas.ScheduledSampling) {
			s.Timesteps, s.BaseTimesteps = new(int64(10)), []float64{1}
		}, "scheduled_sampling.max_step_offset: 10; must be at least 0 and below timesteps"},
		{
			"a base of N", flow,
			func(_ *schemas.Prompt, s *schemas.ScheduledSampling) { s.BaseTimesteps = []float64{1000} },
			"scheduled_sampling.base_timesteps[0]: 1000; must be at least 0 and below 1000",
		},
		{
			"a fraction", epsilon, func(*schemas.Prompt, *schemas.ScheduledSampling) {},
			"scheduled_sampling.base_timesteps[1]: 500.5; must be whole for a model that predicts epsilon",
		},
		{"another N", epsilon, func(_ *schemas.Prompt, s *schemas.ScheduledSampling) {
			s.Timesteps, s.BaseTimesteps = new(int64(100)), []float64{1}
		}, "scheduled_sampling.timesteps: 100; must be 1000, those of a model that predicts epsilon"},
		{"images of such a model", epsilon, func(p *schemas.Prompt, _ *schemas.ScheduledSampling) {
			p.ScheduledSampling,
				p.Start = nil, nil
		}, `scheduled_sampling: null; must be there for model "synthetic-epsilon"`},
		{
			"data of another size", flow, func(p *schemas.Prompt,
				_ *schemas.ScheduledSampling,
			) {
				p.Height = new(int64(64))
			},
			"start.data.latents.shape: [1 4 64]; must be [4 8 64]",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := Resolve("r", rolls(tt.change), tt.policy,
				Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}}); err == nil ||
				!strings.Contains(err.Error(), tt.want) {
				t.Errorf("error\n %v\nwant\n %s", err, tt.want)
			}
		})
	}
	got := Warnings(rolls(func(_ *schemas.Prompt, s *schemas.ScheduledSampling) {
		s.Compat, s.ReflexFlow = "simpletuner", &schemas.ReflexFlow{Alpha: new(2.0)}
	}), flow)
	if len(got) != 2 || !strings.Contains(got[0], "reflexflow.alpha: 2; above 1") ||
		!strings.Contains(got[1], "sampler: unipc; flow models step with euler") {
		t.Errorf("warnings %q", got)
	}
}
