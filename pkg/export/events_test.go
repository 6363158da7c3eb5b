package export_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

var digest = strings.Repeat("a", 64)

// stepOf is step index of a sample; latents are the bytes of its state, whole numbers of 4.
func stepOf(run schemas.Run, uid schemas.UID, sample, index int64, latents []byte) *schemas.Step {
	return &schemas.Step{
		Stage: schemas.StageMain,
		Run:   run, UID: uid, SampleIndex: sample, Attempt: "a", StepIndex: index, NumInferenceSteps: 4,
		Transition: schemas.TransitionODE, Sigma: 1 - float32(index)/4, SigmaNext: 0.75 - float32(index)/4,
		Timestep: 1000 - 250*float32(index), ElementCount: 8, LogProbKind: "density", Latents: []schemas.IndexedTensor{{
			Index: index, Tensor: schemas.Tensor{DType: "F32", Shape: []int64{int64(len(latents) / 4), 1}, Data: latents},
		}},
		WeightsDigest: digest, ScheduleDigest: digest, Sampler: "s", Backend: "cpu",
	}
}

// completed is a sample that has ended, without image, and with these steps.
func completed(run schemas.Run, uid schemas.UID, sample int64, steps ...schemas.StepRef) *schemas.Trajectory {
	e := &schemas.Trajectory{
		Identity: schemas.Identity{Stage: schemas.StageMain}, Steps: steps, ContentDigest: digest,
		ScheduleDigest: digest,
	}
	e.Run, e.UID, e.SampleIndex, e.GroupSize, e.Lane = run, uid, sample, 16, "lane"
	e.Attempt, e.WeightsDigest, e.Sampler, e.Backend = "a", digest, "s", "cpu"
	e.StopReason, e.Prompt, e.Height, e.Width, e.TrueCFGScale = schemas.StopCompleted, "a red fox", 64, 64, 1
	e.LogProbKind, e.Solver, e.LatentsDType, e.CFGRule = "density", "euler", "F32", "rescaled"
	for i := range 5 {
		e.Sigmas = append(e.Sigmas, 1-float32(i)/4)
		e.Timesteps = append(e.Timesteps, float32(1000-250*i))
	}
	for range 4 {
		e.Transitions, e.LogProbs = append(e.Transitions, schemas.TransitionODE), append(e.LogProbs, nil)
	}
	e.LatentStepIndices, e.LatentsShape = []int64{0}, []int64{16, 64}
	e.Group.Batch = string(uid)
	if n := int64(len(steps)); n < 4 {
		e.Stop = &schemas.SegmentStop{StepIndex: n}
	}
	return e
}

// withImage is the sample with an image whose bytes are a blob; nil: one that is gone.
func withImage(e *schemas.Trajectory, ref *schemas.Ref) *schemas.Trajectory {
	e.Stop.Decode, e.Media = true, imageOf(ref)
	return e
}

// imageOf is an image whose bytes are a blob.
func imageOf(ref *schemas.Ref) []schemas.Medium {
	if ref == nil {
		ref = &schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("0", 64), Size: 1} // gone
	}
	return []schemas.Medium{{Kind: schemas.KindImage, Format: "png", Width: 64, Height: 64, Digest: digest, Ref: ref}}
}

// publish stores a valid event.
func publish(t *testing.T, b *bus.Bus, e schemas.Keyed) uint64 {
	t.Helper()
	if err := e.(interface{ Validate() error }).Validate(); err != nil {
		t.Fatalf("%s: %v", e.Subject(), err)
	}
	return put(t, b, e)
}

// refTo is the reference of a trajectory to a stored step.
func refTo(t *testing.T, step *schemas.Step, seq uint64) schemas.StepRef {
	t.Helper()
	digest, err := schemas.PayloadDigest(bustest.Encode(t, step))
	if err != nil {
		t.Fatal(err)
	}
	return schemas.StepRef{Seq: seq, Digest: digest}
}
