package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// DefaultPinnedTTL is the default of ConsumerConfig.PinnedTTL.
	DefaultPinnedTTL = 10 * time.Second
	// maxRetryDelay bounds the doubling of RetryDelay.
	maxRetryDelay = time.Minute
	// maxWaiting is how many pull requests may wait at a durable: each replica has at least one. With the server's
	// default of 512 the other replicas would be refused, and ask again and again.
	maxWaiting = 16 << 10
	// unbounded means "no limit" to the server.
	unbounded     = -1
	maxMaxDeliver = 1_000_000
	// lostPerTry is how many deliveries may be lost, without a result or an error, for each try of MaxDeliver.
	lostPerTry = 10
	// deliverSlack is how many deliveries the server allows beyond those. The client gives a message up, with a dead
	// letter, when it sees the delivery after the last. The server's own limit leaves only an advisory; it is for
	// clients that die.
	deliverSlack = 5
)

// ConsumerConfig describes a durable consumer and how this process works on it. Its
// replicas share the durable: each message goes to one of them.
type ConsumerConfig struct {
	// Durable is the consumer: its stream and name are required. A release with other filters must choose another
	// name: otherwise old and new replicas would replace each other's consumer in turn.
	schemas.Durable
	// AckWait is the time without a heartbeat after which a message goes to another client; default 30 s. Heartbeats
	// are sent automatically.
	AckWait time.Duration
	// MaxDeliver is how often a message may fail in one process before it is given up; default 5, negative: no limit.
	// A lost delivery is no failure: its process died, or returned it at shutdown. But a message that kills its
	// process must not do so without end: it is also given up after ten times MaxDeliver deliveries of any kind.
	MaxDeliver int
	// MaxAckPending bounds the messages in flight over all replicas, including those that wait for their redelivery;
	// when it is reached, no other message is delivered. Default: no bound, since each replica asks for no more
	// messages than it has slots.
	MaxAckPending int
	// Slots is how many handlers run at once (Consume), or how many messages are fetched
	// ahead (Subscription); default 1.
	Slots int
	// PriorityGroup pins the consumer to one client at a time: only that one gets messages, the others stand by.
	// Empty: all clients are active. When the pinned client has not asked for messages for PinnedTTL (default 10 s),
	// another takes over.
	PriorityGroup string
	PinnedTTL     time.Duration
	// DrainTimeout is how long handlers may go on at shutdown; default 10 s. Then their context ends, and their
	// messages are returned.
	DrainTimeout time.Duration
	// RetryDelay is the pause after the first failure. It doubles with each failure and varies by a fifth; default
	// one second, at most a minute.
	RetryDelay time.Duration
	// Service is the name of the service in dead letters; default: Durable up to its first "-".
	Service string
	// OnGiveUp runs before the dead letter of a message that is given up, so that it can tell the later stages. When
	// it fails, it runs again.
	OnGiveUp func(ctx context.Context, m *Message, cause error) error
	// Families returns the groups of messages that are likely to fail together with m, outermost first, such as its
	// run and its group; nil: none. While messages of a family fail, they are tried one at a time, and leave half of
	// the slots to others (see fairness).
	Families func(m *Message) []string
	// OnRelease is called by Subscription.Next when another client has got the pin and all messages have been
	// returned.
	OnRelease func()
	// Look is the pause between two checks whether the durable is still as it should be; default 10 s.
	Look time.Duration
}

// withDefaults returns the settings of a consumer with their defaults filled in, or all their faults, joined.
func (c ConsumerConfig) withDefaults() (ConsumerConfig, error) {
	var errs []error
	if c.Stream == "" {
		errs = append(errs, errors.New("stream: empty"))
	}
	if c.Name == "" || strings.ContainsAny(c.Name, ".*> \t\r\n") {
		errs = append(errs, fmt.Errorf("durable: %q; must be a name without dots, wildcards and spaces", c.Name))
	}
	if c.MaxDeliver > maxMaxDeliver {
		errs = append(errs, fmt.Errorf("max_deliver: %d; must be at most %d, or negative for no limit", c.MaxDeliver,
			maxMaxDeliver))
	}
	for _, f := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"ack_wait", &c.AckWait, 30 * time.Second},
		{"pinned_ttl", &c.PinnedTTL, DefaultPinnedTTL},
		{"drain_timeout", &c.DrainTimeout, 10 * time.Second},
		{"retry_delay", &c.RetryDelay, time.Second},
		{"look", &c.Look, 10 * time.Second},
	} {
		if *f.value < 0 {
			errs = append(errs, fmt.Errorf("%s: %v; must not be negative", f.name, *f.value))
		}
		*f.value = cmp.Or(*f.value, f.def)
	}
	if c.MaxAckPending < 0 || c.Slots < 0 {
		errs = append(errs, fmt.Errorf("max_ack_pending and slots: %d and %d; must not be negative", c.MaxAckPending,
			c.Slots))
	}
	if len(errs) > 0 {
		return c, fmt.Errorf("consumer config: %w", errors.Join(errs...))
	}
	c.MaxDeliver, c.Slots = cmp.Or(c.MaxDeliver, 5), cmp.Or(c.Slots, 1)
	c.MaxAckPending, c.Service = cmp.Or(c.MaxAckPending, unbounded), cmp.Or(c.Service, serviceOf(c.Name))
	return c, nil
}

// serviceOf returns the service that a durable belongs to: the sampler for "sampler-tiny".
func serviceOf(durable string) string {
	stage, _, _ := strings.Cut(durable, "-")
	return stage
}

// natsConfig returns the settings of a consumer in the form of the client library.
func (c ConsumerConfig) natsConfig() jetstream.ConsumerConfig {
	n := jetstream.ConsumerConfig{
		Durable: c.Name, AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverAllPolicy,
		AckWait: c.AckWait, MaxDeliver: -1, MaxAckPending: c.MaxAckPending, MaxWaiting: maxWaiting,
		FilterSubjects: c.Filters, Description: c.Purpose,
	}
	if c.Purpose != "" {
		n.Metadata = c.Metadata()
	}
	if c.MaxDeliver > 0 {
		n.MaxDeliver = c.MaxDeliver*lostPerTry + deliverSlack
	}
	if c.PriorityGroup != "" {
		n.PriorityPolicy, n.PriorityGroups, n.PinnedTTL = jetstream.PriorityPolicyPinned, []string{c.PriorityGroup},
			c.PinnedTTL
	}
	return n
}

// retryUntilReady calls f until it succeeds or ctx ends. It is for what a service cannot begin without. lacking says
// in the log what is missing, and Faults names the stream meanwhile. It returns at once what the server does not
// allow, or refuses.
func (b *Bus) retryUntilReady(ctx context.Context, stream, lacking string, f func(ctx context.Context) error) error {
	began := time.Now()
	for {
		err := b.retryWhileAway(ctx, f)
		if err == nil || ctx.Err() != nil || b.nc.IsClosed() || errors.Is(err, ErrPermission) {
			return err
		}
		if api, ok := errors.AsType[*jetstream.APIError](err); ok && api.Code >= 400 && api.Code < 500 &&
			api.Code != 404 {
			return err
		}
		if b.nc.IsConnected() {
			b.faultLog.noteFailure(stream, 0, began, err) // so that Faults reports it
		}
		if b.waitLog.allow(logEvery) {
			b.log.Warn().Err(err).Msg(lacking + ", trying again")
		}
		if Pause(ctx, rebindPause) != nil {
			return err
		}
	}
}

// backoff returns the pause after so many failures: RetryDelay, doubled with each one, and varied by a fifth so that
// messages that failed together do not come back together.
func (c ConsumerConfig) backoff(failures int) time.Duration {
	return time.Duration(float64(c.doubledDelay(failures)) * (0.8 + 0.4*rand.Float64()))
}

func (c ConsumerConfig) doubledDelay(failures int) time.Duration {
	d := maxRetryDelay
	if failures > 0 && failures <= 16 {
		d = min(d, c.RetryDelay<<(failures-1))
	}
	return d
}

// retrySpan returns how long the tries of one message take when each fails at once: the sum of its pauses.
func (c ConsumerConfig) retrySpan() (d time.Duration) {
	for failures := 1; failures < c.MaxDeliver; failures++ {
		d += c.doubledDelay(failures)
	}
	return d
}

// spent reports whether a message has been delivered too often, with lost deliveries counted.
func (c ConsumerConfig) spent(m *Message) bool {
	return c.MaxDeliver > 0 && m.Delivered > uint64(c.MaxDeliver)*lostPerTry
}

// cameOften reports whether a message has had half of its deliveries. The other half is for tries that fail or are
// lost.
func (c ConsumerConfig) cameOften(m *Message) bool {
	return c.MaxDeliver > 0 && m.Delivered >= uint64(c.MaxDeliver)*lostPerTry/2
}

var errExhausted = errors.New("every delivery ended without a result: the process died, or returned it")
