package verify_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// tail is a bus that holds the run r1 and, in the run tail, its samples from step 1 on, which
// kept their states from step 2 on.
func tail(t *testing.T) (*bus.Bus, *schemas.Trajectory) {
	t.Helper()
	plane := sampledPlane(t)
	b := plane.Bus
	c := client.New(b)
	var states []float32
	var shape []int64
	for i := range int64(samples) {
		trajectory, err := c.Trajectory(t.Context(), "r1", "p1", i)
		if err != nil {
			t.Fatal(err)
		}
		latents, err := c.Latents(t.Context(), trajectory)
		if err != nil {
			t.Fatal(err)
		}
		states, shape = append(states, latents[1]...), trajectory.LatentsShape
	}
	p := prompt()
	p.Rollout.ReturnStepIndices = []int64{2, 3}
	p.Start = &schemas.Start{
		StepIndex: new(int64(1)),
		Latents: &schemas.Tensor{
			DType: "F32", Shape: append([]int64{samples}, shape...),
			Data: tensor.F32.AppendFloats(nil, states),
		},
	}
	sample(t, plane, "tail", p)
	trajectory, err := c.Trajectory(t.Context(), "tail", "p1", 1)
	if err != nil {
		t.Fatal(err)
	}
	return b, trajectory
}

// What a sample started with stands in for a state that was not kept: each stochastic step is
// recomputed, the first from the given states.
func TestRun_Segment(t *testing.T) {
	t.Parallel()
	b, trajectory := tail(t)
	report, err := verify.Run(t.Context(), b, "tail", verify.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !report.OK(0) || report.Steps != samples*stochastic || report.StepsSkipped != 0 {
		t.Errorf("a part as it was made: %+v", report)
	}

	store(t, b, "elsewhere", trajectory, func(e *schemas.Trajectory) {
		e.Start.StepIndex, e.Steps, e.LogProbs[1] = 2,
			e.Steps[1:], nil
	})
	store(t, b, "others", trajectory, func(e *schemas.Trajectory) { e.SampleIndex = 0 })
	store(t, b, "shapeless", trajectory, func(e *schemas.Trajectory) { e.Start.Latents.Shape = []int64{2, 64, 16} })
	store(t, b, "shorter", trajectory, func(e *schemas.Trajectory) {
		e.Stop, e.Media = &schemas.SegmentStop{StepIndex: 3}, nil
		e.Steps, e.LatentStepIndices = e.Steps[:2], []int64{2, 3}
	})
	for run, want := range map[schemas.Run]string{
		"elsewhere": "latents 2: not those that the sample starts with",
		"others":    "sequence",
		"shapeless": "start.latents.shape: [2 64 16]; must be",
		"shorter":   "content_digest: stored",
	} {
		report, err := verify.Run(t.Context(), b, run, verify.Options{})
		if err != nil {
			t.Errorf("%s: %v", run, err)
			continue
		}
		said := ""
		for _, m := range report.Mismatches {
			said += m.What + "\n"
		}
		if report.OK(0) || !strings.Contains(said, want) {
			t.Errorf("%s: %+v; want it found, %q said", run, report, want)
		}
	}
}

// A drawn start is drawn again: a seed that it does not come from is found.
func TestRun_DrawnStart(t *testing.T) {
	t.Parallel()
	plane := sampledPlane(t)
	b := plane.Bus
	p := prompt()
	p.Rollout.SDEStepIndices = []int64{0}
	sample(t, plane, "drawn", p)
	trajectory, err := client.New(b).Trajectory(t.Context(), "drawn", "p1", 0)
	if err != nil {
		t.Fatal(err)
	}
	store(t, b, "reseeded", trajectory, func(e *schemas.Trajectory) { e.NoiseSeed++ })
	report, err := verify.Run(t.Context(), b, "reseeded", verify.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if report.OK(0) || len(report.Mismatches) != 1 ||
		report.Mismatches[0].What != "latents 0: not those that the sample starts with" {
		t.Errorf("another seed: %+v", report)
	}
}

// States that are stored no more prove nothing.
func TestRun_StartGone(t *testing.T) {
	t.Parallel()
	b, trajectory := tail(t)
	blobs, err := b.JetStream().ObjectStore(t.Context(), schemas.BlobBucket)
	if err != nil {
		t.Fatal(err)
	}
	if err := blobs.Delete(t.Context(), trajectory.Start.Latents.Ref.Digest); err != nil {
		t.Fatal(err)
	}
	report, err := verify.Run(t.Context(), b, "tail", verify.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if report.OK(0) || report.StartsGone != samples || len(report.Mismatches) != 0 ||
		!strings.Contains(report.Unproven, "what 2 of the samples started with is gone") {
		t.Errorf("without the states: %+v", report)
	}
}
