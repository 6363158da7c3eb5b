package integration_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// A reward judges the newest output of those that it may, and says which. One that names a stage that did not run for a
// sample has no score there: it is left out, or fails the sample by name.
func TestStages_JudgedStage(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		ends := r.SampleIndex == 1 && r.Answer == int64(len(r.Run)-1)
		return packed(t, &schemas.InteractReply{Content: "fine", Terminate: ends})
	})
	const notRun = "stage sign did not run: the sample ended before it"
	named := []schemas.RewardSpec{{Name: "jpeg_compressibility", Stage: "sign"}, {Name: "confidence"}}
	optional := slices.Clone(named)
	optional[0].Required = new(false)
	for _, x := range []struct {
		run    schemas.Run // its length is the round in which the critic ends sample 1
		reward []schemas.RewardSpec
		scores [2]string
	}{
		{"a", named, [2]string{"sign-2 think-2", notRun + " think"}},
		{"b", optional, [2]string{"sign-2 think-2", notRun + " think"}},
		{"cc", named, [2]string{"sign-2 think-2", "sign think-2"}},
		{"d", []schemas.RewardSpec{{Name: "jpeg_compressibility"}}, [2]string{"sign-2", "paint"}},
	} {
		p := judged("g", 2)
		p.Rounds, p.Reward = new(int64(2)), x.reward
		p.Stages = append(p.Stages, schemas.StageSpec{
			Name: "sign", Routing: schemas.Routing{Model: "synthetic"}, ImageSettings: p.Stages[1].ImageSettings,
		})
		p.Stages[1].Credit = nil
		c.publish(t, x.run, p)
		for _, m := range bustest.Await(t, c.Bus, 2, schemas.StreamRewards, schemas.RewardFilter(x.run, "g", "g")) {
			r := bustest.Decode[schemas.Reward](t, m)
			var got []string
			for _, s := range r.Scores {
				got = append(got, cmp.Or(string(s.Stage), s.Error))
			}
			if got, want := strings.Join(got, " "), x.scores[r.SampleIndex]; got != want {
				t.Errorf("run %s, sample %d: %s; want %s", x.run, r.SampleIndex, got, want)
			}
			want := ""
			if x.run == "a" && r.SampleIndex == 1 {
				want = "required score jpeg_compressibility: " + notRun
			}
			if (want != "") != (r.Status == schemas.StatusFailed) || r.Error != want {
				t.Errorf("run %s, sample %d is %s: %s", x.run, r.SampleIndex, r.Status, r.Error)
			}
		}
	}
}

// A stage ends early when all samples that it leads to are pruned, that of an interaction too; others go on.
func TestStages_Pruned(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	c.serving["reward"].Stop()
	var free atomic.Bool
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		if r.SampleIndex == 2 {
			t.Error("the critic is asked about a sample that is pruned")
		}
		if r.SampleIndex == 0 && !free.Load() {
			return packed(t, &schemas.InteractReply{Error: "busy", Retry: true})
		}
		return packed(t, &schemas.InteractReply{Content: "fine"})
	})
	p := thinkAndPaint("g", 6)
	p.Stages = slices.Insert(p.Stages, 1, schemas.StageSpec{
		Name: "judge", Interaction: &schemas.Interaction{Name: "critic"}, Prompt: "{think.text}",
	})
	prune := func(sample int64) *schemas.ControlReceipt {
		t.Helper()
		asked := &schemas.Control{Run: "r", Action: schemas.ControlPrune, UID: "g", SampleIndex: &sample, By: "me"}
		r, err := c.client.Control(t.Context(), asked)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	of := func(stage schemas.Stage, sample int64) *schemas.Trajectory {
		subject := schemas.TrajectorySubject("r", "g", sample, stage)
		stored := bustest.Await(t, c.Bus, 1, schemas.StreamTrajectories, subject)
		return bustest.Decode[schemas.Trajectory](t, stored[subject])
	}
	c.publish(t, "r", p)
	for _, i := range []int64{0, 2, 4} {
		of("think", i)
	}
	seq := uint64(0)
	for _, i := range []int64{2, 3, 5} {
		r := prune(i)
		if seq = r.Seq; r.Unchanged != "" {
			t.Errorf("prune of sample %d: %s", i, r.Unchanged)
		}
	}
	if _, err := c.client.AwaitControl(t.Context(), seq); err != nil {
		t.Fatal(err)
	}
	c.up(t, "reward")
	for _, x := range []struct {
		stage  schemas.Stage
		sample int64
		want   string
	}{{"judge", 2, "pruned"}, {"paint", 4, "completed"}, {"paint", 5, "pruned"}} {
		e := of(x.stage, x.sample)
		if e.StopReason != x.want {
			t.Errorf("%s of sample %d %s: %s; want %s", x.stage, x.sample, e.StopReason, e.Error, x.want)
		}
		want := fmt.Sprintf("sample %d of group g has its trajectory, %s", x.sample, x.want)
		if got := prune(x.sample).Unchanged; got != want {
			t.Errorf("prune of a sample that ended: %q, want %q", got, want)
		}
	}
	free.Store(true)
	a := c.advantages(t, "r", 1)["g"]
	for i, want := range []string{"scored", "scored", "pruned", "pruned", "scored", "pruned"} {
		if m := a.Members[i]; m.Status != want {
			t.Errorf("sample %d is %s, %s; want %s", i, m.Status, m.Error, want)
		}
	}
}

// A judge that says nothing until the deadline fails its samples by name, and the group closes.
func TestStages_Deadline(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	replies(t, c.world, "critic", func(*schemas.InteractRequest) []byte { return nil })
	bustest.Before(t, func(deadline time.Time) {
		uid := schemas.UID(fmt.Sprint("g", deadline.UnixNano()))
		p := judged(uid, 2)
		p.Deadline = new(deadline.UnixNano())
		if _, err := c.client.Publish(limited(t), "r", p); err != nil {
			return // the machine is busy
		}
		subject := schemas.AdvantageSubject("r", uid)
		stored := bustest.Await(t, c.Bus, 1, schemas.StreamAdvantages, subject)
		a := bustest.Decode[schemas.Advantage](t, stored[subject])
		for _, want := range []string{
			"stage judge: trajectory failed: interaction critic: timeout: no answer by ", ", the deadline of the group",
		} {
			if time.Now().Before(deadline) && !strings.Contains(a.Error, want) {
				t.Errorf("group: %s, %s; want %s", a.Status, a.Error, want)
			}
		}
	})
}
