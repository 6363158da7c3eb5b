package integration_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	proof "github.com/meander-rl/meander/services/verify"
)

// treeSteps is T of the trees here, which part in two at three of them: eight leaves.
const treeSteps, treeLeaves = 10, 8

func treePrompt() *schemas.Prompt {
	return &schemas.Prompt{
		UID: "t", Prompt: `a red sign that says "OPEN"`, Seed: new(int64(11)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(treeSteps)),
			Tree: &schemas.Tree{Branches: []schemas.BranchPoint{
				{StepIndex: 3, Width: 2},
				{StepIndex: 5, Width: 2},
				{StepIndex: 7, Width: 2},
			}},
		},
		Reward: []schemas.RewardSpec{{Name: "jpeg_compressibility"}},
	}
}

// A tree of 2 x 2 x 2 has eight leaves with about half of the evaluations of eight samples;
// every step is stored once, a reader finds the whole path of each leaf, verify finds nothing
// to say, and a leaf that is made alone has the same bits at every step. The first leaf is the
// first sample of the group without a tree.
func TestTree(t *testing.T) {
	t.Parallel()
	for name, model := range map[string]string{"signs": signs(t), "synthetic": "synthetic"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := start(t, func(c *config) { c.sampler.Model = model })
			w.publish(t, "tree", treePrompt())
			flat := treePrompt()
			flat.Tree, flat.GroupSize = nil, new(int64(1))
			w.publish(t, "flat", flat)
			for leaf := range int64(treeLeaves) {
				p := treePrompt()
				p.Tree.Leaf = &leaf
				w.publish(t, alone(leaf), p)
			}
			for leaf := range int64(treeLeaves) {
				w.advantages(t, alone(leaf), 1)
			}
			w.advantages(t, "flat", 1)
			group := w.advantages(t, "tree", 1)["t"]
			if group.Status != schemas.StatusComplete || group.TrainedSteps != treeSteps {
				t.Errorf("the group is %s with %d trained steps: %s", group.Status, group.TrainedSteps, group.Error)
			}

			paths := map[int64][]client.PathStep{}
			seqs := map[uint64]bool{}
			for leaf := range int64(treeLeaves) {
				made := trajectoryOf(t, w, "tree", leaf)
				for _, ref := range made.Steps {
					seqs[ref.Seq] = true
				}
				paths[leaf] = pathOf(t, w, made)
				byItself := pathOf(t, w, trajectoryOf(t, w, alone(leaf), 0))
				samePath(t, leaf, paths[leaf], byItself)
				alone := trajectoryOf(t, w, alone(leaf), 0).Medium(schemas.KindImage)
				if made.Medium(schemas.KindImage).Digest != alone.Digest {
					t.Errorf("leaf %d: another image than alone", leaf)
				}
			}
			samePath(t, 0, paths[0], pathOf(t, w, trajectoryOf(t, w, "flat", 0)))
			if len(seqs) != 39 {
				t.Errorf("%d steps stored of the tree, want 39 of 80", len(seqs))
			}
			report, err := proof.Run(t.Context(), w.Bus, "tree", proof.Options{Model: []string{model}})
			if err != nil || !report.OK(0) || report.Steps != 39 || report.StepsSkipped > 0 ||
				report.Trajectories != treeLeaves {
				t.Errorf("verify: %+v, %v", report, err)
			}
		})
	}
}

func alone(leaf int64) schemas.Run { return schemas.Run("alone-" + string(rune('0'+leaf))) }

func trajectoryOf(t *testing.T, w *world, run schemas.Run, sample int64) *schemas.Trajectory {
	t.Helper()
	tr, err := w.client.Trajectory(t.Context(), run, "t", sample)
	if err != nil {
		t.Fatal(err)
	}
	if tr.StopReason != schemas.StopCompleted {
		t.Fatalf("sample %d of run %s: %s: %s", sample, run, tr.StopReason, tr.Error)
	}
	return tr
}

func pathOf(t *testing.T, w *world, tr *schemas.Trajectory) []client.PathStep {
	t.Helper()
	path, err := w.client.Path(t.Context(), tr)
	if err != nil {
		t.Fatal(err)
	}
	if len(path) != treeSteps {
		t.Fatalf("sample %d of run %s: a path of %d steps, want %d", tr.SampleIndex, tr.Run, len(path), treeSteps)
	}
	return path
}

// samePath says where two paths have other bits.
func samePath(t *testing.T, leaf int64, a, b []client.PathStep) {
	t.Helper()
	for k := range a {
		x, y := a[k].Step, b[k].Step
		if x.StepIndex != int64(k) || y.StepIndex != int64(k) || !reflect.DeepEqual(x.LogProb, y.LogProb) ||
			!reflect.DeepEqual(x.Latents[0], y.Latents[0]) {
			t.Errorf("leaf %d: step %d has other bits in the tree than alone", leaf, k)
		}
	}
	if last := treeSteps - 1; !reflect.DeepEqual(a[last].Step.Latents, b[last].Step.Latents) {
		t.Errorf("leaf %d ends with another state in the tree than alone", leaf)
	}
}

// Samplers that are killed in the middle of a tree leave the same eight trajectories as calm
// ones, each once: leaves that are made stay, and the others go on where their parents stored.
func TestTree_Kill(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := defaults()
	c.sampler.Batch, c.sampler.AckWait = 2, time.Second
	for _, name := range []string{"intake", "reward", "advantage"} {
		w.Serve(t, c.run(name))
	}
	sampler := w.Serve(t, c.run("sampler"))
	w.publish(t, "calm", treePrompt())
	w.advantages(t, "calm", 1)
	w.publish(t, "killed", treePrompt())
	for made := 1; made <= 5; made += 2 {
		bustest.Await(t, w.Bus, made, schemas.StreamTrajectories, schemas.TrajectoryFilter("killed", "t"))
		sampler.Kill()
		sampler = w.Serve(t, c.run("sampler"))
	}
	group := w.advantages(t, "killed", 1)["t"]
	calm := w.advantages(t, "calm", 1)["t"]
	if !reflect.DeepEqual(group.Branches, calm.Branches) || len(group.Branches) != 1+2+4 {
		t.Errorf("branches %+v, want %+v", group.Branches, calm.Branches)
	}
	for leaf := range int64(treeLeaves) {
		a, b := trajectoryOf(t, w, "calm", leaf), trajectoryOf(t, w, "killed", leaf)
		if a.ContentDigest != b.ContentDigest ||
			a.Medium(schemas.KindImage).Digest != b.Medium(schemas.KindImage).Digest {
			t.Errorf("leaf %d: other bits than undisturbed", leaf)
		}
		samePath(t, leaf, pathOf(t, w, a), pathOf(t, w, b))
	}
	report, err := proof.Run(t.Context(), w.Bus, "killed", proof.Options{})
	if err != nil || !report.OK(0) || report.Steps != 39 {
		t.Errorf("verify: %+v, %v", report, err)
	}
}

// What begins in a sample that failed fails with its reason, at once, and the group closes.
func TestTree_FailedParent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := defaults()
	for _, name := range []string{"intake", "reward", "advantage"} {
		w.Serve(t, c.run(name))
	}
	sampler := w.Serve(t, c.run("sampler"))
	one := treePrompt()
	one.Tree.Leaf = new(int64(0))
	w.publish(t, "before", one)
	w.advantages(t, "before", 1)
	sampler.Stop() // its lane is known, and served by no one
	w.standIn(t, "synthetic")
	w.publish(t, "failed", treePrompt())
	var requests []*bus.Message
	bustest.Until(t, "all requests are there", func() (err error) {
		requests, err = w.LastMany(t.Context(), schemas.StreamRequests,
			[]string{schemas.Address{Kind: schemas.KindRequest, Run: "failed"}.Filter()})
		if err == nil && len(requests) != treeLeaves {
			err = fmt.Errorf("%d requests", len(requests))
		}
		return err
	})
	for _, m := range requests {
		var r schemas.Request
		if err := schemas.Decode(m.Data, &r); err != nil {
			t.Fatal(err)
		}
		if r.SampleIndex != 4 {
			continue
		}
		failed := &schemas.Trajectory{
			Identity:       r.Identity,
			Provenance:     schemas.Provenance{Attempt: "a"},
			Outcome:        schemas.Outcome{StopReason: schemas.StopFailed, Error: "out of luck"},
			Sampling:       r.Sampling,
			Denoised:       schemas.Denoised{LogProbs: make([]*float64, len(r.Transitions))},
			ScheduleDigest: r.ScheduleDigest, Group: r.Group,
		}
		if _, err := w.Publish(t.Context(), failed); err != nil {
			t.Fatal(err)
		}
	}
	w.Serve(t, c.run("sampler"))
	group := w.advantages(t, "failed", 1)["t"]
	if got := statuses(group); got[schemas.StatusScored] != 4 || got[schemas.StatusFailed] != 4 ||
		group.Status != schemas.StatusPartial {
		t.Errorf("the group is %s: %v", group.Status, got)
	}
	for leaf := int64(5); leaf < treeLeaves; leaf++ {
		tr, err := w.client.Trajectory(t.Context(), "failed", "t", leaf)
		if err != nil || !strings.Contains(tr.Error, "the sample failed: ") ||
			!strings.Contains(tr.Error, "out of luck") {
			t.Errorf("leaf %d: %v, %v", leaf, tr, err)
		}
	}
}
