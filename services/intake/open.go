package intake

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// openGroups are the groups of all runs without a result, as far as this process has heard: so what intake does about
// them costs no reading of all groups that are stored.
type openGroups struct {
	mu sync.Mutex
	// known is closed once they have been read.
	known chan struct{}
	by    map[groupID]bus.OpenGroup
	// bytes is what the steps of those for whose samples intake asks take at most, each counted as often as its batch
	// has groups; batches counts them by their batch.
	bytes   int64
	batches map[batchID]int
	// gone are groups whose result was heard of before their record.
	gone map[groupID]bool
	// heard is the sequence of the newest record that was heard of; news is closed when it grows, if somebody waits.
	heard uint64
	news  chan struct{}
}

type groupID struct {
	run schemas.Run
	uid schemas.UID
}

// await waits until the open groups are known, or ctx ends.
func (o *openGroups) await(ctx context.Context) error {
	select {
	case <-o.known:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// awaitHeard waits until the records up to a sequence are heard of, or ctx ends.
func (o *openGroups) awaitHeard(ctx context.Context, seq uint64) error {
	for {
		o.mu.Lock()
		if o.heard >= seq {
			o.mu.Unlock()
			return nil
		}
		if o.news == nil {
			o.news = make(chan struct{})
		}
		news := o.news
		o.mu.Unlock()
		select {
		case <-news:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// hear notes the sequence of a record; the caller holds the lock.
func (o *openGroups) hear(seq uint64) {
	if o.heard = max(o.heard, seq); o.news != nil {
		close(o.news)
		o.news = nil
	}
}

// list returns the open groups for whose samples intake asks, in the order in which they were claimed, once they are
// known. An error is that of ctx.
func (o *openGroups) list(ctx context.Context) (all []bus.OpenGroup, err error) {
	if err := o.await(ctx); err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, g := range o.by {
		if g.AsksForSamples() {
			all = append(all, g)
		}
	}
	slices.SortFunc(all, func(a, b bus.OpenGroup) int { return a.Claimed.Compare(b.Claimed) })
	return all, nil
}

// mayStore returns the most bytes of steps that all open batches take.
func (o *openGroups) mayStore() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bytes
}

// has reports whether a batch has open groups.
func (o *openGroups) has(of batchID) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.batches[of] > 0
}

// put takes a group in; the caller holds the lock.
func (o *openGroups) put(g bus.OpenGroup) {
	o.drop(groupID{g.Run, g.UID})
	o.by[groupID{g.Run, g.UID}] = g
	o.count(g, 1)
}

// drop leaves a group out; the caller holds the lock.
func (o *openGroups) drop(id groupID) {
	if g, there := o.by[id]; there {
		delete(o.by, id)
		o.count(g, -1)
	}
}

// count adds a group n times to the sums; the caller holds the lock.
func (o *openGroups) count(g bus.OpenGroup, n int) {
	if !g.AsksForSamples() {
		return
	}
	of := batchID{g.Run, g.Group.Batch}
	o.bytes += int64(n) * g.StepBytes * max(1, g.Group.BatchGroups)
	if o.batches[of] += n; o.batches[of] == 0 {
		delete(o.batches, of)
	}
}

// replace sets all that are open, as of a sequence of their records.
func (o *openGroups) replace(all []bus.OpenGroup, seq uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.by == nil {
		close(o.known)
	}
	o.by, o.gone, o.bytes, o.batches = map[groupID]bus.OpenGroup{}, map[groupID]bool{}, 0, map[batchID]int{}
	for _, g := range all {
		o.put(g)
	}
	o.hear(seq)
}

// add notes a record that was stored.
func (o *openGroups) add(m *bus.Message) {
	r := &schemas.GroupRecord{}
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.hear(m.Seq)
	if bus.Fits(m, r) != nil {
		return
	}
	id := groupID{r.Run, r.UID}
	if !o.gone[id] {
		o.put(bus.OpenGroup{GroupRecord: r, Claimed: m.Time})
	}
	delete(o.gone, id)
}

// remove forgets a group that is closed, or gone.
func (o *openGroups) remove(run schemas.Run, uid schemas.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	id := groupID{run, uid}
	if _, known := o.by[id]; !known {
		o.gone[id] = true
	}
	o.drop(id)
}

// hearClaims waits until all claims that are stored by now are heard of.
func (s *service) hearClaims(ctx context.Context) error {
	m, err := s.bus.Last(ctx, schemas.StreamGroups, schemas.Address{Kind: schemas.KindGroup}.Filter())
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	return s.open.awaitHeard(ctx, m.Seq)
}

// followOpen keeps the open groups up to date until ctx ends. A read that fails begins again.
func (s *service) followOpen(ctx context.Context) error {
	return regularly(ctx, followAgain, zerolog.DebugLevel, "open groups not followed, trying again", s.readOpen)
}

// readOpen reads which groups are open, then follows records and results until ctx ends or a read fails.
func (s *service) readOpen(ctx context.Context) error {
	from := map[string]uint64{}
	for _, stream := range []string{schemas.StreamGroups, schemas.StreamAdvantages} {
		info, err := s.bus.StreamInfo(ctx, stream)
		if err != nil {
			return err
		}
		from[stream] = info.State.LastSeq + 1
	}
	open, err := s.bus.OpenGroups(ctx, "*")
	if err != nil {
		return err
	}
	s.open.replace(open, from[schemas.StreamGroups]-1)
	g, ctx := errgroup.WithContext(ctx)
	follow := func(stream, kind string, note func(*bus.Message)) {
		g.Go(func() error {
			for m, err := range s.bus.Read(ctx, stream, []string{schemas.Address{Kind: kind}.Filter()},
				bus.ReadOptions{FromSeq: from[stream], Live: true}) {
				if err != nil {
					return err
				}
				note(m)
			}
			return ctx.Err()
		})
	}
	follow(schemas.StreamGroups, schemas.KindGroup, s.open.add)
	follow(schemas.StreamAdvantages, schemas.KindAdvantage, func(m *bus.Message) {
		of, _ := schemas.ParseSubject(m.Subject)
		s.open.remove(of.Run, of.UID)
	})
	return g.Wait()
}
