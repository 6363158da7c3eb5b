package bus

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/meander-rl/meander/schemas"
)

// mirror has the newest entry of each key of a bucket, as far as this process has heard. It answers without the
// server, because callers ask it about every message.
type mirror[V any] struct {
	bus            *Bus
	stream, prefix string              // the stream behind the bucket, and how its subjects begin
	decode         func(m *Message) *V // nil: the entry was removed, or cannot be read

	mu      sync.Mutex
	entries map[string]*V
	changed chan struct{} // closed and replaced at the next change
}

// newMirror returns a mirror of a bucket once the server has told all entries; Follow keeps it up to date. what is the
// entries' name in logs and errors.
func newMirror[V any](ctx context.Context, b *Bus, what, bucket string, decode func(*Message) *V) (*mirror[V], error) {
	r := &mirror[V]{
		bus: b, stream: "KV_" + bucket, prefix: schemas.BucketSubject(bucket, ""), decode: decode,
		entries: map[string]*V{}, changed: make(chan struct{}),
	}
	var stored []*Message
	err := b.retryUntilReady(ctx, r.stream, what+" not known", func(ctx context.Context) (err error) {
		stored, err = b.LastMany(ctx, r.stream, []string{r.prefix + ">"})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	for _, m := range stored {
		r.apply(m)
	}
	return r, nil
}

// Follow keeps the entries up to date until ctx ends.
func (r *mirror[V]) Follow(ctx context.Context) error {
	r.bus.followEntries(ctx, r.stream, r.prefix+">", r.apply)
	return nil
}

// apply stores or removes an entry, and wakes those who wait for a change.
func (r *mirror[V]) apply(m *Message) {
	key, v := m.Subject[len(r.prefix):], r.decode(m)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.entries[key] = v; v == nil {
		delete(r.entries, key)
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *mirror[V]) get(key string) *V {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.entries[key]
}

// Changed returns a channel that is closed at the next change.
func (r *mirror[V]) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// followEntries calls each with the newest entry of every key of a bucket that the subject matches, and with each
// later entry, until ctx ends or the bus is closed. stream is the one behind the bucket. After an error it reads
// again.
func (b *Bus) followEntries(ctx context.Context, stream, subject string, each func(*Message)) {
	for ctx.Err() == nil && !b.nc.IsClosed() {
		for m, err := range b.Read(ctx, stream, []string{subject}, ReadOptions{Live: true, lastPerSubject: true}) {
			if err != nil {
				if b.waitLog.allow(logEvery) {
					b.log.Warn().Err(err).Str("subject", subject).Msg("entries not followed, trying again")
				}
				break
			}
			each(m)
		}
		_ = Pause(ctx, rebindPause)
	}
}

// decodeEntry decodes an entry of a bucket, or of a history, into e. at are the subjects that are right for it; none:
// any. It returns false for a removed entry, and for one that cannot be read, which it logs.
func (b *Bus) decodeEntry(m *Message, e schemas.Event, at func() []string) bool {
	if len(m.Data) == 0 {
		return false
	}
	err := schemas.DecodeValid(m.Data, e)
	if err == nil && at != nil {
		if right := at(); !slices.Contains(right, m.Subject) {
			err = fmt.Errorf("an entry of %q", right[0])
		}
	}
	if err != nil && b.waitLog.allow(logEvery) {
		b.log.Warn().Err(err).Str("subject", m.Subject).Msg("entry not readable")
	}
	return err == nil
}
