package bus

import (
	"context"

	"github.com/nats-io/nats.go/jetstream"
)

// withStream calls f with a stream, and again while the server is away. What the stream has cached may be old: only the
// first call of each asks the server for it. That one gets what the server said, later ones nil.
func (b *Bus) withStream(
	ctx context.Context, name string, f func(context.Context, jetstream.Stream, *jetstream.StreamInfo) error,
) error {
	return b.retryWhileAway(ctx, func(ctx context.Context) (err error) {
		if known, ok := b.streams.Load(name); ok {
			return f(ctx, known.(jetstream.Stream), nil)
		}
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return err
		}
		info := s.CachedInfo()
		b.streams.Store(name, s)
		return f(ctx, s, info)
	})
}

// StreamInfo returns the state and the limits of a stream of the contract, or of one behind a bucket.
func (b *Bus) StreamInfo(ctx context.Context, stream string) (info *jetstream.StreamInfo, err error) {
	_, info, err = b.streamNow(ctx, stream)
	return info, err
}

// streamNow returns a stream, with its state and limits as they are now.
func (b *Bus) streamNow(ctx context.Context, name string) (s jetstream.Stream, info *jetstream.StreamInfo, err error) {
	read := func(ctx context.Context, found jetstream.Stream, now *jetstream.StreamInfo) (err error) {
		if s, info = found, now; now == nil {
			info, err = s.Info(ctx)
		}
		return err
	}
	err = b.withStream(ctx, name, read)
	return s, info, err
}
