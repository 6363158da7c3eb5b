package bustest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Patience is how long a test waits while nothing changes: the machine may be busy
// elsewhere, and a test that passes does not wait.
const Patience = 2 * time.Minute

// Until waits until check returns nil. It fails the test when the text of check's error has not changed for
// [Patience] and 300 looks, which take longer where the machine has no time for the test, or after five times as long.
// It calls check often while the text changes, then less often, and for at most half of the time.
func Until(t testing.TB, what string, check func() error) {
	t.Helper()
	const often, seldom, looks = 5 * time.Millisecond, 50 * time.Millisecond, 300
	last, idle, end, pause := "", time.Time{}, time.Now().Add(5*Patience), often
	for same := 0; ; same++ {
		began := time.Now()
		err := check()
		if err == nil {
			return
		}
		now := time.Now()
		pause = min(pause*5/4, seldom)
		if err.Error() != last {
			last, idle, pause, same = err.Error(), now.Add(Patience), often, 0
		}
		if now.After(idle) && same > looks || now.After(end) {
			t.Fatalf("%s: nothing new for %v, or no end: %v", what, Patience, err)
		}
		time.Sleep(max(pause, now.Sub(began)))
	}
}

// Receive returns the next value of a channel; the test fails if none comes for [Patience]. what names it.
func Receive[V any](t testing.TB, what string, from <-chan V) (v V) {
	t.Helper()
	select {
	case v = <-from:
	case <-time.After(Patience):
		t.Fatalf("%s: nothing in %v", what, Patience)
	}
	return v
}

// WhileItMoves returns a context that ends when moved has not been called for [Patience].
func WhileItMoves(t testing.TB) (ctx context.Context, moved func()) {
	ctx, cancel := context.WithCancel(t.Context())
	timer := time.AfterFunc(Patience, cancel)
	t.Cleanup(func() { timer.Stop(); cancel() })
	return ctx, func() { timer.Reset(Patience) }
}

// Await waits until a stream holds messages on at least n subjects of the filters, and returns the newest message of
// each subject.
func Await(t testing.TB, b *bus.Bus, n int, stream string, filters ...string) map[string]*bus.Message {
	t.Helper()
	what := fmt.Sprintf("%d subjects of %q", n, filters)
	seen := map[string]bool{}
	follow(t, b, what, stream, filters, func(m *bus.Message) (enough bool) {
		seen[m.Subject] = true
		return len(seen) >= n
	})
	var out map[string]*bus.Message
	Until(t, what, func() error { // all that is there now; some may have been displaced
		out = map[string]*bus.Message{}
		for m, err := range b.Read(t.Context(), stream, filters, bus.ReadOptions{}) {
			if err != nil {
				return err
			}
			out[m.Subject] = m
		}
		if len(out) < n {
			return fmt.Errorf("%d of %d", len(out), n)
		}
		return nil
	})
	return out
}

// Dead waits for n dead letters, and returns all that there are then. For n = 0 it does not wait.
func Dead(t testing.TB, b *bus.Bus, n int) []*schemas.Dead {
	t.Helper()
	have := 0
	if n > 0 {
		follow(t, b, fmt.Sprintf("%d dead letters", n), schemas.StreamDead, nil, func(*bus.Message) (enough bool) {
			have++
			return have >= n
		})
	}
	var out []*schemas.Dead
	for m, err := range b.Read(t.Context(), schemas.StreamDead, nil, bus.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, Decode[schemas.Dead](t, m))
	}
	return out
}

// follow calls each with stored and new messages until each returns true; the test fails when none has come for
// [Patience].
func follow(t testing.TB, b *bus.Bus, what, stream string, filters []string, each func(m *bus.Message) (enough bool)) {
	t.Helper()
	ctx, moved := WhileItMoves(t)
	n := 0
	for m, err := range b.Read(ctx, stream, filters, bus.ReadOptions{Live: true}) {
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		moved()
		if n++; each(m) {
			return
		}
	}
	t.Fatalf("%s: %d messages, and no more in %v", what, n, Patience)
}

// Decode returns the event of a message; the test fails if it is not valid.
func Decode[E any, P interface {
	*E
	schemas.Event
}](t testing.TB, m *bus.Message) *E {
	t.Helper()
	e := new(E)
	if err := schemas.DecodeValid(m.Data, P(e)); err != nil {
		t.Fatalf("%s: %v", m.Subject, err)
	}
	return e
}

// Free waits until nothing is stored on a subject.
func Free(t testing.TB, b *bus.Bus, stream, subject string) {
	t.Helper()
	Until(t, subject+" is free", func() error {
		_, err := b.Last(t.Context(), stream, subject)
		switch {
		case err == nil:
			return errors.New("something is stored")
		case errors.Is(err, bus.ErrNotFound):
			return nil
		}
		return err
	})
}

// Drained waits until a stream has at least that many consumers, and none of them has a message that waits or is in
// flight.
func Drained(t testing.TB, b *bus.Bus, stream string, consumers int) {
	t.Helper()
	Until(t, stream+" is drained", func() error {
		_, all, err := Consumers(t, b, stream)
		if err != nil {
			return err
		}
		waiting, inFlight := 0, 0
		for _, c := range all {
			waiting, inFlight = waiting+int(c.NumPending), inFlight+c.NumAckPending
		}
		if len(all) < consumers || waiting+inFlight > 0 {
			return fmt.Errorf("%d of %d consumers, %d messages wait, %d in flight", len(all), consumers, waiting,
				inFlight)
		}
		return nil
	})
}

// Consumers returns a stream as it is now, and its consumers; the error is the server's.
func Consumers(t testing.TB, b *bus.Bus, stream string) (jetstream.Stream, []*jetstream.ConsumerInfo, error) {
	t.Helper()
	s, err := b.JetStream().Stream(t.Context(), stream)
	if err != nil {
		return nil, nil, err
	}
	var all []*jetstream.ConsumerInfo
	list := s.ListConsumers(t.Context())
	for c := range list.Info() { // read to its end: otherwise the goroutine of the listing stays
		all = append(all, c)
	}
	return s, all, list.Err()
}

// Before calls do with a deadline, and again with a later one, until do returns before its deadline. On a busy
// machine that takes more than one call.
func Before(t testing.TB, do func(deadline time.Time)) {
	t.Helper()
	for window := time.Second; window < Patience; window *= 2 {
		deadline := time.Now().Add(window)
		if do(deadline); time.Now().Before(deadline) {
			return
		}
	}
	t.Fatalf("not done within %v", Patience)
}

// Redelivers waits until the server has delivered a message of its own again that was not acked for d. By then the
// server has also redelivered what other consumers did not ack in that time.
func Redelivers(t testing.TB, b *bus.Bus, d time.Duration) {
	t.Helper()
	const name = "REDELIVERS"
	ctx := t.Context()
	s, err := b.JetStream().CreateStream(ctx, jetstream.StreamConfig{
		Name: name, Subjects: []string{"redelivers"},
		Storage: jetstream.MemoryStorage,
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, AckWait: d})
	if err == nil {
		_, err = b.JetStream().Publish(ctx, "redelivers", nil)
	}
	for n := uint64(0); n < 2 && err == nil; {
		var m jetstream.Msg
		if m, err = c.Next(jetstream.FetchMaxWait(Patience)); err == nil {
			var meta *jetstream.MsgMetadata
			if meta, err = m.Metadata(); err == nil {
				n = meta.NumDelivered
			}
		}
	}
	if err := errors.Join(err, b.JetStream().DeleteStream(ctx, name)); err != nil {
		t.Fatal(err)
	}
}

// Sequential skips a test under the race detector, which finds nothing where goroutines share nothing. why says what
// the test does instead, or which other tests run the same code side by side.
func Sequential(t testing.TB, why string) {
	t.Helper()
	if Race {
		t.Skip("it runs without the race detector: ", why)
	}
}
