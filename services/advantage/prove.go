package advantage

import (
	"context"
	"errors"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Whoever may publish on the event plane can store what looks like the record of a group. The record
// in MDR_GROUPS is intake's. A group that closes because all of its rewards came, and each names the
// group that the record on their way does, needs no look at it: most never cost one.

// unproven is a group that was opened and not compared with its record yet.
type unproven struct {
	group *group
	since time.Time
}

// proveAfter is how long a group stays open without that.
const proveAfter = 2 * time.Second

var errForeign = errors.New("group: not that of the group's record")

// fetch looks up the records of many groups in one go, for record.
func (w *worker) fetch(ctx context.Context, subjects []string) {
	clear(w.records)
	if len(subjects) < 2 {
		return
	}
	records, err := w.bus.LastMany(ctx, schemas.StreamGroups, subjects)
	if err != nil {
		w.log.Debug().Err(err).Msg("records of groups are looked up one by one")
	}
	for _, m := range records {
		w.records[m.Subject] = m
	}
}

// record is what intake has stored of a group, or ErrNotFound.
func (w *worker) record(ctx context.Context, run schemas.Run, uid schemas.UID) (*schemas.GroupRecord, error) {
	record := &schemas.GroupRecord{}
	if m := w.records[schemas.GroupSubject(run, uid)]; m != nil && bus.Fits(m, record) == nil {
		return record, nil
	}
	return w.bus.Group(ctx, run, uid)
}

// opener is what opens the group of a reward, and when it was stored: its record on the way of its
// rewards, or intake's where somebody's else took that place.
func (w *worker) opener(ctx context.Context, r *schemas.Reward) (*schemas.Opening, time.Time, error) {
	o := &schemas.Opening{}
	m, err := w.bus.Claimed(ctx, schemas.StreamRewards, schemas.StoredSubject(schemas.OpeningSubject(r.Run, r.Group.Batch, r.UID)), o, nil)
	if errors.Is(err, bus.ErrNotFound) {
		m, err = w.bus.Claimed(ctx, schemas.StreamGroups, schemas.GroupSubject(r.Run, r.UID), (*schemas.GroupRecord)(o), nil)
	}
	if err != nil {
		return nil, time.Time{}, err
	}
	return o, m.Time, nil
}

// prove compares groups with their records. One that has none is taken as it is: should its record
// come, that counts. One that says otherwise is dropped, and what opened it displaced.
func (w *worker) prove(ctx context.Context, groups []*group) error {
	subjects := make([]string, len(groups))
	for i, g := range groups {
		subjects[i] = schemas.GroupSubject(g.run, g.uid)
	}
	w.fetch(ctx, subjects)
	for _, g := range groups {
		record, err := w.record(ctx, g.run, g.uid)
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return err
		}
		if err == nil && !g.opens((*schemas.Opening)(record)) {
			if err := w.expose(ctx, g); err != nil {
				return err
			}
			continue
		}
		g.proven = true
	}
	return nil
}

// expose drops a group that its record says otherwise of.
func (w *worker) expose(ctx context.Context, g *group) error {
	var o schemas.Opening
	_, err := w.bus.Claimed(ctx, schemas.StreamRewards, schemas.StoredSubject(schemas.OpeningSubject(g.run, g.spec.Batch, g.uid)), &o, func() (fault, err error) {
		if g.opens(&o) {
			return errForeign, nil
		}
		return nil, nil // the true one has come
	})
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	w.dismiss(g)
	return nil
}

// proveOpen compares what has been open for a while with its record. What was opened again under another
// batch, after its result, would else be held for ever.
func (w *worker) proveOpen(ctx context.Context, now time.Time) {
	var groups []*group
	n := 0
	for n < len(w.unproven) && len(groups) < maxLookups && now.Sub(w.unproven[n].since) > proveAfter {
		if g := w.unproven[n].group; w.groups[g.key()] == g && !g.sent && !g.proven {
			groups = append(groups, g)
		}
		n++
	}
	if err := w.prove(ctx, groups); err != nil {
		w.log.Debug().Err(err).Msg("open groups are compared with their records later")
		return
	}
	clear(w.unproven[:n])
	w.unproven = w.unproven[n:]
}
