package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// BlobStream is the stream behind the object store of blobs.
const BlobStream = "OBJ_" + schemas.BlobBucket

// States of a stream.
const (
	StateOK = "ok"
	// StateNearlyFull has less than a fifth of its bytes or messages left.
	StateNearlyFull = "nearly full"
	// StateFull refuses publishers: there is no room for another message of mean size.
	StateFull = "full"
	// StateRolling drops its oldest messages for new ones.
	StateRolling = "rolling"
)

// StreamLimit changes the limits of a stream that is there.
type StreamLimit struct {
	// Stream is one of schemas.Streams, or BlobStream.
	Stream string
	// MaxBytes is the most bytes it keeps; 0: as it is.
	MaxBytes int64
	// MaxAge is how long it keeps a message; 0: as it is, negative: for ever.
	MaxAge time.Duration
}

// SetLimits changes limits of streams that are there, each named once; those that are as
// asked for are left alone. A limit below what a stream holds is refused, since the server would drop
// the rest, and so are steps that would go before the trajectories that name them.
func (b *Bus) SetLimits(ctx context.Context, limits ...StreamLimit) error {
	if len(limits) == 0 {
		return nil
	}
	return b.patiently(ctx, func(ctx context.Context) error { return b.setLimits(ctx, limits) })
}

func (b *Bus) setLimits(ctx context.Context, limits []StreamLimit) error {
	ages := map[string]time.Duration{}
	for _, name := range []string{schemas.StreamSteps, schemas.StreamTrajectories} {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("set limits of %s: %w", name, err)
		}
		ages[name] = s.CachedInfo().Config.MaxAge
	}
	type change struct {
		config jetstream.StreamConfig
		more   int64 // bytes than now
	}
	var next []change
	for i, l := range limits {
		if slices.ContainsFunc(limits[:i], func(other StreamLimit) bool { return other.Stream == l.Stream }) {
			return fmt.Errorf("set limits of %s: named twice; must be one limit with both", l.Stream)
		}
		s, err := b.js.Stream(ctx, l.Stream)
		if err != nil {
			return fmt.Errorf("set limits of %s: %w", l.Stream, err)
		}
		c, have := s.CachedInfo().Config, s.CachedInfo().State.Bytes
		old := c
		if l.MaxBytes > 0 {
			if uint64(l.MaxBytes) < have {
				return fmt.Errorf("set limits of %s: max_bytes: %d; must be at least the %d that it holds", l.Stream, l.MaxBytes, have)
			}
			c.MaxBytes = l.MaxBytes
		}
		if l.MaxAge != 0 {
			c.MaxAge = max(0, l.MaxAge)
		}
		if c.MaxBytes != old.MaxBytes || c.MaxAge != old.MaxAge {
			next = append(next, change{c, c.MaxBytes - old.MaxBytes})
		}
		ages[l.Stream] = c.MaxAge
	}
	if steps, named := ages[schemas.StreamSteps], ages[schemas.StreamTrajectories]; len(next) > 0 && steps > 0 && (named == 0 || named > steps) {
		return fmt.Errorf("set limits of %s: max_age: %v; must be at least that of the trajectories that name the steps, %s", schemas.StreamSteps, steps, age(named))
	}
	// The server reserves what it promises: what one gives up is there for the others.
	slices.SortStableFunc(next, func(x, y change) int { return cmp.Compare(x.more, y.more) })
	for _, n := range next {
		c := n.config
		if _, err := b.js.UpdateStream(ctx, c); err != nil {
			if classify(err) == classFull {
				err = fmt.Errorf("max_bytes: %d; must be what the server's storage (max_file_store) can hold beside the other streams, of which one can be given less in the same call: %w", c.MaxBytes, err)
			}
			return fmt.Errorf("set limits of %s: %w", c.Name, err)
		}
		b.log.Info().Str("stream", c.Name).Int64("max_bytes", c.MaxBytes).Stringer("max_age", c.MaxAge).Msg("limits changed")
	}
	return nil
}

// age is a MaxAge for people.
func age(d time.Duration) string {
	if d <= 0 {
		return "for ever"
	}
	return d.String()
}

// state is how full a stream is, in words.
func (s *StreamStats) state(refuses bool) string {
	mean := max(1, s.Bytes/max(1, s.Messages))
	full := func(share uint64) bool {
		return s.MaxBytes > 0 && s.Bytes+max(mean, share*uint64(s.MaxBytes)/100) > uint64(s.MaxBytes) ||
			s.MaxMessages > 0 && s.Messages+max(1, share*uint64(s.MaxMessages)/100) > uint64(s.MaxMessages)
	}
	switch {
	case s.Messages == 0 || !full(20):
		return StateOK
	case !refuses:
		return StateRolling
	case full(0):
		return StateFull
	}
	return StateNearlyFull
}

// Fault is a stream that takes no events at the moment.
type Fault struct {
	StreamStats
	// Since is when a publish of this process was refused or not confirmed first; zero: none
	// was.
	Since time.Time
	// Err is what the server answered, or that it did not; nil: no publish was refused here.
	Err error
	// Refused is the size of what does not fit, where it is known.
	Refused int64
}

// Full says that the stream has reached its limits. Otherwise the server does not
// confirm what is published, which may be its disk.
func (f Fault) Full() bool { return f.State == StateFull }

// Faults lists the streams that take no events at the moment: what is full, and where
// publishes of this bus wait for an answer. A full queue of requests is none: it is how
// intake is slowed down to the samplers. An error means that the server did not say.
func (b *Bus) Faults(ctx context.Context) ([]Fault, error) {
	var out []Fault
	for _, k := range kept() {
		stats, _, err := b.statsOf(ctx, k)
		if err != nil {
			return nil, err
		}
		f := Fault{StreamStats: *stats}
		if t, ok := b.troubles.of(k.name); ok {
			room := stats.MaxBytes <= 0 || stats.Bytes+t.size <= uint64(stats.MaxBytes)
			switch {
			case !t.full:
				f.Since, f.Err = t.since, t.err
			case t.server:
				f.Since, f.Err, f.State = t.since, t.err, StateFull
			case !room: // more than a message of mean size
				f.Since, f.Err, f.State, f.Refused = t.since, t.err, StateFull, int64(t.size)
			}
		}
		if f.Err != nil && !f.Full() || f.Full() && !k.queue {
			out = append(out, f)
		}
	}
	return out, nil
}

// keeping is a stream of the contract, or one behind a bucket.
type keeping struct {
	name           string
	refuses, queue bool
}

// kept lists what the contract stores in, in the order data flows, then the buckets.
func kept() []keeping {
	var out []keeping
	for _, s := range specs() {
		out = append(out, keeping{s.Name, s.DiscardNew || s.Guarded, s.WorkQueue})
	}
	return append(out, keeping{BlobStream, true, false},
		keeping{"KV_" + schemas.RunBucket, true, false}, keeping{"KV_" + schemas.PolicyBucket, true, false}, keeping{controlStream, true, false})
}

// keptIn is the stream that stores a subject, empty for none of the contract's.
func keptIn(subject string) string {
	if s, ok := specOf(subject); ok {
		return s.Name
	}
	if strings.HasPrefix(subject, "$O."+schemas.BlobBucket+".") {
		return BlobStream
	}
	return ""
}

// troubles are the publishes that a stream did not take, by the stream's name.
type troubles struct {
	n  atomic.Int64
	mu sync.Mutex
	by map[string]trouble
}

type trouble struct {
	since, last time.Time
	full        bool // the stream, or the server's storage, has no room
	server      bool // it is the server's storage
	size        uint64
	err         error
}

// troubleAge is how long a publish that failed says something: whoever waits for room or an
// answer tries again sooner.
const troubleAge = apiTimeout + 5*retryMax

func (t *troubles) note(stream string, size int, since time.Time, err error) {
	if stream == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	old, ok := t.by[stream]
	if !ok || now.Sub(old.last) > troubleAge {
		old = trouble{since: since}
	}
	full := errors.Is(err, ErrStreamFull)
	if t.by == nil {
		t.by = map[string]trouble{}
	}
	t.by[stream] = trouble{
		since: old.since, last: now, err: err, size: max(old.size, uint64(size)),
		full: full, server: full && classify(err) == classFull,
	}
	t.n.Store(int64(len(t.by)))
}

// took says that a stream has stored a message of that size.
func (t *troubles) took(stream string, size int) {
	if t.n.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if old, ok := t.by[stream]; ok && (!old.full || uint64(size) >= old.size) {
		delete(t.by, stream)
		t.n.Store(int64(len(t.by)))
	}
}

func (t *troubles) of(stream string) (trouble, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, ok := t.by[stream]
	// A caller that had no patience says nothing about the server.
	return found, ok && time.Since(found.last) <= troubleAge && (found.full || found.last.Sub(found.since) >= apiTimeout)
}
