package intake

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
)

func image(s schemas.ImageSettings) schemas.Prompt { return schemas.Prompt{ImageSettings: s} }

// states are of n samples of qwen's default size, as a blob.
func states(n int64) *schemas.Tensor {
	return &schemas.Tensor{
		DType: "F32", Shape: []int64{n, 32 * 32, 64},
		Ref: &schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("ab", 32), Size: 4 * n * 32 * 32 * 64},
	}
}

func from(step int64) *schemas.Start {
	return &schemas.Start{Latents: states(8), StepIndex: &step}
}

func until(step int64) *schemas.Stop { return &schemas.Stop{StepIndex: &step} }

// A segment is of the whole schedule: sigmas, transitions, seeds and schedule digest are those
// of the prompt without it. What is kept and what is trained is that of the steps that run.
func TestResolve_Segment(t *testing.T) {
	whole := resolved(t, &schemas.Prompt{UID: "u", Prompt: "a"})[3]
	list := schemas.Rollout{SDEStepIndices: []int64{2, 5}}
	for _, c := range []struct {
		name       string
		prompt     schemas.Prompt
		begin, end int64
		sde, kept  []int64
	}{
		{
			"from x_T", image(schemas.ImageSettings{Start: &schemas.Start{Latents: states(1)}}), 0, 10,
			[]int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
			[]int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
		},
		{"from the middle", image(schemas.ImageSettings{Start: from(7)}), 7, 10, []int64{7, 8, 9}, []int64{7, 8, 9, 10}},
		{"to the middle", image(schemas.ImageSettings{Stop: until(2)}), 0, 2, []int64{0, 1}, []int64{0, 1, 2}},
		{"a part", image(schemas.ImageSettings{Start: from(4), Stop: until(6)}), 4, 6, []int64{4, 5}, []int64{4, 5, 6}},
		{
			"to the end, said", image(schemas.ImageSettings{Start: from(7), Stop: until(10)}), 7, 10,
			[]int64{7, 8, 9},
			[]int64{7, 8, 9, 10},
		},
		{"by sigma", schemas.Prompt{
			ImageSettings: schemas.ImageSettings{
				Start: &schemas.Start{Latents: states(8), Sigma: new(float64(whole.Sigmas[4]))},
				Stop:  &schemas.Stop{Sigma: new(float64(whole.Sigmas[6]))},
			},
		}, 4, 6, []int64{4, 5}, []int64{4, 5, 6}},
		{
			"by sigma to the end", image(schemas.ImageSettings{Stop: &schemas.Stop{Sigma: new(0.0)}}), 0, 10,
			[]int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
			[]int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
		},
		{"chosen steps", image(schemas.ImageSettings{Start: from(3), Rollout: list}), 3, 10, []int64{5}, []int64{5, 6}},
		{
			"chosen steps before the stop", image(schemas.ImageSettings{Stop: until(5), Rollout: list}), 0, 5,
			[]int64{2},
			[]int64{2, 3, 5},
		},
		{"chosen steps at the stop", image(schemas.ImageSettings{Stop: until(3), Rollout: list}), 0, 3, []int64{2}, []int64{2, 3}},
		{
			"chosen steps elsewhere", image(schemas.ImageSettings{Start: from(6), Stop: until(8), Rollout: list}), 6, 8,
			[]int64{},
			[]int64{6, 7, 8},
		},
		{
			"kept as asked", schemas.Prompt{
				ImageSettings: schemas.ImageSettings{Start: from(6), Rollout: schemas.Rollout{ReturnStepIndices: []int64{8, 6}}},
			}, 6, 10, []int64{6, 7, 8, 9}, []int64{6, 8},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := c.prompt
			p.UID, p.Prompt = "u", "a"
			part := resolved(t, &p)[3]
			p.Start, p.Stop = nil, nil
			p.Rollout.ReturnStepIndices = nil
			whole := resolved(t, &p)[3]
			if !slices.Equal(part.Sigmas, whole.Sigmas) || !slices.Equal(part.Transitions, whole.Transitions) ||
				part.SampleSeed != whole.SampleSeed || part.ScheduleDigest != whole.ScheduleDigest {
				t.Errorf("the segment has another schedule or seed: %+v, whole %+v", part, whole)
			}
			if begin, end := part.Segment(); begin != c.begin || end != c.end {
				t.Errorf("runs [%d, %d), want [%d, %d)", begin, end, c.begin, c.end)
			}
			if got := part.StochasticSteps(); !slices.Equal(got, c.sde) {
				t.Errorf("stochastic steps %v, want %v", got, c.sde)
			}
			if !slices.Equal(part.ReturnStepIndices, c.kept) {
				t.Errorf("kept latents %v, want %v", part.ReturnStepIndices, c.kept)
			}
			if err := part.Validate(); err != nil {
				t.Error(err)
			}
			if c.end == 10 && part.Stop != nil {
				t.Errorf("stop %+v of a sample that runs to the end", part.Stop)
			}
		})
	}
}

func TestResolve_SegmentRefused(t *testing.T) {
	sigma := resolved(t, &schemas.Prompt{UID: "u", Prompt: "a"})[0].Sigmas[3]
	for _, c := range []struct {
		name   string
		prompt schemas.Prompt
		want   string
	}{
		{
			"start beyond the model's steps", image(schemas.ImageSettings{Start: from(10)}),
			"start.step_index: 10; must be between 0 and 9",
		},
		{
			"stop beyond the model's steps", image(schemas.ImageSettings{Stop: until(11)}),
			"stop.step_index: 11; must be between 1 and 10",
		},
		{
			"a sigma of no step", image(schemas.ImageSettings{Stop: &schemas.Stop{Sigma: new(0.75)}}),
			fmt.Sprintf("stop.sigma: 0.75; must be one of the schedule, to the bit of a float32, such as %v of step 3",
				sigma),
		},
		{
			"start at sigma 0",
			image(schemas.ImageSettings{Start: &schemas.Start{Latents: states(8), Sigma: new(0.0)}}),
			"start.step_index: 10; must be between 0 and 9",
		},
		{
			"stop before the start",
			image(schemas.ImageSettings{Start: from(5), Stop: &schemas.Stop{Sigma: new(float64(sigma))}}),
			"stop.step_index: 3; must be between 6 and 10",
		},
		{
			"states of another group", image(schemas.ImageSettings{Start: &schemas.Start{Latents: states(7)}}),
			"start.latents.shape: [7 1024 64]; must be [8 1024 64]: samples (or 1 for all), tokens, channels",
		},
		{
			"states of another size", image(schemas.ImageSettings{Start: from(5), Height: new(int64(256))}),
			"start.latents.shape: [8 1024 64]; must be [8 512 64]",
		},
		{
			"a state before", schemas.Prompt{
				ImageSettings: schemas.ImageSettings{Start: from(5), Rollout: schemas.Rollout{ReturnStepIndices: []int64{6, 4}}},
			}, "rollout.return_step_indices[1]: 4; must be between 5 and 10, the states of the steps that run",
		},
		{
			"a state after",
			image(schemas.ImageSettings{Stop: until(5), Rollout: schemas.Rollout{ReturnStepIndices: []int64{6}}}),
			"rollout.return_step_indices[0]: 6; must be between 0 and 5",
		},
		{
			"checkpoints of a solver's memory",
			schemas.Prompt{
				ImageSettings: schemas.ImageSettings{
					Start: from(5), Rollout: schemas.Rollout{
						SDEType: "ode", Solver: "unipc", CheckpointEvery: new(int64(2)),
					},
				},
			},
			"start.step_index: 5; must be 0",
		},
		{
			"checkpoints of a whole solver's memory",
			image(schemas.ImageSettings{Rollout: schemas.Rollout{
				SDEType: "ode", Solver: "unipc", CheckpointEvery: new(int64(2)),
			}}),
			"rollout.checkpoint_every: 2; must be absent, or a solver without memory",
		},
		{"a solver's memory", schemas.Prompt{
			ImageSettings: schemas.ImageSettings{Start: from(5), Rollout: schemas.Rollout{SDEStepIndices: []int64{2}, Solver: "unipc"}},
		}, "start.step_index: 5; must be 3, or a solver without memory: unipc looks back on the ode steps 3 to 4"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.prompt.UID, c.prompt.Prompt = "u", "a"
			if _, err := Resolve("run", &c.prompt, qwen(),
				Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}}); err == nil ||
				!strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// Checkpoints are states that are not kept, of the steps that run, and change nothing else.
func TestResolve_Checkpoints(t *testing.T) {
	for name, c := range map[string]struct {
		prompt schemas.Prompt
		every  int64
		want   []int64
	}{
		"all are kept":  {schemas.Prompt{}, 1, []int64{}},
		"some are kept": {image(schemas.ImageSettings{Rollout: schemas.Rollout{SDEStepIndices: []int64{1, 4}}}), 3, []int64{8}},
		"none is kept":  {image(schemas.ImageSettings{Rollout: schemas.Rollout{ReturnStepIndices: []int64{}}}), 4, []int64{4, 8}},
		"a part": {schemas.Prompt{
			ImageSettings: schemas.ImageSettings{Start: from(3), Stop: until(9), Rollout: schemas.Rollout{ReturnStepIndices: []int64{4}}},
		}, 2, []int64{6, 8}},
		"evaluated, to T": {
			schemas.Prompt{Validation: true, ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{ReturnStepIndices: []int64{10}}}}, 5, []int64{5},
		},
		"never so far": {image(schemas.ImageSettings{Rollout: schemas.Rollout{ReturnStepIndices: []int64{10}}}), 1000, []int64{}},
	} {
		t.Run(name, func(t *testing.T) {
			p := c.prompt
			p.UID, p.Prompt = "u", "a"
			without := resolved(t, &p)[3]
			p.Rollout.CheckpointEvery = &c.every
			with := *resolved(t, &p)[3]
			if !slices.Equal(with.CheckpointStepIndices, c.want) {
				t.Errorf("got %v, want %v", with.CheckpointStepIndices, c.want)
			}
			with.CheckpointStepIndices = nil
			if err := without.SameSample(&with); err != nil {
				t.Errorf("beside the checkpoints: %v", err)
			}
		})
	}
}

// Advantages are for the stochastic steps that run, not for those of the schedule.
func TestResolve_SegmentTrains(t *testing.T) {
	p := schemas.Prompt{
		UID: "u", Prompt: "a",
		ImageSettings: schemas.ImageSettings{Start: from(4), Stop: until(6), Rollout: schemas.Rollout{SDEStepIndices: []int64{2, 5}}},
		Advantage:     schemas.AdvantageSpec{Estimator: "reinforce_plus_plus", Gamma: new(0.9)},
		Batch:         &schemas.BatchSpec{ID: "b", Groups: 1},
	}
	resolved(t, &p)
	p.Start, p.Stop = from(6), until(8)
	_, err := Resolve("run", &p, qwen(), Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
	if err == nil || !strings.Contains(err.Error(), "this rollout has no stochastic step") {
		t.Errorf("discounted over no step: %v", err)
	}
}

// Before a pipeline is tested its tokens are a guess: states of another shape are not refused for it, and are after.
func TestResolve_StatesOfAPipeline(t *testing.T) {
	for access, want := range map[string]string{"": "", model.AccessExact: "start.latents.shape: [8 1024 64]; must " +
		"be [8 512 64]"} {
		p := schemas.Prompt{Prompt: "p", ImageSettings: schemas.ImageSettings{
			Conditions: []schemas.Condition{given("image", pngOf(t, 8, 8))},
			Start:      &schemas.Start{Latents: states(8)}, Height: new(int64(256)),
		}}
		p.UID = "u"
		_, err := Resolve("run", &p, editor(t, access), Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
		if got := fmt.Sprint(err); want == "" && strings.Contains(got, "latents.shape") ||
			!strings.Contains(got, want) {
			t.Errorf("access %q: %v; want %q", access, err, want)
		}
	}
}
