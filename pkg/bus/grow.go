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
	// grownKey marks, in the metadata of the stream of steps, that its limit was made to follow the storage: what it
	// is from then on belongs to the operator.
	grownKey = "meander.limit-follows-storage"
	// probeStream holds free storage while growLimits finds out how much there is.
	probeStream = "MDR_ROOM"
	// mostProbed bounds what growLimits asks for.
	mostProbed = int64(16) << 40
	// probeRemembered is how long the servers of a cluster may count a stream that is gone: they tell each other of
	// their storage every ten seconds. growAgain is the pause between two tries.
	probeRemembered = 30 * time.Second
	growAgain       = 500 * time.Millisecond
)

// stepsLimit returns the limit of the stream of steps in the registry, the least on storage that holds all limits.
func stepsLimit() int64 {
	spec, _ := schemas.StreamOf(schemas.StepSubject("r", "u", 0, schemas.StageMain, "a", 0))
	return spec.MaxBytes
}

// growth returns what the stream of steps and the object store get of free storage.
func growth(free int64) (steps, blobs int64) {
	return free / 2, min(free/4, mostGrownBlobs)
}

// NewLimits returns the bytes that Setup lets each stream keep on a new server with so much storage.
func NewLimits(storage int64) map[string]int64 {
	for scale := int64(1); ; scale *= 2 {
		limits := map[string]int64{}
		sum := int64(0)
		for _, bucket := range schemas.Buckets() {
			sum += scaled(bucket.MaxBytes, scale)
		}
		for _, spec := range schemas.Streams() {
			if spec.MaxBytes > 0 {
				limits[spec.Name] = scaled(spec.MaxBytes, scale)
				sum += limits[spec.Name]
			}
		}
		if sum > storage && scale <= 1<<16 {
			continue
		}
		if scale == 1 {
			free, _ := mostThatFits(func(bytes int64) (bool, error) { return bytes <= storage-sum, nil })
			steps, _ := growth(free)
			limits[schemas.StreamSteps] += steps
		}
		return limits
	}
}

// growLimits lets the stream of steps grow into the server's storage if it has the registry's limit and never grew;
// with isNew the object store, too, which was made with it.
func (b *Bus) growLimits(ctx context.Context, isNew bool) error {
	s, err := b.js.Stream(ctx, schemas.StreamSteps)
	if err != nil {
		return fmt.Errorf("set up stream %s: %w", schemas.StreamSteps, err)
	}
	c := s.CachedInfo().Config
	if c.MaxBytes != stepsLimit() || c.Metadata[grownKey] != "" || c.Mirror != nil {
		return nil
	}
	free, err := b.freeStorage(ctx, max(1, c.Replicas))
	if err != nil {
		return fmt.Errorf("free storage of the server: %w", replicasError(c.Replicas, err))
	}
	steps, blobs := growth(free)
	if c.Metadata == nil {
		c.Metadata = map[string]string{}
	}
	old := c.MaxBytes
	c.MaxBytes, c.Metadata[grownKey] = old+steps, "true"
	if err := b.grow(ctx, c); err != nil {
		return fmt.Errorf("set up stream %s: %w", c.Name, err)
	}
	if !isNew {
		e := b.log.Info().Str("stream", c.Name).Int64("was_bytes", old).Int64("max_bytes", c.MaxBytes)
		if steps < old {
			e.Msg("widened: its limit was the same on every disk, and now follows the disk, which has little more; " +
				"'meander streams limit --max-steps-bytes SIZE' gives it more once there is room")
		} else {
			e.Msg("widened: its limit was the same on every disk, and now follows the disk")
		}
		return nil
	}
	blobStream, err := b.js.Stream(ctx, schemas.StreamBlobBucket)
	if err == nil {
		c = blobStream.CachedInfo().Config
		c.MaxBytes += blobs
		err = b.grow(ctx, c)
	}
	if err != nil {
		return fmt.Errorf("set up bucket %s: %w", schemas.BlobBucket, err)
	}
	return nil
}

// grow gives a stream a higher limit. The servers of a cluster know for some seconds no better than that the probe has
// the storage still, so a refusal for want of it is asked again for as long.
func (b *Bus) grow(ctx context.Context, c jetstream.StreamConfig) error {
	for until := time.Now().Add(probeRemembered); ; {
		_, err := b.js.UpdateStream(ctx, c)
		if err == nil || classOf(err) != classFull || !b.clustered() || time.Now().After(until) {
			return err
		}
		if err := Pause(ctx, growAgain); err != nil {
			return err
		}
	}
}

// mostThatFits returns the most bytes that fit, up to an eighth less, from 16 MiB to mostProbed; 0: fewer do.
func mostThatFits(fits func(bytes int64) (bool, error)) (most int64, err error) {
	for size := mostProbed; size >= 16<<20; size = size / 8 * 7 {
		if ok, err := fits(size); ok || err != nil {
			return size, err
		}
	}
	return 0, nil
}

// freeStorage returns about how many bytes of storage are free on that many servers. A server tells no one, so a stream
// reserves them and goes again. In a cluster that answer is some seconds old: then all that the account has reserved
// counts as reserved since.
func (b *Bus) freeStorage(ctx context.Context, replicas int) (free int64, err error) {
	remove := func() error {
		err := b.js.DeleteStream(ctx, probeStream)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			err = nil
		}
		return err
	}
	if err := remove(); err != nil { // a process died here
		return 0, err
	}
	free, err = mostThatFits(func(bytes int64) (bool, error) {
		_, err := b.js.CreateStream(ctx, jetstream.StreamConfig{
			Name: probeStream, Storage: jetstream.FileStorage, MaxBytes: bytes, Replicas: replicas,
		})
		switch {
		case err == nil:
			return true, remove()
		case classOf(err) == classFull, errors.Is(err, jetstream.ErrStreamNameAlreadyInUse): // another process probes
			return false, nil
		}
		return false, err
	})
	if err != nil || !b.clustered() {
		return free, err
	}
	account, err := b.js.AccountInfo(ctx)
	if err != nil {
		return 0, err
	}
	return max(0, free-int64(account.ReservedStore)), nil
}
