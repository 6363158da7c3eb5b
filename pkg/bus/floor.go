package bus

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// ConsumerFloor is how far a durable has read a stream.
type ConsumerFloor struct {
	Name string
	// Filters are the stored subjects that it reads; none: all.
	Filters []string
	// Seq is the sequence up to which it has acknowledged all that it reads.
	Seq uint64
	// Own: the durable is one of the pipeline's services.
	Own bool
}

// ownStages are those whose durables the pipeline itself has.
var ownStages = []string{"intake", "sampler", "reward", "advantage"}

// Floors returns the durables of a stream. Those that are not the pipeline's own are of trainers and others who said
// that they are to be waited for.
func (b *Bus) Floors(ctx context.Context, stream string) (out []ConsumerFloor, err error) {
	err = b.patiently(ctx, func(ctx context.Context) error {
		out = nil
		s, err := b.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		// Read before the consumers: what is stored later counts as unread.
		last := s.CachedInfo().State.LastSeq
		consumers, err := b.consumersOf(ctx, s)
		for _, c := range consumers {
			if c.Config.Durable == "" {
				continue
			}
			f := ConsumerFloor{
				Name: c.Name, Filters: c.Config.FilterSubjects, Seq: c.AckFloor.Stream,
				Own: slices.Contains(ownStages, stageOf(c.Name)),
			}
			if c.Config.FilterSubject != "" {
				f.Filters = []string{c.Config.FilterSubject}
			}
			if c.NumPending == 0 && c.NumAckPending == 0 { // it has read all, though the last it matches may be far back
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

// Matches says whether the durable reads some of what a filter matches.
func (f *ConsumerFloor) Matches(filter string) bool {
	return len(f.Filters) == 0 || slices.ContainsFunc(f.Filters, func(own string) bool { return overlap(own, filter) })
}

// overlap says whether some subject matches both filters.
func overlap(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := range x {
		switch {
		case x[i] == ">":
			return len(y) > i
		case i >= len(y):
			return false
		case y[i] == ">":
			return true
		case x[i] != y[i] && x[i] != "*" && y[i] != "*":
			return false
		}
	}
	return len(x) == len(y)
}
