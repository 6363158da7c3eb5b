package integration_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	proof "github.com/meander-rl/meander/services/verify"
)

// branchPrompt asks for two samples of six steps.
func branchPrompt(from *schemas.Branch) *schemas.Prompt {
	p := &schemas.Prompt{
		UID: "g", Prompt: `a red sign that says "OPEN"`, Seed: new(int64(11)), GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(6)),
			Rollout:           schemas.Rollout{ReturnStepIndices: []int64{2, 3, 4, 5, 6}},
		},
		Reward: []schemas.RewardSpec{{Name: "jpeg_compressibility"}},
	}
	if from != nil {
		p.Start = &schemas.Start{Branch: from}
	}
	return p
}

// Samples that branch from a state which another sample stored go on as that one did, where
// they have its noise; the trajectory names the parent, and verify follows it there.
func TestBranch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var pipeline []*bustest.Service
	for _, name := range stages {
		pipeline = append(pipeline, w.Serve(t, defaults().run(name)))
	}
	w.publish(t, "whole", branchPrompt(nil))
	w.advantages(t, "whole", 1)
	at := schemas.Branch{Run: "whole", UID: "g", SampleIndex: 1, StepIndex: 2}
	w.publish(t, "branched", branchPrompt(&at))
	w.advantages(t, "branched", 1)
	for sample := range int64(2) {
		whole, err1 := w.client.Trajectory(t.Context(), "whole", "g", sample)
		branched, err2 := w.client.Trajectory(t.Context(), "branched", "g", sample)
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		if begin, end := branched.Segment(); begin != 2 || end != 6 ||
			!reflect.DeepEqual(branched.Start, &schemas.SegmentStart{StepIndex: 2, Branch: &at}) {
			t.Errorf("sample %d: steps %d to %d, from %+v", sample, begin, end, branched.Start)
		}
		if same := whole.Medium(schemas.KindImage).Digest == branched.Medium(schemas.KindImage).Digest &&
			reflect.DeepEqual(whole.LogProbs[2:], branched.LogProbs[2:]); same != (sample == 1) {
			t.Errorf("sample %d: the same image and log-probs as the sample of its noise: %t", sample, same)
		}
	}
	report, err := proof.Run(t.Context(), w.Bus, "branched", proof.Options{})
	if err != nil || !report.OK(0) || report.Steps != 8 || report.StartsGone > 0 {
		t.Errorf("verify: %+v, %v", report, err)
	}

	for _, s := range pipeline {
		s.Stop() // what is forged now is displaced by no one
	}
	// A trajectory that names other parents than the sample had is found.
	forged, err := w.client.Trajectory(t.Context(), "branched", "g", 1)
	if err != nil {
		t.Fatal(err)
	}
	forged.Run, forged.UID, forged.Group.Batch, forged.Start.Branch.SampleIndex = "forged", "g", "g", 0
	if _, err := w.Publish(t.Context(), forged); err != nil {
		t.Fatal(err)
	}
	report, err = proof.Run(t.Context(), w.Bus, "forged", proof.Options{})
	if err != nil || !strings.Contains(fmt.Sprint(report.Mismatches), "not those that the sample starts with") {
		t.Errorf("verify of another parent: %+v, %v", report, err)
	}
}

// A branch that cannot be followed is refused by name, before any sample is asked for.
func TestBranch_Refused(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	w.publish(t, "whole", branchPrompt(nil))
	w.advantages(t, "whole", 1)
	gone := branchPrompt(nil)
	w.publish(t, "gone", gone)
	w.advantages(t, "gone", 1)
	made, err := w.client.Trajectory(t.Context(), "gone", "g", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Delete(t.Context(), schemas.StreamSteps, made.Steps[3].Seq); err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		name   string
		change func(p *schemas.Prompt, at *schemas.Branch)
		want   string
	}{
		{
			"no such run", func(_ *schemas.Prompt, at *schemas.Branch) { at.Run = "nobody" },
			"start.branch: sample 1 of group g of run nobody: not found; must be a sample that was completed and is still stored",
		},
		{
			"no such sample", func(_ *schemas.Prompt, at *schemas.Branch) { at.SampleIndex = 2 },
			"start.branch: sample 2 of group g of run whole: not found",
		},
		{
			"its own group", func(_ *schemas.Prompt, at *schemas.Branch) { at.Run = "" },
			"start.branch: sample 1 of group g of run refused-2: not found",
		},
		{
			"kept no such state", func(_ *schemas.Prompt, at *schemas.Branch) { at.StepIndex = 1 },
			"start.branch.step_index: 1; must be of a state that is stored: state 1 of sample 1 of group g: not found: kept are [2 3 4 5 6]",
		},
		{
			"after the last step", func(p *schemas.Prompt, at *schemas.Branch) { p.NumInferenceSteps, at.StepIndex = nil, 12 },
			"start.branch.step_index: 12; must be between 0 and 9",
		},
		{
			"purged", func(_ *schemas.Prompt, at *schemas.Branch) { at.Run, at.SampleIndex, at.StepIndex = "gone", 0, 3 },
			"start.branch.step_index: 3; must be of a state that is stored: state 3 of sample 0 of group g: get MDR_STEPS",
		},
		{
			"another size", func(p *schemas.Prompt, _ *schemas.Branch) { p.Height = new(int64(32)) },
			"start.branch: a state of 64x64 pixels; must be of the prompt's size, 64x32 pixels",
		},
		{
			"another schedule", func(p *schemas.Prompt, _ *schemas.Branch) { p.NumInferenceSteps = new(int64(5)) },
			"start.branch.step_index: 2; must be of the same schedule: the sample has 6 steps, its step 2 at sigma ",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			at := schemas.Branch{Run: "whole", UID: "g", SampleIndex: 1, StepIndex: 2}
			p := branchPrompt(&at)
			p.Rollout.ReturnStepIndices = nil
			c.change(p, &at)
			_, err := w.client.Publish(t.Context(), schemas.Run(fmt.Sprint("refused-", i)), p)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error\n %v\nwant\n %s", err, c.want)
			}
		})
	}
}
