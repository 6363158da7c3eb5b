package integration_test

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// Half way through fifty steps the program that makes them is killed, asked to stop with no time
// to finish, or cut off for longer than the server waits for it: the other replica redoes
// at most as many steps as a checkpoint is apart, and the digest is that of a calm run.
func TestResume_Programs(t *testing.T) {
	const steps, every = 50, 5
	for name, c := range map[string]struct {
		ackWait string
		cut     func(v *victim)
	}{
		"killed":  {"1s", func(v *victim) { v.end(syscall.SIGKILL) }},
		"stopped": {"1h", func(v *victim) { v.end(syscall.SIGTERM) }},
		"cut off": {"1s", func(v *victim) { v.pause(4 * time.Second) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, bustest.TCP)
			w.Serve(t, defaults().run("intake"))
			replicas, dir := map[string]*victim{}, t.TempDir()
			for _, instance := range []string{"a", "b"} {
				replicas[instance] = raise(t, &victim{name: "sampler-" + instance, path: program(t, "meander-sampler"), dir: dir, args: []string{
					"--nats-url", w.Server.ClientURL(), "--health-addr", "", "--model", "synthetic", "--instance", instance,
					"--ack-wait", c.ackWait, "--drain-timeout", "10ms", "--batch", "1", "--workers", "1",
				}})
			}
			prompt := &schemas.Prompt{
				UID: "u", Prompt: "a red fox", Seed: new(int64(7)), GroupSize: new(int64(1)), NumInferenceSteps: new(int64(steps)),
				Height: new(int64(768)), Width: new(int64(768)), Reward: []schemas.RewardSpec{{Name: "synthetic"}},
				Rollout: schemas.Rollout{ReturnStepIndices: []int64{10, 11}, CheckpointEvery: new(int64(every))},
			}
			publish(t, w, "cut", prompt)
			first := halfWay(t, w, steps/2)
			c.cut(replicas[first.Sampler])
			got := trajectories(t, w, "cut", 1)["u"]
			publish(t, w, "calm", prompt)
			calm := trajectories(t, w, "calm", 1)["u"]
			a, err1 := schemas.ContentDigest(got)
			b, err2 := schemas.ContentDigest(calm)
			if err1 != nil || err2 != nil || a != b {
				t.Errorf("digests %x and %x, %v, %v; want that of the calm run", a, b, err1, err2)
			}
			if name == "cut off" { // which of the two was first, nobody knows
				bustest.Settled(t, w.Bus, schemas.StreamRequests, 1)
				return
			}
			if want := []string{first.Attempt, got.Attempt}; !slices.Equal(got.Attempts(), want) || got.Sampler == first.Sampler {
				t.Fatalf("attempts %v, the last by %s; want %v, the first by %s", got.Attempts(), got.Sampler, want, first.Sampler)
			}
			made := map[string][]int64{} // step indices by attempt
			for m, err := range w.Read(t.Context(), schemas.StreamSteps, []string{schemas.Address{Kind: schemas.KindStep, Run: "cut"}.Filter()}, bus.ReadOptions{}) {
				if err != nil {
					t.Fatal(err)
				}
				s := bustest.Decode[schemas.Step](t, m)
				made[s.Attempt] = append(made[s.Attempt], s.StepIndex)
			}
			last, next := slices.Max(made[first.Attempt]), slices.Min(made[got.Attempt])
			if last < steps/2 || last == steps-1 {
				t.Fatalf("cut off after step %d: not in the middle, so this proves nothing", last)
			}
			if redone := last - next + 1; redone > every || (next-11)%every != 0 { // every fifth since 11, which is kept
				t.Errorf("went on with step %d after step %d: %d steps were made again, want at most %d", next, last, redone, every)
			}
			said := fmt.Sprintf("sample 0 was gone on with: steps 0 to %d by attempt %s, %d to %d by attempt %s", next-1, first.Attempt, next, steps-1, got.Attempt)
			out := meander(t, dir, "show", "--nats", w.Server.ClientURL(), "--run", "cut", "u").must(t, 0)
			if !strings.Contains(strings.Join(strings.Fields(out.stdout), " "), said) {
				t.Errorf("show does not say %q:\n%s", said, out.stdout)
			}
			out = meander(t, dir, "watch", "--nats", w.Server.ClientURL(), "--run", "cut", "--kinds", "trajectory", "--all", "--count", "1").must(t, 0)
			if want := fmt.Sprintf("completed, %d steps of 2 attempts", steps); !strings.Contains(out.stdout, want) {
				t.Errorf("watch does not say %q:\n%s", want, out.stdout)
			}
			meander(t, dir, "verify", "--nats", w.Server.ClientURL(), "--run", "cut").must(t, 0)
		})
	}
}

// halfWay waits for a step of the run cut, and returns it.
func halfWay(t *testing.T, w *world, index int64) *schemas.Step {
	t.Helper()
	ctx, moved := bustest.WhileItMoves(t)
	for m, err := range w.Read(ctx, schemas.StreamSteps, []string{schemas.Address{Kind: schemas.KindStep, Run: "cut"}.Filter()}, bus.ReadOptions{Live: true}) {
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
