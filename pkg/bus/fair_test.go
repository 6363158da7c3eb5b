package bus_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// fair is sampler with families, a run and a group.
func fair() bus.ConsumerConfig {
	c := sampler()
	c.Families = func(m *bus.Message) []string {
		t := strings.Split(schemas.MessageID(m.Subject), ".")
		return []string{t[1], t[1] + "." + t[3]}
	}
	return c
}

func publishSamples(t testing.TB, b *bus.Bus, run schemas.Run, uid schemas.UID, n int) {
	t.Helper()
	p := b.NewPublisher(1024, 16<<20)
	defer p.Close()
	var futures []*bus.Future
	for i := range n {
		f, err := p.Publish(context.Background(), request(run, uid, int64(i)))
		if err != nil {
			t.Fatal(err)
		}
		futures = append(futures, f)
	}
	for _, f := range futures {
		if _, err := f.Wait(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
}

var errBad = errors.New("bad")

// What waits for its redelivery keeps nothing else out, however much of it there is.
func TestBus_Consume_failuresLeaveTheWindow(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		const good = 8
		publishSamples(t, e.Bus, "r1", "bad0", 1024)
		publishSamples(t, e.Bus, "r2", "bad1", 1024)
		publishSamples(t, e.Bus, "r2", "good", good)
		done := make(chan struct{}, good)
		c := sampler()
		c.RetryDelay = time.Hour // what failed does not come back within this test
		consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
			if strings.Contains(m.Subject, ".bad") {
				return errBad
			}
			done <- struct{}{}
			return nil
		})
		for range good {
			bustest.Receive(t, "a message that does not fail", done)
		}
	})
}

// A group that fails slowly has one slot, others the rest; and so has a run of groups
// that fail one after the other.
func TestBus_Consume_failingFamiliesShareOneHalf(t *testing.T) {
	t.Parallel()
	for name, bad := range map[string]struct {
		groups, size int
		most         int64
	}{
		"group": {1, 256, 1}, "run of groups": {256, 1, 2},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, "in-process")
			e.setup(t)
			const good = 64
			for i := range bad.groups {
				publishSamples(t, e.Bus, "bad", uid(i), bad.size)
			}
			publishSamples(t, e.Bus, "good", "g", good)
			var begun, running atomic.Int64
			release, finish := make(chan struct{}), make(chan struct{})
			done := make(chan int64, good)
			c := fair()
			c.RetryDelay = time.Hour
			c.Slots = 4
			stop := consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
				if strings.Contains(m.Subject, ".good.") {
					done <- running.Load()
					return nil
				}
				n := begun.Add(1)
				running.Add(1)
				defer running.Add(-1)
				if n <= 4 { // no one knows yet that they fail
					<-release
				} else {
					<-finish
				}
				return errBad
			})
			eventually(t, "every slot taken", func() bool { return running.Load() == 4 })
			close(release)
			for range good {
				if n := bustest.Receive(t, "a message that does not fail", done); n > bad.most {
					t.Errorf("%d messages that fail at work beside one that does not, want at most %d", n, bad.most)
				}
			}
			close(finish)
			stop()
		})
	}
}

// A message that gave its turn to others of its family is not lost, however long they work: the server stops delivering
// what has come too often, without a word.
func TestBus_Consume_longTurnsLoseNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	publishSamples(t, e.Bus, "r1", "u", 3)
	var calls atomic.Int64
	waited := make(chan struct{})
	c := fair()
	c.Slots, c.MaxDeliver = 2, 1
	consume(t, e.Bus, c, func(ctx context.Context, _ *bus.Message) error {
		switch calls.Add(1) {
		case 1:
			return errBad // given up: its family is suspect from now on
		case 2:
			select { // works until the other one has been let in
			case <-waited:
			case <-ctx.Done():
			}
		default:
			close(waited)
		}
		return nil
	})
	bustest.Receive(t, "the sample that waited for the other one", waited)
}

// A success clears a family: its messages run side by side again, and all get done.
func TestBus_Consume_familyRecovers(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	publishSamples(t, e.Bus, "r1", "u", 200)
	var calls atomic.Int64
	c := fair()
	c.MaxDeliver = 30 // however slow the machine is, the family is not given up before
	consume(t, e.Bus, c, func(context.Context, *bus.Message) error {
		if calls.Add(1) <= 6 {
			return errBad
		}
		return nil
	})
	eventually(t, "all acked", func() bool { return e.waiting(t) == 0 })
	if dead := bustest.Dead(t, e.Bus, 0); len(dead) > 0 {
		t.Errorf("%d dead letters, want none: %+v", len(dead), dead[0])
	}
}

// A family that fails on and on is given up message by message, each tried at least once
// and none as often as if it were alone.
func TestBus_Consume_familyGivenUp(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	const n = 200
	publishSamples(t, e.Bus, "r1", "u", n)
	tried := make([]atomic.Int64, n)
	c := fair()
	c.RetryDelay, c.MaxDeliver = 5*time.Millisecond, 4
	consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
		var r schemas.Request
		if err := schemas.Decode(m.Data, &r); err != nil {
			return err
		}
		tried[r.SampleIndex].Add(1)
		return errBad
	})
	eventually(t, "all given up", func() bool { return e.waiting(t) == 0 })
	total := int64(0)
	for i := range tried {
		if tried[i].Load() == 0 {
			t.Errorf("sample %d was never tried", i)
		}
		total += tried[i].Load()
	}
	dead := bustest.Dead(t, e.Bus, 0)
	for _, d := range dead {
		if d.Reason != errBad.Error() {
			t.Errorf("%s: reason %q, want the cause", d.OriginalSubject, d.Reason)
		}
	}
	if len(dead) != n || total >= n*4 {
		t.Errorf("%d dead letters after %d tries, want %d after fewer than %d", len(dead), total, n, n*4)
	}
}

// A server that is away says nothing of the messages that failed meanwhile: the others of
// their group go on, all at once.
func TestBus_Consume_outageMakesNoSuspects(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		const n = 4
		publishSamples(t, e.Bus, "r", "lost", 1)
		c := fair()
		c.Slots, c.RetryDelay = n, time.Hour
		var tries, inside atomic.Int64
		together := make(chan struct{})
		consume(t, e.Bus, c, func(ctx context.Context, m *bus.Message) error {
			if tries.Add(1) == 1 {
				return fmt.Errorf("look up: %w", nats.ErrTimeout)
			}
			if inside.Add(1) == n {
				close(together)
			}
			select {
			case <-together:
			case <-ctx.Done():
			}
			return nil
		})
		eventually(t, "the failure", func() bool { return tries.Load() == 1 })
		publishSamples(t, e.Bus, "r", "late", n) // of the same run
		eventually(t, "all at once", func() bool { return inside.Load() == n })
	})
}
