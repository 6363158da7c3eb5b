package bus

import (
	"context"
	"errors"
	"fmt"
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

// Announce says that a service runs until ctx ends: it renews the entry that state
// returns in schemas.PresenceBucket, at once for each word on changed (nil: there is none),
// and takes it out at the end. An entry that is not renewed goes by itself, and so that of a
// process that died does. What fails is logged, and tried again; only an entry against the
// rules and a bucket that keeps its entries for ever (ErrIncompatible) are errors.
func (b *Bus) Announce(ctx context.Context, state func() *schemas.Presence, changed <-chan struct{}) error {
	for ctx.Err() == nil {
		p := state()
		if err := p.Validate(); err != nil {
			return fmt.Errorf("announce: %w", err)
		}
		beat, err := b.renew(ctx, p)
		if errors.Is(err, ErrIncompatible) {
			return fmt.Errorf("announce %s: %w", p.Instance, err)
		}
		if err != nil {
			if b.nc.IsClosed() {
				return nil
			}
			if ctx.Err() == nil && b.waitLog.allow() {
				b.log.Warn().Err(err).Str("instance", p.Instance).Msg("presence not renewed, trying again")
			}
			beat = schemas.PresenceTTL / beatsPerTTL
		}
		t := time.NewTimer(beat)
		select {
		case <-ctx.Done():
		case <-changed:
		case <-t.C:
		}
		t.Stop()
	}
	if !b.nc.IsConnected() {
		return nil // it goes by itself
	}
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer stop()
	kv, err := b.bucket(last, schemas.PresenceBucket)
	if err == nil {
		err = kv.Purge(last, state().Instance)
	}
	if err != nil {
		b.log.Debug().Err(err).Str("instance", state().Instance).Msg("left without a word")
	}
	return nil
}

// renew stores an entry and says when to do so again.
func (b *Bus) renew(ctx context.Context, p *schemas.Presence) (beat time.Duration, err error) {
	p.At = time.Now().UnixNano()
	data, err := schemas.Encode(p)
	if err != nil {
		return 0, err
	}
	ctx, stop := context.WithTimeout(ctx, apiTimeout)
	defer stop()
	kv, err := b.bucket(ctx, schemas.PresenceBucket)
	if err != nil {
		return 0, err
	}
	status, err := kv.Status(ctx)
	if err != nil {
		return 0, err
	}
	if _, err := kv.Put(ctx, p.Instance, data); err != nil {
		return 0, err
	}
	if status.TTL() <= 0 {
		return 0, fmt.Errorf("%w: bucket %s keeps its entries for ever; must forget them, after %v", ErrIncompatible, schemas.PresenceBucket, schemas.PresenceTTL)
	}
	return status.TTL() / beatsPerTTL, nil
}

// Present returns the services that run. Entries that cannot be read are left out, and
// logged.
func (b *Bus) Present(ctx context.Context) ([]*schemas.Presence, error) {
	stored, err := b.LastMany(ctx, "KV_"+schemas.PresenceBucket, []string{schemas.PresenceSubject(">")})
	if err != nil {
		return nil, fmt.Errorf("services that run: %w", err)
	}
	var out []*schemas.Presence
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
		out = append(out, p)
	}
	return out, nil
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

// LaneConsumer is the durable of a lane's samplers.
func LaneConsumer(lane schemas.Lane) string { return "sampler-" + string(lane) }
