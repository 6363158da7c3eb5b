package verify_test

import (
	"testing"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// States that are stored for samplers to go on from prove steps as those that are kept do.
func TestRun_Checkpoints(t *testing.T) {
	t.Parallel()
	plane := sampledPlane(t)
	p := prompt()
	p.Rollout.ReturnStepIndices, p.Rollout.CheckpointEvery = []int64{3}, new(int64(1))
	sample(t, plane, "points", p)
	report, err := verify.Run(t.Context(), plane.Bus, "points", verify.Options{})
	if err != nil || !report.OK(0) || report.StepsSkipped != 0 || report.Steps != samples*stochastic {
		t.Errorf("%+v, %v", report, err)
	}
	trajectory, err := client.New(plane.Bus).Trajectory(t.Context(), "points", "p1", 1)
	if err != nil {
		t.Fatal(err)
	}
	steps, err := client.New(plane.Bus).Steps(t.Context(), trajectory)
	if err != nil || steps[1].Checkpoint == nil {
		t.Fatalf("no checkpoint in step 1: %v", err)
	}
	// A step whose checkpoint is none of its rollout, in a trajectory that names it.
	forged := *steps[1]
	forged.Run, forged.Checkpoint = "forged", new(*forged.Checkpoint)
	forged.Checkpoint.Data = append([]byte{}, forged.Checkpoint.Data...)
	forged.Checkpoint.Data[3] ^= 0x40
	publisher := plane.NewPublisher(1, 1<<20)
	defer publisher.Close()
	future, err := publisher.PublishStep(t.Context(), &forged, nil)
	if err != nil {
		t.Fatal(err)
	}
	ack, err := future.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ref := schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest}
	store(t, plane.Bus, "forged", trajectory, func(e *schemas.Trajectory) { e.Steps[1] = ref })
	report, err = verify.Run(t.Context(), plane.Bus, "forged", verify.Options{})
	if err != nil || report.OK(0) {
		t.Errorf("a checkpoint that is none: %+v, %v", report, err)
	}
}
