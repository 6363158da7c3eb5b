package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Defaults of a ConsumerConfig.
const (
	DefaultAckWait      = 30 * time.Second
	DefaultMaxDeliver   = 5
	DefaultSlots        = 1
	DefaultDrainTimeout = 10 * time.Second
	DefaultPinnedTTL    = 10 * time.Second
	DefaultRetryDelay   = time.Second
	DefaultLook         = 10 * time.Second
	// maxRetryDelay bounds the doubling of RetryDelay.
	maxRetryDelay = time.Minute
	// maxWaiting is how many requests for messages may wait at a durable, one at least of each
	// replica; the server's default of 512 would send the others away, to ask again and again.
	maxWaiting = 16 << 10
	// unbounded is no limit of the server.
	unbounded     = -1
	maxMaxDeliver = 1_000_000
	// lostPerTry is how many deliveries may be lost, without a result or an error, for
	// each try of MaxDeliver.
	lostPerTry = 10
	// deliverSlack is how many deliveries the server allows beyond those. The client
	// gives a message up, with a dead letter, on sight of the delivery after the last; the
	// server's own limit, which leaves only an advisory, is for clients that cannot.
	deliverSlack = 5
)

// ConsumerConfig describes a durable consumer and how this process works on it. Its
// replicas share the durable: each message goes to one of them.
type ConsumerConfig struct {
	// Stream and Durable name the consumer. Required.
	Stream  string
	Durable string
	// Filters are stored subjects to take; none: all. A release that takes others names another durable: replicas with
	// other filters would make it anew in turn.
	Filters []string
	// AckWait is the time without a heartbeat after which a message goes to someone
	// else; default 30 s. Signs are given automatically.
	AckWait time.Duration
	// MaxDeliver is how often a message may fail in one process before it is given up;
	// default 5, negative: for ever. A delivery that was lost is no failure: its process
	// ended, or handed it back at shutdown. But a message that ends its process must not do
	// so for ever: after ten times MaxDeliver deliveries of any kind it is given up, too.
	MaxDeliver int
	// MaxAckPending bounds the messages in hand over all replicas, those included that wait
	// for their redelivery; when it is reached, no other message is delivered. Default: no
	// bound, since each replica asks for no more than it has slots for.
	MaxAckPending int
	// Slots is how many handlers run at once (Consume), or how many messages are fetched
	// ahead (Subscription); default 1.
	Slots int
	// PriorityGroup pins the consumer to one client at a time, the others being hot
	// standbys; empty: all clients are active. When the pinned client has not asked for
	// messages for PinnedTTL (default 10 s), another takes over.
	PriorityGroup string
	PinnedTTL     time.Duration
	// DrainTimeout bounds the handlers at shutdown; default 10 s. Then their context
	// ends, and their messages are handed back.
	DrainTimeout time.Duration
	// RetryDelay is the pause after the first failure, doubled after each and varied by a
	// fifth; default 1 s, at most a minute.
	RetryDelay time.Duration
	// Stage is named in dead letters; default Durable up to its first "-".
	Stage string
	// OnGiveUp runs before the dead letter of a message that failed for good, so that the
	// stages after can be told. When it fails, it is tried again.
	OnGiveUp func(ctx context.Context, m *Message, cause error) error
	// Families names what a message shares its fate with, outermost first, such as its run
	// and its group; nil: nothing. While messages of a family fail, they are tried one at a
	// time and leave half of the slots to others, see fairness.
	Families func(m *Message) []string
	// OnRelease is called by Subscription.Next when the pin went to another client and
	// every message held has been handed back.
	OnRelease func()
	// Look is the pause between two looks whether the durable is still as it should be; default 10 s.
	Look time.Duration
}

func (c ConsumerConfig) withDefaults() (ConsumerConfig, error) {
	var errs []error
	if c.Stream == "" {
		errs = append(errs, errors.New("stream: empty"))
	}
	if c.Durable == "" || strings.ContainsAny(c.Durable, ".*> \t\r\n") {
		errs = append(errs, fmt.Errorf("durable: %q; must be a name without dots, wildcards and spaces", c.Durable))
	}
	if c.MaxDeliver > maxMaxDeliver {
		errs = append(errs, fmt.Errorf("max_deliver: %d; must be at most %d, or negative for no limit", c.MaxDeliver, maxMaxDeliver))
	}
	for name, v := range map[string]int64{
		"ack_wait": int64(c.AckWait), "max_ack_pending": int64(c.MaxAckPending), "slots": int64(c.Slots),
		"pinned_ttl": int64(c.PinnedTTL), "drain_timeout": int64(c.DrainTimeout), "retry_delay": int64(c.RetryDelay),
		"look": int64(c.Look),
	} {
		if v < 0 {
			errs = append(errs, fmt.Errorf("%s: %d; must not be negative", name, v))
		}
	}
	if len(errs) > 0 {
		return c, fmt.Errorf("consumer config: %w", errors.Join(errs...))
	}
	orDefault(&c.AckWait, DefaultAckWait)
	orDefault(&c.MaxDeliver, DefaultMaxDeliver)
	orDefault(&c.Slots, DefaultSlots)
	orDefault(&c.MaxAckPending, unbounded)
	orDefault(&c.PinnedTTL, DefaultPinnedTTL)
	orDefault(&c.DrainTimeout, DefaultDrainTimeout)
	orDefault(&c.RetryDelay, DefaultRetryDelay)
	orDefault(&c.Look, DefaultLook)
	if c.Stage == "" {
		c.Stage = stageOf(c.Durable)
	}
	return c, nil
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// stageOf is the stage that a durable belongs to: "sampler-tiny" is of the sampler.
func stageOf(durable string) string {
	stage, _, _ := strings.Cut(durable, "-")
	return stage
}

// native translates c.
func (c ConsumerConfig) native() jetstream.ConsumerConfig {
	n := jetstream.ConsumerConfig{
		Durable: c.Durable, AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverAllPolicy,
		AckWait: c.AckWait, MaxDeliver: -1, MaxAckPending: c.MaxAckPending, MaxWaiting: maxWaiting, FilterSubjects: c.Filters,
	}
	if c.MaxDeliver > 0 {
		n.MaxDeliver = c.MaxDeliver*lostPerTry + deliverSlack
	}
	if c.PriorityGroup != "" {
		n.PriorityPolicy, n.PriorityGroups, n.PinnedTTL = jetstream.PriorityPolicyPinned, []string{c.PriorityGroup}, c.PinnedTTL
	}
	return n
}

// insist runs f patiently, and again until ctx ends: for what a service cannot begin without. Its
// health says so meanwhile. What is not allowed, or refused, is an error.
func (b *Bus) insist(ctx context.Context, stream, lacking string, f func(ctx context.Context) error) error {
	began := time.Now()
	for {
		err := b.patiently(ctx, f)
		if err == nil || ctx.Err() != nil || b.nc.IsClosed() || errors.Is(err, ErrPermission) {
			return err
		}
		if api, ok := errors.AsType[*jetstream.APIError](err); ok && api.Code >= 400 && api.Code < 500 && api.Code != 404 {
			return err
		}
		if b.nc.IsConnected() {
			b.troubles.note(stream, 0, began, err) // who waits for it stands still
		}
		if b.waitLog.allow() {
			b.log.Warn().Err(err).Msg(lacking + ", trying again")
		}
		if pause(ctx, rebindPause) != nil {
			return err
		}
	}
}

// backoff is the pause after so many failures: RetryDelay, doubled with each, varied by
// a fifth so that what failed together does not come back together.
func (c ConsumerConfig) backoff(failures int) time.Duration {
	return time.Duration(float64(c.doubled(failures)) * (0.8 + 0.4*rand.Float64()))
}

func (c ConsumerConfig) doubled(failures int) time.Duration {
	d := maxRetryDelay
	if failures > 0 && failures <= 16 {
		d = min(d, c.RetryDelay<<(failures-1))
	}
	return d
}

// patience is how long a message is tried that fails at once each time.
func (c ConsumerConfig) patience() (d time.Duration) {
	for failures := 1; failures < c.MaxDeliver; failures++ {
		d += c.doubled(failures)
	}
	return d
}

// spent says whether a message has come more often than it may come at all.
func (c ConsumerConfig) spent(m *Message) bool {
	return c.MaxDeliver > 0 && m.Delivered > uint64(c.MaxDeliver)*lostPerTry
}

var errExhausted = errors.New("every delivery ended without a result: the process died, or handed it back")
