package instrument_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// values are the counters and gauges of a registry that are not 0, as name{label values}.
func values(t *testing.T, r *prometheus.Registry) (out []string) {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			if v := m.GetCounter().GetValue() + m.GetGauge().GetValue(); v != 0 {
				out = append(out, fmt.Sprintf("%s{%s} %v", f.GetName(), strings.Join(labels, ","), v))
			}
		}
	}
	return out
}

// Copies of a service add up; what they counted stays when they go, what they have does not.
func TestSet_CopiesAddUp(t *testing.T) {
	r := prometheus.NewRegistry()
	var stops []func()
	for i := range 2 {
		s := instrument.New(r, "x")
		s.Counter("a_total", "a").WithLabelValues().Inc()
		stops = append(stops,
			s.CounterOf("b_total", "b", func() float64 { return float64(i + 1) }),
			s.GaugeOf("c", "c", func() float64 { return 10 }))
	}
	if got, want := values(t, r), []string{
		"meander_x_a_total{} 2", "meander_x_b_total{} 3",
		"meander_x_c{} 20",
	}; !slices.Equal(got, want) {
		t.Errorf("two copies: %v, want %v", got, want)
	}
	stops[2]() // of the second copy
	stops[3]()
	if got, want := values(t, r), []string{
		"meander_x_a_total{} 2", "meander_x_b_total{} 3",
		"meander_x_c{} 10",
	}; !slices.Equal(got, want) {
		t.Errorf("one copy: %v, want %v", got, want)
	}
	instrument.New(nil, "x").Gauge("d", "d").WithLabelValues().Inc() // counts, and no one sees it
}

// A delivery counts once however often its handler runs; what fails counts as a retry,
// what is given up as a dead letter.
func TestSet_Count(t *testing.T) {
	b := bustest.New(t).Bus
	if _, err := b.PublishPrompt(t.Context(), "r", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}

	r := prometheus.NewRegistry()
	told := false
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	outcomes := []error{
		bus.ErrStreamFull, errors.New("it may pass"), bus.Terminal(schemas.CodeInvalid, errors.New("never")),
		bus.Garbage(schemas.CodeDecode, errors.New("no event")),
	}
	consumer, handle := instrument.New(r, "x").Count(bus.ConsumerConfig{
		Durable: schemas.Durable{Stream: schemas.StreamPrompts, Name: "x"}, RetryDelay: time.Millisecond,
		OnGiveUp: func(context.Context, *bus.Message, error) error { told = true; return nil },
	}, func(context.Context, *bus.Message) error {
		err := outcomes[0]
		outcomes = outcomes[1:]
		return err
	})
	consumed := make(chan error, 1)
	go func() { consumed <- b.Consume(ctx, consumer, handle) }()
	bustest.Await(t, b, 1, schemas.StreamDead)
	if _, err := b.PublishPrompt(t.Context(), "s", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, b, 2, schemas.StreamDead)
	cancel()
	if err := <-consumed; err != nil {
		t.Fatal(err)
	}
	want := []string{
		"meander_x_dead_total{decode,MDR_PROMPTS} 1", "meander_x_dead_total{invalid,MDR_PROMPTS} 1",
		"meander_x_deliveries_total{again,MDR_PROMPTS} 1", "meander_x_deliveries_total{first,MDR_PROMPTS} 2",
		"meander_x_retries_total{error,MDR_PROMPTS} 1", "meander_x_retries_total{full,MDR_PROMPTS} 1",
	}
	if got := values(t, r); !slices.Equal(got, want) || !told {
		t.Errorf("%v, want %v; the service's own hook ran: %v", got, want, told)
	}
}

// Streams and queues are shown while there is a server; without one the scrape says so
// and has the rest.
func TestPlane(t *testing.T) {
	p := bustest.New(t)
	b := p.Bus
	r := prometheus.NewRegistry()
	stop := instrument.ShowStreams(r, b)
	if _, err := b.PublishPrompt(t.Context(), "r", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	// A reader may have a durable of one name on several streams.
	for _, stream := range []string{schemas.StreamPrompts, schemas.StreamAdvantages} {
		_, err := b.JetStream().CreateConsumer(t.Context(), stream, jetstream.ConsumerConfig{Durable: "mine"})
		if err != nil {
			t.Fatal(err)
		}
	}
	got := values(t, r)
	for _, want := range []string{
		"meander_stream_up{} 1", "meander_stream_messages{MDR_PROMPTS} 1",
		"meander_queue_waiting_messages{mine,mine,MDR_PROMPTS} 1",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("%v, want %s among it", got, want)
		}
	}
	instrument.New(r, "x").Counter("a_total", "a").WithLabelValues().Inc()
	if err := errors.Join(b.Close(), p.Server.Close()); err != nil {
		t.Fatal(err)
	}
	if got, want := values(t, r), []string{"meander_x_a_total{} 1"}; !slices.Equal(got, want) {
		t.Errorf("without a server: %v, want %v and meander_stream_up 0", got, want)
	}
	stop()
	if families, _ := r.Gather(); len(families) != 1 {
		t.Errorf("%d metrics after the end, want the service's own", len(families))
	}
}

// A struct says by its tags which instruments it has.
func TestFill(t *testing.T) {
	t.Parallel()
	var of struct {
		Made prometheus.Counter `metric:"made_total" help:"made"`
		In   struct {
			Open  prometheus.Gauge       `metric:"open" help:"open"`
			Ended *prometheus.CounterVec `metric:"ended_total" labels:"state" help:"ended, by state"`
		}
		Took prometheus.Observer `metric:"took_seconds" help:"took"`
		Fill prometheus.Observer `metric:"fill_ratio" help:"fill"`
	}
	r := prometheus.NewRegistry()
	instrument.New(r, "s").Fill(&of)
	of.Made.Inc()
	of.In.Open.Set(2)
	of.In.Ended.WithLabelValues("well").Inc()
	of.Took.Observe(0.5)
	of.Fill.Observe(0.5)
	want := []string{"meander_s_ended_total{well} 1", "meander_s_made_total{} 1", "meander_s_open{} 2"}
	if got := values(t, r); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
