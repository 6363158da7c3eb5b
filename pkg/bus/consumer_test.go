package bus_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// Every replica of a durable asks for messages at once, and there may be more than a thousand; of a
// durable that is there already, how many may is what it was made with.
func TestConsumer_ManyReplicas(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	c := partition("u1")
	waiting := func() (int, time.Duration) {
		s, err := e.Subscription(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		made, err := e.JetStream().Consumer(t.Context(), schemas.StreamRewards, c.Name)
		if err != nil {
			t.Fatal(err)
		}
		return made.CachedInfo().Config.MaxWaiting, made.CachedInfo().Config.AckWait
	}
	if n, _ := waiting(); n < 4096 {
		t.Errorf("%d replicas may ask at once", n)
	}
	c.Name, c.AckWait = "older", 7*time.Second
	_, err := e.JetStream().CreateConsumer(t.Context(), schemas.StreamRewards, jetstream.ConsumerConfig{
		Durable: c.Name, AckPolicy: jetstream.AckExplicitPolicy, FilterSubjects: c.Filters, AckWait: time.Second, MaxWaiting: 512,
	})
	if err != nil {
		t.Fatal(err)
	}
	if n, wait := waiting(); n != 512 || wait != c.AckWait {
		t.Errorf("the older durable has max_waiting %d, ack_wait %v", n, wait)
	}
}

// Messages wait for a service while nothing pulls them, also before its first program.
func TestUnservedBacklog(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	unserved := func(want uint64) {
		t.Helper()
		bustest.Until(t, "the count", func() error {
			all, err := e.Stats(t.Context())
			if n := bus.UnservedBacklog(all)[schemas.ServiceReward]; err != nil || n != want {
				return fmt.Errorf("%d, %w; want %d", n, err, want)
			}
			return nil
		})
	}
	unserved(0)
	publish := func(sample int64) {
		t.Helper()
		if _, err := e.JetStream().Publish(t.Context(), schemas.TrajectorySubject("r", "u", sample, schemas.StageMain),
			[]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	publish(0)
	unserved(1) // no reward service was ever there
	d := schemas.TrajectoriesDurable()
	c, err := e.JetStream().CreateConsumer(t.Context(), d.Stream, jetstream.ConsumerConfig{
		Durable: d.Name, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	unserved(1)
	publish(1)
	unserved(2)
	m, err := c.Next()
	if err != nil {
		t.Fatal(err)
	}
	unserved(0) // one is in flight
	if err := m.DoubleAck(t.Context()); err != nil {
		t.Fatal(err)
	}
	unserved(1)
}
