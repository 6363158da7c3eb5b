package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
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

// MeanSize estimates how many bytes a message of a run takes in a stream, as the server counts them. It measures the
// newest message; of steps, up to sixteen of its sample once that has ended, since those with latents are far larger
// than the others. 0: the stream has no message of the run, or none that we may read.
func (b *Bus) MeanSize(ctx context.Context, stream string, run schemas.Run) (uint64, error) {
	for _, filter := range schemas.RunFilters(run)[stream] {
		m, err := b.Last(ctx, stream, filter)
		switch {
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrPermission):
		case err != nil:
			return 0, fmt.Errorf("size of a message: %w", err)
		case stream == schemas.StreamSteps:
			return b.meanOfSample(ctx, m)
		default:
			return m.StoredSize(), nil
		}
	}
	return 0, nil
}

// mostMeasured is how many steps of a sample are read for their size.
const mostMeasured = 16

// meanOfSample returns the mean size of the stored steps of the sample that m is a step of, or the size of m while its
// trajectory is not there to name them. It gets them by their sequences: a reader would search the whole stream.
func (b *Bus) meanOfSample(ctx context.Context, m *Message) (uint64, error) {
	a, _ := schemas.ParseSubject(m.Subject)
	var t schemas.Trajectory
	ended, err := b.Last(ctx, schemas.StreamTrajectories, schemas.Address{
		Kind: schemas.KindTrajectory, Run: a.Run, UID: a.UID, Sample: a.Sample, Stage: a.Stage,
	}.Filter())
	if errors.Is(err, ErrNotFound) || errors.Is(err, ErrPermission) || err == nil && Fits(ended, &t) != nil {
		return m.StoredSize(), nil
	}
	if err != nil {
		return 0, fmt.Errorf("size of a step: %w", err)
	}
	sum, n, reads := uint64(0), uint64(0), min(len(t.Steps), mostMeasured)
	for i := range reads {
		step, err := b.Get(ctx, m.Stream, t.Steps[i*len(t.Steps)/reads].Seq)
		if err == nil {
			sum, n = sum+step.StoredSize(), n+1
		} else if !errors.Is(err, ErrNotFound) { // it was freed
			return 0, fmt.Errorf("size of a step: %w", err)
		}
	}
	if n == 0 {
		return m.StoredSize(), nil
	}
	return sum / n, nil
}

// StoredSize returns what the server's file store takes for the message: a record of 22 bytes, a checksum of 8, the
// subject, the payload, and headers in the form of the wire with their length. It may have been read without payload.
func (m *Message) StoredSize() uint64 {
	n := 30 + len(m.Subject) + len(m.Data)
	if len(m.Header) > 0 {
		n += 4 + len("NATS/1.0\r\n\r\n")
	}
	for name, values := range m.Header {
		if name == nats.MsgSize { // the server's own, where it left the payload out
			size, _ := strconv.Atoi(values[0])
			n += size
			continue
		}
		for _, v := range values {
			n += len(name) + len(": \r\n") + len(v)
		}
	}
	return uint64(n)
}

// Examined is what Examine found about a stream of the contract, or one behind a bucket.
type Examined struct {
	StreamStats
	// Missing means that it does not exist, Err that the server did not say.
	Missing bool
	Err     error
	// Wrong lists differences from the contract that cannot be repaired, Stale those that Setup would repair. Both are
	// empty for a mirror, which has settings of its own.
	Wrong, Stale []string
	// Rolls means that it drops its oldest messages for new ones, and so is never full.
	Rolls bool
	// Peers is how many servers the cluster has, as far as the stream's leader says; 1 without a cluster.
	Peers int
}

// Examine looks at every stream and bucket of the contract, and at their consumers if asked. It changes nothing. A
// fault of one stream does not keep it from examining the others.
func (b *Bus) Examine(ctx context.Context, withConsumers bool) (out []Examined, err error) {
	err = b.retryWhileAway(ctx, func(ctx context.Context) error {
		out = nil
		if _, err := b.js.AccountInfo(ctx); errors.Is(noJetStream(err), ErrNoJetStream) {
			return noJetStream(err)
		}
		for _, k := range allStores() {
			e, err := b.examine(ctx, k, withConsumers)
			if ctx.Err() != nil || b.mayAnswerLater(err) {
				return errors.Join(err, ctx.Err())
			}
			e.Name, e.Err, e.Rolls = k.name, err, !k.refuses || e.Mirror
			out = append(out, e)
		}
		// their limits do not matter
		for _, name := range []string{
			schemas.StreamPresenceBucket, schemas.StreamLeaseBucket, schemas.StreamSealBucket,
		} {
			s, err := b.js.Stream(ctx, name)
			e := Examined{StreamStats: StreamStats{Name: name}, Err: err}
			switch {
			case errors.Is(err, jetstream.ErrStreamNotFound):
				e.Missing, e.Err = true, nil
			case err == nil && name != schemas.StreamSealBucket && s.CachedInfo().Config.MaxAge <= 0:
				e.Wrong = append(e.Wrong, fmt.Sprintf("it keeps its entries for ever, must forget them after %v",
					schemas.PresenceTTL))
				fallthrough
			case err == nil:
				e.Replicas = s.CachedInfo().Config.Replicas
				e.Current = e.Replicas
				e.countReplicas(s.CachedInfo().Cluster)
			}
			out = append(out, e)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("examine the streams: %w", err)
	}
	return out, nil
}

// examine is Examine of one stream. A stream that does not exist is no error.
func (b *Bus) examine(ctx context.Context, k storedIn, withConsumers bool) (e Examined, err error) {
	stats, s, err := b.streamStats(ctx, k)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		e.Missing = true
		return e, nil
	}
	if stats != nil {
		e.StreamStats = *stats
	}
	if err != nil {
		return e, err
	}
	info := s.CachedInfo()
	e.Peers = 1
	if c := info.Cluster; c != nil && c.Name != "" {
		e.Peers = max(2, len(c.Replicas)+1)
	}
	if spec, ok := schemas.StreamNamed(k.name); ok && !e.Mirror {
		e.Wrong = incompatibilities(info.Config, streamConfig(spec, e.Replicas))
		_, e.Stale = withContract(info.Config, streamConfig(spec, e.Replicas))
	}
	if withConsumers {
		err = b.addConsumers(ctx, &e.StreamStats, s)
	}
	return e, err
}
