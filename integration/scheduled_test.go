package integration_test

import (
	"bytes"
	"image"
	"image/color"
	"image/png"
	"testing"

	"github.com/meander-rl/meander/schemas"
	proof "github.com/meander-rl/meander/services/verify"
)

// paint is a image as a PNG.
func paint(t *testing.T, width, height, shade int) []byte {
	t.Helper()
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			img.SetNRGBA(x, y, color.NRGBA{R: uint8(shade), G: uint8(255 * x / width), B: uint8(255 * y / height), A: 255})
		}
	}
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// rolled asks for samples of scheduled sampling and returns their trajectories and their plan.
func (w *world) rolled(t *testing.T, run schemas.Run, p *schemas.Prompt) ([]*schemas.Trajectory, *schemas.Plan) {
	t.Helper()
	if _, err := w.client.Publish(t.Context(), run, p); err != nil {
		t.Fatal(err)
	}
	w.advantages(t, run, 1)
	var out []*schemas.Trajectory
	for i := range *p.GroupSize {
		tr, err := w.client.Trajectory(t.Context(), run, p.UID, i)
		if err != nil {
			t.Fatal(err)
		}
		if tr.StopReason != schemas.StopCompleted {
			t.Fatalf("sample %d: %s: %s", i, tr.StopReason, tr.Error)
		}
		out = append(out, tr)
	}
	m, err := w.Bus.Last(t.Context(), schemas.StreamGroups, schemas.PlanSubject(run, p.UID))
	if err != nil {
		t.Fatal(err)
	}
	plan := &schemas.Plan{}
	if err := schemas.DecodeValid(m.Data, plan); err != nil {
		t.Fatal(err)
	}
	return out, plan
}

// Samples of scheduled sampling go through the real pipeline, on both models: the plan is stored,
// each sample rolls as it says, and verify proves it.
func TestScheduled(t *testing.T) {
	t.Parallel()
	for name, model := range map[string]string{"signs": signs(t), "synthetic": "synthetic"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := start(t, func(c *config) { c.sampler.Model = model })
			data := &schemas.Data{}
			for i := range 4 {
				data.Images = append(data.Images, schemas.DataImage{Data: paint(t, 64, 64, 60*i)})
			}
			got, plan := w.rolled(t, "r", &schemas.Prompt{
				UID: "u", Prompt: `a red sign that says "OPEN"`, Seed: new(int64(3)), GroupSize: new(int64(4)), Start: &schemas.Start{Data: data},
				ScheduledSampling: &schemas.ScheduledSampling{
					MaxStepOffset: new(int64(10)), Probability: new(1.0), Timesteps: new(int64(50)), BaseTimesteps: []float64{20.5, 49, 0, 7}, Decode: true,
				},
			})
			for i, tr := range got {
				roll := plan.Samples[i]
				t.Logf("sample %d: %+v, %d steps, %d forwards, drift %v, %+v", i, roll, len(tr.Steps), tr.Rolled.Forwards, *tr.Rolled.Drift, *tr.Rolled.ReflexFlow)
				if int64(len(tr.Steps)) != roll.Source-roll.Base {
					t.Errorf("sample %d: %d steps, want %d", i, len(tr.Steps), roll.Source-roll.Base)
				}
			}
			report, err := proof.Run(t.Context(), w.Bus, "r", proof.Options{Model: model})
			if err != nil {
				t.Fatal(err)
			}
			if want := 3*1 + 4 + 2 + 9 + 10; !report.OK(0) || report.Rolled != want { // states before and after each step, and the results
				t.Errorf("%+v, want %d states", report, want)
			}
		})
	}
}
