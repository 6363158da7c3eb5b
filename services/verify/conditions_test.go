package verify_test

import (
	"image"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// Scheduled sampling of a whole pipeline rolls given latents beside conditions, and is computed again with them.
func TestRun_RollsBesideConditions(t *testing.T) {
	t.Parallel()
	x, again := newPipelineStudio(t, remotetest.EditClass)
	file, err := media.EncodePNG(image.NewNRGBA(image.Rect(0, 0, 64, 64)))
	if err != nil {
		t.Fatal(err)
	}
	latents := tensor.F32.AppendFloats(nil, make([]float32, 16*remotetest.Channels))
	if _, err := x.peer.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "p", Prompt: "red", Seed: new(int64(5)), GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{
			Conditions:        []schemas.Condition{{Name: "image", DataImage: schemas.DataImage{Data: file}}},
			ScheduledSampling: &schemas.ScheduledSampling{Probability: new(1.0), MaxStepOffset: new(int64(3)), BaseTimesteps: []float64{20}, Timesteps: new(int64(50)), Decode: true},
			Height:            new(int64(64)), Width: new(int64(64)),
			Start: &schemas.Start{Data: &schemas.Data{Latents: &schemas.Tensor{DType: "F32", Shape: []int64{1, 16, remotetest.Channels}, Data: latents}}},
		},
	}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, x.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", "p"))
	tr, err := x.peer.Trajectory(t.Context(), "r", "p", 0)
	if err != nil || tr.StopReason != schemas.StopCompleted || len(tr.Conditions) != 1 || tr.ScheduledSampling == nil {
		t.Fatalf("%+v, %v", tr, err)
	}
	r, err := verify.Run(t.Context(), x.Bus, "r", again)
	if err != nil || !r.OK(0) || r.Rolled == 0 || len(r.Mismatches) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// What a pipeline encodes of its texts is stored and compared, and velocities are computed of the recipe, with the
// scale of each step.
func TestRun_ConditioningOfRecipe(t *testing.T) {
	t.Parallel()
	x, again := newPipelineStudio(t, remotetest.EditClass)
	file, err := media.EncodePNG(image.NewNRGBA(image.Rect(0, 0, 64, 64)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := x.peer.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "p", Prompt: "red", Seed: new(int64(5)), GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{
			Conditions: []schemas.Condition{{Name: "image", DataImage: schemas.DataImage{Data: file}}},
			Height:     new(int64(64)), Width: new(int64(64)), CFGUntil: new(0.5), TrueCFGScale: new(3.0),
			Rollout: schemas.Rollout{SDEStepIndices: []int64{0, 3}, ReturnConditioning: true},
		},
	}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, x.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", "p"))
	tr, err := x.peer.Trajectory(t.Context(), "r", "p", 0)
	if err != nil || len(tr.Conditioning) != 2 || tr.Conditioning[0].Name != "prompt_embeds" {
		t.Fatalf("%+v, %v", tr, err)
	}
	r, err := verify.Run(t.Context(), x.Bus, "r", again)
	if err != nil || !r.OK(0) || r.Conditionings != 2 || r.Steps != 2 || len(r.Mismatches) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
}
