package bus_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// partition is a pinned consumer of one partition of the rewards, with short times.
func partition(of string) bus.ConsumerConfig {
	p := schemas.Partition(of)
	return bus.ConsumerConfig{
		Durable: schemas.Durable{Stream: schemas.StreamRewards, Name: fmt.Sprintf("advantage-p%02d", p), Filters: []string{fmt.Sprintf("mdr.v1.reward.%d.>", p)}},
		AckWait: 500 * time.Millisecond, MaxDeliver: -1, MaxAckPending: 10_000, Slots: 64,
		PriorityGroup: "advantage", PinnedTTL: 500 * time.Millisecond,
	}
}

func subscribe(t testing.TB, b *bus.Bus, c bus.ConsumerConfig) *bus.Subscription {
	t.Helper()
	s, err := b.Subscription(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// take reads messages for a while, at most n.
func take(t testing.TB, s *bus.Subscription, n int, wait time.Duration) []*bus.Message {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	var out []*bus.Message
	for len(out) < n {
		m, err := s.Next(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

func publishGroup(t testing.TB, b *bus.Bus, uid schemas.UID, from, n int) {
	t.Helper()
	for i := range n {
		if _, err := b.Publish(context.Background(), reward(uid, int64(from+i))); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSubscription_holdsUntilSettled(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishGroup(t, e.Bus, "u1", 0, 8)
		c := partition("u1")
		c.AckWait = 2 * time.Second
		s := subscribe(t, e.Bus, c)
		held := take(t, s, 8, bustest.Patience)
		if len(held) != 8 || s.Held() != 8 {
			t.Fatalf("got %d messages, %d held; want 8", len(held), s.Held())
		}
		bustest.Redelivers(t, e.Bus, 2*c.AckWait)
		if again := take(t, s, 1, 10*time.Millisecond); len(again) != 0 {
			t.Errorf("%s came again while held, delivery %d", again[0].Subject, again[0].Delivered)
		}
		for _, m := range held[1:] {
			if err := m.AckAsync(); err != nil {
				t.Error(err)
			}
		}
		if err := held[0].Ack(t.Context()); err != nil {
			t.Error(err)
		}
		if err := held[0].AckAsync(); !errors.Is(err, bus.ErrAcknowledged) {
			t.Errorf("second settlement: got %v, want ErrAcknowledged", err)
		}
		if s.Held() != 0 {
			t.Errorf("%d held after all were acked", s.Held())
		}
		bustest.Redelivers(t, e.Bus, 2*c.AckWait)
		if again := take(t, s, 1, 10*time.Millisecond); len(again) != 0 {
			t.Errorf("%s came again after its ack", again[0].Subject)
		}
	})
}

func TestSubscription_nakBringsItBack(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishGroup(t, e.Bus, "u1", 0, 1)
		s := subscribe(t, e.Bus, partition("u1"))
		first := take(t, s, 1, bustest.Patience)
		if len(first) != 1 {
			t.Fatal("nothing came")
		}
		if err := first[0].NakWithDelay(50 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		again := take(t, s, 1, bustest.Patience)
		if len(again) != 1 || again[0].Delivered != 2 || again[0].Seq != first[0].Seq {
			t.Fatalf("got %+v, want the same message, second delivery", again)
		}
		if err := again[0].Term("done with it"); err != nil {
			t.Fatal(err)
		}
		if more := take(t, s, 1, 800*time.Millisecond); len(more) != 0 {
			t.Error("it came again after Term")
		}
	})
}

// Two clients on one pinned durable: one works, the other takes over when it goes.
func TestSubscription_pinnedFailover(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, s *bus.Subscription, b *bus.Bus){
		"by closing":     func(t *testing.T, s *bus.Subscription, _ *bus.Bus) { _ = s.Close() },
		"without a word": func(t *testing.T, _ *bus.Subscription, b *bus.Bus) { b.Conn().Close() },
	} {
		t.Run(name, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, e *env) {
				c := partition("u1")
				if name == "by closing" { // who says goodbye hands over at once
					c.AckWait, c.PinnedTTL = time.Minute, time.Minute
				}
				activeBus, err := bus.Connect(t.Context(), e.Config(), zerolog.Nop())
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = activeBus.Close() }()
				active, err := activeBus.Subscription(t.Context(), c)
				if err != nil {
					t.Fatal(err)
				}
				publishGroup(t, e.Bus, "u1", 0, 4)
				held := take(t, active, 4, bustest.Patience)
				if len(held) != 4 {
					t.Fatalf("the first client got %d of 4", len(held))
				}
				standby := subscribe(t, e.Bus, c)
				publishGroup(t, e.Bus, "u1", 4, 2)
				if got := take(t, active, 2, bustest.Patience); len(got) != 2 {
					t.Fatalf("the pinned client got %d of 2", len(got))
				}
				if got := take(t, standby, 1, 300*time.Millisecond); len(got) != 0 {
					t.Fatalf("the standby got %s", got[0].Subject)
				}
				leave(t, active, activeBus)
				publishGroup(t, e.Bus, "u1", 6, 2)
				seen := map[string]bool{}
				for _, m := range take(t, standby, 8, bustest.Patience) {
					seen[m.Subject] = true
				}
				if len(seen) != 8 {
					t.Errorf("the standby got %d of the group's 8 rewards", len(seen))
				}
				_ = active.Close()
			})
		})
	}
}

// A client that got nothing and closes leaves nothing behind that the server could pin
// the consumer to.
func TestSubscription_closedBeforeTheFirstMessage(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		c := partition("u1")
		c.AckWait, c.PinnedTTL = time.Minute, time.Minute
		first := subscribe(t, e.Connect(t), c)
		server := func(what string, is func(c *jetstream.ConsumerInfo) bool) {
			eventually(t, what, func() bool {
				_, all, err := bustest.Consumers(t, e.Bus, c.Stream)
				return err == nil && len(all) == 1 && is(all[0])
			})
		}
		server("its pull is with the server", func(c *jetstream.ConsumerInfo) bool { return c.NumWaiting > 0 })
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		publishGroup(t, e.Bus, "u1", 0, 2)
		server("no client has the messages", func(c *jetstream.ConsumerInfo) bool {
			return c.NumPending == 2 && c.NumAckPending == 0
		})
		if got := take(t, subscribe(t, e.Bus, c), 2, bustest.Patience); len(got) != 2 {
			t.Errorf("the next client got %d of 2", len(got))
		}
	})
}

// A client that stops asking loses the pin, is told, and hands back what it holds.
func TestSubscription_lostPin(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		c := partition("u1")
		c.Slots = 2
		released := 0
		c.OnRelease = func() { released++ }
		slow := subscribe(t, e.Bus, c)
		publishGroup(t, e.Bus, "u1", 0, 6)
		if got := take(t, slow, 1, bustest.Patience); len(got) != 1 {
			t.Fatal("nothing came")
		}
		// Its fetch-ahead is full, so it does not ask any more.
		c.OnRelease = nil
		c.Slots = 64
		other := subscribe(t, e.Connect(t), c)
		eventually(t, "somebody took over", func() bool { return len(take(t, other, 1, 200*time.Millisecond)) > 0 })
		// Now the slow one wakes up, maybe more than once: it may have had the pin again meanwhile.
		eventually(t, "told", func() bool { _ = take(t, slow, 1, time.Millisecond); return released > 0 })
	})
}

// A client that is pinned anew before it notices that it was unpinned hands back all that
// it had fetched ahead, and asks for it again.
func TestSubscription_pinnedAgain(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		c := partition("u1")
		// The test alone takes the pin: a full queue does not ask, and on a busy machine that lasts longer than a short
		// TTL.
		c.AckWait, c.PinnedTTL = time.Minute, time.Minute
		c.Slots = 4
		released := 0
		c.OnRelease = func() { released++ }
		s := subscribe(t, e.Bus, c)
		publishGroup(t, e.Bus, "u1", 0, 1)
		eventually(t, "the first message is there", func() bool { return s.Held() == 1 })
		if _, err := e.Conn().Request("$JS.API.CONSUMER.UNPIN."+c.Stream+"."+c.Name, []byte(`{"group":"advantage"}`), time.Second); err != nil {
			t.Fatal(err)
		}
		publishGroup(t, e.Bus, "u1", 1, 6)
		eventually(t, "the queue is full", func() bool { return s.Held() == c.Slots })
		if got := take(t, s, 7, 5*time.Second); len(got) != 7 || released != 1 {
			t.Errorf("got %d of 7, told %d times; want once", len(got), released)
		}
	})
}

// No message tells a client that it was unpinned while no other one comes. It finds out, and hands back what it
// holds.
func TestSubscription_unpinnedInSilence(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		c := partition("u1")
		c.AckWait, c.PinnedTTL, c.Look = time.Minute, time.Minute, 50*time.Millisecond
		released := 0
		c.OnRelease = func() { released++ }
		s := subscribe(t, e.Bus, c)
		publishGroup(t, e.Bus, "u1", 0, 1)
		held := take(t, s, 1, bustest.Patience)
		if again := take(t, s, 1, 4*c.Look); len(held) != 1 || len(again) != 0 || released != 0 {
			t.Fatalf("got %d, then %d, told %d times; want 1 that it keeps", len(held), len(again), released)
		}
		if _, err := e.Conn().Request("$JS.API.CONSUMER.UNPIN."+c.Stream+"."+c.Name, []byte(`{"group":"advantage"}`),
			time.Second); err != nil {
			t.Fatal(err)
		}
		again := take(t, s, 1, bustest.Patience)
		if len(again) != 1 || again[0].Delivered != 2 || released != 1 {
			t.Errorf("got %d, told %d times; want the same again, told once", len(again), released)
		}
	})
}

func TestSubscription_Next_ends(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	other := e.Connect(t)
	s := subscribe(t, other, partition("u1"))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the context's error", err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), bustest.Patience)
	defer cancel()
	if _, err := s.Next(ctx); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

// Every group lands in one partition, and the sixteen take everything.
func TestSubscription_partitions(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		const groups = 40
		for i := range groups {
			publishGroup(t, e.Bus, uid(i), 0, 2)
		}
		var total atomic.Int64
		for p := range schemas.RewardPartitions {
			c := partition("u1")
			c.Name, c.Filters = fmt.Sprintf("advantage-p%02d", p), []string{fmt.Sprintf("mdr.v1.reward.%d.>", p)}
			s := subscribe(t, e.Bus, c)
			want := 0
			for i := range groups {
				if schemas.Partition(string(uid(i))) == p {
					want += 2
				}
			}
			got := take(t, s, want, 10*time.Second)
			total.Add(int64(len(got)))
			for _, m := range got {
				var r schemas.Reward
				if err := schemas.Decode(m.Data, &r); err != nil || schemas.Partition(string(r.UID)) != p {
					t.Errorf("partition %d has %s, %v", p, m.Subject, err)
				}
			}
		}
		if total.Load() != 2*groups {
			t.Errorf("%d rewards in all partitions, want %d", total.Load(), 2*groups)
		}
	})
}
