package schemas_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

func TestPrompt_Validate_segment(t *testing.T) {
	type P = schemas.Prompt
	at := func(p *P, start, stop int64) { p.Start.StepIndex, p.Stop = &start, &schemas.Stop{StepIndex: &stop} }
	valid := func() *P {
		return &P{
			Prompt: "x", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{
				NumInferenceSteps: new(int64(4)),
				Start:             &schemas.Start{Latents: states(true), StepIndex: new(int64(1))},
			},
		}
	}
	faults(t, valid, []fault[P]{
		{"from x_T", func(p *P) { p.Start.StepIndex = nil }, ""},
		{"the last step", func(p *P) { at(p, 3, 4) }, ""},
		{"a prefix", func(p *P) { p.Start, p.Stop = nil, &schemas.Stop{StepIndex: new(int64(1))} }, ""},
		{"to the end", func(p *P) { p.Stop = &schemas.Stop{} }, ""},
		{"by sigma", func(p *P) { p.Start.StepIndex, p.Start.Sigma, p.Stop = nil, new(0.5), &schemas.Stop{Sigma: new(0.0)} }, ""},
		{"unknown steps", func(p *P) { p.NumInferenceSteps = nil; at(p, 998, 1000) }, ""},
		{"of unknown group size", func(p *P) { p.GroupSize = nil }, ""},
		{"one state for all", func(p *P) {
			p.Start.Latents.Shape, p.Start.Latents.Data = []int64{1, 2, 4}, p.Start.Latents.Data[:32]
		}, ""},

		{"start after the end", func(p *P) { p.Start.StepIndex = new(int64(4)) }, "start.step_index: 4; must be between 0 and 3"},
		{"negative start", func(p *P) { p.Start.StepIndex = new(int64(-1)) }, "start.step_index: -1; must be between 0 and 999"},
		{"start beyond any schedule", func(p *P) { p.NumInferenceSteps, p.Start.StepIndex = nil, new(int64(1000)) }, "start.step_index: 1000; must be between 0 and 999"},
		{"stop at the start", func(p *P) { at(p, 2, 2) }, "stop.step_index: 2; must be between 3 and 4"},
		{"stop before the start", func(p *P) { at(p, 2, 0) }, "stop.step_index: 0; must be between 1 and 1000"},
		{"stop after the end", func(p *P) { at(p, 0, 5) }, "stop.step_index: 5; must be between 1 and 4"},
		{"two starts", func(p *P) { p.Start.Sigma = new(0.5) }, "start.sigma: 0.5; must be absent beside step_index"},
		{"two stops", func(p *P) { at(p, 1, 2); p.Stop.Sigma = new(0.5) }, "stop.sigma: 0.5; must be absent beside step_index"},
		{"sigma of no schedule", func(p *P) { p.Start.StepIndex, p.Start.Sigma = nil, new(1.5) }, "start.sigma: 1.5; must be above 0 and at most 1"},
		{"negative sigma", func(p *P) { p.Stop = &schemas.Stop{Sigma: new(-0.5)} }, "stop.sigma: -0.5; must be between 0 and 1"},
		{"without states", func(p *P) { p.Start.Latents = nil }, "start.latents: null; must be the states to begin with, [n, S, C] or [1, S, C], or branch one that a sample stored, or data what noise is added to"},
		{"drawn noise too", func(p *P) { p.InitialNoise = "shared" }, `initial_noise: "shared"; must be absent beside start, which gives the state to begin with`},
		{"states of another kind", func(p *P) {
			p.Start.Latents = &schemas.Tensor{DType: "U8", Shape: []int64{1, 2}, Data: []byte{1, 2}}
		}, "start.latents.dtype: \"U8\"; must be one of F32, F16, BF16\nstart.latents.shape: [1 2]; must be " +
			"[samples, tokens, channels]"},
		{"states of another group", func(p *P) { p.GroupSize = new(int64(3)) }, "start.latents.shape: [2 2 4]; must begin with 3, the group_size, or 1 for all"},
		{"states that are too short", func(p *P) { p.Start.Latents.Data = p.Start.Latents.Data[:60] }, "start.latents.data: 60 bytes; must be 64, the size of F32 [2 2 4]"},
		{"a branch", func(p *P) { p.Start = &schemas.Start{Branch: &schemas.Branch{UID: "u", StepIndex: 3}} }, ""},
		{"a branch after the end", func(p *P) { p.Start = &schemas.Start{Branch: &schemas.Branch{UID: "u", StepIndex: 4}} }, "start.branch.step_index: 4; must be between 0 and 3"},
		{"a branch of nobody", func(p *P) { p.Start = &schemas.Start{Branch: &schemas.Branch{SampleIndex: -1, StepIndex: -1}} }, "start.branch.uid: \"\"; must be 1 to 64 characters of A-Z a-z 0-9 _ -\n" +
			"start.branch.sample_index: -1; must be between 0 and 1023\nstart.branch.step_index: -1; must be between 0 and 999"},
		{"a branch elsewhere", func(p *P) { p.Start.Latents, p.Start.Branch = nil, &schemas.Branch{UID: "u", StepIndex: 3} }, "start.step_index: 1; must be absent beside branch, which says the step"},
		{"a branch and states", func(p *P) { p.Start.StepIndex, p.Start.Branch = nil, &schemas.Branch{UID: "u"} }, "start.branch: given; must be absent beside latents"},
		{"states in parts", func(p *P) {
			p.Start.Latents.Data, p.Start.Latents.Parts = nil, &schemas.Parts{Count: 1, Size: 64, Digest: digestOf("x")}
		}, "start.latents.parts: given; must be data or ref: only steps have parts"},
	})
}

func TestRequest_Validate_segment(t *testing.T) {
	type R = schemas.Request
	faults(t, func() *R { return find[R](t, "request-segment") }, []fault[R]{
		{"from the start", func(r *R) { r.Start = nil }, ""},
		{"to the end", func(r *R) { r.Stop, r.ReturnStepIndices = nil, []int64{1, 4} }, ""},
		{"after the end", func(r *R) { r.Start.StepIndex = 4 }, "start.step_index: 4; must be between 0 and 3\nstop.step_index: 3; must be between 5 and 3"},
		{"stop at T", func(r *R) { r.Stop.StepIndex = 4 }, "stop.step_index: 4; must be between 2 and 3"},
		{"nothing runs", func(r *R) { r.Stop.StepIndex = 1 }, "stop.step_index: 1; must be between 2 and 3"},
		{"a state before", func(r *R) { r.ReturnStepIndices = []int64{0, 1} }, "return_step_indices[0]: 0; must be between 1 and 3"},
		{"a state after", func(r *R) { r.ReturnStepIndices = []int64{3, 4} }, "return_step_indices[1]: 4; must be between 1 and 3"},
		{"no states", func(r *R) { r.Start.Latents = &schemas.Tensor{DType: "F32", Shape: []int64{2, 2, 4}} }, "start.latents.data: none; must be exactly one of data, ref and parts"},
	})
}

func TestTrajectory_Validate_segment(t *testing.T) {
	type T = schemas.Trajectory
	faults(t, func() *T { return segmentTrajectory(t) }, []fault[T]{
		{"with its image", func(e *T) { e.Stop.Decode, e.Media = true, inlineTrajectory(t).Media }, ""},
		{"an image of noise", func(e *T) { e.Media = inlineTrajectory(t).Media }, "media: present; must be absent: the sample stops at step 3 with noise in it, and stop.decode is false"},
		{"an image that is missing", func(e *T) { e.Stop.Decode = true }, "media: none; must be present when completed"},
		{"a step too many", func(e *T) { e.Steps = append(e.Steps, e.Steps[0]) }, "steps: 3 items; must be 2, one per step that runs"},
		{"a log-prob before", func(e *T) { e.LogProbs[0] = new(0.5) }, "log_probs[0]: 0.5; must be null on a step that did not run"},
		{"a log-prob after", func(e *T) { e.LogProbs[3] = new(0.5) }, "log_probs[3]: 0.5; must be null on a step that did not run"},
		{"a log-prob that is missing", func(e *T) { e.LogProbs[2] = nil }, `log_probs[2]: null; must be null exactly on ode steps; this one is "cps"`},
		{"latents after", func(e *T) { e.LatentStepIndices = []int64{3, 4} }, "latent_step_indices[1]: 4; must be between 1 and 3"},
		{"failed, without a schedule", func(e *T) {
			*e = T{
				Identity:   schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "u", GroupSize: 2, Lane: "l"},
				Provenance: schemas.Provenance{Attempt: "a"},
				Outcome:    schemas.Outcome{StopReason: "failed", Error: "x"},
				Sampling:   schemas.Sampling{Start: e.Start, Stop: e.Stop}, Group: schemas.Group{Batch: "u"},
			}
		}, ""},
	})
}

// A trajectory that begins or ends elsewhere is no answer, nor one with other states.
func TestRequest_AnsweredBy_segment(t *testing.T) {
	request := func() (*schemas.Request, *schemas.Trajectory) {
		e := segmentTrajectory(t)
		r := find[schemas.Request](t, "request-segment")
		r.Group = e.Group
		return r, e
	}
	r, e := request()
	if err := r.AnsweredBy(e); err != nil {
		t.Fatalf("the trajectory of the request is refused: %v", err)
	}
	for _, c := range []struct {
		name   string
		change func(*schemas.Trajectory)
		want   string
	}{
		{"start", func(e *schemas.Trajectory) { e.Start.StepIndex = 0 }, "start: not that of the request"},
		{"states", func(e *schemas.Trajectory) { e.Start.Latents.Ref.Digest = digestOf("others") }, "start: not that of the request"},
		{"no start", func(e *schemas.Trajectory) { e.Start = nil }, "start: not that of the request"},
		{"stop", func(e *schemas.Trajectory) { e.Stop.StepIndex = 2 }, "stop: not that of the request"},
		{"decoded", func(e *schemas.Trajectory) { e.Stop.Decode = true }, "stop: not that of the request"},
		{"whole", func(e *schemas.Trajectory) { e.Steps = completedTrajectory(t).Steps }, `steps: 4; must be 2, as requested`},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, e := request()
			c.change(e)
			if err := r.AnsweredBy(e); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("AnsweredBy = %v, want %q", err, c.want)
			}
		})
	}
}

// Each part of a segment tells contents apart; the schedule's digest has none of it.
func TestContentDigest_segment(t *testing.T) {
	seen := map[[32]byte]string{}
	for name, change := range map[string]func(*schemas.Trajectory){
		"as it is": func(*schemas.Trajectory) {},
		"start":    func(e *schemas.Trajectory) { e.Start.StepIndex = 2 },
		"states":   func(e *schemas.Trajectory) { e.Start.Latents.Ref.Digest = digestOf("others") },
		"no start": func(e *schemas.Trajectory) { e.Start = nil },
		"stop":     func(e *schemas.Trajectory) { e.Stop.StepIndex = 2 },
		"decode":   func(e *schemas.Trajectory) { e.Stop.Decode = true },
		"no stop":  func(e *schemas.Trajectory) { e.Stop = nil },
	} {
		e := segmentTrajectory(t)
		change(e)
		sum, err := schemas.ContentDigest(e)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := seen[sum]; ok {
			t.Errorf("%q and %q have one content digest", name, other)
		}
		seen[sum] = name
	}
	whole, part := fullRequest(t), fullRequest(t)
	part.Start, part.Stop = segment(1, 3)
	if whole.ComputeScheduleDigest() != part.ComputeScheduleDigest() {
		t.Error("a segment has another schedule digest than its whole")
	}
}

func TestSegment(t *testing.T) {
	start, stop := segment(1, 3)
	for _, c := range []struct {
		start      *schemas.SegmentStart
		stop       *schemas.SegmentStop
		begin, end int64
	}{{nil, nil, 0, 4}, {start, nil, 1, 4}, {nil, stop, 0, 3}, {start, stop, 1, 3}} {
		r := fullRequest(t)
		r.Start, r.Stop = c.start, c.stop
		begin, end := r.Segment()
		e := &schemas.Trajectory{Sampling: schemas.Sampling{Transitions: r.Transitions, Start: c.start, Stop: c.stop}}
		if b, n := e.Segment(); !reflect.DeepEqual([]int64{begin, end, b, n}, []int64{c.begin, c.end, c.begin, c.end}) {
			t.Errorf("request [%d, %d), trajectory [%d, %d), want [%d, %d)", begin, end, b, n, c.begin, c.end)
		}
	}
}
