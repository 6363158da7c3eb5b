package bus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// beatsPerTTL is how often an entry is renewed while it would stay: three may be late.
	beatsPerTTL = 4
	// leaveTimeout bounds the farewell of a service that stops.
	leaveTimeout = 2 * time.Second
)

// Announcement is the entry of a service that runs in schemas.PresenceBucket.
type Announcement struct {
	b     *Bus
	state func() *schemas.Presence
	// changed has a word when there is something new to say; nil: there never is.
	changed <-chan struct{}
	// stored is told the revision of each entry, before another is made; nil: nobody is.
	stored func(revision uint64)
	// mu is held from the state to its entry, so that none is replaced by an older one.
	mu sync.Mutex
	// kv is the bucket, looked at when it was opened; an entry stays for ttl.
	kv     jetstream.KeyValue
	ttl    time.Duration
	opened time.Time
	// renewed is when the entry was stored last; lapses counts how often it had gone by then.
	renewed atomic.Int64
	lapses  atomic.Int64
}

// Announcement is made of what state returns whenever it is renewed: now and then, and for each word
// on changed (nil: there is none).
func (b *Bus) Announcement(state func() *schemas.Presence, changed <-chan struct{}) *Announcement {
	a := &Announcement{b: b, state: state, changed: changed}
	a.renewed.Store(time.Now().UnixNano())
	return a
}

// age is how long ago the entry was renewed.
func (a *Announcement) age() time.Duration { return time.Since(time.Unix(0, a.renewed.Load())) }

// lapsed is how often others may have found no entry, until now.
func (a *Announcement) lapsed() int64 {
	n := a.lapses.Load()
	if a.age() > schemas.PresenceTTL {
		n++
	}
	return n
}

// Announce is Run of an announcement.
func (b *Bus) Announce(ctx context.Context, state func() *schemas.Presence, changed <-chan struct{}) error {
	return b.Announcement(state, changed).Run(ctx)
}

// Run says that a service runs until ctx ends: it renews the entry, and takes it out at the
// end. An entry that is not renewed goes by itself, and so that of a process that died does.
// What fails is logged, and tried again; only an entry against the rules and a bucket that
// keeps its entries for ever (ErrIncompatible) are errors.
func (a *Announcement) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		beat, err := a.renew(ctx)
		if err != nil {
			if _, terminal := errors.AsType[*TerminalError](err); terminal || errors.Is(err, ErrIncompatible) {
				return err
			}
			if a.b.nc.IsClosed() {
				return nil
			}
			if ctx.Err() == nil && a.b.waitLog.allow() {
				a.b.log.Warn().Err(err).Str("instance", a.state().Instance).Msg("presence not renewed, trying again")
			}
			beat = schemas.PresenceTTL / beatsPerTTL
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
		return nil // it goes by itself
	}
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer stop()
	kv, err := a.b.bucket(last, schemas.PresenceBucket)
	if err == nil {
		err = kv.Purge(last, a.state().Instance)
	}
	if err != nil {
		a.b.log.Debug().Err(err).Str("instance", a.state().Instance).Msg("left without a word")
	}
	return nil
}

// renew stores the entry and says when to do so again.
func (a *Announcement) renew(ctx context.Context) (beat time.Duration, err error) {
	ctx, stop := context.WithTimeout(ctx, apiTimeout)
	defer stop()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.open(ctx); err != nil {
		return 0, err
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
	revision, err := a.kv.Put(ctx, p.Instance, data)
	if err != nil {
		a.opened = time.Time{} // look again
		return 0, err
	}
	if a.stored != nil {
		a.stored(revision)
	}
	a.lapses.Store(a.lapsed())
	a.renewed.Store(time.Now().UnixNano())
	if a.ttl <= 0 {
		return 0, fmt.Errorf("announce %s: %w: bucket %s keeps its entries for ever; must forget them, after %v", p.Instance, ErrIncompatible, schemas.PresenceBucket, schemas.PresenceTTL)
	}
	return a.ttl / beatsPerTTL, nil
}

// open looks at the bucket, now and then: rooms renew their entry for every other sample.
func (a *Announcement) open(ctx context.Context) error {
	if time.Since(a.opened) < schemas.PresenceTTL/beatsPerTTL/2 {
		return nil
	}
	kv, err := a.b.bucket(ctx, schemas.PresenceBucket)
	if err != nil {
		return err
	}
	status, err := kv.Status(ctx)
	if err != nil {
		return err
	}
	a.kv, a.ttl, a.opened = kv, status.TTL(), time.Now()
	return nil
}

// Present returns the services that run. Entries that cannot be read are left out, and
// logged.
func (b *Bus) Present(ctx context.Context) ([]*schemas.Presence, error) {
	out, _, err := b.present(ctx)
	return out, err
}

// present is Present, with the revision of each entry.
func (b *Bus) present(ctx context.Context) (out []*schemas.Presence, revisions []uint64, err error) {
	stored, err := b.LastMany(ctx, "KV_"+schemas.PresenceBucket, []string{schemas.PresenceSubject(">")})
	if err != nil {
		return nil, nil, fmt.Errorf("services that run: %w", err)
	}
	for _, m := range stored {
		if len(m.Data) == 0 {
			continue // it has left
		}
		p := &schemas.Presence{}
		if err := schemas.DecodeValid(m.Data, p); err != nil {
			if b.waitLog.allow() {
				b.log.Warn().Err(err).Str("subject", m.Subject).Msg("presence not readable")
			}
			continue
		}
		out, revisions = append(out, p), append(revisions, m.Seq)
	}
	return out, revisions, nil
}

// LaneBacklog is how many requests of a lane are not done: waiting, or in hand.
func (b *Bus) LaneBacklog(ctx context.Context, lane schemas.Lane) (uint64, error) {
	c, err := b.js.Consumer(ctx, schemas.StreamRequests, LaneConsumer(lane))
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("requests of lane %s: %w", lane, err)
	}
	info := c.CachedInfo()
	return info.NumPending + uint64(info.NumAckPending), nil
}
