package bus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// renewalsPerTTL is how often an entry is renewed in its lifetime, so that three renewals may be late.
	renewalsPerTTL = 4
	// removeTimeout bounds the removal of the entry of a service that stops.
	removeTimeout = 2 * time.Second
)

// Announcement is the entry of a running service in schemas.PresenceBucket. Run keeps it there.
type Announcement struct {
	b     *Bus
	state func() *schemas.Presence
	// changed receives when there is something new to announce; nil: there never is.
	changed <-chan struct{}
	// stored is called with the revision of each entry, before another is stored; nil: not needed.
	stored func(revision uint64)
	// mu is held from reading the state until its entry is stored, so that no entry is replaced by an older one.
	mu sync.Mutex
	// ttl is how long the bucket keeps an entry; 0: not known.
	ttl time.Duration
	// renewed is when the entry was last stored; lapses counts how often it had expired by then.
	renewed atomic.Int64
	lapses  atomic.Int64
}

// Announcement returns an entry whose content comes from state. It is renewed now and then, and whenever changed
// receives (nil: never).
func (b *Bus) Announcement(state func() *schemas.Presence, changed <-chan struct{}) *Announcement {
	a := &Announcement{b: b, state: state, changed: changed}
	a.renewed.Store(time.Now().UnixNano())
	return a
}

func (a *Announcement) age() time.Duration { return time.Since(time.Unix(0, a.renewed.Load())) }

// lapsed returns how often others may have found no entry, up to now.
func (a *Announcement) lapsed() int64 {
	n := a.lapses.Load()
	if a.age() > schemas.PresenceTTL {
		n++
	}
	return n
}

// Announce makes an Announcement and runs it.
func (b *Bus) Announce(ctx context.Context, state func() *schemas.Presence, changed <-chan struct{}) error {
	return b.Announcement(state, changed).Run(ctx)
}

// Announcing makes an Announcement and runs it until stop, which waits for its end and returns its error.
func (b *Bus) Announcing(
	ctx context.Context, state func() *schemas.Presence, changed <-chan struct{},
) (stop func() error) {
	ctx, end := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- b.Announce(ctx, state, changed) }()
	return func() error {
		end()
		return <-ended
	}
}

// Run keeps the entry of a process in the bucket of presence renewed until ctx ends, and removes it then. The entry
// of a process that died expires. Run logs failures and tries again; it returns an error only for an invalid entry,
// and for a bucket that never forgets its entries (ErrIncompatible).
func (a *Announcement) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		beat, err := a.storeEntry(ctx)
		if err != nil {
			if _, terminal := errors.AsType[*TerminalError](err); terminal || errors.Is(err, ErrIncompatible) {
				return err
			}
			if a.b.nc.IsClosed() {
				return nil
			}
			if ctx.Err() == nil && a.b.waitLog.allow(logEvery) {
				a.b.log.Warn().Err(err).Str("instance", a.state().Instance).Msg("presence not renewed, trying again")
			}
			beat = schemas.PresenceTTL / renewalsPerTTL
		}
		t := time.NewTimer(beat)
		select {
		case <-ctx.Done():
		case <-a.changed:
		case <-t.C:
		}
		t.Stop()
	}
	if !a.b.nc.IsConnected() {
		return nil // the entry expires
	}
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer stop()
	kv, err := a.b.bucket(last, schemas.PresenceBucket)
	if err == nil {
		err = kv.Purge(last, a.state().Instance)
	}
	if err != nil {
		a.b.log.Debug().Err(err).Str("instance", a.state().Instance).Msg("entry not removed, it expires")
	}
	return nil
}

// storeEntry stores the entry of presence with its newest state, and returns the pause until the next renewal.
func (a *Announcement) storeEntry(ctx context.Context) (beat time.Duration, err error) {
	ctx, stop := context.WithTimeout(ctx, apiTimeout)
	defer stop()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ttl == 0 {
		info, err := a.b.StreamInfo(ctx, schemas.StreamPresenceBucket)
		if err != nil {
			return 0, err
		}
		a.ttl = info.Config.MaxAge
	}
	p := a.state()
	if err := p.Validate(); err != nil {
		return 0, Terminal(schemas.CodeInvalid, fmt.Errorf("announce: %w", err))
	}
	p.At = time.Now().UnixNano()
	data, err := schemas.Encode(p)
	if err != nil {
		return 0, err
	}
	ack, err := a.b.publishOnce(ctx, &nats.Msg{Subject: schemas.PresenceSubject(p.Instance), Data: data})
	if err != nil {
		a.ttl = 0 // look again
		return 0, err
	}
	if a.stored != nil {
		a.stored(ack.Seq)
	}
	a.lapses.Store(a.lapsed())
	a.renewed.Store(time.Now().UnixNano())
	if a.ttl <= 0 {
		return 0, fmt.Errorf("announce %s: %w: bucket %s keeps its entries for ever; must forget them, after %v",
			p.Instance, ErrIncompatible, schemas.PresenceBucket, schemas.PresenceTTL)
	}
	return a.ttl / renewalsPerTTL, nil
}

// Present returns the services that run. It leaves out entries that cannot be read, and logs them.
func (b *Bus) Present(ctx context.Context) ([]*schemas.Presence, error) {
	out, _, err := b.PresentAt(ctx)
	return out, err
}

// PresentAt is Present, the entries of the services that run, with the revision of each. Entries that cannot be read
// are logged and left out.
func (b *Bus) PresentAt(ctx context.Context) (out []*schemas.Presence, revisions []uint64, err error) {
	stored, err := b.LastMany(ctx, schemas.StreamPresenceBucket, []string{schemas.PresenceSubject(">")})
	if err != nil {
		return nil, nil, fmt.Errorf("services that run: %w", err)
	}
	for _, m := range stored {
		p := &schemas.Presence{}
		if b.decodeEntry(m, p, nil) {
			out, revisions = append(out, p), append(revisions, m.Seq)
		}
	}
	return out, revisions, nil
}

// UnservedBacklog returns how many messages wait for each service but the samplers, such as schemas.ServiceReward,
// while no program takes them. all is what Stats returned. For a service that never ran all messages of its streams
// wait.
func UnservedBacklog(all []StreamStats) map[string]uint64 {
	waiting, served := map[string]uint64{}, map[string]bool{}
	for _, s := range all {
		never := map[string]bool{}
		for _, d := range schemas.Durables() {
			i := slices.IndexFunc(s.Consumers, func(c ConsumerStats) bool { return c.Name == d.Name && c.Takes })
			switch {
			case d.Stream != s.Name:
			case i < 0:
				never[d.Service] = true
			case s.Consumers[i].Pulls > 0 || s.Consumers[i].AckPending > 0:
				served[d.Service] = true
			default:
				waiting[d.Service] += s.Consumers[i].Pending
			}
		}
		for service := range never {
			waiting[service] += s.Messages
		}
	}
	maps.DeleteFunc(waiting, func(service string, n uint64) bool { return n == 0 || served[service] })
	return waiting
}

// LaneBacklog returns how many requests of a lane wait or are in flight.
func (b *Bus) LaneBacklog(ctx context.Context, lane schemas.Lane) (uint64, error) {
	c, err := b.js.Consumer(ctx, schemas.StreamRequests, schemas.RequestsDurable(lane).Name)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("requests of lane %s: %w", lane, err)
	}
	info := c.CachedInfo()
	return info.NumPending + uint64(info.NumAckPending), nil
}
