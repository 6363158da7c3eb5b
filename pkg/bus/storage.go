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

// States of a stream.
const (
	StateOK = "ok"
	// StateNearlyFull has less than a fifth of its bytes or messages left.
	StateNearlyFull = "nearly full"
	// StateFull refuses publishers: there is no space for another message of mean size.
	StateFull = "full"
	// StateRolling drops its oldest messages for new ones.
	StateRolling = "rolling"
)

// StreamLimit is a change of the limits of an existing stream.
type StreamLimit struct {
	// Stream is one of schemas.Streams, or schemas.StreamBlobBucket.
	Stream string
	// MaxBytes is the most bytes that the stream keeps; 0: unchanged.
	MaxBytes int64
	// MaxAge is how long the stream keeps a message; 0: unchanged, negative: without limit.
	MaxAge time.Duration
}

// SetLimits changes limits of existing streams, each named once. It leaves streams alone that have the limits
// already. It refuses a limit below what a stream holds, since the server would drop the rest, and an age that drops
// steps before the trajectories that name them.
func (b *Bus) SetLimits(ctx context.Context, limits ...StreamLimit) error {
	if len(limits) == 0 {
		return nil
	}
	return b.retryWhileAway(ctx, func(ctx context.Context) error { return b.setLimits(ctx, limits) })
}

// setLimits is one try of SetLimits: it changes the limits of streams that are given. The error names the limit and
// what it must be.
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
		more   int64 // bytes more than now
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
				return fmt.Errorf("set limits of %s: max_bytes: %d; must be at least the %d that it holds", l.Stream,
					l.MaxBytes, have)
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
	steps, named := ages[schemas.StreamSteps], ages[schemas.StreamTrajectories]
	if len(next) > 0 && steps > 0 && (named == 0 || named > steps) {
		return fmt.Errorf("set limits of %s: max_age: %v; must be at least that of the trajectories that name the "+
			"steps, %s", schemas.StreamSteps, steps, formatAge(named))
	}
	// The server reserves the limits: change first the streams that get smaller, so that others can use their space.
	slices.SortStableFunc(next, func(x, y change) int { return cmp.Compare(x.more, y.more) })
	for _, n := range next {
		c := n.config
		if _, err := b.js.UpdateStream(ctx, c); err != nil {
			if classOf(err) == classFull {
				err = fmt.Errorf("max_bytes: %d; must be what the server's storage (max_file_store) can hold beside "+
					"the other streams, of which one can be given less in the same call: %w", c.MaxBytes, err)
			}
			return fmt.Errorf("set limits of %s: %w", c.Name, err)
		}
		b.log.Info().Str("stream", c.Name).Int64("max_bytes", c.MaxBytes).Stringer("max_age", c.MaxAge).
			Msg("limits changed")
	}
	return nil
}

func formatAge(d time.Duration) string {
	if d <= 0 {
		return "for ever"
	}
	return d.String()
}

// fullness returns how full a stream is, one of the State constants, by the limit that is nearer: bytes or messages.
// refuses means that the full stream refuses messages; otherwise it drops its oldest.
func (s *StreamStats) fullness(refuses bool) string {
	mean := max(1, s.Bytes/max(1, s.Messages))
	// lessFree reports whether less than so many percent of a limit is free, or less than a message of mean size needs.
	lessFree := func(percent uint64) bool {
		return s.MaxBytes > 0 && s.Bytes+max(mean, percent*uint64(s.MaxBytes)/100) > uint64(s.MaxBytes) ||
			s.MaxMessages > 0 && s.Messages+max(1, percent*uint64(s.MaxMessages)/100) > uint64(s.MaxMessages)
	}
	switch {
	case s.Messages == 0 || !lessFree(20):
		return StateOK
	case !refuses:
		return StateRolling
	case lessFree(0):
		return StateFull
	}
	return StateNearlyFull
}

// Fault is a stream that does not accept events at the moment.
type Fault struct {
	StreamStats
	// Since is when a publish of this process first failed; zero: none did.
	Since time.Time
	// Err is the server's answer, or that it did not answer; nil: no publish of this process failed.
	Err error
	// Refused is the size of the message that does not fit, if known.
	Refused int64
}

// Full reports whether the stream has reached its limits. Otherwise the server does not confirm publishes, perhaps
// because of its disk.
func (f Fault) Full() bool { return f.State == StateFull }

// Faults lists the streams that do not accept events at the moment: those that are full, and those where publishes of
// this bus wait for an answer. A full queue of requests is no fault: it slows intake down to the speed of the
// samplers. An error means that the server did not answer.
func (b *Bus) Faults(ctx context.Context) ([]Fault, error) {
	all, err := b.Sizes(ctx)
	return b.FaultsOf(all), err
}

// FaultsOf is Faults of what Stats or Sizes returned, without another request.
func (b *Bus) FaultsOf(all []StreamStats) (out []Fault) {
	for _, stats := range all {
		f := Fault{StreamStats: stats}
		if t, ok := b.faultLog.current(stats.Name); ok {
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
		queue := slices.ContainsFunc(allStores(), func(k storedIn) bool { return k.queue && k.name == stats.Name })
		if f.Err != nil && !f.Full() || f.Full() && !queue {
			out = append(out, f)
		}
	}
	return out
}

// storedIn is a stream of the contract, or one behind a bucket. refuses: it refuses messages when it is full. queue:
// it is a work queue.
type storedIn struct {
	name           string
	refuses, queue bool
}

// allStores returns the contract's streams in the order in which data flows, then those behind the buckets, for stats
// and faults.
func allStores() []storedIn {
	var out []storedIn
	for _, s := range schemas.Streams() {
		out = append(out, storedIn{s.Name, s.DiscardNew || s.Guarded, s.WorkQueue})
	}
	return append(out, storedIn{schemas.StreamBlobBucket, true, false},
		storedIn{schemas.StreamRunBucket, true, false}, storedIn{schemas.StreamCountBucket, true, false},
		storedIn{schemas.StreamPolicyBucket, true, false}, storedIn{schemas.StreamControlBucket, true, false})
}

// streamStoring returns the stream that stores a subject; "" if it is none of the contract.
func streamStoring(subject string) string {
	if s, ok := schemas.StreamOf(subject); ok {
		return s.Name
	}
	if strings.HasPrefix(subject, "$O."+schemas.BlobBucket+".") {
		return schemas.StreamBlobBucket
	}
	return ""
}

// faultLog has the failed publishes, by the name of the stream. n is their number, so that the usual case needs no
// lock.
type faultLog struct {
	n  atomic.Int64
	mu sync.Mutex
	by map[string]publishFault
}

// publishFault is what is known of the failed publishes to one stream: the first and the last of them, and the
// largest size.
type publishFault struct {
	since, last time.Time
	full        bool // the stream or the server's storage has no space
	server      bool // it is the server's storage
	size        uint64
	err         error
}

// faultAge is how long a failed publish counts: a caller that waits for space or an answer tries again sooner.
const faultAge = apiTimeout + 5*retryMax

// noteFailure notes, for Faults, a failed publish of size bytes that began at since.
func (t *faultLog) noteFailure(stream string, size int, since time.Time, err error) {
	if stream == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	old, ok := t.by[stream]
	if !ok || now.Sub(old.last) > faultAge {
		old = publishFault{since: since}
	}
	full := errors.Is(err, ErrStreamFull)
	if t.by == nil {
		t.by = map[string]publishFault{}
	}
	t.by[stream] = publishFault{
		since: old.since, last: now, err: err, size: max(old.size, uint64(size)),
		full: full, server: full && classOf(err) == classFull,
	}
	t.n.Store(int64(len(t.by)))
}

// noteStored notes, for Faults, that a stream has stored a message of that size, which ends its fault unless a larger
// one was refused.
func (t *faultLog) noteStored(stream string, size int) {
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

// current returns the fault of a stream, if it still counts: a publish must have failed because of a full stream, or
// waited for apiTimeout.
func (t *faultLog) current(stream string) (publishFault, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, ok := t.by[stream]
	// A caller that gave up early says nothing about the server.
	return found, ok && time.Since(found.last) <= faultAge && (found.full || found.last.Sub(found.since) >= apiTimeout)
}
