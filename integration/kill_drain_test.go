package integration_test

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"math/rand/v2"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

const drainGroups, drainSize, drainRoom = 3, 4, 5

// drainTest is a pipeline whose programs end one after the other while they are busy.
type drainTest struct {
	*crew
	dir          string
	steps        int64 // of a sample
	images, side int64
	asked        map[schemas.UID]int64 // samples by uid
	rounds       int                   // groups of large images
}

func (d *drainTest) run(t *testing.T, name, version string, args ...string) *harness.Process {
	t.Helper()
	return harness.Raise(t, &harness.Process{
		Name: name + "-" + version, Path: program(t, "meander-"+name), Dir: d.dir,
		Args: append([]string{"--nats-url", d.Server.ClientURL(), "--health-addr", "", "--ack-wait", "1h"}, args...),
	})
}

func (*drainTest) stop(t *testing.T, v *harness.Process) {
	t.Helper()
	if v.Bury(t); len(v.Deaths()) > 0 {
		t.Errorf("%s ended with %q; want status 0", v.Name, v.Deaths())
	}
}

func (d *drainTest) handedBack(t *testing.T, stream, durable string, messages int) {
	t.Helper()
	if n := d.consumer(t, stream, durable).Delivered.Consumer; n <= uint64(messages) {
		t.Errorf("%s: %d deliveries of %d messages: nothing was handed back, so this proves nothing", durable, n,
			messages)
	}
}

// Every program, stopped with SIGTERM while it is busy, ends quickly with status 0 and
// hands back what it has in hand: another one goes on with it at once. No one waits
// for the ack wait, which is an hour here.
func TestDrain_BusyProgramsHandOver(t *testing.T) {
	t.Parallel()
	d := &drainTest{
		crew: assemble(t), dir: t.TempDir(), steps: 400, images: 6, side: 2048,
		asked: map[schemas.UID]int64{},
	}
	if raceEnabled {
		d.steps, d.side = 150, 1024
	}
	d.rewards(t, d.samples(t))
	d.groups(t)
}

// samples ends intake and the sampler while they are busy, and gives one of the
// trajectories that others made.
func (d *drainTest) samples(t *testing.T) *schemas.Trajectory {
	t.Helper()
	c, b := d.crew, d.Bus
	// Intake: busy with prompts whose requests have no room.
	c.resize(t, schemas.StreamRequests, drainRoom)
	first := d.run(t, "intake", "1", "--models", "synthetic", "--slots", "2", "--drain-timeout", "10ms")
	for i := range drainGroups {
		p := slowPrompt(schemas.UID(fmt.Sprintf("g%d", i)), drainSize, d.steps)
		p.Height, p.Width = new(int64(128)), new(int64(128))
		d.asked[p.UID] = drainSize
		data, err := schemas.Encode(p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.PublishPrompt(t.Context(), "r", data, nil); err != nil {
			t.Fatal(err)
		}
	}
	sampler := d.run(t, "sampler", "1", "--model", "synthetic", "--batch", "1", "--workers", "1", "--drain-timeout",
		"10ms")
	bustest.Until(t, "the first sampler is in the middle of a sample", func() error {
		if n := c.messages(t, schemas.StreamSteps); n < 20 {
			return fmt.Errorf("%d steps", n)
		}
		return nil
	})
	bustest.Until(t, "the requests are full", func() error {
		if n := c.messages(t, schemas.StreamRequests); n != drainRoom {
			return fmt.Errorf("%d of %d", n, drainRoom)
		}
		return nil
	})
	if err := inHand(t, c.Bus, schemas.StreamPrompts, "intake", 1); err != nil {
		t.Errorf("the first intake is not busy, make the requests fewer: %v", err)
	}
	d.stop(t, first)
	d.run(t, "intake", "2")

	// Sampler: busy with samples that it cannot finish in its drain timeout. On a busy machine it may have finished
	// them before the signal came: then there is one more.
	for unfinished := 0; unfinished == 0; {
		bustest.Until(t, "the first sampler has samples in hand", func() error {
			return inHand(t, c.Bus, schemas.StreamRequests, "sampler-synthetic", 2)
		})
		d.stop(t, sampler)
		delivered := c.consumer(t, schemas.StreamRequests, "sampler-synthetic").Delivered.Consumer
		if unfinished = int(delivered) - int(c.messages(t, schemas.StreamTrajectories)); unfinished == 0 {
			sampler = d.run(t, "sampler", "1-again", "--model", "synthetic", "--batch", "1", "--workers", "1",
				"--drain-timeout", "10ms")
		}
	}
	d.run(t, "sampler", "2", "--model", "synthetic", "--batch", "4", "--instance", "second")
	bustest.Until(t, "all trajectories", func() error {
		if n := c.messages(t, schemas.StreamTrajectories); n != drainGroups*drainSize {
			return fmt.Errorf("%d of %d", n, drainGroups*drainSize)
		}
		return nil
	})
	d.handedBack(t, schemas.StreamPrompts, "intake", drainGroups)
	d.handedBack(t, schemas.StreamRequests, "sampler-synthetic", drainGroups*drainSize)
	one, err := c.client.Trajectory(t.Context(), "r", "g0", 0)
	if err != nil {
		t.Fatal(err)
	}
	return one
}

// rewards ends a reward service that is busy with large images. On a busy machine it may have scored them all before
// the signal came: then there are more.
func (d *drainTest) rewards(t *testing.T, one *schemas.Trajectory) {
	t.Helper()
	c, ref := d.crew, bigImage(t, d.Bus, int(d.side))
	trajectories, all := drainGroups*drainSize, uint64(0)
	for unfinished := uint64(0); unfinished == 0; {
		d.publishImages(t, one, ref)
		d.rounds++
		// The stream has the records of the groups, too.
		small := uint64(drainGroups + d.rounds + trajectories)
		trajectories += int(d.images)
		all = small + uint64(d.images)
		busy := d.run(t, "reward", fmt.Sprintf("1-%d", d.rounds), "--workers", "2", "--drain-timeout", "10ms")
		bustest.Until(t, "some rewards", func() error {
			if n := c.messages(t, schemas.StreamRewards); n <= small {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
		d.stop(t, busy)
		if unfinished = all - c.messages(t, schemas.StreamRewards); unfinished == 0 && d.rounds == 10 {
			t.Fatal("ten reward services had nothing in hand; make the images larger")
		}
	}
	d.run(t, "reward", "2")
	bustest.Until(t, "all rewards", func() error {
		if n := c.messages(t, schemas.StreamRewards); n != all {
			return fmt.Errorf("%d of %d", n, all)
		}
		return nil
	})

	d.handedBack(t, schemas.StreamTrajectories, "reward", trajectories)
}

// publishImages publishes a group of large images, and the record of it, which is not intake's: each time in a run of
// its own.
func (d *drainTest) publishImages(t *testing.T, one *schemas.Trajectory, ref schemas.Ref) {
	t.Helper()
	run := schemas.Run(fmt.Sprintf("images-%d", d.rounds))
	for i := range d.images {
		e := *one
		e.Run, e.SampleIndex, e.GroupSize = run, i, d.images
		e.Media = []schemas.Medium{{
			Kind: schemas.KindImage, Format: schemas.ImagePNG, Width: d.side, Height: d.side, Digest: digest, Ref: &ref,
		}}
		oneStep(t, d.Bus, &e)
		if _, err := d.Bus.Publish(t.Context(), &e); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.Bus.Publish(t.Context(), &schemas.Opening{
		Run: run, UID: one.UID, GroupSize: d.images, PromptDigest: digest, Prompt: one.Prompt, Lane: one.Lane,
		ScheduleDigest: one.ScheduleDigest, Group: one.Group,
	}); err != nil {
		t.Fatal(err)
	}
}

func (d *drainTest) groups(t *testing.T) {
	t.Helper()
	c, b := d.crew, d.Bus
	// Advantage: busy with a group that is not complete, its successor standing by.
	active := d.run(t, "advantage", "1")
	bustest.Until(t, "groups closed", func() error {
		if n := c.messages(t, schemas.StreamAdvantages); n != uint64(drainGroups+d.rounds) {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	for i := range int64(3) {
		putReward(t, b, rewardOf("half", "h", i, 4, float64(i)))
	}
	bustest.Until(t, "a record and three rewards in hand",
		func() error { return inHand(t, c.Bus, schemas.StreamRewards, holder("h"), 1+3) })
	d.run(t, "advantage", "2")
	bustest.Until(t, "the second stands by", func() error {
		if n := c.consumer(t, schemas.StreamRewards, holder("h")).NumWaiting; n < 2 {
			return fmt.Errorf("%d ask for rewards", n)
		}
		return nil
	})
	d.stop(t, active)
	putReward(t, b, rewardOf("half", "h", 3, 4, 3))
	d.asked["h"] = 4
	bustest.Until(t, "the half group is closed", func() error {
		if n := c.messages(t, schemas.StreamAdvantages); n != uint64(drainGroups+d.rounds+1) {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	if a := harness.ReadBooks(t, b, "half").Advantages["h"]; a == nil || a.Status != schemas.StatusComplete {
		t.Errorf("half group: %+v; want complete", a)
	}
	delete(d.asked, "h")
	harness.AwaitIdle(t, b)
	harness.ReadBooks(t, b, "r").Check(t, d.asked, d.steps)
	harness.NoDead(t, b)
}

// oneStep makes the rollout of a trajectory one of a single step, which is stored.
func oneStep(t *testing.T, b *bus.Bus, e *schemas.Trajectory) {
	t.Helper()
	e.Sigmas, e.Timesteps, e.Transitions, e.LogProbs = []float32{1, 0}, []float32{1000, 0},
		[]string{schemas.TransitionODE}, []*float64{nil}
	e.LatentStepIndices = []int64{}
	p := b.NewPublisher(1, 1<<20)
	defer p.Close()
	f, err := p.PublishStep(t.Context(), &schemas.Step{
		Stage: schemas.StageMain,
		Run:   e.Run, UID: e.UID, SampleIndex: e.SampleIndex, Attempt: e.Attempt, NumInferenceSteps: 1,
		Transition: schemas.TransitionODE,
		Sigma:      1, Timestep: 1000, LogProbKind: e.LogProbKind, ElementCount: 1, Latents: []schemas.IndexedTensor{},
		Debug:          []schemas.NamedTensor{},
		ScheduleDigest: e.ScheduleDigest,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ack, err := f.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e.Steps = []schemas.StepRef{{Seq: ack.Seq, Digest: ack.Digest}}
}

// bigImage stores an image that takes a while to decode.
func bigImage(t *testing.T, b *bus.Bus, side int) schemas.Ref {
	t.Helper()
	img := image.NewNRGBA(image.Rect(0, 0, side, side))
	r := rand.New(rand.NewPCG(1, 2))
	for i := range img.Pix {
		img.Pix[i] = byte(r.Uint32()) | byte(i&3/3*255) // opaque noise
	}
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		t.Fatal(err)
	}
	ref, err := b.PutBlob(t.Context(), buf.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return ref
}
