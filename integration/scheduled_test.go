package integration_test

import (
	"bytes"
	"encoding/json"
	"image"
	"image/color"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
			img.SetNRGBA(x, y, color.NRGBA{
				R: uint8(shade), G: uint8(255 * x / width), B: uint8(255 * y / height), A: 255,
			})
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
				UID: "u", Prompt: `a red sign that says "OPEN"`, Seed: new(int64(3)), GroupSize: new(int64(4)),
				ImageSettings: schemas.ImageSettings{
					Start: &schemas.Start{Data: data},
					ScheduledSampling: &schemas.ScheduledSampling{
						MaxStepOffset: new(int64(10)), Probability: new(1.0), Timesteps: new(int64(50)),
						BaseTimesteps: []float64{20.5, 49, 0, 7}, Decode: true,
					},
				},
			})
			for i, tr := range got {
				roll := plan.Samples[i]
				t.Logf("sample %d: %+v, %d steps, %d forwards, drift %v, %+v", i, roll, len(tr.Steps),
					tr.Rolled.Forwards,
					*tr.Rolled.Drift, *tr.Rolled.ReflexFlow)
				if int64(len(tr.Steps)) != roll.Source-roll.Base {
					t.Errorf("sample %d: %d steps, want %d", i, len(tr.Steps), roll.Source-roll.Base)
				}
			}
			report, err := proof.Run(t.Context(), w.Bus, "r", proof.Options{Model: []string{model}})
			if err != nil {
				t.Fatal(err)
			}
			// states before and after each step, and the results
			if want := 3*1 + 4 + 2 + 9 + 10; !report.OK(0) || report.Rolled != want {
				t.Errorf("%+v, want %d states", report, want)
			}
		})
	}
}

// With probability 0 nothing changes: every sample has the latent of data and noise alone, and is
// verified. What is stored of a sample that rolled cannot be changed unnoticed.
func TestScheduled_Masked(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	prompt := func(p float64) *schemas.Prompt {
		return &schemas.Prompt{
			UID: "u", Prompt: "a red fox", GroupSize: new(int64(3)),
			ImageSettings: schemas.ImageSettings{
				Start: &schemas.Start{Data: &schemas.Data{Images: []schemas.DataImage{{Data: paint(t, 64, 64, 90)}}}},
				ScheduledSampling: &schemas.ScheduledSampling{
					MaxStepOffset: new(int64(10)), Strategy: "biased_late", Probability: &p, BaseTimesteps: []float64{500},
					ReflexFlow: &schemas.ReflexFlow{Keep: "tensors"},
				},
			},
		}
	}
	masked, plan := w.rolled(t, "masked", prompt(0))
	for i, tr := range masked {
		if len(tr.Steps) > 0 || tr.Rolled.Latents.Ref.Digest != tr.Rolled.TeacherDigest || *tr.Rolled.Drift != 0 ||
			tr.Rolled.Clean.Digest != tr.Rolled.Biased.Digest || plan.Samples[i].Reason != "masked" {
			t.Errorf("sample %d: %+v of %+v", i, tr.Rolled, plan.Samples[i])
		}
	}
	rolled, _ := w.rolled(t, "rolled", prompt(1))
	for i, tr := range rolled {
		if len(tr.Steps) == 0 || tr.Rolled.Latents.Ref.Digest == tr.Rolled.TeacherDigest {
			t.Errorf("sample %d: %d steps, latents %.8s", i, len(tr.Steps), tr.Rolled.Latents.Ref.Digest)
		}
	}
	for name, change := range map[string]func(*schemas.Trajectory){
		"drift":  func(e *schemas.Trajectory) { e.Rolled.Drift = new(*e.Rolled.Drift / 2) },
		"biased": func(e *schemas.Trajectory) { e.Rolled.Biased = e.Rolled.Clean },
		"latent": func(e *schemas.Trajectory) { e.Rolled.Latents = rolled[1].Rolled.Latents },
		"plan":   func(e *schemas.Trajectory) { e.ScheduledSampling.PlanDigest = e.ScheduleDigest },
	} {
		forged := new(*rolled[0])
		forged.Rolled, forged.ScheduledSampling = new(*forged.Rolled), new(*forged.ScheduledSampling)
		change(forged)
		if _, err := w.Bus.PurgeSubject(t.Context(), schemas.StreamTrajectories, forged.Subject()); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Bus.Publish(t.Context(), forged); err != nil {
			t.Fatal(err)
		}
		if report, err := proof.Run(t.Context(), w.Bus, "rolled", proof.Options{}); err != nil || report.OK(0) {
			t.Errorf("another %s is not found: %+v, %v", name, report, err)
		}
	}
	if report, err := proof.Run(t.Context(), w.Bus, "masked", proof.Options{}); err != nil || !report.OK(0) ||
		report.Rolled != 3 {
		t.Errorf("%+v, %v", report, err)
	}
}

// The example of the guide does what it says: 16 images of the shipped model are rolled, the sheet
// shows all of them, and verify rolls them again.
func TestExamples_Scheduled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	example := regexp.MustCompile(`(?m)^bin/meander ((?:run -n 16 --out folder|run --start-image folder|scheduled folder) .*)$`)
	lines := example.FindAllStringSubmatch(read(t, "deploy/guide/scheduled-sampling.md"), -1)
	if len(lines) != 3 {
		t.Fatalf("%d lines of the example, want 3", len(lines))
	}
	do := func(line string) {
		t.Helper()
		c := exec.Command("sh", "-c", program(t, "meander")+" "+line)
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("meander %s: %v\n%s", line, err, out)
		}
	}
	for i, m := range lines {
		extra := " --model " + signs(t)
		if i == 2 {
			extra += " --run rolled --out out --seed 1"
		}
		do(regexp.MustCompile(` +#.*`).ReplaceAllString(m[1], "") + extra)
	}
	do("verify --run rolled --model " + signs(t))
	data, err := os.ReadFile(filepath.Join(dir, "out", "results.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var group struct {
		Members []struct {
			Roll *struct {
				Timestep float64  `json:"timestep"`
				Source   int64    `json:"source"`
				Reason   string   `json:"reason"`
				Drift    *float64 `json:"drift"`
			} `json:"scheduled_sampling"`
		} `json:"members"`
	}
	if err := json.NewDecoder(bytes.NewReader(data)).Decode(&group); err != nil {
		t.Fatal(err)
	}
	rolled := 0
	for i, m := range group.Members {
		k := float64(m.Roll.Source) - m.Roll.Timestep
		if m.Roll.Reason == "" && k >= 1 && k <= 10 && *m.Roll.Drift > 0 && *m.Roll.Drift < 1 {
			rolled++
		} else if m.Roll.Reason == "" || k != 0 || *m.Roll.Drift != 0 {
			t.Errorf("sample %d: %+v", i, m.Roll)
		}
	}
	if len(group.Members) != 16 || rolled < 10 {
		t.Errorf("%d of %d samples rolled", rolled, len(group.Members))
	}
	sheets, err := filepath.Glob(filepath.Join(dir, "out", "*-sheet.png"))
	if err != nil || len(sheets) != 1 {
		t.Fatalf("sheets %q, %v", sheets, err)
	}
	f, err := os.Open(sheets[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if c, err := png.DecodeConfig(f); err != nil || c.Width < 5*128 || c.Height < 16*64 {
		t.Errorf("a sheet of %d x %d, %v", c.Width, c.Height, err)
	}
}
