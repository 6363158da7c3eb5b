package counters

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// readRecords reads the records. Runs without one, or with one that cannot be read, are counted from the head, or in
// full.
func (k *book) readRecords(ctx context.Context) error {
	var packed []bus.Entry
	from := uint64(0)
	if k.run == "*" {
		e, err := k.b.Entry(ctx, schemas.CountBucket, packKey)
		if err != nil {
			return err
		}
		if msgpack.Unmarshal(e.Value, &packed) == nil && len(packed) > 0 {
			from = packed[len(packed)-1].Revision + 1
		} else {
			packed = nil
		}
	}
	entries, err := k.b.EntriesFrom(ctx, schemas.CountBucket, key(k.run), from)
	if err != nil {
		return err
	}
	k.newer = len(entries)
	for _, e := range slices.Backward(append(packed, entries...)) {
		r, name := &Run{revision: e.Revision}, schemas.Run(strings.TrimPrefix(e.Key, key("")))
		if k.runs[name] != nil { // it has changed since it was packed
			continue
		}
		whole := msgpack.Unmarshal(e.Value, r) == nil && !r.Large
		for i, m := range r.Marks {
			whole = whole && m.Seq <= k.states[counted[i]].last // else the stream was made anew
		}
		k.runs[name] = r
		if !whole {
			if err := k.recount(ctx, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// write stores what has changed, and moves the head if all of it is stored. Another writer may be first: the next look
// goes on from there.
func (k *book) write(ctx context.Context) {
	if !k.b.MayWrite(schemas.CountBucket) {
		return
	}
	g, inner := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for name, r := range k.runs {
		if r.changed {
			k.newer++
			g.Go(func() error { return k.swap(inner, key(name), r, r.revision) })
		}
	}
	if g.Wait() != nil || k.run != "*" || k.unsure {
		return
	}
	h := &head{Marks: map[string]Mark{}, Measured: k.measured}
	if k.head != nil {
		h.revision = k.head.revision
	}
	for stream, s := range k.states {
		h.Marks[stream] = Mark{Seq: s.last, Events: s.messages}
	}
	_ = k.swap(ctx, headKey, h, h.revision) // else another has moved it
}

// errFirst means that another writer was first.
var errFirst = errors.New("another writer was first")

// swap stores a value over a revision.
func (k *book) swap(ctx context.Context, key string, value any, revision uint64) error {
	data, err := msgpack.Marshal(value)
	if r, is := value.(*Run); is && err == nil && len(data) > maxRecord {
		data, err = msgpack.Marshal(&Run{Marks: r.Marks, Large: true})
	}
	if err != nil {
		return err
	}
	stored, err := k.b.SwapEntry(ctx, schemas.CountBucket, key, data, revision)
	if err == nil && !stored {
		return errFirst
	}
	return err
}

// pack stores all records in one entry, those aside that changed last where it would be too large. Who looks at all
// runs reads it and the records that are newer, in place of a thousand messages.
func (k *book) pack(ctx context.Context) error {
	old, err := k.b.Entry(ctx, schemas.CountBucket, packKey)
	if err != nil {
		return err
	}
	all, err := k.b.EntriesFrom(ctx, schemas.CountBucket, key("*"), 0)
	if err != nil {
		return err
	}
	n, left := 0, int(k.b.Conn().MaxPayload())/2
	for n < len(all) && left > len(all[n].Key)+len(all[n].Value) {
		left -= len(all[n].Key) + len(all[n].Value) + 32 // the names of the fields
		n++
	}
	data, err := msgpack.Marshal(all[:n])
	if err == nil {
		_, err = k.b.SwapEntry(ctx, schemas.CountBucket, packKey, data, old.Revision) // else another has stored one
	}
	return err
}
