package bus_test

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// rollout stores a trajectory of three steps, the last of them of another attempt, which kept
// the states 0, 2 and 3.
func rollout(t *testing.T, e *env) (*schemas.Trajectory, []*schemas.Step) {
	t.Helper()
	p := e.NewPublisher(8, 8<<20)
	defer p.Close()
	tr := trajectory("u1", 0)
	tr.StopReason, tr.Error, tr.Attempt = schemas.StopCompleted, "", "a2"
	tr.Transitions, tr.LatentStepIndices = []string{"ode", "ode", "ode"}, []int64{0, 2, 3}
	tr.LatentsDType, tr.LatentsShape, tr.ScheduleDigest = "U8", []int64{8, 1}, step("u1", 0, "a1", 0, 8).ScheduleDigest
	var steps []*schemas.Step
	for i, attempt := range []string{"a1", "a1", "a2"} {
		s := step("u1", 0, attempt, int64(i), 8)
		switch i {
		case 1:
			s.Latents = nil
		case 2:
			s.Latents = append(s.Latents, schemas.IndexedTensor{
				Index: 3, Tensor: step("u1", 0, attempt, 3, 8).Latents[0].Tensor,
			})
		}
		f, err := p.PublishStep(t.Context(), s, nil)
		if err != nil {
			t.Fatal(err)
		}
		ack, err := f.Wait(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ref := schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest}
		if attempt != tr.Attempt {
			ref.Attempt = attempt
		}
		tr.Steps, steps = append(tr.Steps, ref), append(steps, s)
	}
	return tr, steps
}

func TestBus_LoadState(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		tr, steps := rollout(t, e)
		if got := tr.Attempts(); !slices.Equal(got, []string{"a1", "a2"}) {
			t.Errorf("attempts %v", got)
		}
		if fault, err := e.CheckSteps(t.Context(), tr); fault != nil || err != nil {
			t.Errorf("steps of two attempts: %v, %v", fault, err)
		}
		for index, of := range map[int64]*schemas.Step{0: steps[0], 2: steps[2], 3: steps[2]} {
			got, err := e.LoadState(t.Context(), tr, index)
			if err != nil || !bytes.Equal(got.Data, of.State(index).Data) {
				t.Errorf("state %d: got %+v, %v", index, got, err)
			}
		}
		for _, index := range []int64{-1, 1, 4} {
			if _, err := e.LoadState(t.Context(), tr, index); !errors.Is(err, bus.ErrNotFound) {
				t.Errorf("state %d: %v, want ErrNotFound", index, err)
			}
		}
		for name, change := range map[string]func(tr *schemas.Trajectory){
			"digest":        func(tr *schemas.Trajectory) { tr.Steps[2].Digest = digest },
			"another step":  func(tr *schemas.Trajectory) { tr.Steps[2] = tr.Steps[0] },
			"other attempt": func(tr *schemas.Trajectory) { tr.Steps[2].Attempt = "a1" },
			"sample":        func(tr *schemas.Trajectory) { tr.SampleIndex = 1 },
			"shape":         func(tr *schemas.Trajectory) { tr.LatentsShape = []int64{4, 2} },
			"dtype":         func(tr *schemas.Trajectory) { tr.LatentsDType = "F32" },
			"schedule":      func(tr *schemas.Trajectory) { tr.ScheduleDigest = tr.Steps[0].Digest },
		} {
			wrong := *tr
			wrong.Steps = slices.Clone(tr.Steps)
			change(&wrong)
			if _, err := e.LoadState(t.Context(), &wrong, 2); !errors.Is(err, bus.ErrCorrupt) {
				t.Errorf("%s: %v, want ErrCorrupt", name, err)
			}
		}
		wrong := *tr
		wrong.Steps = slices.Clone(tr.Steps)
		wrong.Steps[1].Attempt = ""
		if fault, err := e.CheckSteps(t.Context(), &wrong); fault == nil || err != nil {
			t.Errorf("a step of another attempt than is stored: %v, %v", fault, err)
		}
		if err := e.Delete(t.Context(), schemas.StreamSteps, tr.Steps[2].Seq); err != nil {
			t.Fatal(err)
		}
		if _, err := e.LoadState(t.Context(), tr, 2); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("deleted: %v, want ErrNotFound", err)
		}
	})
}
