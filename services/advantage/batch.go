package advantage

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// batch is an explicit batch: groups normalised or reported together. All its
// rewards stay unacked until the Batch event is stored, so a crash loses nothing.
//
// What it is made of depends on what is stored, not on who looks when: on the times at
// which the server stored the rewards, and, when it closes at a deadline, only after
// everything stored before is here. A worker that takes over in the middle of closing
// therefore computes what the one before it computed.
type batch struct {
	run, id  string
	expected int64
	groups   map[string]*group // by uid
	step     *int64
	epoch    *int64
}

// batchOf returns the explicit batch of a group, nil when it has none.
func (w *worker) batchOf(g *group) *batch {
	if g.spec.BatchGroups == 0 {
		return nil
	}
	key := g.run + "." + g.spec.Batch
	b, ok := w.batches[key]
	if !ok {
		b = &batch{run: g.run, id: g.spec.Batch, expected: g.spec.BatchGroups, groups: map[string]*group{}}
		w.batches[key] = b
	}
	if b.step == nil {
		b.step = g.spec.BatchStep
	}
	if b.epoch == nil {
		b.epoch = g.spec.BatchEpoch
	}
	return b
}

// inTime are the groups that belong to the batch, by uid: each was opened before the
// deadline that those opened before it set, and the last of these deadlines.
func (b *batch) inTime() (groups []*group, deadline time.Time) {
	all := slices.SortedFunc(maps.Values(b.groups), func(x, y *group) int {
		if c := x.opened.Compare(y.opened); c != 0 {
			return c
		}
		return compare(x.uid, y.uid)
	})
	for _, g := range all {
		if len(groups) > 0 && g.opened.After(deadline) {
			break
		}
		groups = append(groups, g)
		if g.deadline.After(deadline) {
			deadline = g.deadline
		}
	}
	slices.SortFunc(groups, func(x, y *group) int { return compare(x.uid, y.uid) })
	return groups, deadline
}

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// advanceBatch stores the results that are due and, when every place has a group that
// counts or is given up, the Batch event. caughtUp lets deadlines count.
func (w *worker) advanceBatch(ctx context.Context, b *batch, now time.Time, caughtUp bool) error {
	groups, deadline := b.inTime()
	expired := caughtUp && now.After(deadline)
	places := map[string]bool{} // by root: whether the place is settled
	var due []*group
	var outlines []*schemas.Advantage
	wide := false
	for _, g := range groups {
		root := g.root()
		if !expired && !g.ripe(now, caughtUp) {
			places[root] = false
			continue
		}
		a := g.result
		if a == nil {
			a = g.outline()
			if !counts(a) {
				var err error
				if a, err = w.drop(ctx, g, a); err != nil {
					return err
				}
			}
		}
		if _, waits := places[root]; !waits {
			places[root] = true
		}
		if a.RefilledBy != "" && b.groups[a.RefilledBy] == nil {
			places[root] = false // its group has not come yet
		}
		due, outlines = append(due, g), append(outlines, a)
		wide = wide || counts(a) && g.batchWide()
	}
	settled := int64(len(places)) >= b.expected
	for _, done := range places {
		settled = settled && done
	}
	if !wide {
		// Each group closes by itself.
		for i, g := range due {
			if g.result == nil {
				estimate([]*group{g}, outlines[i:i+1])
				if err := w.store(ctx, g, outlines[i]); err != nil {
					return err
				}
			}
			outlines[i] = g.result
		}
	}
	if !settled && !expired {
		return nil
	}
	return w.closeBatch(ctx, b, due, outlines, expired && !settled, now)
}

// drop stores the result of a group that does not count, and asks for another in its
// place where the policy wants one.
func (w *worker) drop(ctx context.Context, g *group, a *schemas.Advantage) (*schemas.Advantage, error) {
	if err := w.refill(ctx, g, a); err != nil {
		return nil, err
	}
	if err := w.store(ctx, g, a); err != nil {
		return nil, err
	}
	if g.result.RefilledBy != "" {
		if err := w.askAgain(ctx, g.run, g.spec.PromptSeq, g.result); err != nil {
			g.result = nil // come back for it: nothing is acked yet
			return nil, err
		}
	}
	return g.result, nil
}

// closeBatch stores what is missing of the batch's results and last the Batch event.
func (w *worker) closeBatch(ctx context.Context, b *batch, due []*group, outlines []*schemas.Advantage, partial bool, now time.Time) error {
	began := time.Now()
	var wide []*group
	var wideOutlines []*schemas.Advantage
	for i, g := range due {
		if g.result == nil {
			wide, wideOutlines = append(wide, g), append(wideOutlines, outlines[i])
		}
	}
	estimate(wide, wideOutlines)
	seconds := time.Since(began).Seconds()
	for i, g := range wide {
		if err := w.store(ctx, g, wideOutlines[i]); err != nil {
			return err
		}
	}
	e := summary(b, due, now, seconds)
	if partial {
		e.Status = schemas.StatusPartial
	}
	if _, err := w.bus.Publish(ctx, e); err != nil {
		return fmt.Errorf("publish batch %s: %w", b.id, err)
	}
	w.metrics.batch(e)
	w.log.Info().Str("run", b.run).Str("batch", b.id).Str("status", e.Status).Int64("groups", e.Groups).Int("dropped", len(e.Dropped)).Msg("batch closed")
	delete(w.batches, b.run+"."+b.id)
	for _, g := range b.groups {
		if !slices.Contains(due, g) {
			if err := w.tooLate(ctx, g); err != nil {
				return err
			}
		}
		w.forgetGroup(g)
		w.release(ctx, g)
	}
	return nil
}

// tooLate stores that a group came after its batch had closed: whoever waits for it
// must not wait for ever.
func (w *worker) tooLate(ctx context.Context, g *group) error {
	a := g.outline()
	for i := range a.Members {
		a.Members[i] = schemas.Member{SampleIndex: a.Members[i].SampleIndex, Status: schemas.StatusMissing}
	}
	a.Status, a.Error = schemas.StatusFailed, fmt.Sprintf("batch %s had closed without the group", g.spec.Batch)
	a.PolicyVersionMin, a.PolicyVersionMax = 0, 0
	return w.store(ctx, g, a)
}

// batchClosed says whether the batch of a reward has closed.
func (w *worker) batchClosed(ctx context.Context, r *schemas.Reward) (bool, error) {
	if r.Group.BatchGroups == 0 {
		return false, nil
	}
	_, err := w.bus.Last(ctx, schemas.StreamAdvantages, schemas.BatchSubject(r.Run, r.Group.Batch))
	if errors.Is(err, bus.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up batch %s: %w", r.Group.Batch, err)
	}
	return true, nil
}
