package bus

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// MaxReplicas is the greatest number of servers that can keep one stream.
const MaxReplicas = 5

// ErrTooFewServers is returned when a stream is to be kept by more servers than are there.
var ErrTooFewServers = errors.New("too few servers")

// SetupOption changes one Setup.
type SetupOption func(*setupOptions)

type setupOptions struct{ replicas int }

// Replicas makes n servers of a cluster keep each stream, new or old. With 0, one server keeps a new stream, and old
// ones stay as they are.
func Replicas(n int) SetupOption { return func(o *setupOptions) { o.replicas = n } }

// SetReplicas makes n servers of a cluster keep each existing stream and bucket. The server copies the messages while
// work goes on. It returns ErrTooFewServers when n is more than there are; 0 changes nothing.
func (b *Bus) SetReplicas(ctx context.Context, n int) error {
	return b.retryWhileAway(ctx, func(ctx context.Context) error { return b.setReplicas(ctx, n) })
}

// setReplicas is one try of SetReplicas: it gives all streams n replicas; 0 leaves them as they are.
func (b *Bus) setReplicas(ctx context.Context, n int) error {
	if n == 0 {
		return nil
	}
	for _, name := range schemas.StreamNames() {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("replicas of %s: %w", name, err)
		}
		c := s.CachedInfo().Config
		if c.Replicas == n {
			continue
		}
		was := c.Replicas
		c.Replicas = n
		if _, err := b.js.UpdateStream(ctx, c); err != nil {
			return fmt.Errorf("replicas of %s: %w", name, replicasError(n, err))
		}
		b.log.Info().Str("stream", name).Int("replicas", n).Int("before", was).Msg("replicas changed")
	}
	return nil
}

// Codes of the server's API errors about replicas (nats-server, errors.json).
const (
	codeNoPeers   = 10005
	codeNoCluster = 10074
)

// replicasError adds to an error of changing to n replicas what an operator can do.
func replicasError(n int, err error) error {
	api, ok := errors.AsType[*jetstream.APIError](err)
	if !ok || n < 2 {
		return err
	}
	switch api.ErrorCode {
	case codeNoCluster:
		return fmt.Errorf("replicas: %d; must be 1 on a server that is not part of a cluster: %w", n, err)
	case codeInsufficient, codeStorageExceeded:
		return fmt.Errorf("replicas: %d; each server must have room (max_file_store) for all of the streams' limits; "+
			"make those smaller with 'meander streams limit', or the stores larger: %w", n, err)
	case codeNoPeers:
		return fmt.Errorf("%w: replicas: %d; must be at most the servers of the cluster that are up and have room: %w",
			ErrTooFewServers, n, err)
	}
	return err
}
