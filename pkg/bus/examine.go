package bus

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

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
