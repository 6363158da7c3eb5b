package bus_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// mistakes are what may be done to a durable, with what is said of it.
var mistakes = map[string]struct {
	do   func(ctx context.Context, b *bus.Bus, c jetstream.ConsumerConfig) error
	says string
}{
	"another filter": {func(_ context.Context, b *bus.Bus, c jetstream.ConsumerConfig) error {
		// The bare form: the name is in the request alone.
		c.Name, c.Durable, c.FilterSubject = c.Durable, "", schemas.PromptSubject("other")
		body, err := json.Marshal(map[string]any{"stream_name": schemas.StreamPrompts, "config": c})
		if err != nil {
			return err
		}
		m, err := b.Conn().Request("$JS.API.CONSUMER.CREATE."+schemas.StreamPrompts, body, bustest.Patience)
		if err == nil && strings.Contains(string(m.Data), `"error"`) {
			err = errors.New(string(m.Data))
		}
		return err
	}, "filter_subjects is"},
	"headers alone": {func(ctx context.Context, b *bus.Bus, c jetstream.ConsumerConfig) error {
		c.HeadersOnly = true
		_, err := b.JetStream().UpdateConsumer(ctx, schemas.StreamPrompts, c)
		return err
	}, "headers_only is true, must be absent"},
	"paused": {func(ctx context.Context, b *bus.Bus, _ jetstream.ConsumerConfig) error {
		_, err := b.JetStream().PauseConsumer(ctx, schemas.StreamPrompts, schemas.PromptsDurable().Name,
			time.Now().Add(time.Hour))
		return err
	}, "pause_until is"},
	"only what is new": {func(ctx context.Context, b *bus.Bus, c jetstream.ConsumerConfig) error {
		c.DeliverPolicy, c.FilterSubject = jetstream.DeliverNewPolicy, schemas.PromptSubject("other")
		for { // our own look may come between the two
			err := b.JetStream().DeleteConsumer(ctx, schemas.StreamPrompts, schemas.PromptsDurable().Name)
			if err == nil || errors.Is(err, jetstream.ErrConsumerNotFound) {
				_, err = b.JetStream().CreateConsumer(ctx, schemas.StreamPrompts, c)
			}
			if _, refused := errors.AsType[*jetstream.APIError](err); !refused {
				return err
			}
		}
	}, ""}, // where our own look comes between the two, it has vanished
	"gone": {func(ctx context.Context, b *bus.Bus, _ jetstream.ConsumerConfig) error {
		return b.JetStream().DeleteConsumer(ctx, schemas.StreamPrompts, schemas.PromptsDurable().Name)
	}, "it has vanished"},
}

// A durable that somebody changes or removes is found, said and made as it should be, and what it passed over
// meanwhile comes.
func TestConsume_ItsDurableChanged(t *testing.T) {
	t.Parallel()
	config := bus.ConsumerConfig{
		Durable: schemas.PromptsDurable(), Slots: 4, AckWait: bustest.Patience, Look: 2 * time.Second,
	}
	for name, c := range mistakes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, "in-process")
			e.setup(t)
			came := make(chan string, 64)
			publish := func(run schemas.Run, what string) {
				t.Helper()
				if _, err := e.JetStream().Publish(t.Context(), schemas.PromptSubject(run), []byte(what)); err != nil {
					t.Fatal(err)
				}
			}
			consume(t, e.Bus, config, func(_ context.Context, m *bus.Message) error {
				if len(m.Data) == 0 {
					t.Error("a handler met what no message is")
				}
				came <- string(m.Data)
				return nil
			})
			// until waits for a prompt; others may come again.
			until := func(what string) {
				t.Helper()
				for bustest.Receive(t, what, came) != what {
				}
			}
			publish("r", "before")
			until("before")
			bustest.Until(t, "a look at the durable as it is", func() error {
				have, err := e.JetStream().Consumer(t.Context(), schemas.StreamPrompts, config.Name)
				if err == nil && have.CachedInfo().NumAckPending > 0 {
					err = errors.New("not acknowledged yet")
				}
				return err
			})
			have, err := e.JetStream().Consumer(t.Context(), schemas.StreamPrompts, config.Name)
			if err == nil {
				err = c.do(t.Context(), e.Bus, have.CachedInfo().Config)
			}
			if err != nil {
				t.Fatal(err)
			}
			publish("r", "passed-over")
			publish("other", "taken") // what is acknowledged behind it moves the floor
			bustest.Until(t, "the change is said", func() error {
				if err := e.Bus.Changed(); err == nil || !strings.Contains(err.Error(), c.says) {
					return fmt.Errorf("it says %w, want %q", err, c.says)
				}
				return nil
			})
			until("passed-over")
			bustest.Until(t, "it is as it should be", e.Bus.Changed)
		})
	}
}

// The settings of another replica are no reason to deliver again.
func TestConsume_ItsSettingsChanged(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	c := sampler()
	c.Look = 10 * time.Millisecond
	came := make(chan uint64, 64)
	consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
		came <- m.Seq
		return nil
	})
	publishRequests(t, e.Bus, 1)
	bustest.Receive(t, "the request", came)
	have, err := e.JetStream().Consumer(t.Context(), c.Stream, c.Name)
	if err != nil {
		t.Fatal(err)
	}
	other := have.CachedInfo().Config
	other.AckWait, other.MaxDeliver = time.Second, 1
	if _, err := e.JetStream().UpdateConsumer(t.Context(), c.Stream, other); err != nil {
		t.Fatal(err)
	}
	bustest.Until(t, "they are set back", func() error {
		now, err := e.JetStream().Consumer(t.Context(), c.Stream, c.Name)
		if err != nil {
			return err
		}
		if got := now.CachedInfo(); got.Config.AckWait != c.AckWait || !got.Created.Equal(have.CachedInfo().Created) {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	if err := e.Bus.Changed(); err != nil {
		t.Error(err)
	}
}
