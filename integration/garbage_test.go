package integration_test

import (
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// checkGroup reads a closed group as a trainer does: each member's reward is that of the
// trajectory that it names, whose steps are all there.
func (w *world) checkGroup(t *testing.T, a *schemas.Advantage, size int64) {
	t.Helper()
	if a.Status != schemas.StatusComplete || a.GroupSize != size || int64(len(a.Members)) != size {
		t.Fatalf("%+v; want a complete group of %d", a, size)
	}
	for _, m := range a.Members {
		tr, err := w.client.Trajectory(t.Context(), a.Run, a.UID, m.SampleIndex)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.client.Steps(t.Context(), tr); err != nil {
			t.Error(err)
		}
		var r schemas.Reward
		subject := schemas.StoredSubject(schemas.RewardSubject(a.Run, a.Batch, a.UID, m.SampleIndex))
		stored, err := w.Last(t.Context(), schemas.StreamRewards, subject)
		if err == nil {
			err = bus.Fits(stored, &r)
		}
		if err != nil || r.TrajectorySeq != m.TrajectorySeq || *r.Reward != *m.Reward || tr.Sampler == "forger" {
			t.Errorf("sample %d: %+v and %+v, %v; want one sample", m.SampleIndex, m, r, err)
		}
	}
}

// What is stored where the events of a group belong, before its prompt comes, keeps none
// of them out.
func TestPipeline_GarbageFirst(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	for i := range int64(4) {
		w.Forge(t, schemas.RequestSubject("r", "synthetic", "g", i, schemas.StageMain), []byte("rubbish"))
		w.Forge(t, schemas.TrajectorySubject("r", "g", i, schemas.StageMain), []byte("rubbish"))
		w.Forge(t, schemas.RewardSubject("r", "b", "g", i), []byte("rubbish"))
	}
	w.Forge(t, schemas.AdvantageSubject("r", "g"), []byte("rubbish"))
	w.Forge(t, schemas.BatchSubject("r", "b"), []byte("rubbish"))
	w.Forge(t, schemas.GroupSubject("r", "g"), []byte("rubbish"))
	if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "g", Prompt: "a red fox", GroupSize: new(int64(4)), Batch: &schemas.BatchSpec{ID: "b", Groups: 1},
	}); err != nil {
		t.Fatal(err)
	}
	w.checkGroup(t, w.advantages(t, "r", 1)["g"], 4)
	bustest.Until(t, "the true batch", func() error {
		var b schemas.Batch
		m, err := w.Last(t.Context(), schemas.StreamAdvantages, schemas.BatchSubject("r", "b"))
		if err == nil {
			err = bus.Fits(m, &b)
		}
		if err == nil && b.Samples != 4 {
			t.Errorf("batch: %+v", b)
		}
		return err
	})
	bustest.Until(t, "a dead letter of each", func() error { // of those whom two services displaced at once, two
		letters := map[string]bool{}
		for _, d := range bustest.Dead(t, w.Bus, 0) {
			letters[d.OriginalSubject] = true
		}
		if len(letters) != 15 {
			return fmt.Errorf("of %d subjects, want 15: %v", len(letters), letters)
		}
		return nil
	})
}

// Events that would pass for those of a group, but for what its record and its stored
// steps say, keep no true one out either.
func TestPipeline_ForgedWhileSampling(t *testing.T) {
	t.Parallel()
	w := start(t, func(c *config) { c.sampler.Batch, c.sampler.Workers = 1, 1 })
	if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "g", Prompt: "a red fox", GroupSize: new(int64(6)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(500))},
	}); err != nil {
		t.Fatal(err)
	}
	record, err := w.Group(t.Context(), "r", "g")
	if err != nil {
		t.Fatal(err)
	}
	// The last samples wait: what is stored for them now came first.
	other := record.Group
	other.PromptSeq = 4711
	for i, spec := range map[int64]schemas.Group{3: record.Group, 4: other} {
		tr := &schemas.Trajectory{
			Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "g", SampleIndex: i, GroupSize: 6, Lane: "synthetic"},
			Provenance: schemas.Provenance{
				Attempt: "a",
				Sampler: "forger",
			},
			Outcome: schemas.Outcome{StopReason: schemas.StopCompleted},
			Sampling: schemas.Sampling{
				Prompt: "a red fox", Height: 64, Width: 64, Sigmas: []float32{1, 0},
				Transitions: []string{"ode"}, LogProbKind: schemas.LogProbDensity, Solver: "euler",
				LatentsDType: "F32",
			},
			Denoised: schemas.Denoised{
				CFGRule: schemas.CFGPlain, Timesteps: []float32{1000, 0},
				LogProbs:          []*float64{nil},
				LatentStepIndices: []int64{}, LatentsShape: []int64{16, 64},
				Conditioning: []schemas.NamedTensor{},
			},
			Steps: []schemas.StepRef{{Seq: 1, Digest: digest}}, ContentDigest: digest,
			Media: []schemas.Medium{{
				Kind: schemas.KindImage, Format: schemas.ImagePNG, Width: 64, Height: 64, Digest: digest,
				Data: []byte("rubbish"),
			}},
			ScheduleDigest: record.ScheduleDigest, Group: spec,
		}
		if err := tr.Validate(); err != nil {
			t.Fatal(err)
		}
		data, err := schemas.Encode(tr)
		if err != nil {
			t.Fatal(err)
		}
		w.Forge(t, tr.Subject(), data)
	}
	r := &schemas.Reward{
		Run: "r", UID: "g", SampleIndex: 5, GroupSize: 7, Status: schemas.StatusScored, Reward: new(1e6),
		Scores:        []schemas.Score{},
		TrajectorySeq: 4711, Trained: schemas.Trained{ScheduleDigest: record.ScheduleDigest}, Group: record.Group,
	}
	data, err := schemas.Encode(r)
	if err != nil {
		t.Fatal(err)
	}
	w.Forge(t, r.Subject(), data)
	w.checkGroup(t, w.advantages(t, "r", 1)["g"], 6)
}

// A request that is not its prompt's makes no sample.
func TestPipeline_ForgedRequest(t *testing.T) {
	t.Parallel()
	w := start(t, func(c *config) { c.sampler.Lane = "synthetic" })
	if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "g", Prompt: "a red fox",
		GroupSize: new(int64(2)),
	}); err != nil {
		t.Fatal(err)
	}
	w.checkGroup(t, w.advantages(t, "r", 1)["g"], 2)
	tr, err := w.client.Trajectory(t.Context(), "r", "g", 0)
	if err != nil {
		t.Fatal(err)
	}
	forged := &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "g", SampleIndex: 0, GroupSize: 2, Lane: "synthetic"},
		Sampling: schemas.Sampling{
			Prompt: "a blue fox", Height: tr.Height, Width: tr.Width,
			Sigmas: tr.Sigmas, Transitions: tr.Transitions, LogProbKind: tr.LogProbKind, Solver: tr.Solver,
			LatentsDType: tr.LatentsDType,
		},
		Group: tr.Group,
	}
	forged.ScheduleDigest = forged.ComputeScheduleDigest()
	// the true one goes a little after its group has closed
	bustest.Free(t, w.Bus, schemas.StreamRequests, forged.Subject())
	if _, err := w.Bus.Publish(t.Context(), forged); err != nil {
		t.Fatal(err)
	}
	if d := bustest.Dead(t, w.Bus, 1)[0]; d.OriginalSubject != forged.Subject() || d.Code != schemas.CodeInvalid {
		t.Errorf("%+v", d)
	}
	after, err := w.client.Trajectory(t.Context(), "r", "g", 0)
	if err != nil || fmt.Sprint(after.Steps) != fmt.Sprint(tr.Steps) {
		t.Errorf("%+v, %v; want the true trajectory untouched", after, err)
	}
	bustest.Free(t, w.Bus, schemas.StreamRequests, forged.Subject())
}
