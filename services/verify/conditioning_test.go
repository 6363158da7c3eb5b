package verify_test

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// What the model makes of the texts is stored once for all samples, stays while a trajectory names it,
// and is what verify goes by.
func TestRun_Conditioning(t *testing.T) {
	t.Parallel()
	plane := sampledPlane(t) // r1 keeps none
	b := plane.Bus
	p := prompt()
	p.Rollout.ReturnConditioning = true
	sample(t, plane, "r2", p)
	read := func(run schemas.Run, sample int64) *schemas.Trajectory {
		e, err := client.New(b).Trajectory(t.Context(), run, "p1", sample)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	first, second := read("r2", 0), read("r2", 1)
	var names []string
	for i, c := range first.Conditioning {
		names = append(names, c.Name)
		if c.Tensor.Ref == nil || *c.Tensor.Ref != *second.Conditioning[i].Tensor.Ref {
			t.Errorf("%s: %+v, of the other sample %+v; want one blob", c.Name, c.Tensor.Ref,
				second.Conditioning[i].Tensor.Ref)
		}
	}
	if want := []string{
		"prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds",
		"negative_prompt_embeds_mask",
	}; !slices.Equal(names, want) {
		t.Fatalf("conditioning %v, want %v", names, want)
	}
	if n := len(read("r1", 0).Conditioning); n != 0 {
		t.Errorf("%d tensors that were not asked for", n)
	}
	if _, err := b.SweepBlobs(t.Context(), -time.Hour, false); err != nil {
		t.Fatal(err)
	}
	report, err := verify.Run(t.Context(), b, "r2", verify.Options{})
	if err != nil || !report.OK(0) || report.Conditionings != 4*samples {
		t.Errorf("a run as it was made: %+v, %v", report, err)
	}
	swapped := *first.Conditioning[2].Tensor.Ref // the negative prompt's in place of the prompt's
	store(t, b, "swapped", first, func(e *schemas.Trajectory) { e.Conditioning[0].Tensor.Ref = &swapped })
	store(t, b, "fewer", first, func(e *schemas.Trajectory) { e.Conditioning = e.Conditioning[:2] })
	store(t, b, "renamed", first, func(e *schemas.Trajectory) { e.Conditioning[0].Name = "embeds" })
	for _, run := range []schemas.Run{"swapped", "fewer", "renamed"} {
		if report, err := verify.Run(t.Context(), b, run, verify.Options{}); err != nil || report.OK(0) {
			t.Errorf("%s: %+v, %v; want a fault", run, report, err)
		}
	}
	if report, err = verify.Run(t.Context(), b, "swapped", verify.Options{}); err != nil || report.MaxRatio == 0 ||
		report.MaxConditioning == 0 {
		t.Errorf("velocities are not made with what is stored: %+v, %v", report, err)
	}
	gone, err := b.PutBlob(t.Context(), bytes.Repeat([]byte{7}, int(swapped.Size)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.SweepBlobs(t.Context(), -time.Hour, false); err != nil {
		t.Fatal(err)
	}
	store(t, b, "gone", first, func(e *schemas.Trajectory) { e.Conditioning[0].Tensor.Ref = &gone })
	report, err = verify.Run(t.Context(), b, "gone", verify.Options{})
	if err != nil || report.OK(0) || report.ConditioningGone != 1 || report.Unproven == "" {
		t.Errorf("embeddings that no event named: %+v, %v", report, err)
	}
}
