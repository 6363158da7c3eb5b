package integration_test

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// critique is a prompt of three stages: a thought, what the critic says of it, and two paintings of that.
func critique(uid schemas.UID, size int64) *schemas.Prompt {
	p := thinkAndPaint(uid, size)
	judge := &schemas.Interaction{Name: "critic", TimeoutMS: new(int64(600_000))}
	p.Stages = slices.Insert(p.Stages, 1, schemas.StageSpec{Name: "judge", Interaction: judge, Prompt: "{think.text}"})
	p.Stages[2].Prompt = "a sign that says \"{judge.text}\""
	return p
}

// withoutPainter has two lanes, and one of their samplers: a stand-in keeps the other lane announced, so its requests
// wait.
func (c *crew) withoutPainter(t *testing.T) {
	t.Helper()
	c.twoLanes(t)
	c.services(t, schemas.ServiceSampler, 2)
	c.serving["sampler"].Stop()
	c.standIn(t, "synthetic")
}

// waiting waits until so many requests of a stage of a run are in a stream.
func (c *crew) waiting(t *testing.T, kind string, run schemas.Run, stage schemas.Stage, want int) {
	t.Helper()
	stream := schemas.StreamRequests
	if kind == schemas.KindParked {
		stream = schemas.StreamParked
	}
	bustest.Until(t, fmt.Sprintf("%d %s of stage %s of run %s", want, kind, stage, run), func() error {
		subjects, err := c.Subjects(t.Context(), stream, schemas.Address{Kind: kind, Run: run, Stage: stage}.Filter())
		if err == nil && len(subjects) != want {
			err = fmt.Errorf("%d", len(subjects))
		}
		return err
	})
}

func (c *crew) control(t *testing.T, run schemas.Run, action string) {
	t.Helper()
	r, err := c.client.Control(t.Context(), &schemas.Control{Run: run, Action: action, By: "me"})
	if err != nil || r.Unchanged != "" {
		t.Fatalf("%s: %+v, %v", action, r, err)
	}
}

// A cancelled run ends at whatever stage its samples are: what is asked for is withdrawn, an interaction is not waited
// for, and no later stage is asked for.
func TestStages_Cancelled(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.withoutPainter(t)
	asked := make(chan int64, 8)
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		if r.Run == "r" && r.SampleIndex == 0 {
			asked <- r.SampleIndex
			return nil
		}
		return packed(t, &schemas.InteractReply{Content: "fine"})
	})
	c.publish(t, "r", critique("g", 4))
	c.waiting(t, schemas.KindRequest, "r", "paint", 2)
	bustest.Receive(t, "the critic is asked", asked)
	c.control(t, "r", schemas.ControlCancel)
	a := c.advantages(t, "r", 1)["g"]
	for _, m := range a.Members {
		if a.Status != schemas.StatusCancelled || m.Status != schemas.StatusCancelled {
			t.Errorf("group %s, sample %d %s", a.Status, m.SampleIndex, m.Status)
		}
	}
	c.waiting(t, schemas.KindRequest, "r", "paint", 0)
	harness.AwaitIdle(t, c.Bus)
	c.up(t, "sampler")
	c.publish(t, "other", critique("g", 4))
	if a := c.advantages(t, "other", 1)["g"]; a.Status != schemas.StatusComplete {
		t.Errorf("group of another run: %s, %s", a.Status, a.Error)
	}
	made, err := c.Made(t.Context(), "r", "g")
	if err != nil || len(made) != 3 {
		t.Errorf("%d trajectories of the cancelled run, want two thoughts and a judgement: %v", len(made), err)
	}
	harness.NoDead(t, c.Bus)
}

// A paused run goes no further, at whatever stage its samples are, and goes on with the same bits once it is resumed:
// an interaction is asked then, and what was asked of a lane that only a later stage uses is asked again.
func TestStages_Paused(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	var paused atomic.Bool
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		if r.Run == "r" && paused.Load() {
			t.Error("the critic is asked in a paused run")
		}
		return packed(t, &schemas.InteractReply{Content: fmt.Sprint("fine ", r.SampleIndex)})
	})
	c.publish(t, "calm", critique("g", 4))
	c.advantages(t, "calm", 1)
	c.serving["reward"].Stop()
	c.publish(t, "r", critique("g", 4))
	bustest.Await(t, c.Bus, 2, schemas.StreamTrajectories, schemas.TrajectoryFilter("r", "g"))
	paused.Store(true)
	c.control(t, "r", schemas.ControlPause)
	c.up(t, "reward")
	c.publish(t, "calm", critique("later", 4)) // its thoughts are judged after those of the paused run are looked at
	c.advantages(t, "calm", 2)
	c.serving["sampler"].Stop()
	c.standIn(t, "synthetic")
	paused.Store(false)
	c.control(t, "r", schemas.ControlResume)
	c.waiting(t, schemas.KindRequest, "r", "paint", 4)
	c.control(t, "r", schemas.ControlPause)
	c.up(t, "sampler")
	c.waiting(t, schemas.KindParked, "r", "paint", 4)
	c.control(t, "r", schemas.ControlResume)
	if a := c.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusComplete {
		t.Fatalf("group: %s, %s", a.Status, a.Error)
	}
	c.counted(t, "r", 4, 4, 0)
	harness.NoDead(t, c.Bus)
	calm, r := harness.ReadBooks(t, c.Bus, "calm"), harness.ReadBooks(t, c.Bus, "r")
	for key, digest := range r.Digests {
		if calm.Digests[key] != digest {
			t.Errorf("%s: digest %q, in a run that was not paused %q", key, digest, calm.Digests[key])
		}
	}
}

// A stage that several samples share, and whose request cannot be made, fails them all by name, and no others.
func TestStages_SharedFails(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		if r.SampleIndex == 2 {
			return packed(t, &schemas.InteractReply{Content: strings.Repeat("no", 1<<13)})
		}
		return packed(t, &schemas.InteractReply{Content: "fine"})
	})
	p := critique("g", 6)
	draft := p.Stages[2]
	draft.Name, draft.Children, draft.Credit = "draft", nil, nil
	p.Stages = []schemas.StageSpec{p.Stages[0], p.Stages[1], draft, p.Stages[2]}
	p.Stages[3].Prompt = ""
	c.publish(t, "r", p)
	a := c.advantages(t, "r", 1)["g"]
	c.counted(t, "r", 4, 4, 2)
	for i, m := range a.Members {
		want, ran := schemas.StatusScored, 4
		if i == 2 || i == 3 {
			want, ran = schemas.StatusFailed, 2
		}
		if m.Status != want || len(m.Stages) != ran {
			t.Errorf("sample %d is %s after %d stages; want %s after %d", i, m.Status, len(m.Stages), want, ran)
		}
	}
	for _, m := range bustest.Await(t, c.Bus, 6, schemas.StreamRewards, schemas.RewardFilter("r", "g", "g")) {
		if r := bustest.Decode[schemas.Reward](t, m); r.Status == schemas.StatusFailed &&
			!strings.Contains(r.Error, "stage draft: prompt: ") {
			t.Errorf("sample %d: %s", r.SampleIndex, r.Error)
		}
	}
}

// A group that closes at its deadline between two stages asks for no later one, also when the service that makes their
// requests was killed and comes back behind the deadline.
func TestStages_DeadlineBetween(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.config.reward.AckWait = time.Second
	c.withoutPainter(t)
	closed := schemas.UID("")
	for wait := time.Second; closed == "" && wait < bustest.Patience; wait *= 2 { // the machine may be busy
		c.serving["reward"].Kill()
		uid := schemas.UID(fmt.Sprint("g", int(wait.Seconds())))
		p := thinkAndPaint(uid, 4)
		p.Deadline = new(time.Now().Add(wait).UnixNano())
		if _, err := c.client.Publish(limited(t), "r", p); err != nil {
			continue
		}
		bustest.Await(t, c.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", uid))
		if made, err := c.Made(t.Context(), "r", uid); err == nil && len(made) == 2 {
			closed = uid
		}
	}
	c.up(t, "reward")
	c.publish(t, "r", thinkAndPaint("open", 4))
	c.waiting(t, schemas.KindRequest, "r", "paint", 4)
	c.up(t, "sampler")
	for n := 2; ; n++ {
		if a := c.advantages(t, "r", n)["open"]; a != nil {
			break
		}
	}
	if made, err := c.Made(t.Context(), "r", closed); err != nil || len(made) != 2 {
		t.Errorf("%d trajectories of the closed group, want its two thoughts: %v", len(made), err)
	}
}

// A group that is refilled runs all stages again, with the prompt of its substitute, and its advantages are of its own
// samples.
func TestStages_Refilled(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	replies(t, c.world, "critic", func(r *schemas.InteractRequest) []byte {
		if r.UID == "g" {
			return packed(t, &schemas.InteractReply{Error: "no idea"})
		}
		return packed(t, &schemas.InteractReply{Content: "fine"})
	})
	p := critique("g", 4)
	p.GroupPolicy = &schemas.GroupPolicy{Failed: schemas.GroupRefill}
	p.Substitutes = []schemas.Substitute{{Prompt: "3+4=?"}}
	c.publish(t, "r", p)
	closed := c.advantages(t, "r", 2)
	first, again := closed["g"], closed["g-r1"]
	if first.Status != schemas.StatusFailed || first.RefilledBy != "g-r1" || again.Status != schemas.StatusComplete {
		t.Fatalf("%s, refilled by %q, and that is %s: %s", first.Status, first.RefilledBy, again.Status, again.Error)
	}
	for i, m := range again.Members {
		if len(m.Stages) != 3 || m.Stages[0].SampleIndex != int64(i-i%2) || m.Stages[2].SampleIndex != int64(i) ||
			m.Advantage == nil || again.Credits[0].Values[i/2] == nil || again.Credits[1].Values[i] == nil {
			t.Errorf("member %+v; credits %+v", m, again.Credits)
		}
	}
	if think := c.stage(t, "r", "g-r1", 2, "think"); think.Prompt != "3+4=?" {
		t.Errorf("the thought is of %q", think.Prompt)
	}
	run, err := results.Read(t.Context(), c.Bus, "r")
	if err != nil || len(run.Groups) != 1 || run.Groups[0].Group != "g-r1" || run.Groups[0].Prompt != "3+4=?" {
		t.Errorf("results: %+v, %v", run, err)
	}
	c.says(t, "show --run r g", "failed: interaction critic: error: the worker says: no idea")
}
