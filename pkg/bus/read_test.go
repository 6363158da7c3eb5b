package bus_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// collect reads to the end.
func collect(t testing.TB, b *bus.Bus, stream string, filters []string, o bus.ReadOptions) []*bus.Message {
	t.Helper()
	var out []*bus.Message
	for m, err := range b.Read(context.Background(), stream, filters, o) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

func TestBus_Read(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		if got := collect(t, e.Bus, schemas.StreamTrajectories, nil, bus.ReadOptions{}); len(got) != 0 {
			t.Errorf("empty stream: got %d messages", len(got))
		}
		const groups, samples = 30, 8
		var middle time.Time
		for i := range groups {
			if i == groups/2 {
				time.Sleep(20 * time.Millisecond)
				middle = time.Now()
				time.Sleep(20 * time.Millisecond)
			}
			for s := range samples {
				if _, err := e.Publish(t.Context(), trajectory(uid(i), int64(s))); err != nil {
					t.Fatal(err)
				}
			}
		}
		all := collect(t, e.Bus, schemas.StreamTrajectories, nil, bus.ReadOptions{})
		if len(all) != groups*samples {
			t.Fatalf("got %d messages, want %d", len(all), groups*samples)
		}
		for i, m := range all {
			if m.Seq != uint64(i+1) || m.Stream != schemas.StreamTrajectories || m.Delivered != 0 ||
				m.Header.Get("Mdr-Type") != "trajectory/1" || len(m.Data) == 0 {
				t.Fatalf("message %d: %+v", i, m)
			}
			if err := m.AckAsync(); err == nil {
				t.Fatal("a message that was read can be acked")
			}
		}
		for _, test := range []struct {
			name    string
			filters []string
			options bus.ReadOptions
			want    int
			first   uint64
		}{
			{"one group", []string{"mdr.v1.trajectory.r1.u7.*.*"}, bus.ReadOptions{}, samples, 7*samples + 1},
			{"two groups", []string{"mdr.v1.trajectory.r1.u3.*.*", "mdr.v1.trajectory.r1.u7.*.*"}, bus.ReadOptions{}, 2 * samples, 3*samples + 1},
			{"nothing", []string{"mdr.v1.trajectory.other.*.*.*"}, bus.ReadOptions{}, 0, 0},
			{"from a sequence", nil, bus.ReadOptions{FromSeq: 101}, groups*samples - 100, 101},
			{"from beyond", nil, bus.ReadOptions{FromSeq: groups*samples + 1}, 0, 0},
			{"from a time", nil, bus.ReadOptions{FromTime: middle}, groups * samples / 2, groups*samples/2 + 1},
			{"from the future", nil, bus.ReadOptions{FromTime: time.Now().Add(time.Hour)}, 0, 0},
			{"group from a sequence", []string{"mdr.v1.trajectory.r1.u7.*.*"}, bus.ReadOptions{FromSeq: 7*samples + 3}, samples - 2, 7*samples + 3},
		} {
			got := collect(t, e.Bus, schemas.StreamTrajectories, test.filters, test.options)
			if len(got) != test.want || len(got) > 0 && got[0].Seq != test.first {
				t.Errorf("%s: got %d messages, want %d from %d", test.name, len(got), test.want, test.first)
			}
		}
		for m, err := range e.Read(t.Context(), schemas.StreamTrajectories, nil, bus.ReadOptions{HeadersOnly: true}) {
			if err != nil || len(m.Data) != 0 || m.Subject == "" {
				t.Errorf("headers only: got %+v, %v", m, err)
			}
			break
		}
		for _, err := range e.Read(t.Context(), "MDR_NONE", nil, bus.ReadOptions{}) {
			if err == nil {
				t.Error("a stream that is not there can be read")
			}
		}
		eventually(t, "no state left behind",
			func() bool { return e.Info(t, schemas.StreamTrajectories).State.Consumers == 0 })
	})
}

// A read whose context ends before everything is read says so: what came is not all.
func TestBus_Read_cancelled(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		for s := range int64(4) {
			if _, err := e.Publish(t.Context(), trajectory(uid(0), s)); err != nil {
				t.Fatal(err)
			}
		}
		for live, want := range map[bool]error{false: context.Canceled, true: nil} {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			n, got := 0, error(nil)
			for _, err := range e.Read(ctx, schemas.StreamTrajectories, nil, bus.ReadOptions{Live: live}) {
				if err != nil {
					got = err
					continue
				}
				n++
				stop()
			}
			if n == 0 || !errors.Is(got, want) || (got == nil) != (want == nil) {
				t.Errorf("live %t: %d messages, then %v; want some, then %v", live, n, got, want)
			}
		}
	})
}

func TestBus_Read_live(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishGroup(t, e.Bus, "u1", 0, 3)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		got := make(chan string)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for m, err := range e.Read(ctx, schemas.StreamRewards, []string{schemas.RewardFilter("r1", "*", "u1")},
				bus.ReadOptions{Live: true}) {
				if err != nil {
					t.Error(err)
					return
				}
				select {
				case got <- m.Subject:
				case <-ctx.Done():
					return
				}
			}
		}()
		for i := range 6 {
			if i >= 3 {
				publishGroup(t, e.Bus, "other", i, 1)
				publishGroup(t, e.Bus, "u1", i, 1)
			}
			s := bustest.Receive(t, "a reward", got)
			if want := "u1." + string(rune('0'+i)); s[len(s)-4:] != want {
				t.Errorf("got %q, want one that ends in %q", s, want)
			}
		}
		cancel()
		bustest.Receive(t, "the end of the reader", done)
	})
}

// A read that should end does so although what it was to end with has gone.
func TestBus_Read_endsAfterDelete(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	publishGroup(t, e.Bus, "u1", 0, 300)
	n := 0
	for _, err := range e.Read(t.Context(), schemas.StreamRewards, nil, bus.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 1 {
			if _, err := e.Purge(t.Context(), "r1"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n == 0 || n == 300 {
		t.Errorf("read %d messages of 300, purged after the first", n)
	}
}

func TestBus_Last(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		if _, err := e.Last(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject("r1", "u1")); !errors.Is(err,
			bus.ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
		if _, err := e.Get(ctx, schemas.StreamAdvantages, 1); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
		if _, err := e.Newest(ctx, schemas.StreamAdvantages); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
		publishGroup(t, e.Bus, "u1", 0, 3)
		newest, err := e.Newest(ctx, schemas.StreamRewards)
		if err != nil || newest.Seq != 3 {
			t.Errorf("got %+v, %v; want sequence 3", newest, err)
		}
		got, err := e.Get(ctx, schemas.StreamRewards, 2)
		if err != nil || got.Seq != 2 || got.Header.Get("Nats-Msg-Id") != "reward.r1.u1.u1.1" ||
			got.Header.Get("Nats-Sequence") != "" || got.Time.IsZero() {
			t.Errorf("got %+v, %v", got, err)
		}
		subjects, err := e.Subjects(ctx, schemas.StreamRewards, schemas.RewardFilter("r1", "*", "u1"))
		if err != nil || len(subjects) != 3 {
			t.Errorf("got %v, %v; want 3 subjects", subjects, err)
		}
		if none, err := e.Subjects(ctx, schemas.StreamRewards, schemas.RewardFilter("r2", "*", "*")); err != nil ||
			len(none) != 0 {
			t.Errorf("got %v, %v; want none", none, err)
		}
		if err := e.Delete(ctx, schemas.StreamRewards, 2); err != nil {
			t.Error(err)
		}
		if err := e.Delete(ctx, schemas.StreamRewards, 2); err != nil {
			t.Errorf("second delete: %v", err)
		}
		if _, err := e.Get(ctx, schemas.StreamRewards, 2); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("deleted: got %v, want ErrNotFound", err)
		}
	})
}

func TestBus_LastMany(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		if got, err := e.LastMany(ctx, schemas.StreamRewards, []string{"mdr.v1.reward.>"}); err != nil ||
			len(got) != 0 {
			t.Errorf("empty: got %d, %v", len(got), err)
		}
		p := e.NewPublisher(256, 8<<20)
		defer p.Close()
		publish := func(n, from int) {
			t.Helper()
			for i := range n {
				if _, err := p.Publish(ctx, reward(uid(from+i), 0)); err != nil {
					t.Fatal(err)
				}
			}
			if err := p.Flush(ctx); err != nil {
				t.Fatal(err)
			}
		}
		check := func(want int) {
			t.Helper()
			got, err := e.LastMany(ctx, schemas.StreamRewards, []string{schemas.RewardFilter("r1", "*", "*")})
			if err != nil || len(got) != want {
				t.Fatalf("got %d, %v; want %d", len(got), err, want)
			}
			if !slices.IsSortedFunc(got, func(a, b *bus.Message) int { return int(a.Seq) - int(b.Seq) }) {
				t.Error("not sorted by sequence")
			}
			seen := map[string]bool{}
			for _, m := range got {
				seen[m.Subject] = true
			}
			if len(seen) != want {
				t.Errorf("%d subjects, want %d", len(seen), want)
			}
		}
		publish(700, 0) // several pages
		check(700)
		two, err := e.LastMany(ctx, schemas.StreamRewards, []string{
			schemas.RewardFilter("r1", "u1", "u1"),
			schemas.RewardFilter("r1", "u5", "u5"),
		})
		if err != nil || len(two) != 2 {
			t.Errorf("two filters: got %d, %v", len(two), err)
		}
		publish(500, 700) // more than the server resolves at once
		check(1200)
	})
}

// Large messages come in pages bounded by bytes.
func TestBus_LastMany_large(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		for i := range 40 {
			if _, err := e.Publish(t.Context(), step("u1", 0, "a1", int64(i), 500_000)); err != nil {
				t.Fatal(err)
			}
		}
		got, err := e.LastMany(t.Context(), schemas.StreamSteps, []string{"mdr.v1.step.r1.u1.>"})
		if err != nil || len(got) != 40 {
			t.Fatalf("got %d, %v; want 40", len(got), err)
		}
		for i, m := range got {
			if m.Seq != uint64(i+1) || len(m.Data) < 500_000 {
				t.Errorf("message %d: sequence %d, %d bytes", i, m.Seq, len(m.Data))
			}
		}
		if e.Server.SlowConsumers() != 0 {
			t.Error("cut off as a slow consumer")
		}
	})
}

// What was read is not read again, and what cannot be said of is an error.
func TestBus_ReadAfterCursor(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publish := func(from, to int) {
			t.Helper()
			for i := from; i < to; i++ {
				if _, err := e.Publish(t.Context(), trajectory(uid(i), 0)); err != nil {
					t.Fatal(err)
				}
			}
		}
		after := func(c bus.Cursor) ([]*bus.Message, error) {
			var out []*bus.Message
			for m, err := range e.Read(t.Context(), schemas.StreamTrajectories, nil, bus.ReadOptions{After: c}) {
				if err != nil {
					return out, err
				}
				out = append(out, m)
			}
			return out, nil
		}
		publish(0, 5)
		all, err := after("")
		if err != nil || len(all) != 5 {
			t.Fatalf("%d messages, %v; want 5", len(all), err)
		}
		for i, m := range all {
			rest, err := after(m.Cursor())
			if err != nil || len(rest) != 4-i || len(rest) > 0 && rest[0].Seq != m.Seq+1 {
				t.Errorf("after %s: %d messages, %v; want %d", m.Cursor(), len(rest), err, 4-i)
			}
		}
		if c := mustLast(t, e).Cursor(); c != "" {
			t.Errorf("a message that was not read has the cursor %q", c)
		}
		for _, c := range []bus.Cursor{"3", "x", "0@1", "-1@1", "3@", bus.Cursor("3@1"), "4294967296" +
			all[0].Cursor()[1:]} {
			if _, err := after(c); !errors.Is(err, bus.ErrCursor) {
				t.Errorf("after %q: %v; want ErrCursor", c, err)
			}
		}

		s, err := e.JetStream().Stream(t.Context(), schemas.StreamTrajectories)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Purge(t.Context(), jetstream.WithPurgeSequence(3)); err != nil { // 1 and 2 go
			t.Fatal(err)
		}
		if rest, err := after(all[1].Cursor()); err != nil || len(rest) != 3 {
			t.Errorf("nothing unread is gone: %d messages, %v; want 3", len(rest), err)
		}
		if _, err := after(all[0].Cursor()); !errors.Is(err, bus.ErrEvicted) ||
			!strings.Contains(err.Error(), "2 to 2 are gone") {
			t.Errorf("2 is gone unread: %v; want ErrEvicted", err)
		}
		if err := s.Purge(t.Context()); err != nil {
			t.Fatal(err)
		}
		if rest, err := after(all[4].Cursor()); err != nil || len(rest) != 0 {
			t.Errorf("all was read: %d messages, %v; want none", len(rest), err)
		}
		publish(5, 6)
		if rest, err := after(all[4].Cursor()); err != nil || len(rest) != 1 || rest[0].Seq != 6 {
			t.Errorf("%d messages, %v; want the new one", len(rest), err)
		}
		if err := e.JetStream().DeleteStream(t.Context(), schemas.StreamTrajectories); err != nil {
			t.Fatal(err)
		}
		e.setup(t)
		publish(0, 5)
		if _, err := after(all[2].Cursor()); !errors.Is(err, bus.ErrCursor) {
			t.Errorf("the stream was made anew: %v; want ErrCursor", err)
		}
	})
}

func mustLast(t *testing.T, e *env) *bus.Message {
	t.Helper()
	m, err := e.Newest(t.Context(), schemas.StreamTrajectories)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// A look at the subjects of a stream is one request: it is made for each sample. The first one also asks for the
// stream.
func TestSubjects_OneRequest(t *testing.T) {
	t.Parallel()
	e := bustest.New(t)
	asked, err := e.Conn().SubscribeSync("$JS.API.STREAM.INFO." + schemas.StreamSteps)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := e.Bus.Subjects(t.Context(), schemas.StreamSteps,
			schemas.StepsFilter("r", "u", "0", schemas.StageMain)); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Conn().Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := asked.Pending(); n > 4 || err != nil {
		t.Errorf("%d requests for 3 looks, %v", n, err)
	}
}
