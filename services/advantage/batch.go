package advantage

import (
	"cmp"
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
	run      schemas.Run
	id       string
	expected int64
	groups   map[schemas.UID]*group // by uid
	roots    map[schemas.UID]bool   // the places that they are for
	// earliest is the first deadline of a group, zero while none has one: nothing that was
	// stored before it came too late.
	earliest time.Time
	// decided is the number of its groups that have a verdict: with fewer than expected it
	// cannot be complete.
	decided int64
	step    *int64
	epoch   *int64
}

// batchOf returns the explicit batch of a group, nil when it has none, and makes the
// group a part of it.
func (w *worker) batchOf(g *group) *batch {
	if g.spec.BatchGroups == 0 {
		return nil
	}
	key := string(g.run) + "." + g.spec.Batch
	b, ok := w.batches[key]
	if !ok {
		b = &batch{run: g.run, id: g.spec.Batch, expected: g.spec.BatchGroups, groups: map[schemas.UID]*group{}, roots: map[schemas.UID]bool{}}
		w.batches[key] = b
	}
	if b.step == nil {
		b.step = g.spec.BatchStep
	}
	if b.epoch == nil {
		b.epoch = g.spec.BatchEpoch
	}
	b.groups[g.uid], b.roots[g.root()] = g, true
	if d := g.deadline; !d.IsZero() && (b.earliest.IsZero() || d.Before(b.earliest)) {
		b.earliest = d
	}
	return b
}

// inTime are the groups that belong to the batch, by uid: those that have one of the places
// expected, opened before the batch's deadline. That is the last of theirs, of those that
// were decided on before it; zero as long as none has one.
func (b *batch) inTime() (groups []*group, deadline time.Time) {
	all := slices.SortedFunc(maps.Values(b.groups), func(x, y *group) int {
		return cmp.Or(x.opened.Compare(y.opened), cmp.Compare(x.uid, y.uid))
	})
	places := map[schemas.UID]bool{}
	for _, g := range all {
		if int64(len(places)) < b.expected || places[g.root()] {
			places[g.root()] = true
			groups = append(groups, g)
		}
	}
	for _, g := range slices.SortedFunc(slices.Values(groups), func(x, y *group) int { return x.due.Compare(y.due) }) {
		if g.deadline.After(deadline) && g.before(deadline) {
			deadline = g.deadline
		}
	}
	groups = slices.DeleteFunc(groups, func(g *group) bool { return !deadline.IsZero() && g.opened.After(deadline) })
	slices.SortFunc(groups, func(x, y *group) int { return cmp.Compare(x.uid, y.uid) })
	return groups, deadline
}

// before says whether the group has a deadline that was decided on before the batch's
// deadline: nothing that was stored later may change what the batch is made of.
func (g *group) before(deadline time.Time) bool {
	return !g.deadline.IsZero() && (deadline.IsZero() || !g.due.After(deadline))
}

// leave takes a group out of its batch.
func (b *batch) leave(g *group) {
	delete(b.groups, g.uid)
	if g.decided {
		b.decided--
	}
	clear(b.roots)
	for _, rest := range b.groups {
		b.roots[rest.root()] = true
	}
}

// filled says whether each place has a group that counts or has been given up: no group
// of it is open, none has been asked for that has not come, and so has every one that was
// replaced: what a killed worker had in hand may come after what was asked for later.
func (b *batch) filled(groups []*group) bool {
	places := map[schemas.UID]bool{}
	for _, g := range groups {
		if g.verdict == nil || g.verdict.RefilledBy != "" && b.groups[g.verdict.RefilledBy] == nil {
			return false
		}
		if r := g.spec.Refill; r != nil && b.groups[refillUID(r.Root, r.Round-1)] == nil {
			return false
		}
		places[g.root()] = true
	}
	return int64(len(places)) == b.expected
}

// decide gives a group of a batch that can close its verdict. It is stored at once,
// unless it counts and its numbers depend on the rest of the batch. last says that the
// batch closes, too, so that a fresh group would come too late.
func (w *worker) decide(ctx context.Context, b *batch, g *group, last bool) error {
	if g.result != nil || g.sent {
		return nil
	}
	if !g.before(b.earliest) || int64(len(b.roots)) > b.expected {
		groups, deadline := b.inTime()
		if !slices.Contains(groups, g) || g.refused == "" && g.ended == nil && !g.before(deadline) {
			return nil // it is told so when the batch closes
		}
	}
	a := g.verdict
	if a == nil {
		if err := w.date(ctx, g); err != nil {
			return err
		}
		a = g.outline()
		if counts(a) && !g.batchWide() {
			w.estimate([]*group{g}, []*schemas.Advantage{a})
		}
	}
	var err error
	switch {
	case !counts(a):
		err = w.drop(ctx, g, a, last || g.overdue())
	case !g.batchWide():
		err = w.send(ctx, g, a)
	}
	if err != nil {
		return err
	}
	if g.verdict == nil {
		g.verdict = a
	}
	if !g.decided {
		g.decided = true
		b.decided++
	}
	return nil
}

// advance closes the batch when every place is filled, or when its deadline has passed
// and everything stored before is here: caughtUp is the time up to which that is so. A batch
// of a run that was cancelled gets no more groups: it closes with those it has.
func (w *worker) advance(ctx context.Context, b *batch, caughtUp time.Time) error {
	ended := w.ended(b)
	if caughtUp.IsZero() && b.decided < b.expected && !ended {
		return nil
	}
	groups, deadline := b.inTime()
	filled := b.filled(groups)
	if !filled && !ended {
		if deadline.IsZero() || !caughtUp.After(deadline) {
			return nil
		}
		for _, g := range groups {
			if !g.before(deadline) {
				g.due, g.deadline = deadline, deadline // it has nothing that counts
			}
		}
	}
	return w.closeBatch(ctx, b, groups, !filled)
}

// drop stores the result of a group that does not count, and asks for another in its
// place where the policy wants one and there is time.
func (w *worker) drop(ctx context.Context, g *group, a *schemas.Advantage, tooLate bool) error {
	if err := w.refill(ctx, g, a, tooLate); err != nil {
		return err
	}
	stored, err := w.publish(ctx, a)
	if hopeless(err) {
		return w.bury(ctx, g, a, err)
	}
	if err != nil {
		return err
	}
	a = stored
	if a.RefilledBy != "" { // before anything is acked
		if err := w.askAgain(ctx, g.run, g.spec.PromptSeq, a); err != nil {
			return err
		}
	}
	w.finish(ctx, g, a)
	return nil
}

// closeBatch stores what is missing of the batch's results and last the Batch event.
func (w *worker) closeBatch(ctx context.Context, b *batch, groups []*group, partial bool) error {
	var wide []*group
	var outlines []*schemas.Advantage
	for _, g := range groups {
		if err := w.decide(ctx, b, g, true); err != nil {
			return err
		}
		if g.result == nil && !g.sent {
			wide, outlines = append(wide, g), append(outlines, g.outline())
		}
	}
	began := time.Now()
	w.estimate(wide, outlines)
	seconds := time.Since(began).Seconds()
	for i, g := range wide {
		if err := w.send(ctx, g, outlines[i]); err != nil {
			return err
		}
	}
	w.collect(ctx, ctx)
	for _, g := range groups {
		if g.result == nil {
			return fmt.Errorf("advantage of %s is not stored yet", g.uid)
		}
	}
	e := summary(b, groups, time.Now(), seconds)
	if partial {
		e.Status = schemas.StatusPartial
	}
	_, err := w.bus.Publish(ctx, e)
	switch {
	case hopeless(err):
		for _, g := range b.groups { // to wait for room would be in vain
			if err := w.bury(ctx, g, g.outline(), fmt.Errorf("batch %s: %w", b.id, err)); err != nil {
				return err
			}
		}
	case err != nil:
		return fmt.Errorf("publish batch %s: %w", b.id, err)
	default:
		w.metrics.batch(e)
		w.log.Info().Str("run", string(b.run)).Str("batch", b.id).Str("status", e.Status).Int64("groups", e.Groups).Int("dropped", len(e.Dropped)).Msg("batch closed")
	}
	for _, g := range b.groups {
		if g.result == nil {
			if err := w.endLate(ctx, g); err != nil {
				return err
			}
		}
	}
	delete(w.batches, string(b.run)+"."+b.id)
	for _, g := range b.groups {
		w.forgetGroup(g)
		w.release(ctx, g)
	}
	return nil
}

// endLate stores the result of a group that came after its batch had closed.
func (w *worker) endLate(ctx context.Context, g *group) error {
	late := g.tooLate()
	a, err := w.publish(ctx, late)
	switch {
	case hopeless(err):
		return w.bury(ctx, g, late, err)
	case err == nil:
		w.finish(ctx, g, a)
	}
	return err
}

// tooLate is the result of a group that came after its batch had closed: whoever waits
// for it must not wait for ever.
func (g *group) tooLate() *schemas.Advantage {
	a := g.outline()
	for i := range a.Members {
		a.Members[i] = schemas.Member{SampleIndex: a.Members[i].SampleIndex, Status: schemas.StatusMissing}
	}
	a.Status, a.Error = schemas.StatusFailed, fmt.Sprintf("batch %s had closed without the group", g.spec.Batch)
	if g.ended != nil {
		a.Status, a.Error = schemas.StatusCancelled, g.ended.Error()
	}
	a.Mean, a.Std = nil, nil
	a.PolicyVersionMin, a.PolicyVersionMax = 0, 0
	return a
}

// batchClosed says whether the batch of a record has closed.
func (w *worker) batchClosed(ctx context.Context, r *schemas.Opening) (bool, error) {
	_, err := w.bus.Claimed(ctx, schemas.StreamAdvantages, schemas.BatchSubject(r.Run, r.Group.Batch), &schemas.Batch{}, nil)
	if errors.Is(err, bus.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up batch %s: %w", r.Group.Batch, err)
	}
	return true, nil
}
