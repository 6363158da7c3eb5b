package intake

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

func (p *plane) limitSteps(t testing.TB, bytes int64) {
	t.Helper()
	if err := p.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: bytes}); err != nil {
		t.Fatal(err)
	}
}

// A group that waits for space is refused after the time that a prompt may wait, and the code says that space lacks.
func TestSpace_WaitsAsLongAsPrompts(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.limitSteps(t, 16<<20)
	cfg := DefaultConfig()
	cfg.Hold, cfg.DrainTimeout = 2*time.Second, 100*time.Millisecond
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, cfg, b, zerolog.Nop()) })
	for _, run := range []schemas.Run{"first", "second"} {
		if r := receipt(t, p.publish(t, run, prompt("u1", "a fox", nil))); !r.Accepted {
			t.Fatalf("%+v", r)
		}
	}
	if d := bustest.Dead(t, p.Bus, 1)[0]; d.Code != schemas.CodeExhausted ||
		!strings.Contains(d.Reason, "MDR_STEPS is full: batch") {
		t.Errorf("%+v", d)
	}
}

// Of two batches that do not fit together, the second waits with its first group and says so, while the first goes on
// with all of its groups. The limit that is proposed is enough.
func TestSpace_TwoBatches(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.limitSteps(t, 16<<20)
	p.serve(t)
	// 11 states of 256 KiB are 2.75 MiB a sample: a batch takes about 11 MiB.
	ask := func(run schemas.Run, uid schemas.UID) *nats.Subscription {
		t.Helper()
		return p.publish(t, run, prompt(uid, "a fox", func(p *schemas.Prompt) {
			p.GroupSize, p.Batch = new(int64(2)), &schemas.BatchSpec{ID: "b", Groups: 2}
		}))
	}
	if r := receipt(t, ask("first", "u1")); !r.Accepted {
		t.Fatalf("%+v", r)
	}
	second := ask("second", "u1")
	r := receipt(t, second)
	r.Waiting = strings.Join(r.Warnings, "\n")
	for _, say := range []string{
		"MDR_STEPS is full: batch b takes up to ", "up to 1", "to be stored by batches that are begun, of 16.0 MiB",
		"meander streams limit --max-steps-bytes 2",
	} {
		if !strings.Contains(r.Waiting, say) {
			t.Errorf("%+v; must say %q", r, say)
		}
	}
	small := p.publish(t, "third", prompt("u1", "a fox", nil)) // it must not keep the second out
	if r := receipt(t, small); !r.Accepted || r.Warnings == nil {
		t.Errorf("a small group overtakes: %+v", r)
	}
	if r := receipt(t, ask("first", "u2")); !r.Accepted {
		t.Errorf("a later group of a batch that is begun: %+v", r)
	}
	var fault bus.Fault
	bustest.Until(t, "what waits for space", func() error {
		faults, err := p.Faults(t.Context())
		if err != nil {
			return err
		}
		for _, f := range faults {
			if fault = f; f.Name == schemas.StreamSteps && f.Waiting == 6 && f.Enough > 33<<20 {
				return nil
			}
		}
		return fmt.Errorf("%+v", faults)
	})
	for _, run := range []schemas.Run{"second", "third"} {
		if asked := p.requests(t, run); len(asked) > 0 {
			t.Errorf("%s begins beside it: %v", run, asked)
		}
		if s, err := counters.Status(t.Context(), p.Bus, run); err != nil || s.Lost > 0 {
			t.Errorf("%+v, %v; must wait, and not be lost", s, err)
		}
	}
	p.limitSteps(t, fault.Enough)
	bustest.Until(t, "both begin with the limit that was proposed", func() error {
		if n, m := len(p.requests(t, "second")["u1"]), len(p.requests(t, "third")["u1"]); n != 2 || m != 4 {
			return fmt.Errorf("%d and %d requests", n, m)
		}
		return nil
	})
	bustest.Until(t, "no fault", func() error {
		faults, err := p.Faults(t.Context())
		if err == nil && len(faults) > 0 {
			err = fmt.Errorf("%+v", faults)
		}
		return err
	})
}

// Of two intakes side by side, which get two batches in the same moment, each of which takes more than half of the
// space, one begins one.
func TestSpace_TwoIntakesBeginOneBatch(t *testing.T) {
	t.Parallel()
	for i := range 4 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			p := newPlane(t)
			p.limitSteps(t, 8<<20)
			p.serve(t)
			p.serve(t)
			for _, run := range []schemas.Run{"first", "second"} {
				p.publish(t, run, prompt("u1", "a fox", func(p *schemas.Prompt) { p.GroupSize = new(int64(2)) }))
			}
			asked := func(run schemas.Run) int { return len(p.requests(t, run)["u1"]) }
			bustest.Until(t, "one waits, and one is begun", func() error {
				faults, err := p.Faults(t.Context())
				if err == nil && (len(faults) != 1 || asked("first")+asked("second") == 0) {
					err = fmt.Errorf("%+v", faults)
				}
				return err
			})
			if n := asked("first") + asked("second"); n != 2 {
				t.Errorf("%d samples are asked for; want the 2 of one group", n)
			}
		})
	}
}
