package harness_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/schemas"
)

// flawless are the books of two groups of two samples of two steps, and the steps that they name.
func flawless() (*harness.Books, map[uint64]harness.Stored) {
	k := &harness.Books{
		Trajectories: map[string]*schemas.Trajectory{}, Advantages: map[schemas.UID]*schemas.Advantage{},
		Batches: map[string]*schemas.Batch{},
		Digests: map[string]string{}, Twice: map[string]int{}, Steps: 8,
	}
	stored := map[uint64]harness.Stored{}
	seq := uint64(0)
	for _, uid := range []schemas.UID{"a", "b"} {
		k.Advantages[uid] = &schemas.Advantage{Status: schemas.StatusComplete, Members: make([]schemas.Member, 2)}
		k.Digests[string("advantage "+uid)] = string(uid)
		for i := range int64(2) {
			key := fmt.Sprintf("%s/%d", uid, i)
			tr := &schemas.Trajectory{
				Identity:   schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: uid, SampleIndex: i},
				Outcome:    schemas.Outcome{StopReason: schemas.StopCompleted},
				Provenance: schemas.Provenance{Attempt: "x"},
			}
			for s := range 2 {
				seq++
				tr.Steps = append(tr.Steps, schemas.StepRef{Seq: seq, Digest: fmt.Sprint(seq)})
				stored[seq] = harness.Stored{Subject: tr.StepSubject(s), Digest: fmt.Sprint(seq)}
			}
			k.Trajectories[key], k.Digests["trajectory "+key], k.Digests["reward "+key] = tr, key, key
		}
	}
	return k, stored
}

// Whatever is lost, doubled or wrong is found, and under its uid.
func TestBooks_FindsEveryFault(t *testing.T) {
	t.Parallel()
	asked := map[schemas.UID]int64{"a": 2, "b": 2}
	type world struct {
		*harness.Books
		stored map[uint64]harness.Stored
	}
	for _, c := range []struct {
		name, want string
		damage     func(w *world)
	}{
		{"nothing", "", func(*world) {}},
		{
			"a superseded step is none", "",
			func(w *world) {
				w.stored[99] = harness.Stored{Subject: schemas.StepSubject("r", "a", 0, schemas.StageMain, "y", 0)}
			},
		},
		{"no advantage", "b: lost: no advantage", func(w *world) { delete(w.Advantages, "b") }},
		{
			"a group that is not complete", "b: wrong: advantage",
			func(w *world) { w.Advantages["b"].Status = schemas.StatusPartial },
		},
		{
			"a member less", "b: wrong: advantage",
			func(w *world) { w.Advantages["b"].Members = make([]schemas.Member, 1) },
		},
		{"an advantage of nobody", "c: wrong: an advantage", func(w *world) { w.Advantages["c"] = w.Advantages["b"] }},
		{"no trajectory", "b: lost: trajectory b/1", func(w *world) { delete(w.Trajectories, "b/1") }},
		{
			"a trajectory of nobody", "b: wrong: trajectory b/1: nobody",
			func(w *world) { w.Trajectories["b/1"].SampleIndex = 2 },
		},
		{
			"a trajectory that failed", "b: wrong: trajectory b/1",
			func(w *world) { w.Trajectories["b/1"].StopReason = schemas.StopFailed },
		},
		{
			"a step less", "b: wrong: trajectory b/1 names 1 steps",
			func(w *world) { w.Trajectories["b/1"].Steps = w.Trajectories["b/1"].Steps[:1] },
		},
		{
			"a step of two", "b: wrong: sequence 1 is a/0 step 0 and b/1 step 1",
			func(w *world) { w.Trajectories["b/1"].Steps[1].Seq = 1 },
		},
		{"no reward", "b: lost: reward b/1", func(w *world) { delete(w.Digests, "reward b/1") }},
		{"stored twice", "b: doubled: reward b/1: stored 2 times", func(w *world) { w.Twice["reward b/1"] = 1 }},
		{"another content", "b: wrong: reward b/1: content", func(w *world) { w.Digests["reward b/1"] = "other" }},
		{
			"an event more", "c: wrong: reward c/0: the calm run has none",
			func(w *world) { w.Digests["reward c/0"] = "c/0" },
		},
		{"a step that is gone", "b: lost: step 1 of b/1", func(w *world) { delete(w.stored, 8) }},
		{
			"other bytes", "b: wrong: step 1 of b/1",
			func(w *world) { w.stored[8] = harness.Stored{Subject: w.stored[8].Subject, Digest: "0"} },
		},
		{
			"another subject", "b: wrong: step 1 of b/1",
			func(w *world) { w.stored[8] = harness.Stored{Subject: w.stored[7].Subject, Digest: "8"} },
		},
		{"a step twice", "b: doubled: step", func(w *world) { w.stored[9] = w.stored[8] }},
	} {
		t.Run(c.name, func(t *testing.T) {
			calm, _ := flawless()
			k, stored := flawless()
			w := &world{k, maps.Clone(stored)}
			c.damage(w)
			wrong, _ := w.StepFaults(w.stored)
			var said []string
			for _, f := range append(append(w.Faults(asked, 2), wrong...), w.Differs(calm)...) {
				said = append(said, f.String())
			}
			if got := strings.Join(said, "\n"); !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
				t.Errorf("found\n%s\nwant %q", got, c.want)
			}
		})
	}
}

// Each stage of each sample is asked after: those that are lost, that nobody asked for, and that the advantage does not
// name. A judge that ends a sample ends what is asked for.
func TestBooks_Stages(t *testing.T) {
	t.Parallel()
	asked := map[schemas.UID]int64{"a": 2}
	for _, c := range []struct {
		name, want string
		damage     func(k *harness.Books)
	}{
		{"nothing", "", func(*harness.Books) {}},
		{"a stage less", "a: lost: trajectory a/1/paint", func(k *harness.Books) { delete(k.Trajectories, "a/1/paint") }},
		{
			"a child's thought", "a: wrong: trajectory a/1/think: nobody asked",
			func(k *harness.Books) { k.Trajectories["a/1/think"] = staged("think", 1, 1) },
		},
		{
			"a stage that has no steps", "a: wrong: trajectory a/0/think names 0 steps",
			func(k *harness.Books) { k.Trajectories["a/0/think"].Steps = nil },
		},
		{
			"a stage that the advantage does not name", "a: wrong: advantage: sample 1 ran [a/0/think]",
			func(k *harness.Books) { k.Advantages["a"].Members[1].Stages = k.Advantages["a"].Members[1].Stages[:1] },
		},
		{
			"a sample that was ended early", "a: wrong: advantage: sample 0 ran",
			func(k *harness.Books) {
				k.Trajectories["a/0/think"].Text = &schemas.TextResult{
					SaidBy: "judge", Conversation: schemas.ConversationTerminated,
				}
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := &harness.Books{
				Trajectories: map[string]*schemas.Trajectory{
					"a/0/think": staged("think", 0, 1), "a/0/paint": staged("paint", 0, 2), "a/1/paint": staged("paint", 1, 4),
				},
				Advantages: map[schemas.UID]*schemas.Advantage{"a": {Status: schemas.StatusComplete}},
				Digests:    map[string]string{"reward a/0": "0", "reward a/1": "1"}, Steps: 8,
				Staged: map[schemas.UID][]harness.StageOf{
					"a": {{Stage: "think", Every: 2, Steps: harness.AnySteps}, {Stage: "paint", Every: 1, Steps: 1}},
				},
			}
			for i := range int64(2) {
				k.Advantages["a"].Members = append(k.Advantages["a"].Members, schemas.Member{
					Stages: []schemas.StageResult{{Stage: "think"}, {Stage: "paint", SampleIndex: i}},
				})
			}
			c.damage(k)
			var said []string
			for _, f := range k.Faults(asked, 9) {
				said = append(said, f.String())
			}
			if got := strings.Join(said, "\n"); !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
				t.Errorf("found\n%s\nwant %q", got, c.want)
			}
		})
	}
}

// staged is a trajectory of one step.
func staged(stage schemas.Stage, sample int64, seq uint64) *schemas.Trajectory {
	return &schemas.Trajectory{
		Identity: schemas.Identity{Stage: stage, Run: "r", UID: "a", SampleIndex: sample},
		Outcome:  schemas.Outcome{StopReason: schemas.StopCompleted},
		Steps:    []schemas.StepRef{{Seq: seq}},
	}
}
