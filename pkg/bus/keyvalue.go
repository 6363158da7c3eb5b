package bus

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const maxRunSpec = 512 << 10

func (b *Bus) bucket(ctx context.Context, name string) (jetstream.KeyValue, error) {
	kv, err := b.js.KeyValue(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", name, err)
	}
	return kv, nil
}

// CreateRun stores the spec of a run, what it was started with, if there is none. It returns the stored spec, and
// whether this call stored it.
func (b *Bus) CreateRun(ctx context.Context, run schemas.Run, spec []byte) (stored []byte, created bool, err error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, false, fmt.Errorf("create run: %w", err)
	}
	if len(spec) > maxRunSpec {
		return nil, false, fmt.Errorf("create run %q: spec of %d bytes; must be at most %d", run, len(spec), maxRunSpec)
	}
	created, err = b.createKey(ctx, schemas.RunBucket, string(run), spec)
	if err != nil {
		return nil, false, fmt.Errorf("create run %q: %w", run, err)
	}
	if created {
		return spec, true, nil
	}
	stored, err = b.Run(ctx, run)
	return stored, false, err
}

// createKey stores the value of a key of a bucket if there is none, and reports whether it did.
func (b *Bus) createKey(ctx context.Context, bucket, key string, value []byte) (created bool, err error) {
	err = b.updateKey(ctx, bucket, key, func(_ context.Context, old []byte) ([]byte, error) {
		if created = old == nil; created {
			return value, nil
		}
		return nil, nil
	})
	return created && err == nil, err
}

// updateKey stores what next makes of the value of a key, which is nil where there is none; next returns nil to leave
// it. When another writer is first, next is called again.
func (b *Bus) updateKey(
	ctx context.Context, bucket, key string, next func(ctx context.Context, old []byte) ([]byte, error),
) error {
	for {
		var old []byte
		revision := uint64(0)
		m, err := b.Last(ctx, "KV_"+bucket, schemas.BucketSubject(bucket, key))
		switch {
		case err == nil:
			if revision = m.Seq; !m.removesKey() {
				old = append([]byte{}, m.Data...)
			}
		case !errors.Is(err, ErrNotFound):
			return err
		}
		value, err := next(ctx, old)
		if err != nil || value == nil {
			return err
		}
		if stored, err := b.SwapEntry(ctx, bucket, key, value, revision); stored || err != nil {
			return err
		}
	}
}

// removesKey reports whether the message is the marker of a key that was removed from its bucket.
func (m *Message) removesKey() bool { return m.Header.Get(headerKVOperation) != "" }

// getKey returns the value of a key of a bucket, or ErrNotFound.
func (b *Bus) getKey(ctx context.Context, bucket, key string) ([]byte, error) {
	e, err := b.Entry(ctx, bucket, key)
	if err == nil && e.Revision == 0 {
		err = ErrNotFound
	}
	return e.Value, err
}

// Entry is what a key of a bucket holds, and the revision under which it was stored; revision 0: nothing.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
}

// Entry returns what a key of a bucket holds.
func (b *Bus) Entry(ctx context.Context, bucket, key string) (Entry, error) {
	m, err := b.Last(ctx, "KV_"+bucket, schemas.BucketSubject(bucket, key))
	if errors.Is(err, ErrNotFound) || err == nil && m.removesKey() {
		return Entry{}, nil
	}
	if err != nil {
		return Entry{}, err
	}
	return Entry{key, m.Data, m.Seq}, nil
}

// Entries returns what the keys of a bucket hold that a filter matches.
func (b *Bus) Entries(ctx context.Context, bucket, filter string) ([]Entry, error) {
	all, err := b.EntriesFrom(ctx, bucket, filter, 0)
	return slices.DeleteFunc(all, func(e Entry) bool { return e.Value == nil }), err
}

// EntriesFrom returns what the keys hold that were stored under a revision from one on, in the order of revisions. The
// value of a key that was removed is nil.
func (b *Bus) EntriesFrom(ctx context.Context, bucket, filter string, from uint64) (all []Entry, err error) {
	stored, err := b.lastManyFrom(ctx, "KV_"+bucket, []string{schemas.BucketSubject(bucket, filter)}, from)
	for _, m := range stored {
		e := Entry{strings.TrimPrefix(m.Subject, schemas.BucketSubject(bucket, "")), m.Data, m.Seq}
		if m.removesKey() {
			e.Value = nil
		}
		all = append(all, e)
	}
	return all, err
}

// SwapEntry stores the value of a key if the key still has the revision (0: it has no value), and reports whether it
// did.
func (b *Bus) SwapEntry(
	ctx context.Context, bucket, key string, value []byte, revision uint64,
) (stored bool, err error) {
	err = b.retryWhileAway(ctx, func(ctx context.Context) error {
		_, err := b.js.Publish(ctx, b.writeSubject(schemas.BucketSubject(bucket, key)), value,
			jetstream.WithExpectLastSequencePerSubject(revision))
		return err
	})
	api, _ := errors.AsType[*jetstream.APIError](err)
	if api != nil && api.ErrorCode == codeStreamWrongLastSeq {
		return false, nil
	}
	return err == nil, err
}

// MayWrite reports whether this connection may write to a bucket, as far as its credentials say.
func (b *Bus) MayWrite(bucket string) bool {
	return b.user.Writes(schemas.BucketSubject(bucket, "key"))
}

const (
	// sealKey is the only key of schemas.SealBucket; its value has sealKeyBytes bytes.
	sealKey      = "steps"
	sealKeyBytes = 32
)

// SealKey returns the secret with which samplers sign their steps (a seal): random bytes, made at first use, the same
// for all samplers of the event plane.
func (b *Bus) SealKey(ctx context.Context) ([]byte, error) {
	fresh := make([]byte, sealKeyBytes)
	_, _ = rand.Read(fresh) // never fails
	if _, err := b.createKey(ctx, schemas.SealBucket, sealKey, fresh); err != nil {
		return nil, fmt.Errorf("make the key of seals: %w", err)
	}
	key, err := b.getKey(ctx, schemas.SealBucket, sealKey)
	if err == nil && len(key) != sealKeyBytes {
		err = fmt.Errorf("%w: %d bytes; must be %d. Remove the key %s of the bucket %s: a new one is made", ErrCorrupt,
			len(key), sealKeyBytes, sealKey, schemas.SealBucket)
	}
	if err != nil {
		return nil, fmt.Errorf("key of seals: %w", err)
	}
	return key, nil
}

// Run returns the spec of a run, what it was started with, or ErrNotFound.
func (b *Bus) Run(ctx context.Context, run schemas.Run) ([]byte, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, fmt.Errorf("run: %w", err)
	}
	spec, err := b.getKey(ctx, schemas.RunBucket, string(run))
	if err != nil {
		return nil, fmt.Errorf("run %q: %w", run, err)
	}
	return spec, nil
}

// deleteRun removes the spec of a run, in mirrors too, its counts and its controls; Purge ends with it.
func (b *Bus) deleteRun(ctx context.Context, run schemas.Run) error {
	kv, err := b.bucket(ctx, schemas.RunBucket)
	if err == nil {
		err = kv.Delete(ctx, string(run)) // a marker, which reaches mirrors
	}
	if err == nil {
		err = kv.Delete(ctx, notesKey(run))
	}
	for _, key := range []string{string(run), notesKey(run)} {
		if err == nil {
			_, err = b.PurgeSubject(ctx, schemas.StreamRunBucket, schemas.BucketSubject(schemas.RunBucket, key))
		}
	}
	for _, key := range []string{"*." + string(run), "pack.*"} { // its record, and all records
		if err == nil {
			_, err = b.PurgeSubject(ctx, schemas.StreamCountBucket, schemas.BucketSubject(schemas.CountBucket, key))
		}
	}
	if err == nil {
		err = b.deleteControls(ctx, run)
	}
	if err != nil {
		return fmt.Errorf("delete run %q: %w", run, err)
	}
	return nil
}
