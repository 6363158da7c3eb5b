package intake

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// openGroups are the groups of all runs without a result, as far as this process has heard: so what intake does about
// them costs no reading of all groups that are stored.
type openGroups struct {
	mu    sync.Mutex
	known bool
	by    map[groupID]bus.OpenGroup
	// gone are groups whose result was heard of before their record.
	gone map[groupID]bool
}

type groupID struct {
	run schemas.Run
	uid schemas.UID
}

// list returns the open groups for whose samples intake asks, in the order in which they were claimed, and whether they
// are known yet.
func (o *openGroups) list() (all []bus.OpenGroup, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, g := range o.by {
		if g.AsksForSamples() {
			all = append(all, g)
		}
	}
	slices.SortFunc(all, func(a, b bus.OpenGroup) int { return a.Claimed.Compare(b.Claimed) })
	return all, o.known
}

// replace sets all that are open.
func (o *openGroups) replace(all []bus.OpenGroup) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.by, o.gone, o.known = map[groupID]bus.OpenGroup{}, map[groupID]bool{}, true
	for _, g := range all {
		o.by[groupID{g.Run, g.UID}] = g
	}
}

// add notes a record that was stored.
func (o *openGroups) add(m *bus.Message) {
	r := &schemas.GroupRecord{}
	if bus.Fits(m, r) != nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	id := groupID{r.Run, r.UID}
	if !o.gone[id] {
		o.by[id] = bus.OpenGroup{GroupRecord: r, Claimed: m.Time}
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
	delete(o.by, id)
}

// followOpen keeps the open groups up to date until ctx ends. A read that fails begins again.
func (s *service) followOpen(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := s.readOpen(ctx); err != nil && ctx.Err() == nil {
			zerolog.Ctx(ctx).Debug().Err(err).Msg("open groups not followed, trying again")
		}
		select {
		case <-ctx.Done():
		case <-time.After(followAgain):
		}
	}
	return nil
}

// readOpen reads which groups are open, then follows records and results until ctx ends or a read fails. followOpen
// calls it.
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
	s.open.replace(open)
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
