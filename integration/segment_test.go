package integration_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	proof "github.com/meander-rl/meander/services/verify"
)

// segmentSamples is the group of each rollout here, segmentSteps its T.
const segmentSamples, segmentSteps = 2, 6

type segmentCase struct {
	name    string
	rollout schemas.Rollout
	cuts    []int64 // the steps that a rollout can be entered at
}

func segmentCases() []segmentCase {
	some := []int64{1, 3} // ode elsewhere: dpm and unipc cannot be entered at 5, where they look back on step 4
	anywhere := []int64{1, 2, 3, 4, 5}
	return []segmentCase{
		{"sde", schemas.Rollout{}, anywhere},
		{"dance_sde", schemas.Rollout{SDEType: "dance_sde", LogProbKind: "scaled"}, anywhere},
		{"cps", schemas.Rollout{SDEType: "cps", LogProbKind: "squared"}, anywhere},
		{"ode", schemas.Rollout{SDEType: "ode"}, anywhere},
		{"half", schemas.Rollout{SDEStepIndices: some, LatentsDType: "F16"}, anywhere},
		{"heun", schemas.Rollout{SDEStepIndices: some, Solver: "heun"}, anywhere},
		{"rk4", schemas.Rollout{SDEStepIndices: some, Solver: "rk4"}, anywhere},
		{"dpm", schemas.Rollout{SDEStepIndices: some, Solver: "dpm"}, anywhere[:4]},
		{"unipc", schemas.Rollout{SDEStepIndices: some, Solver: "unipc"}, anywhere[:4]},
	}
}

// part asks for the steps [begin, end) of a case in a run, and keeps every state.
func (c segmentCase) part(t *testing.T, w *world, run schemas.Run, begin, end int64, states *schemas.Tensor) {
	t.Helper()
	p := &schemas.Prompt{
		UID: schemas.UID(c.name), Prompt: `a red sign that says "OPEN"`, Seed: new(int64(11)),
		GroupSize:     new(int64(segmentSamples)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(segmentSteps)), TrueCFGScale: new(2.0), Rollout: c.rollout},
		Reward:        []schemas.RewardSpec{{Name: "jpeg_compressibility"}},
	}
	p.Rollout.Debug = []string{"noise", "mean", "model_output"}
	for i := begin; i <= end; i++ {
		p.Rollout.ReturnStepIndices = append(p.Rollout.ReturnStepIndices, i)
	}
	if states != nil {
		p.Start = &schemas.Start{Latents: states, StepIndex: &begin}
	}
	if end < segmentSteps {
		p.Stop = &schemas.Stop{StepIndex: &end}
	}
	receipt, err := w.client.Publish(t.Context(), run, p)
	if err != nil {
		t.Fatalf("%s, steps %d to %d: %v", c.name, begin, end, err)
	}
	if stop := max(0, end%segmentSteps); receipt.StartStepIndex != begin || receipt.StopStepIndex != stop {
		t.Errorf("%s: receipt of the steps %d to %d, want %d to %d", c.name, receipt.StartStepIndex,
			receipt.StopStepIndex,
			begin, stop)
	}
}

// trajectory is that of one sample of a case.
func (c segmentCase) trajectory(t *testing.T, w *world, run schemas.Run, sample int64) *schemas.Trajectory {
	t.Helper()
	tr, err := w.client.Trajectory(t.Context(), run, schemas.UID(c.name), sample)
	if err != nil {
		t.Fatal(err)
	}
	if tr.StopReason != schemas.StopCompleted {
		t.Fatalf("%s of run %s: %s: %s", c.name, run, tr.StopReason, tr.Error)
	}
	return tr
}

// states are those before a step that the samples of a run stored, as a prompt gives them.
func (c segmentCase) states(t *testing.T, w *world, run schemas.Run, index int64) *schemas.Tensor {
	t.Helper()
	var all []float32
	var shape []int64
	for sample := range int64(segmentSamples) {
		tr := c.trajectory(t, w, run, sample)
		latents, err := w.client.Latents(t.Context(), tr)
		if err != nil {
			t.Fatal(err)
		}
		all, shape = append(all, latents[index]...), tr.LatentsShape
	}
	ref, err := w.PutBlob(t.Context(), tensor.F32.AppendFloats(nil, all))
	if err != nil {
		t.Fatal(err)
	}
	return &schemas.Tensor{DType: "F32", Shape: append([]int64{segmentSamples}, shape...), Ref: &ref}
}

// equal says that a run has the bits of the steps [begin, end) of the run whole.
func (c segmentCase) equal(t *testing.T, w *world, run schemas.Run, begin, end int64) {
	t.Helper()
	for sample := range int64(segmentSamples) {
		whole, part := c.trajectory(t, w, "whole", sample), c.trajectory(t, w, run, sample)
		a, err := w.client.Steps(t.Context(), whole)
		if err != nil {
			t.Fatal(err)
		}
		b, err := w.client.Steps(t.Context(), part)
		if err != nil {
			t.Fatal(err)
		}
		if part.ScheduleDigest != whole.ScheduleDigest || part.SampleSeed != whole.SampleSeed ||
			int64(len(b)) != end-begin {
			t.Fatalf("%s of run %s: %d steps, schedule or seed not those of the whole", c.name, run, len(b))
		}
		if last := b[len(b)-1]; end < segmentSteps {
			// The whole rollout keeps this state with the step that it goes on with.
			kept := last.Latents[len(last.Latents)-1]
			if !reflect.DeepEqual(kept, a[end].Latents[0]) {
				t.Errorf("%s of run %s: stops with another state %d than the whole has there", c.name, run, kept.Index)
			}
			last.Latents = last.Latents[:len(last.Latents)-1]
		}
		for i := range b {
			got, err1 := schemas.ContentDigest(b[i])
			want, err2 := schemas.ContentDigest(a[begin+int64(i)])
			if err1 != nil || err2 != nil || got != want {
				t.Errorf("%s of run %s: step %d has another content than in the whole rollout (%v, %v)", c.name, run,
					b[i].StepIndex, err1, err2)
			}
		}
		for i, p := range part.LogProbs {
			ran := begin <= int64(i) && int64(i) < end
			if !ran && p != nil || ran && !reflect.DeepEqual(p, whole.LogProbs[i]) {
				t.Errorf("%s of run %s: log-prob %d differs", c.name, run, i)
			}
		}
		switch {
		case end < segmentSteps && len(part.Media) > 0:
			t.Errorf("%s of run %s: an image of noise", c.name, run)
		case end == segmentSteps && (len(part.Media) == 0 ||
			part.Medium(schemas.KindImage).Digest != whole.Medium(schemas.KindImage).Digest):
			t.Errorf("%s of run %s: another image than the whole rollout's", c.name, run)
		}
	}
}

// Any part of any rollout, asked for by itself from stored states, has the bits of those steps
// of the whole: contents of step events, log-probs, latents, image. Two halves, the second
// from where the first stopped, are the whole. Through the real pipeline, on both models, with
// every transition and solver; verify proves the parts as it does the whole.
func TestSegments(t *testing.T) {
	t.Parallel()
	for name, model := range map[string]string{"signs": signs(t), "synthetic": "synthetic"} {
		t.Run(name, func(t *testing.T) {
			if name == "signs" {
				sequential(t) // the other model takes the same way through the pipeline
			}
			t.Parallel()
			w := start(t, func(c *config) { c.sampler.Model = model })
			groups := map[string]int{} // of each run
			ask := func(c segmentCase, run schemas.Run, begin, end int64, states *schemas.Tensor) {
				c.part(t, w, run, begin, end, states)
				groups[string(run)]++
			}
			await := func() {
				for run, n := range groups {
					w.advantages(t, schemas.Run(run), n)
				}
			}
			cases := segmentCases()
			if name == "signs" { // steps, transitions and solvers do not depend on the model
				cases = []segmentCase{cases[0], cases[4], cases[8]}
			}
			for _, c := range cases {
				ask(c, "whole", 0, segmentSteps, nil)
				for _, cut := range c.cuts {
					ask(c, schemas.Run(fmt.Sprint("to", cut)), 0, cut, nil)
				}
			}
			await()
			for _, c := range cases {
				for _, cut := range c.cuts {
					ask(c, schemas.Run(fmt.Sprint("from", cut)), cut, segmentSteps,
						c.states(t, w, schemas.Run(fmt.Sprint("to", cut)), cut))
				}
				last := slices.Max(c.cuts)
				ask(c, "between", c.cuts[1], last, c.states(t, w, "whole", c.cuts[1]))
			}
			await()
			for _, c := range cases {
				for _, cut := range c.cuts {
					c.equal(t, w, schemas.Run(fmt.Sprint("to", cut)), 0, cut)
					c.equal(t, w, schemas.Run(fmt.Sprint("from", cut)), cut, segmentSteps)
				}
				c.equal(t, w, "between", c.cuts[1], slices.Max(c.cuts))
			}
			for _, run := range []string{"whole", "to3", "from3", "between"} {
				report, err := proof.Run(t.Context(), w.Bus, schemas.Run(run), proof.Options{Model: []string{model}})
				if err != nil {
					t.Fatal(err)
				}
				if !report.OK(0) || report.StepsSkipped > 0 {
					t.Errorf("run %s: %+v", run, report)
				}
			}
		})
	}
}

// The example of the guide does what it says: the tail's images are those of the whole, and its
// log-probs.
func TestExamples_Segment(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	example := regexp.MustCompile(`(?m)^bin/meander (run .*-latents whole\.safetensors [^#\n]*|verify )`)
	lines := example.FindAllStringSubmatch(read(t, "deploy/guide/from-the-middle.md"), -1)
	if len(lines) != 3 {
		t.Fatalf("%d lines of the example, want 3", len(lines))
	}
	for _, m := range lines {
		c := exec.Command("sh", "-c", program(t, "meander")+" "+m[1]+" --model "+signs(t))
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("meander %s: %v\n%s", m[1], err, out)
		}
	}
	images, err := filepath.Glob(filepath.Join(dir, "meander-out/whole/*.png"))
	if err != nil || len(images) != 5 { // with the sheet
		t.Fatalf("%d images, %v", len(images), err)
	}
	for _, image := range images {
		whole, err1 := os.ReadFile(image)
		tail, err2 := os.ReadFile(filepath.Join(dir, "meander-out/tail", filepath.Base(image)))
		if err1 != nil || err2 != nil || !bytes.Equal(whole, tail) {
			t.Errorf("%s is another image in the tail (%v, %v)", filepath.Base(image), err1, err2)
		}
	}
	logProbs := func(run schemas.Run) (all [][]*float64) {
		data, err := os.ReadFile(filepath.Join(dir, "meander-out", string(run), "results.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		var group struct {
			Members []struct {
				LogProbs []*float64 `json:"log_probs"`
			}
		}
		if err := json.NewDecoder(bytes.NewReader(data)).Decode(&group); err != nil {
			t.Fatal(err)
		}
		for _, m := range group.Members {
			all = append(all, m.LogProbs)
		}
		return all
	}
	whole, tail := logProbs("whole"), logProbs("tail")
	for i := range whole {
		if !reflect.DeepEqual(tail[i][5:], whole[i][5:]) || slices.ContainsFunc(tail[i][:5],
			func(p *float64) bool { return p != nil }) {
			t.Errorf("sample %d: log-probs of the tail %v, of the whole %v", i, tail[i], whole[i])
		}
	}
}
