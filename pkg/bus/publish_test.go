package bus_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

func TestBus_Publish_guardIsPermanent(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		for _, event := range []func(error string) schemas.Keyed{
			func(s string) schemas.Keyed { v := trajectory("u1", 3); v.Error = s; return v },
			func(s string) schemas.Keyed { v := reward("u1", 3); v.Error = s; return v },
			func(s string) schemas.Keyed {
				return &schemas.Advantage{
					Run: "r1", UID: "u1", Batch: "u1", Status: "failed", Error: s, GroupSize: 8, Members: []schemas.Member{},
					Scale: "group", StdBasis: "sample", Estimator: "flow_grpo",
				}
			},
		} {
			first := event("first")
			ack, err := e.Publish(ctx, first)
			if err != nil || ack.Duplicate || ack.Seq == 0 {
				t.Fatalf("%s: got %+v, %v; want stored", first.Subject(), ack, err)
			}
			if _, err := e.Publish(ctx, trajectory("other", int64(ack.Seq))); err != nil {
				t.Fatal(err)
			}
			// Inside the window the message id refuses, beyond it the subject does: another
			// id is what the server sees when it has forgotten the first.
			second := event("second")
			again, err := e.Publish(ctx, second)
			if err != nil || !again.Duplicate || again.Seq != ack.Seq || again.Stream != ack.Stream {
				t.Errorf("%s again: got %+v, %v; want duplicate of %d", second.Subject(), again, err, ack.Seq)
			}
			data, err := schemas.Encode(second)
			if err != nil {
				t.Fatal(err)
			}
			again, err = e.PublishRaw(ctx, second.Subject(), data, nil, "an id that is new")
			if err != nil || !again.Duplicate || again.Seq != ack.Seq {
				t.Errorf("%s beyond the window: got %+v, %v; want duplicate of %d", second.Subject(), again, err,
					ack.Seq)
			}
			m, err := e.Get(ctx, ack.Stream, ack.Seq)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(m.Data), "first") || strings.Contains(string(m.Data), "second") {
				t.Errorf("%s: the first content did not stay", m.Subject)
			}
		}
	})
}

func TestBus_Publish_headers(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
		ack, err := e.Publish(tracing.With(t.Context(), tracing.Context{Parent: trace}), trajectory("u1", 0))
		if err != nil {
			t.Fatal(err)
		}
		m, err := e.Get(t.Context(), ack.Stream, ack.Seq)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{
			"Nats-Msg-Id": "trajectory.r1.u1.0.main", "Mdr-Type": "trajectory/1", "Content-Type": "application/msgpack", "traceparent": trace,
			"Mdr-Outcome": "failed", "Mdr-Lane": "tiny",
		}
		for name, v := range want {
			if got := m.Header[name]; len(got) != 1 || got[0] != v {
				t.Errorf("header %s: got %q, want %q", name, got, v)
			}
		}
		if len(m.Header) != len(want) {
			t.Errorf("headers: got %v, want only %v", m.Header, want)
		}
	})
}

func TestBus_Publish_workQueueRefusesWhileWaiting(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		ack, err := e.Publish(ctx, request("r1", "u1", 0))
		if err != nil {
			t.Fatal(err)
		}
		data, _ := schemas.Encode(request("r1", "u1", 0))
		again, err := e.PublishRaw(ctx, request("r1", "u1", 0).Subject(), data, nil, "other")
		if err != nil || !again.Duplicate || again.Seq != ack.Seq {
			t.Errorf("got %+v, %v; want duplicate of %d", again, err, ack.Seq)
		}
		if n := e.Info(t, schemas.StreamRequests).State.Msgs; n != 1 {
			t.Errorf("%d requests stored, want 1", n)
		}
	})
}

func TestBus_Publish_fullStream(t *testing.T) {
	for name, test := range map[string]struct {
		stream            string
		maxBytes, maxMsgs int64
		event             func(i int) schemas.Keyed
	}{
		"by count": {schemas.StreamRequests, -1, 5, func(i int) schemas.Keyed { return request("r1", uid(i), 0) }},
		"by bytes": {schemas.StreamTrajectories, 4096, -1, func(i int) schemas.Keyed { return trajectory(uid(i), 0) }},
	} {
		t.Run(name, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, e *env) {
				ctx := t.Context()
				e.resize(t, test.stream, test.maxBytes, test.maxMsgs)
				stored := 0
				var err error
				for ; stored < 100; stored++ {
					if _, err = e.Publish(ctx, test.event(stored)); err != nil {
						break
					}
				}
				if !errors.Is(err, bus.ErrStreamFull) || stored < 3 {
					t.Fatalf("after %d events: %v; want ErrStreamFull", stored, err)
				}
				var terminal *bus.TerminalError
				if errors.As(err, &terminal) {
					t.Error("a full stream is not terminal")
				}
				// What is stored already is a duplicate, full or not.
				if ack, err := e.Publish(ctx, test.event(0)); err != nil || !ack.Duplicate {
					t.Errorf("stored event on a full stream: got %+v, %v; want duplicate", ack, err)
				}
				waited := make(chan error, 1)
				go func() {
					_, err := e.Publish(ctx, test.event(stored), bus.WaitForSpace())
					waited <- err
				}()
				select {
				case err := <-waited:
					t.Fatalf("WaitForSpace returned %v while full", err)
				case <-time.After(100 * time.Millisecond):
				}
				if _, err := e.PurgeSubject(ctx, test.stream, test.event(0).Subject()); err != nil {
					t.Fatal(err)
				}
				if _, err := e.PurgeSubject(ctx, test.stream, test.event(1).Subject()); err != nil {
					t.Fatal(err)
				}
				if err := bustest.Receive(t, "what waited for space", waited); err != nil {
					t.Errorf("after a purge: %v", err)
				}
			})
		})
	}
}

func TestBus_Publish_fullStorage(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process", func(o *natsd.Options) { o.MaxFileStore = 24 << 20 })
	e.setup(t) // scaled down to fit
	var err error
	for i := range 200 {
		if _, err = e.Publish(t.Context(), step(uid(i), 0, "a1", 0, 500_000)); err != nil {
			break
		}
	}
	if !errors.Is(err, bus.ErrStreamFull) {
		t.Errorf("got %v, want ErrStreamFull", err)
	}
}

func TestBus_Publish_tooLarge(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		_, err := e.Publish(t.Context(), step("u1", 0, "a1", 0, 1<<20))
		if !errors.Is(err, bus.ErrTooLarge) || bus.Code(err) != "too_large" {
			t.Errorf("got %v (code %s), want ErrTooLarge", err, bus.Code(err))
		}
		if _, err := e.Publish(t.Context(), step("u1", 0, "a1", 0, e.MaxInline()-1024)); err != nil {
			t.Errorf("%d bytes: %v", e.MaxInline(), err)
		}
	})
}

func TestBus_Publish_unreachable(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		if err := e.JetStream().DeleteStream(t.Context(), schemas.StreamTrajectories); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if _, err := e.Publish(ctx, trajectory("u1", 0)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the context's error", err)
		}
	})
}

func TestBus_Publish_rewardPartition(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		const groups = 64
		for i := range groups {
			if _, err := e.Publish(t.Context(), reward(uid(i), 0)); err != nil {
				t.Fatal(err)
			}
		}
		used := map[int]bool{}
		for i := range groups {
			used[schemas.Partition(string(uid(i)))] = true
			m, err := e.Last(t.Context(), schemas.StreamRewards, schemas.RewardFilter("r1", string(uid(i)), uid(i)))
			if err != nil {
				t.Fatal(err)
			}
			want := "mdr.v1.reward." + strconv.Itoa(schemas.Partition(string(uid(i)))) + ".r1." + string(uid(i)) + "." +
				string(uid(i)) + ".0"
			if m.Subject != want {
				t.Errorf("stored as %q, want %q", m.Subject, want)
			}
		}
		if len(used) < 12 {
			t.Errorf("%d groups in %d of 16 partitions", groups, len(used))
		}
	})
}

func TestBus_PublishPrompt(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		data, err := schemas.Encode(&schemas.Prompt{Prompt: "a red fox"})
		if err != nil {
			t.Fatal(err)
		}
		first, err := e.PublishPrompt(ctx, "r1", data, nats.Header{schemas.HeaderReply: {"_INBOX.x"}})
		if err != nil {
			t.Fatal(err)
		}
		second, err := e.PublishPrompt(ctx, "r1", data, nil)
		if err != nil || second.Seq == first.Seq || second.Duplicate {
			t.Errorf("the same prompt again: got %+v, %v; want a second one", second, err)
		}
		id := nats.Header{"Nats-Msg-Id": {"mine"}}
		third, _ := e.PublishPrompt(ctx, "r1", data, id)
		fourth, err := e.PublishPrompt(ctx, "r1", data, id)
		if err != nil || fourth.Seq != third.Seq || !fourth.Duplicate {
			t.Errorf("same id: got %+v, %v; want duplicate of %+v", fourth, err, third)
		}
		m, err := e.Get(ctx, schemas.StreamPrompts, first.Seq)
		if err != nil || m.Header.Get(schemas.HeaderReply) != "_INBOX.x" || string(m.Data) != string(data) {
			t.Errorf("got %+v, %v", m, err)
		}
		for _, run := range []schemas.Run{"", "a.b", "*", ">", schemas.Run(strings.Repeat("x", 65))} {
			if _, err := e.PublishPrompt(ctx, run, data, nil); bus.Code(err) != "invalid" {
				t.Errorf("run %q: got %v, want invalid", run, err)
			}
		}
	})
}

// Texts that an event cuts keep none from going out, also on a subject that has one event.
func TestBus_Publish_longTexts(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		long, tr, rw := strings.Repeat("é", schemas.MaxText), trajectory("long", 1), reward("long", 1)
		tr.Error, rw.Error = long, long+"\xff"
		for _, event := range []schemas.Keyed{tr, rw, &schemas.Alarm{Run: "r1", Rule: "kl", Of: long, Says: long}} {
			ack, err := e.Publish(t.Context(), event)
			if err != nil {
				t.Errorf("%s: %v", event.Subject(), err)
				continue
			}
			if m, err := e.Get(t.Context(), ack.Stream, ack.Seq); err != nil || len(m.Data) > 3*schemas.MaxText {
				t.Errorf("%s: %d bytes, %v", event.Subject(), len(m.Data), err)
			}
		}
		if tr.Error != long {
			t.Error("the event itself was changed")
		}
	})
}
