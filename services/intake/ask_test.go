package intake

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

// fail stores a failed reward of a sample: it counts as made.
func (p *plane) fail(t testing.TB, r *schemas.Request) {
	t.Helper()
	_, err := p.Publish(t.Context(), &schemas.Reward{
		Run: r.Run, UID: r.UID, SampleIndex: r.SampleIndex, GroupSize: r.GroupSize, Status: schemas.StatusFailed,
		Error: "made", Scores: []schemas.Score{}, Group: r.Group, Scored: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Requests that a server has lost are asked for again: those of samples that are made or in the hands of a sampler are
// not, and those of a paused run are parked. Intakes side by side ask once, and a restarted one asks too.
func TestAsk_LostRequests(t *testing.T) {
	t.Parallel()
	p := &plane{bustest.New(t)}
	if err := p.SetPolicy(t.Context(), qwen(), nil); err != nil {
		t.Fatal(err)
	}
	var making atomic.Pointer[schemas.Making]
	making.Store(&schemas.Making{Run: "r", UID: "one", SampleIndex: 1})
	changed := make(chan struct{}, 1)
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return b.Announce(ctx, func() *schemas.Presence {
			e := &schemas.Presence{Service: schemas.ServiceSampler, Instance: "sampler-1", Lane: qwen().Lane}
			if m := making.Load(); m != nil {
				e.Making = []schemas.Making{*m}
			}
			return e
		}, changed)
	})
	first := p.serve(t)
	ask := func(run schemas.Run, uid schemas.UID) {
		t.Helper()
		if r := receipt(t, p.publish(t, run, prompt(uid, "a fox", nil))); !r.Accepted {
			t.Fatalf("%+v", r)
		}
	}
	ask("r", "one")
	made := p.requests(t, "r")["one"][0]
	p.fail(t, made)
	purge := func() {
		t.Helper()
		for _, stream := range []string{schemas.StreamRequests, schemas.StreamParked} {
			if _, err := p.PurgeSubject(t.Context(), stream, schemas.Prefix+">"); err != nil {
				t.Fatal(err)
			}
		}
	}
	// until waits for what the run has asked for.
	until := func(run schemas.Run, want string) {
		t.Helper()
		bustest.Until(t, want, func() error {
			s, err := counters.Status(t.Context(), p.Bus, run)
			if err != nil {
				return err
			}
			var asked []int64
			for _, r := range p.requests(t, run)["one"] {
				asked = append(asked, r.SampleIndex)
			}
			if got := fmt.Sprintf("asked for %v, parked %d, lost %d", asked, s.Parked, s.Lost); got != want {
				return fmt.Errorf("%s; want %s", got, want)
			}
			return nil
		})
	}
	purge()
	until("r", "asked for [2 3], parked 0, lost 0")
	making.Store(nil) // the sampler gave it up
	changed <- struct{}{}
	first.Kill()
	until("r", "asked for [2 3], parked 0, lost 1")
	p.serve(t)
	p.serve(t)
	until("r", "asked for [2 3 1], parked 0, lost 0")

	ask("paused", "one")
	if _, mine, err := p.PutControl(t.Context(),
		&schemas.Control{Run: "paused", Action: schemas.ControlPause, At: 1, Seq: 1}); err != nil || !mine {
		t.Fatal(mine, err)
	}
	purge()
	until("paused", "asked for [], parked 4, lost 0")

	// A prompt that is gone can be asked for no more: the group closes.
	if _, err := p.PurgeSubject(t.Context(), schemas.StreamPrompts, schemas.Prefix+"prompt.paused"); err != nil {
		t.Fatal(err)
	}
	purge()
	bustest.Await(t, p.Bus, 4, schemas.StreamRewards, schemas.Address{Kind: schemas.KindReward, Run: "paused"}.Filter())
}
