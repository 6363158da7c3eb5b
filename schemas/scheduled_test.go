package schemas_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

func rollSettings() schemas.RollSettings {
	return schemas.RollSettings{
		Timesteps: 5, Prediction: "flow_prediction", Sampler: "unipc", Order: 2, Compat: "exact", Decode: true,
		ReflexFlow: &schemas.ReflexFlow{Mode: "on", Alpha: new(1.0), Beta1: new(10.0), Beta2: new(1.0), Keep: "tensors"},
	}
}

func scheduledSample() *schemas.ScheduledSample {
	return &schemas.ScheduledSample{
		RollSettings: rollSettings(), PlanDigest: digestOf("plan"),
		Roll: schemas.Roll{Timestep: 1.5, Base: 1, Source: 3, Offset: 3},
	}
}

func dataStart(step int64) *schemas.SegmentStart {
	image := &schemas.Ref{Bucket: "mdr-blobs", Digest: digestOf("image"), Size: 70}
	return &schemas.SegmentStart{StepIndex: step, Data: &schemas.SegmentData{
		Image: image, GroupDigest: digestOf("images"),
	}}
}

// rolledTrajectory is a sample that rolled two steps of a schedule of four.
func rolledTrajectory(t testing.TB) *schemas.Trajectory {
	e := segmentTrajectory(t)
	e.Start, e.Stop, e.ScheduledSampling, e.Media = dataStart(1), nil, scheduledSample(), inlineTrajectory(t).Media
	e.Sigmas, e.Timesteps = []float32{1, 0.75, 0.5, 0.25, 0}, []float32{1000, 750, 500, 250, 0}
	e.Transitions, e.LogProbs = slices.Repeat([]string{"ode"}, 4), make([]*float64, 4)
	x := latents("F32", 4)
	prediction := &schemas.Prediction{Digest: digestOf("clean"), Tensor: &x}
	e.Rolled = &schemas.Rolled{
		Timestep: 1, U: 0.25, A: 0.75, Latents: x, TeacherDigest: digestOf("teacher"), Drift: new(0.125), Forwards: 4,
		Clean: prediction, Biased: prediction,
		ReflexFlow: &schemas.ReflexTerms{ExposureL1: 0.5, WeightMin: 0.5, WeightMax: 1.5, FCLoss: 0.25, ADRLoss: 0.0625},
		Noised:     &e.Media[0], Teacher: &e.Media[0],
	}
	return e
}

func rolledStep() *schemas.Step {
	return &schemas.Step{
		Stage: schemas.StageMain,
		Run:   "run-1", UID: "p17", SampleIndex: 1, Attempt: "a1", StepIndex: 1, NumInferenceSteps: 4,
		Transition: "ode", Sigma: 0.75, SigmaNext: 0.5, Timestep: 750, LogProbKind: "density", ElementCount: 8,
		ScheduleDigest: digestOf("schedule"),
		ScheduledSampling: &schemas.RolledStep{
			Base: 1, Source: 3, From: 3, To: 2, U: 0.75, A: 0.25, UNext: 0.5, ANext: 0.5, Sampler: "unipc", Order: 1, Compat: "exact",
		},
	}
}

func scheduledPlan() *schemas.Plan {
	return &schemas.Plan{
		Run: "run-1", UID: "p17", Lane: "tiny", Seed: 7, TrainStep: 100, MaxStepOffset: 4, Strategy: "uniform", Probability: 0.5, RollSettings: rollSettings(),
		Samples: []schemas.Roll{{Timestep: 1.5, Base: 1, Source: 3, Offset: 3}, {Timestep: 4, Base: 4, Source: 4, Offset: 2, Reason: "clipped"}},
		Metrics: []schemas.Metric{{Name: "scheduled_sampling/probability", Value: 0.5}},
	}
}

func scheduledPrompt() *schemas.Prompt {
	return &schemas.Prompt{
		Prompt: "x", GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{
			Start: &schemas.Start{Data: &schemas.Data{Images: []schemas.DataImage{{Data: []byte("png")}, {Ref: &schemas.Ref{Bucket: "mdr-blobs", Digest: digestOf("image"), Size: 70}}}}},
			ScheduledSampling: &schemas.ScheduledSampling{
				MaxStepOffset: new(int64(10)), Strategy: "biased_late", Probability: new(0.0), TrainStep: new(int64(100)), Timesteps: new(int64(1000)),
				Ramp:          &schemas.ProbabilityRamp{StartStep: new(int64(50)), RampSteps: new(int64(100)), Shape: "cosine", ProbStart: new(0.0), ProbEnd: new(0.5)},
				BaseTimesteps: []float64{600, 623.4}, Sampler: "dpm", Order: new(int64(3)), Compat: "simpletuner", Decode: true, Seed: new(int64(7)),
				ReflexFlow: &schemas.ReflexFlow{Mode: "on", Alpha: new(1.5), Beta1: new(0.0), Beta2: new(0.5), Keep: "tensors"},
			},
		},
	}
}

func scheduledSamples(t testing.TB) []sample {
	t.Helper()
	request := fullRequest(t)
	request.GroupSize, request.SampleIndex, request.Start, request.ScheduledSampling = 2, 1, dataStart(1),
		scheduledSample()
	request.Sigmas, request.Transitions = []float32{1, 0.75, 0.5, 0.25, 0}, slices.Repeat([]string{"ode"}, 4)
	request.ReturnStepIndices = []int64{1, 2, 3}
	request.ScheduleDigest = request.ComputeScheduleDigest()
	still := rolledTrajectory(t)
	still.ScheduledSampling.Roll = schemas.Roll{Timestep: 0, Reason: "masked"}
	still.ScheduledSampling.RollSettings.ReflexFlow, still.ScheduledSampling.RollSettings.Decode = nil, false
	still.Start, still.Steps, still.LatentStepIndices, still.Media = dataStart(4), []schemas.StepRef{}, []int64{}, nil
	still.Rolled = &schemas.Rolled{A: 1, Latents: latents("F32", 4), TeacherDigest: digestOf("teacher")}
	return []sample{
		{"prompt-data-latents", &schemas.Prompt{
			Prompt: "x", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{InitialNoise: "shared", Start: &schemas.Start{Data: &schemas.Data{Latents: states(false)}, Sigma: new(0.75)}},
		}},
		{"prompt-scheduled", scheduledPrompt()},
		{"plan-full", scheduledPlan()},
		{"request-scheduled", request},
		{"step-scheduled", rolledStep()},
		{"trajectory-scheduled", rolledTrajectory(t)},
		{"trajectory-scheduled-still", still},
	}
}

// What a prompt says of data and of scheduled sampling is refused by the name of the field.
func TestPrompt_ScheduledSampling(t *testing.T) {
	type P = schemas.Prompt
	for _, tt := range []struct {
		name   string
		change func(p *P)
		want   string
	}{
		{"no data", func(p *P) { p.Start = nil }, "start.data: null; must be there: the images or latents that are rolled"},
		{"states", func(p *P) { p.Start = &schemas.Start{Latents: states(true)} }, "start.data: null; must be there"},
		{"data of another group", func(p *P) { p.GroupSize = new(int64(3)) }, "start.data.images: 2 items; must be 3, the group_size, or 1 for all"},
		{"images and latents", func(p *P) { p.Start.Data.Latents = states(true) }, "start.data.latents: given; must be absent beside images"},
		{"neither", func(p *P) { p.Start.Data.Images = nil }, "start.data.images: null; must be there, or latents"},
		{"an image twice", func(p *P) { p.Start.Data.Images[1].Data = []byte("png") }, "start.data.images[1].data: beside ref or without it; must be the only one of the two"},
		{"a step", func(p *P) { p.Start.StepIndex = new(int64(1)) }, "start.step_index: given; must be absent beside scheduled_sampling"},
		{"a data without a step", func(p *P) { p.ScheduledSampling = nil }, "start.step_index: null; must be there beside data, or sigma: how noisy the samples begin"},
		{"stop", func(p *P) { p.Stop = &schemas.Stop{} }, "stop: given; must be absent"},
		{"steps", func(p *P) { p.NumInferenceSteps = new(int64(5)) }, "num_inference_steps: given; must be absent"},
		{"a transition", func(p *P) { p.Rollout.SDEType = "cps" }, `rollout.sde_type: "cps"; must be absent`},
		{"bases of another group", func(p *P) { p.ScheduledSampling.BaseTimesteps = []float64{1, 2, 3} }, "scheduled_sampling.base_timesteps: 3 items; must be 2, the group_size, or 1 for all"},
		{"a base below 0", func(p *P) { p.ScheduledSampling.BaseTimesteps = []float64{-1} }, "scheduled_sampling.base_timesteps[0]: -1; must not be negative"},
		{"p above 1", func(p *P) { p.ScheduledSampling.Probability = new(1.5) }, "scheduled_sampling.probability: 1.5; must be between 0 and 1"},
		{"M below 0", func(p *P) { p.ScheduledSampling.MaxStepOffset = new(int64(-1)) }, "scheduled_sampling.max_step_offset: -1; must be between 0 and 999"},
		{"a strategy", func(p *P) { p.ScheduledSampling.Strategy = "early" }, `scheduled_sampling.strategy: "early"; must be one of uniform, biased_early, biased_late`},
		{"a sampler", func(p *P) { p.ScheduledSampling.Sampler = "heun" }, `scheduled_sampling.sampler: "heun"; must be one of euler, dpm, unipc, unip, rk4`},
		{"an order", func(p *P) { p.ScheduledSampling.Order = new(int64(10)) }, "scheduled_sampling.order: 10; must be between 1 and 9"},
		{"a ramp", func(p *P) { p.ScheduledSampling.Ramp.RampSteps = new(int64(-1)) }, "scheduled_sampling.ramp.ramp_steps: -1; must not be negative"},
		{"beta1", func(p *P) { p.ScheduledSampling.ReflexFlow.Beta1 = new(-1.0) }, "scheduled_sampling.reflexflow.beta1: -1; must be between 0 and 1000000"},
		{"timesteps", func(p *P) { p.ScheduledSampling.Timesteps = new(int64(1)) }, "scheduled_sampling.timesteps: 1; must be between 2 and 1000"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := scheduledPrompt()
			if err := p.Validate(); err != nil {
				t.Fatal(err)
			}
			tt.change(p)
			if err := p.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error\n %v\nwant\n %s", err, tt.want)
			}
		})
	}
}

// Noise falls from step to step, but where the public trainer's way lets it rise; a sample has a
// result exactly when it is completed.
func TestScheduledSampling_Events(t *testing.T) {
	step := rolledStep()
	step.ScheduledSampling.UNext = 0.8
	if err := step.Validate(); err == nil || !strings.Contains(err.Error(),
		"scheduled_sampling.u_next: 0.8; must be below u: noise falls") {
		t.Errorf("a step that adds noise: %v", err)
	}
	step.ScheduledSampling.Compat = schemas.CompatSimpleTuner
	if err := step.Validate(); err != nil {
		t.Errorf("in the public trainer's way: %v", err)
	}
	for want, change := range map[string]func(e *schemas.Trajectory){
		"rolled: null; must be there":                          func(e *schemas.Trajectory) { e.Rolled = nil },
		"rolled: present; must be absent":                      func(e *schemas.Trajectory) { e.ScheduledSampling = nil },
		"rolled.clean: null; must be there":                    func(e *schemas.Trajectory) { e.Rolled.Clean = nil },
		"steps: 2 items; must be 1, one per step that runs":    func(e *schemas.Trajectory) { e.ScheduledSampling.Roll.Source = 2 },
		"scheduled_sampling.roll.source: 1; must be between 2": func(e *schemas.Trajectory) { e.ScheduledSampling.Roll.Source = 1 },
		"scheduled_sampling.roll.base: 2; must be the integer": func(e *schemas.Trajectory) { e.ScheduledSampling.Roll.Base = 2 },
		"start.data: null; must be there beside":               func(e *schemas.Trajectory) { e.Start = nil },
	} {
		e := rolledTrajectory(t)
		if err := e.Validate(); err != nil {
			t.Fatal(err)
		}
		if change(e); e.Validate() == nil || !strings.Contains(e.Validate().Error(), want) {
			t.Errorf("error\n %v\nwant\n %s", e.Validate(), want)
		}
	}
}
