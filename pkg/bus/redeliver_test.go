package bus_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// What a client had in hand that vanished without a word comes again at once, counted.
func TestBus_RedeliverAll(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		publishRequests(t, e.Bus, 5)
		config := sampler()
		config.AckWait = time.Hour
		c, err := e.JetStream().CreateOrUpdateConsumer(t.Context(), schemas.StreamRequests, jetstream.ConsumerConfig{
			Durable: config.Name, FilterSubject: config.Filters[0], AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour,
		})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 4 { // the second is acknowledged, the others never are
			m, err := c.Next()
			if err == nil && i == 1 {
				err = m.DoubleAck(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if taken, err := e.RedeliverAll(t.Context()); err != nil || taken != 3 {
			t.Fatalf("took back %d, %v; want 3", taken, err)
		}
		type delivery struct{ seq, n uint64 }
		came := make(chan delivery, 10)
		consume(t, e.Bus, config, func(_ context.Context, m *bus.Message) error {
			came <- delivery{m.Seq, m.Delivered}
			return nil
		})
		want := map[delivery]bool{{1, 2}: true, {3, 2}: true, {4, 2}: true, {5, 1}: true}
		for range len(want) {
			if d := bustest.Receive(t, "a message again", came); !want[d] {
				t.Errorf("message %d came, delivery %d", d.seq, d.n)
			}
		}
	})
}

func TestRedactURL(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"nats://127.0.0.1:4222":                        "nats://127.0.0.1:4222",
		"nats://user:s3cret@a:4222":                    "nats://***@a:4222",
		"nats://s3cret@a,tls://user:s3cret@b, ws://c":  "nats://***@a,tls://***@b, ws://c",
		"user:s3cret@a":                                "***@a",
		"nats://user:s3/cr@et@a":                       "nats://***@a",
		`parse "nats://user:s3cret@a:x": invalid port`: `parse "nats://***@a:x": invalid port`,
		"": "",
	} {
		if got := bus.RedactURL(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}
