package bus

import (
	"context"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// ConsumerFloor is how far a durable has read a stream.
type ConsumerFloor struct {
	Name string
	// Filters are the stored subjects that it reads; none: all.
	Filters []string
	// Seq is the sequence up to which it has acknowledged all that it reads.
	Seq uint64
	// Own means that the durable belongs to a service of the pipeline.
	Own bool
}

// Floors returns how far each durable of a stream has acknowledged it, for the janitor. Those that are not Own belong
// to trainers and other readers who want the stream to keep messages until they have read them.
func (b *Bus) Floors(ctx context.Context, stream string) (out []ConsumerFloor, err error) {
	err = b.withStream(ctx, stream, func(ctx context.Context, s jetstream.Stream, _ *jetstream.StreamInfo) error {
		out = nil
		// Read this before the consumers: then messages that are stored later count as unread.
		info, err := s.Info(ctx)
		if err != nil {
			return err
		}
		last := info.State.LastSeq
		consumers, err := b.consumersOf(ctx, s)
		for _, c := range consumers {
			if c.Config.Durable == "" {
				continue
			}
			f := ConsumerFloor{
				Name: c.Name, Filters: filtersOf(c.Config), Seq: c.AckFloor.Stream,
				Own: slices.Contains(schemas.Services, serviceOf(c.Name)),
			}
			if c.NumPending == 0 && c.NumAckPending == 0 { // it has read all; the last message it reads may be far back
				f.Seq = max(f.Seq, last)
			}
			out = append(out, f)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("consumers of %s: %w", stream, err)
	}
	return out, nil
}

// Matches reports whether the durable reads some of the subjects that a filter matches.
func (f *ConsumerFloor) Matches(filter string) bool {
	return len(f.Filters) == 0 || slices.ContainsFunc(f.Filters,
		func(own string) bool { return schemas.Overlap(own, filter) })
}

func filtersOf(c jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return []string{c.FilterSubject}
	}
	return c.FilterSubjects
}
