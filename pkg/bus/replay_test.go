package bus_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// refuse consumes a stream, writes a dead letter for all it gets, and returns the
// sequences that have been delivered.
func refuse(t *testing.T, e *env, stream string) <-chan *bus.Message {
	t.Helper()
	seen := make(chan *bus.Message, 16)
	consume(t, e.Bus, bus.ConsumerConfig{Durable: schemas.Durable{Stream: stream, Name: "reward"}, Slots: 4},
		func(_ context.Context, m *bus.Message) error {
			seen <- m
			if m.Header.Get(nats.MsgIdHdr) != "" && strings.HasPrefix(m.Header.Get(nats.MsgIdHdr), "replay.") {
				return nil
			}
			return bus.Terminal(schemas.CodeInvalid, context.DeadlineExceeded)
		})
	return seen
}

func next(t *testing.T, seen <-chan *bus.Message) *bus.Message {
	t.Helper()
	return bustest.Receive(t, "a delivery", seen)
}

// letterOf waits for a dead letter and returns its sequence.
func letterOf(t *testing.T, e *env) uint64 {
	t.Helper()
	seq := uint64(0)
	eventually(t, "dead letter", func() bool {
		m, err := e.Newest(t.Context(), schemas.StreamDead)
		if err == nil {
			seq = m.Seq
		}
		return err == nil
	})
	return seq
}

// What a service refused is delivered to it again, with the same bytes, on the same
// subject, and the letter goes.
func TestBus_Replay(t *testing.T) {
	t.Parallel()
	verdict := &schemas.Verdict{Run: "r1", UID: "u1", SampleIndex: 2, Name: "ann", Value: new(1.0), At: 1}
	for name, event := range map[string]schemas.Keyed{
		schemas.StreamRequests: request("r1", "u1", 2), schemas.StreamTrajectories: trajectory("u1", 2),
		schemas.StreamVerdicts: verdict, schemas.StreamRewards: reward("u1", 2),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, "in-process")
			e.setup(t)
			seen := refuse(t, e, name)
			if _, err := e.Publish(t.Context(), event); err != nil {
				t.Fatal(err)
			}
			first := next(t, seen)
			letter := letterOf(t, e)
			ctx, stop := context.WithTimeout(t.Context(), bustest.Patience)
			defer stop()
			ack, subject, err := e.Replay(ctx, letter)
			if err != nil || ack.Stream != name || ack.Seq <= first.Seq || ack.Duplicate || subject != event.Subject() {
				t.Fatalf("replay: %+v on %q, %v", ack, subject, err)
			}
			again := next(t, seen)
			if again.Seq != ack.Seq || again.Subject != first.Subject || !bytes.Equal(again.Data, first.Data) {
				t.Errorf("delivered again: %s %d; want %s %d", again.Subject, again.Seq, first.Subject, ack.Seq)
			}
			if got := again.Header.Get(schemas.HeaderType); got != event.Type() {
				t.Errorf("header %s is %q", schemas.HeaderType, got)
			}
			if n := len(bustest.Dead(t, e.Bus, 0)); n != 0 {
				t.Errorf("%d letters left", n)
			}
		})
	}
}

// The partition of a record is the server's, too.
func TestBus_Replay_opening(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	seen := refuse(t, e, schemas.StreamRewards)
	subject := schemas.OpeningSubject("r1", "b1", "u1")
	if _, err := e.PublishRaw(t.Context(), subject, []byte("x"), nil, ""); err != nil {
		t.Fatal(err)
	}
	first := next(t, seen)
	if _, published, err := e.Replay(t.Context(), letterOf(t, e)); err != nil || published != subject {
		t.Fatalf("replayed on %q, %v", published, err)
	}
	if again := next(t, seen); again.Subject != first.Subject || string(again.Data) != "x" {
		t.Errorf("got %q on %s", again.Data, again.Subject)
	}
}

// An original that is in the object store is published whole.
func TestBus_Replay_large(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	seen := refuse(t, e, schemas.StreamPrompts)
	data := bytes.Repeat([]byte("x"), e.MaxInline())
	if _, err := e.PublishRaw(t.Context(), schemas.PromptSubject("r1"), data, nil, ""); err != nil {
		t.Fatal(err)
	}
	next(t, seen)
	if _, _, err := e.Replay(t.Context(), letterOf(t, e)); err != nil {
		t.Fatal(err)
	}
	again := next(t, seen)
	if !bytes.Equal(again.Data, data) || again.Header.Get(bus.HeaderRef) != "" {
		t.Errorf("got %d bytes with headers %v; want %d", len(again.Data), again.Header, len(data))
	}
}

// What cannot be published again stays a letter, with the reason.
func TestBus_Replay_refuses(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	ctx, stop := context.WithTimeout(t.Context(), bustest.Patience)
	defer stop()
	ack, err := e.Publish(ctx, reward("u1", 0))
	if err != nil {
		t.Fatal(err)
	}
	stored, err := e.Get(ctx, ack.Stream, ack.Seq)
	if err != nil {
		t.Fatal(err)
	}
	gone := strings.Repeat("0", 64)
	for i, test := range []struct {
		m    *bus.Message
		want string
	}{
		{&bus.Message{Subject: "elsewhere", Data: []byte("x")}, "no stream takes events on it"},
		{&bus.Message{Subject: "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.S.C", Data: []byte("x")}, "no stream takes events on it"},
		{&bus.Message{Subject: stored.Subject, Data: []byte("another reward")}, "holds another event by now"},
		{&bus.Message{Subject: schemas.PromptSubject("r1"), Header: nats.Header{bus.HeaderRef: {schemas.BlobBucket + "/" + gone + "/5"}}}, "not found"},
	} {
		test.m.Stream, test.m.Seq = "S", uint64(i+1)
		if err := e.Dead(ctx, "reward", schemas.CodeInvalid, "no", test.m); err != nil {
			t.Fatal(err)
		}
		if _, _, err := e.Replay(ctx, letterOf(t, e)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v; want %q", test.m.Subject, err, test.want)
		}
		if n := len(bustest.Dead(t, e.Bus, 0)); n != i+1 {
			t.Errorf("%s: %d letters, want %d", test.m.Subject, n, i+1)
		}
	}
	junk, err := e.PublishRaw(ctx, schemas.DeadSubject("reward", "r1", "u1"), []byte("junk"), nil, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := e.Replay(ctx, junk.Seq); err == nil || !strings.Contains(err.Error(), "decode") {
		t.Errorf("an unreadable letter: got %v", err)
	}
}

// Cut off after it stored the original, a replay does not store it twice.
func TestBus_Replay_again(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	seen := refuse(t, e, schemas.StreamTrajectories)
	if _, err := e.Publish(t.Context(), trajectory("u1", 0)); err != nil {
		t.Fatal(err)
	}
	next(t, seen)
	letter := letterOf(t, e)
	m, err := e.Get(t.Context(), schemas.StreamDead, letter)
	if err != nil {
		t.Fatal(err)
	}
	first, _, err := e.Replay(t.Context(), letter)
	if err != nil {
		t.Fatal(err)
	}
	back, err := e.PublishRaw(t.Context(), m.Subject, m.Data, nil, "") // as if it had never been removed
	if err != nil {
		t.Fatal(err)
	}
	second, _, err := e.Replay(t.Context(), back.Seq)
	if err != nil || second.Seq != first.Seq || !second.Duplicate {
		t.Errorf("got %+v, %v; want a duplicate of %d", second, err, first.Seq)
	}
}
