package bus

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// Examined is a stream of the contract, or one behind a bucket, as Examine found it.
type Examined struct {
	StreamStats
	// Missing says that it is not there, Err that the server did not tell.
	Missing bool
	Err     error
	// Wrong is in what it is not the contract's, for good; Stale what Setup would change.
	Wrong, Stale []string
	// Rolls says that it drops its oldest messages for new ones, and so is never full.
	Rolls bool
	// Peers is how many servers their cluster has, as far as its leader tells; 1 without one.
	Peers int
}

// Examine looks at every stream and bucket of the contract, with its consumers where they are asked for,
// and changes none. What is wrong with one keeps it from none of the others.
func (b *Bus) Examine(ctx context.Context, withConsumers bool) (out []Examined, err error) {
	err = b.patiently(ctx, func(ctx context.Context) error {
		out = nil
		if _, err := b.js.AccountInfo(ctx); errors.Is(err, jetstream.ErrJetStreamNotEnabled) || errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
			return err
		}
		for _, k := range kept() {
			e, err := b.examine(ctx, k, withConsumers)
			if ctx.Err() != nil || b.isAway(err) {
				return errors.Join(err, ctx.Err())
			}
			e.Name, e.Err, e.Rolls = k.name, err, !k.refuses
			out = append(out, e)
		}
		for _, name := range []string{presenceStream, sealStream} { // nobody asks for their limits
			s, err := b.js.Stream(ctx, name)
			e := Examined{StreamStats: StreamStats{Name: name}, Err: err}
			switch {
			case errors.Is(err, jetstream.ErrStreamNotFound):
				e.Missing, e.Err = true, nil
			case err == nil && name == presenceStream && s.CachedInfo().Config.MaxAge <= 0:
				e.Wrong = append(e.Wrong, fmt.Sprintf("it keeps its entries for ever, must forget them after %v", schemas.PresenceTTL))
				fallthrough
			case err == nil:
				e.Replicas = s.CachedInfo().Config.Replicas
				e.Current = e.Replicas
				e.kept(s.CachedInfo().Cluster)
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

func (b *Bus) examine(ctx context.Context, k keeping, withConsumers bool) (e Examined, err error) {
	stats, s, err := b.statsOf(ctx, k)
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
	if spec, ok := specNamed(k.name); ok {
		e.Wrong = wrong(info.Config, streamConfig(spec, e.Replicas))
		_, e.Stale = brought(info.Config, streamConfig(spec, e.Replicas))
	}
	if withConsumers {
		err = b.addConsumers(ctx, &e.StreamStats, s)
	}
	return e, err
}
