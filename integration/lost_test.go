package integration_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/doctor"
)

// A run whose requests are purged while samples are being made, and whose intake dies too, ends by itself: with the
// bits of a calm one, and no sample made twice. Doctor names the fault in between.
func TestLost_RequestsArePurged(t *testing.T) {
	t.Parallel()
	var calm *harness.Books
	for _, purged := range []bool{false, true} {
		w := newWorld(t)
		var mu sync.Mutex
		attempts := map[string]bool{}
		heard, err := w.Conn().Subscribe(schemas.Prefix+"step.>", func(m *nats.Msg) {
			a, _ := schemas.ParseSubject(m.Subject)
			mu.Lock()
			defer mu.Unlock()
			attempts[fmt.Sprintf("%s %s %s", a.UID, a.Sample, a.Attempt)] = true
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = heard.Unsubscribe() })
		c := defaults()
		c.sampler.Batch, c.sampler.Workers = 1, 1
		intake := w.Serve(t, c.run("intake"))
		for _, name := range stages[1:] {
			w.Serve(t, c.run(name))
		}
		prompts := make([]*schemas.Prompt, 4)
		for i := range prompts {
			prompts[i] = &schemas.Prompt{
				UID: schemas.UID(fmt.Sprint("u", i)), Prompt: "a red fox", GroupSize: new(int64(8)),
				ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(200))},
			}
		}
		w.publish(t, "r", prompts...)
		if purged {
			bustest.Await(t, w.Bus, 3, schemas.StreamTrajectories,
				schemas.Address{Kind: schemas.KindTrajectory}.Filter())
			intake.Kill()
			if _, err := w.PurgeSubject(t.Context(), schemas.StreamRequests, schemas.Prefix+">"); err != nil {
				t.Fatal(err)
			}
			bustest.Until(t, "what doctor says", func() error {
				said := ""
				doctor.Run(t.Context(), doctor.Options{Bus: w.Bus, Where: "here"}, func(f doctor.Finding) {
					if f.State == doctor.Fault && f.Area == "consumers" {
						said += f.Says + "\n"
					}
				})
				if !strings.Contains(said, "neither made nor asked for") {
					return fmt.Errorf("%q", said)
				}
				return nil
			})
			w.Serve(t, c.run("intake"))
			w.Serve(t, c.run("intake"))
		}
		w.advantages(t, "r", len(prompts))
		harness.AwaitIdle(t, w.Bus)
		k := harness.ReadBooks(t, w.Bus, "r")
		if calm == nil {
			calm = k
		}
		k.Same(t, calm)
		mu.Lock()
		if n := 8 * len(prompts); len(attempts) != n || len(k.Twice) != 0 {
			t.Errorf("%d attempts at %d samples, twice: %v", len(attempts), n, k.Twice)
		}
		mu.Unlock()
	}
}

// A group whose rewards are purged, and whose advantage service dies too, gets the same rewards again, and closes.
func TestLost_RewardsArePurged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := defaults()
	for _, name := range stages[:len(stages)-1] {
		w.Serve(t, c.run(name))
	}
	advantage := w.Serve(t, c.run("advantage"))
	w.publish(t, "r", &schemas.Prompt{
		UID: "u", Prompt: "a red fox", GroupSize: new(int64(2)),
		Reward: []schemas.RewardSpec{{Name: "external"}, {Name: "jpeg_compressibility"}},
	})
	judge := func(i int64) {
		v := &schemas.Verdict{Run: "r", UID: "u", SampleIndex: i, Name: "external", Value: new(float64(i))}
		if _, err := w.Bus.Publish(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	filter := schemas.Address{Kind: schemas.KindReward}.Filter()
	bustest.Await(t, w.Bus, 2, schemas.StreamTrajectories)
	judge(0)
	first := &schemas.Reward{}
	for _, m := range bustest.Await(t, w.Bus, 1, schemas.StreamRewards, filter) {
		first = bustest.Decode[schemas.Reward](t, m)
	}
	advantage.Kill()
	if _, err := w.PurgeSubject(t.Context(), schemas.StreamRewards, schemas.Prefix+">"); err != nil {
		t.Fatal(err)
	}
	judge(1)
	for _, m := range bustest.Await(t, w.Bus, 2, schemas.StreamRewards, filter) {
		if r := bustest.Decode[schemas.Reward](t, m); r.SampleIndex == 0 && *r.Reward != *first.Reward {
			t.Errorf("reward %v again, %v at first", *r.Reward, *first.Reward)
		}
	}
	w.Serve(t, c.run("advantage"))
	if a := w.advantages(t, "r", 1)["u"]; a.Status != schemas.StatusComplete {
		t.Errorf("%+v", a)
	}
}
