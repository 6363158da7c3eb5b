package bus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// sampler is a consumer of requests with short times.
func sampler() bus.ConsumerConfig {
	return bus.ConsumerConfig{
		Durable: schemas.RequestsDurable("tiny"),
		AckWait: bustest.Patience, Slots: 4, RetryDelay: 10 * time.Millisecond, DrainTimeout: time.Second,
	}
}

// consume runs a consumer until the returned function is called, which waits for it.
func consume(t testing.TB, b *bus.Bus, c bus.ConsumerConfig, h bus.Handler) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.Consume(ctx, c, h) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := bustest.Receive(t, "the end of a consumer", done); err != nil {
			t.Errorf("consume: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func publishRequests(t testing.TB, b *bus.Bus, n int) {
	t.Helper()
	for i := range n {
		if _, err := b.Publish(context.Background(), request("r1", uid(i), 0)); err != nil {
			t.Fatal(err)
		}
	}
}

func (e *env) waiting(t testing.TB) uint64 { return e.Info(t, schemas.StreamRequests).State.Msgs }

func TestBus_Consume_acksOnce(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		const n = 200
		publishRequests(t, e.Bus, n)
		var running, most atomic.Int64
		var mu sync.Mutex
		seen := map[string]int{}
		consume(t, e.Bus, sampler(), func(_ context.Context, m *bus.Message) error {
			if r := running.Add(1); r > most.Load() {
				most.Store(r)
			}
			defer running.Add(-1)
			time.Sleep(time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			seen[m.Subject]++
			if m.Delivered != 1 || m.Stream != schemas.StreamRequests || m.Seq == 0 ||
				time.Since(m.Time) > time.Minute {
				t.Errorf("message: %+v", m)
			}
			return nil
		})
		eventually(t, "all acked", func() bool { return e.waiting(t) == 0 })
		mu.Lock()
		defer mu.Unlock()
		for subject, count := range seen {
			if count != 1 {
				t.Errorf("%s handled %d times", subject, count)
			}
		}
		if len(seen) != n || most.Load() != 4 {
			t.Errorf("%d of %d handled, at most %d at once; want 4", len(seen), n, most.Load())
		}
	})
}

// A replica asks for as many messages as it has free slots: what it cannot work on is
// left to the others.
func TestBus_Consume_leavesTheRestToOthers(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 5)
		c := sampler()
		c.Slots = 2
		release := make(chan struct{})
		var first, second atomic.Int64
		consume(t, e.Bus, c, func(context.Context, *bus.Message) error {
			first.Add(1)
			<-release
			return nil
		})
		eventually(t, "two in hand", func() bool { return first.Load() == 2 })
		consume(t, e.Connect(t), c, func(context.Context, *bus.Message) error {
			second.Add(1)
			return nil
		})
		eventually(t, "the others take three", func() bool { return second.Load() == 3 })
		close(release)
		eventually(t, "all acked", func() bool { return e.waiting(t) == 0 })
		if first.Load() != 2 {
			t.Errorf("the first replica handled %d, want 2", first.Load())
		}
	})
}

func TestBus_Consume_longWorkStaysAlone(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 1)
		var calls atomic.Int64
		c := sampler()
		c.AckWait = 2 * time.Second
		h := func(context.Context, *bus.Message) error {
			calls.Add(1)
			bustest.Redelivers(t, e.Bus, 3*time.Second)
			return nil
		}
		consume(t, e.Bus, c, h)
		consume(t, e.Connect(t), c, h)
		eventually(t, "acked", func() bool { return e.waiting(t) == 0 })
		if calls.Load() != 1 {
			t.Errorf("handled %d times, want 1", calls.Load())
		}
	})
}

// A consumer that vanishes without a word: its message goes to another after AckWait.
func TestBus_Consume_redeliversWhatACrashLeft(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 1)
		c, err := e.JetStream().CreateOrUpdateConsumer(t.Context(), schemas.StreamRequests, jetstream.ConsumerConfig{
			Durable: "sampler-tiny", FilterSubject: "mdr.v1.request.*.tiny.*.*.*", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 300 * time.Millisecond,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Next(); err != nil { // taken, never acknowledged
			t.Fatal(err)
		}
		delivered := make(chan uint64, 100) // on a busy machine the ack can be late, and it comes again
		config := sampler()
		config.AckWait = 300 * time.Millisecond
		consume(t, e.Bus, config, func(_ context.Context, m *bus.Message) error {
			delivered <- m.Delivered
			return nil
		})
		if n := bustest.Receive(t, "the second delivery", delivered); n != 2 {
			t.Errorf("delivery %d, want 2", n)
		}
	})
}

func TestBus_Consume_retries(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 1)
		var calls atomic.Int64
		consume(t, e.Bus, sampler(), func(_ context.Context, m *bus.Message) error {
			if n := calls.Add(1); uint64(n) != m.Delivered {
				t.Errorf("call %d is delivery %d", n, m.Delivered)
			}
			if m.Delivered < 3 {
				return errors.New("not yet")
			}
			return nil
		})
		eventually(t, "acked", func() bool { return e.waiting(t) == 0 })
		if calls.Load() != 3 || len(bustest.Dead(t, e.Bus, 0)) != 0 {
			t.Errorf("%d calls, %d dead letters; want 3 and none", calls.Load(), len(bustest.Dead(t, e.Bus, 0)))
		}
	})
}

func TestBus_Consume_givesUp(t *testing.T) {
	for name, test := range map[string]struct {
		fail  func() error
		code  string
		calls int64
	}{
		"terminal":  {func() error { return fmt.Errorf("wrapped: %w", bus.Terminal("invalid", errors.New("bad seed"))) }, "invalid", 1},
		"panic":     {func() error { panic("bad seed") }, "panic", 1},
		"exhausted": {func() error { return errors.New("bad seed") }, "exhausted", 3},
	} {
		t.Run(name, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, e *env) {
				const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
				if _, err := e.Publish(tracing.With(t.Context(), tracing.Context{Parent: trace}),
					request("r1", "u1", 5)); err != nil {
					t.Fatal(err)
				}
				c := sampler()
				c.MaxDeliver = 3
				var calls, hooks atomic.Int64
				c.OnGiveUp = func(ctx context.Context, m *bus.Message, cause error) error {
					if len(bustest.Dead(t, e.Bus, 0)) != 0 || e.waiting(t) != 1 {
						t.Error("the hook ran after the dead letter or the term")
					}
					if !strings.Contains(cause.Error(), "bad seed") || bus.Code(cause) != test.code ||
						tracing.In(ctx).Parent != trace {
						t.Errorf("hook got %v, code %s, trace %q", cause, bus.Code(cause), tracing.In(ctx).Parent)
					}
					if hooks.Add(1) == 1 {
						return errors.New("hook fails once") // and is tried again
					}
					return nil
				}
				consume(t, e.Bus, c, func(context.Context, *bus.Message) error {
					calls.Add(1)
					return test.fail()
				})
				eventually(t, "terminated", func() bool { return e.waiting(t) == 0 })
				if hooks.Load() != 2 || calls.Load() != test.calls {
					t.Errorf("hook ran %d times, handler %d; want 2 and %d", hooks.Load(), calls.Load(), test.calls)
				}
				dead := bustest.Dead(t, e.Bus, 0)
				if len(dead) != 1 {
					t.Fatalf("%d dead letters, want 1", len(dead))
				}
				d := dead[0]
				if d.Service != "sampler" || d.Run != "r1" || d.UID != "u1" || d.Stream != schemas.StreamRequests ||
					d.StreamSeq != 1 || d.At == 0 ||
					d.OriginalSubject != request("r1", "u1", 5).Subject() || d.Deliveries != uint64(test.calls) {
					t.Errorf("dead letter: %+v", d)
				}
				want, _ := schemas.Encode(request("r1", "u1", 5))
				if !bytes.Equal(d.Data, want) {
					t.Error("the original bytes are not in the dead letter")
				}
				if len(d.Headers) != 4 || d.Headers[3] != (schemas.Header{Name: "traceparent", Value: trace}) {
					t.Errorf("headers: %+v", d.Headers)
				}
			})
		})
	}
}

// A hook that can never succeed does not keep a message for ever: the letter says that
// no one was told.
func TestBus_Consume_hookFailsForGood(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	if _, err := e.Publish(t.Context(), request("r1", "u1", 5)); err != nil {
		t.Fatal(err)
	}
	c := sampler()
	c.OnGiveUp = func(context.Context, *bus.Message, error) error {
		return fmt.Errorf("tell: %w", bus.Terminal("invalid", errors.New("no such group")))
	}
	consume(t, e.Bus, c, func(context.Context, *bus.Message) error {
		return bus.Terminal("invalid", errors.New("bad seed"))
	})
	eventually(t, "terminated", func() bool { return e.waiting(t) == 0 })
	dead := bustest.Dead(t, e.Bus, 0)
	if len(dead) != 1 || !strings.Contains(dead[0].Reason, "bad seed") ||
		!strings.Contains(dead[0].Reason, "not told: no such group") {
		t.Errorf("dead letters: %+v", dead)
	}
}

// A message that kills its process each time is given up on sight, untried, when its
// deliveries are used up.
func TestBus_Consume_crashLoop(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 1)
		c := sampler()
		c.MaxDeliver, c.AckWait = 1, 100*time.Millisecond
		if _, err := e.JetStream().CreateOrUpdateConsumer(t.Context(), c.Stream, jetstream.ConsumerConfig{
			Durable: c.Name, FilterSubjects: c.Filters, AckPolicy: jetstream.AckExplicitPolicy, AckWait: c.AckWait, MaxDeliver: -1,
		}); err != nil {
			t.Fatal(err)
		}
		r, err := e.JetStream().Consumer(t.Context(), c.Stream, c.Name)
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			if _, err := r.Next(); err != nil { // the process dies
				t.Fatal(err)
			}
		}
		gaveUp := make(chan error, 100) // on a busy machine the end is told late, and it comes again
		c.OnGiveUp = func(_ context.Context, _ *bus.Message, cause error) error { gaveUp <- cause; return nil }
		consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
			t.Errorf("tried at delivery %d", m.Delivered)
			return nil
		})
		if cause := bustest.Receive(t, "the end of the tries", gaveUp); bus.Code(cause) != "exhausted" {
			t.Errorf("given up as %s", bus.Code(cause))
		}
		eventually(t, "terminated", func() bool { return e.waiting(t) == 0 })
		if dead := bustest.Dead(t, e.Bus, 0); len(dead) != 1 || dead[0].Code != "exhausted" ||
			dead[0].Deliveries != 11 {
			t.Errorf("dead letters: %+v", dead)
		}
	})
}

// Deliveries that were handed back or lost with their process are no failures: a
// restart of every replica must not use up the tries.
func TestBus_Consume_lostDeliveriesAreNoFailures(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 1)
		c := sampler()
		c.MaxDeliver = 2
		for i := range 9 {
			ctx, shutDown := context.WithTimeout(t.Context(), bustest.Patience)
			c.DrainTimeout = time.Millisecond
			err := e.Consume(ctx, c, func(ctx context.Context, m *bus.Message) error {
				if m.Delivered != uint64(i+1) {
					t.Errorf("delivery %d, want %d", m.Delivered, i+1)
				}
				shutDown()
				<-ctx.Done()
				return ctx.Err()
			})
			if err != nil || !errors.Is(ctx.Err(), context.Canceled) {
				t.Fatalf("delivery %d: %v, %v", i+1, err, ctx.Err())
			}
		}
		var calls atomic.Int64
		consume(t, e.Bus, c, func(context.Context, *bus.Message) error {
			if calls.Add(1) == 1 {
				return errors.New("a mishap")
			}
			return nil
		})
		eventually(t, "acked", func() bool { return e.waiting(t) == 0 })
		if calls.Load() != 2 || len(bustest.Dead(t, e.Bus, 0)) != 0 {
			t.Errorf("tried %d times, dead letters %+v; want 2, none", calls.Load(), bustest.Dead(t, e.Bus, 0))
		}
	})
}

// A full stream further on is no fault of the message: its handler is run again, the
// delivery does not count.
func TestBus_Consume_waitsForSpace(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 1)
		e.resize(t, schemas.StreamTrajectories, -1, 1)
		if _, err := e.Publish(t.Context(), trajectory("other", 0)); err != nil {
			t.Fatal(err)
		}
		c := sampler()
		c.MaxDeliver = 1
		var calls atomic.Int64
		consume(t, e.Bus, c, func(ctx context.Context, m *bus.Message) error {
			if m.Delivered != 1 {
				t.Errorf("delivery %d", m.Delivered)
			}
			calls.Add(1)
			_, err := e.Publish(ctx, trajectory("u1", 0))
			return err
		})
		eventually(t, "several tries", func() bool { return calls.Load() >= 4 })
		if _, err := e.PurgeSubject(t.Context(), schemas.StreamTrajectories,
			trajectory("other", 0).Subject()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "acked", func() bool { return e.waiting(t) == 0 })
		if dead := bustest.Dead(t, e.Bus, 0); len(dead) != 0 {
			t.Errorf("dead letters: %+v", dead)
		}
	})
}

func TestBus_Consume_drain(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 20)
		c := sampler()
		c.AckWait = time.Hour // a test that waits for it fails
		c.Slots, c.DrainTimeout = 6, time.Second
		started := make(chan struct{}, 6)
		release := make(chan struct{})
		var finished, cancelled atomic.Int64
		stop := consume(t, e.Connect(t), c, func(ctx context.Context, m *bus.Message) error {
			started <- struct{}{}
			if m.Seq%2 == 0 {
				<-ctx.Done() // never finishes by itself
				cancelled.Add(1)
				return ctx.Err()
			}
			<-release
			if ctx.Err() != nil {
				t.Error("cancelled before the drain timeout")
			}
			finished.Add(1)
			return nil
		})
		for range 6 {
			bustest.Receive(t, "a message in hand", started)
		}
		go func() {
			time.Sleep(100 * time.Millisecond)
			close(release)
		}()
		stop()
		if finished.Load() != 3 || cancelled.Load() != 3 {
			t.Errorf("%d finished, %d cancelled; want 3 and 3", finished.Load(), cancelled.Load())
		}
		var rest atomic.Int64
		consume(t, e.Bus, c, func(context.Context, *bus.Message) error { rest.Add(1); return nil })
		eventually(t, "another replica has the rest at once", func() bool { return e.waiting(t) == 0 })
		if rest.Load() != 17 {
			t.Errorf("the other replica handled %d, want 17", rest.Load())
		}
	})
}

// A backlog of large messages does not get the client cut off.
func TestBus_Consume_largeBacklog(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		const n = 160 // 80 MiB: more than the server keeps for a client
		p := e.NewPublisher(16, 16<<20)
		for i := range n {
			if _, err := p.PublishStep(t.Context(), step(uid(i), 0, "a1", 0, 512<<10), nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		p.Close()
		var redelivered, handled atomic.Int64
		c := bus.ConsumerConfig{Durable: schemas.Durable{Stream: schemas.StreamSteps, Name: "reader"}, Slots: 256}
		consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
			if m.Delivered > 1 {
				redelivered.Add(1)
			}
			handled.Add(1)
			return nil
		})
		eventually(t, "all handled", func() bool { return handled.Load() == n })
		read := 0
		for _, err := range e.Read(t.Context(), schemas.StreamSteps, nil, bus.ReadOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			read++
		}
		if e.Server.SlowConsumers() != 0 || redelivered.Load() != 0 || read != n {
			t.Errorf("%d slow consumers, %d redelivered, %d read; want 0, 0 and %d", e.Server.SlowConsumers(),
				redelivered.Load(), read, n)
		}
	})
}

func TestBus_Consume_survives(t *testing.T) {
	t.Run("its durable deleted", func(t *testing.T) {
		eachTransport(t, func(t *testing.T, e *env) {
			var handled atomic.Int64
			consume(t, e.Bus, sampler(), func(context.Context, *bus.Message) error { handled.Add(1); return nil })
			publishRequests(t, e.Bus, 3)
			eventually(t, "acked", func() bool { return e.waiting(t) == 0 })
			if err := e.JetStream().DeleteConsumer(t.Context(), schemas.StreamRequests, "sampler-tiny"); err != nil {
				t.Fatal(err)
			}
			if _, err := e.Publish(t.Context(), request("r1", "after", 0)); err != nil {
				t.Fatal(err)
			}
			eventually(t, "acked", func() bool { return e.waiting(t) == 0 })
			if handled.Load() != 4 {
				t.Errorf("handled %d, want 4", handled.Load())
			}
		})
	})
	t.Run("a restart of the server", func(t *testing.T) {
		e := newEnv(t, "tcp")
		e.setup(t)
		e.Options.Listen = strings.TrimPrefix(e.Server.ClientURL(), "nats://")
		var handled sync.Map
		c := sampler()
		c.AckWait = 300 * time.Millisecond // what was on its way is lost
		consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
			handled.Store(m.Subject, true)
			return nil
		})
		publishRequests(t, e.Bus, 3)
		eventually(t, "acked", func() bool { return e.waiting(t) == 0 })
		if err := e.Server.Close(); err != nil {
			t.Fatal(err)
		}
		e.Start(t)
		for i := range 20 {
			if _, err := e.Publish(t.Context(), request("r1", "after", int64(i))); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "acked", func() bool {
			n := 0
			handled.Range(func(any, any) bool { n++; return true })
			return n == 23
		})
	})
}

func TestBus_Consume_refuses(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	requests := schemas.RequestsDurable("x")
	for name, c := range map[string]bus.ConsumerConfig{
		"no stream":       {Durable: schemas.Durable{Name: "x"}},
		"no durable":      {Durable: schemas.Durable{Stream: schemas.StreamRequests}},
		"dots":            {Durable: schemas.Durable{Stream: schemas.StreamRequests, Name: "a.b"}},
		"negative slots":  {Durable: requests, Slots: -1},
		"negative wait":   {Durable: requests, AckWait: -time.Second},
		"negative window": {Durable: requests, MaxAckPending: -5},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), bustest.Patience)
		if err := e.Consume(ctx, c, func(context.Context, *bus.Message) error { return nil }); err == nil ||
			ctx.Err() != nil {
			t.Errorf("%s: got %v", name, err)
		}
		cancel()
	}
}

// All faults of a configuration are named, always in one order.
func TestBus_Consume_faultsInOrder(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	c := bus.ConsumerConfig{
		Durable: schemas.RequestsDurable("x"), AckWait: -1, Slots: -1, DrainTimeout: -1, RetryDelay: -1, Look: -1,
	}
	const want = "ack_wait: -1ns; must not be negative\ndrain_timeout: -1ns; must not be negative\n" +
		"retry_delay: -1ns; must not be negative\nlook: -1ns; must not be negative\n" +
		"max_ack_pending and slots: 0 and -1; must not be negative"
	for range 20 {
		if err := e.Consume(t.Context(), c, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("got %v; want %s", err, want)
		}
	}
}

func TestBus_Consume_closedBus(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	other := e.Connect(t)
	done := make(chan error, 1)
	go func() {
		done <- other.Consume(context.Background(), sampler(), func(context.Context, *bus.Message) error { return nil })
	}()
	eventually(t, "consumer is there", func() bool { return e.Info(t, schemas.StreamRequests).State.Consumers == 1 })
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if err := bustest.Receive(t, "the end of the consumer", done); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

func TestBus_WatchAdvisories(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 1)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.WatchAdvisories(ctx) }()
		// A consumer that is not ours takes the message and never acknowledges it.
		c, err := e.JetStream().CreateOrUpdateConsumer(ctx, schemas.StreamRequests, jetstream.ConsumerConfig{
			Durable: "sampler-foreign", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 50 * time.Millisecond, MaxDeliver: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Next(); err != nil {
			t.Fatal(err)
		}
		if m, err := c.Next(jetstream.FetchMaxWait(300 * time.Millisecond)); !errors.Is(err, nats.ErrTimeout) {
			t.Fatalf("second delivery: %v, %v", m, err)
		}
		eventually(t, "removed from the queue", func() bool { return e.waiting(t) == 0 })
		dead := bustest.Dead(t, e.Bus, 0)
		if len(dead) != 1 || dead[0].Code != "exhausted" || dead[0].Service != "sampler" || dead[0].UID != "u0" ||
			len(dead[0].Data) == 0 {
			t.Errorf("dead letters: %+v", dead)
		}
		cancel()
		if err := bustest.Receive(t, "the end of the watch", done); err != nil {
			t.Error(err)
		}
	})
}
