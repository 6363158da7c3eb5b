package integration_test

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// cutSteps is T of the rollouts that are cut off, cutEvery how far their checkpoints are apart.
const cutSteps, cutEvery = 50, 5

type interruption struct {
	name, ackWait string
	cut           func(t *testing.T, w *world, v *harness.Process)
}

// Half way through fifty steps the program that makes them is killed, asked to stop with no time
// to finish, cut off for longer than the server waits for it, or has the run paused under it:
// the sampler that gets the sample redoes at most as many steps as a checkpoint is apart, and the digest
// is that of a calm run.
func TestResume_Programs(t *testing.T) {
	t.Parallel()
	calm := map[int64][32]byte{} // digests of calm runs, by the side of their images
	for _, c := range []interruption{
		{"killed", "5s", func(_ *testing.T, _ *world, v *harness.Process) { v.End(syscall.SIGKILL) }},
		{"stopped", "1h", func(_ *testing.T, _ *world, v *harness.Process) { v.End(syscall.SIGTERM) }},
		{"cut off", "1s", func(_ *testing.T, _ *world, v *harness.Process) { v.Pause(4 * time.Second) }},
		{"paused", "1h", func(t *testing.T, w *world, _ *harness.Process) {
			for _, verb := range []string{"pause", "resume"} {
				meander(t, t.TempDir(), verb, "cut", "--nats", w.Server.ClientURL()).must(t, 0)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			// On a busy machine small images are finished before they can be cut off.
			for side := int64(512); !c.happens(t, side, calm); side += 256 {
				if side > 1200 { // beyond, checkpoints are more than one message
					t.Fatal("not cut off in the middle, so this proves nothing")
				}
			}
		})
	}
}

// happens interrupts a rollout of images of that side; false where it came too late.
func (c interruption) happens(t *testing.T, side int64, calm map[int64][32]byte) bool {
	t.Helper()
	w := newWorld(t, bustest.TCP)
	w.Serve(t, defaults().run("intake"))
	replicas, dir := map[string]*harness.Process{}, t.TempDir()
	for _, instance := range []string{"a", "b"} {
		replicas[instance] = harness.Raise(t, &harness.Process{
			Name: "sampler-" + instance,
			Path: program(t, "meander-sampler"), Dir: dir, Args: []string{
				"--nats-url", w.Server.ClientURL(), "--health-addr", "", "--model", "synthetic", "--instance", instance,
				"--ack-wait", c.ackWait, "--drain-timeout", "10ms", "--batch", "1", "--workers", "1",
			},
		})
	}
	prompt := &schemas.Prompt{
		UID: "u", Prompt: "a red fox", Seed: new(int64(7)), GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(cutSteps)),
			Height:            &side, Width: &side,
			Rollout: schemas.Rollout{
				ReturnStepIndices: []int64{10, 11}, CheckpointEvery: new(int64(cutEvery)),
				LatentsDType: "F16",
			},
		},
		Reward: []schemas.RewardSpec{{Name: "synthetic"}},
	}
	publish(t, w, "cut", prompt)
	first := halfWay(t, w, cutSteps/2)
	c.cut(t, w, replicas[first.Sampler])
	got := trajectories(t, w, "cut", 1)["u"]
	stored := int64(w.Info(t, schemas.StreamSteps).State.LastSeq) // all that were made, some of them removed since
	digest := func(tr *schemas.Trajectory) [32]byte {
		sum, err := schemas.ContentDigest(tr)
		if err != nil {
			t.Fatal(err)
		}
		return sum
	}
	if _, known := calm[side]; !known {
		publish(t, w, "calm", prompt)
		calm[side] = digest(trajectories(t, w, "calm", 1)["u"])
	}
	if sum := digest(got); sum != calm[side] {
		t.Errorf("digest %x; want that of the calm run, %x", sum, calm[side])
	}
	if c.name == "cut off" { // which of the two was first, no one knows
		bustest.Drained(t, w.Bus, schemas.StreamRequests, 1)
		return true
	}
	redone, next := stored-cutSteps, int64(0)
	for i := range got.Steps {
		if got.StepAttempt(i) == first.Attempt {
			next++
		}
	}
	if next+redone == cutSteps || got.Attempt == first.Attempt {
		return false
	}
	if want := []string{first.Attempt, got.Attempt}; !slices.Equal(got.Attempts(), want) || got.Sampler == first.Sampler &&
		c.name != "paused" {
		t.Fatalf("attempts %v, the last by %s; want %v, the first by %s", got.Attempts(), got.Sampler, want, first.Sampler)
	}
	if redone < 0 || redone > cutEvery || (next-11)%cutEvery != 0 { // every fifth since 11, which is kept
		t.Errorf("went on with step %d: %d steps were made again, want at most %d", next, redone, cutEvery)
	}
	if c.name != "killed" {
		return true
	}
	said := fmt.Sprintf("sample 0 was continued: steps 0 to %d by attempt %s, %d to %d by attempt %s", next-1,
		first.Attempt, next, cutSteps-1, got.Attempt)
	c.told(t, w, dir, "show", said, "u")
	c.told(t, w, dir, "watch", fmt.Sprintf("completed, %d steps of 2 attempts", cutSteps), "--kinds", "trajectory",
		"--all", "--count", "1")
	c.told(t, w, dir, "verify", "0 mismatches")
	return true
}

// told is what a command says of the run that was cut off.
func (interruption) told(t *testing.T, w *world, dir, command, want string, args ...string) {
	t.Helper()
	out := meander(t, dir, append([]string{command, "--nats", w.Server.ClientURL(), "--run", "cut"}, args...)...).must(t,
		0)
	if !strings.Contains(strings.Join(strings.Fields(out.stdout), " "), want) {
		t.Errorf("%s does not say %q:\n%s", command, want, out.stdout)
	}
}

// halfWay waits for a step of the run cut, and returns it.
func halfWay(t *testing.T, w *world, index int64) *schemas.Step {
	t.Helper()
	ctx, moved := bustest.WhileItMoves(t)
	for m, err := range w.Read(ctx, schemas.StreamSteps, []string{schemas.Address{
		Kind: schemas.KindStep,
		Run:  "cut",
	}.Filter()}, bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatal(err)
		}
		moved()
		if s := bustest.Decode[schemas.Step](t, m); s.StepIndex >= index {
			return s
		}
	}
	t.Fatal("no step came so far")
	return nil
}
