package advantage

import (
	"context"
	"errors"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// A group opens with a copy of intake's record in the stream of rewards. Other clients can publish there too, so the
// copy may be false; only the record in MDR_GROUPS is surely intake's. To confirm a group means to compare it with that
// record. Most groups need no confirmation: all of their rewards came, and each describes the same group as the copy.

type unconfirmed struct {
	group *group
	since time.Time
}

const confirmAfter = 2 * time.Second

var errForeign = errors.New("group: not that of the group's record")

// loadRecords reads intake's records of several groups with one request and keeps them for the method record. If that
// fails, record reads them one by one.
func (w *worker) loadRecords(ctx context.Context, subjects []string) {
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

func (w *worker) record(ctx context.Context, run schemas.Run, uid schemas.UID) (*schemas.GroupRecord, error) {
	record := &schemas.GroupRecord{}
	if m := w.records[schemas.GroupSubject(run, uid)]; m != nil && bus.Fits(m, record) == nil {
		return record, nil
	}
	return w.bus.Group(ctx, run, uid)
}

// storedOpening returns the record that opens the group of a reward, and when it was stored: the copy in the stream
// of rewards, or intake's own record if there is no copy. The error is bus.ErrNotFound if there is neither.
func (w *worker) storedOpening(ctx context.Context, r *schemas.Reward) (*schemas.Opening, time.Time, error) {
	o := &schemas.Opening{}
	m, err := w.bus.StoredEvent(ctx, schemas.StreamRewards,
		schemas.StoredSubject(schemas.OpeningSubject(r.Run, r.Group.Batch, r.UID)), o, nil)
	if errors.Is(err, bus.ErrNotFound) {
		m, err = w.bus.StoredEvent(ctx, schemas.StreamGroups, schemas.GroupSubject(r.Run, r.UID),
			(*schemas.GroupRecord)(o), nil)
	}
	if err != nil {
		return nil, time.Time{}, err
	}
	return o, m.Time, nil
}

// confirmGroups compares groups with intake's records. A group without a record counts as confirmed. A group that
// differs from its record is dropped, and the false copy that opened it is displaced; then g.confirmed stays false.
// An error is of the server.
func (w *worker) confirmGroups(ctx context.Context, groups []*group) error {
	subjects := make([]string, len(groups))
	for i, g := range groups {
		subjects[i] = schemas.GroupSubject(g.run, g.uid)
	}
	w.loadRecords(ctx, subjects)
	for _, g := range groups {
		record, err := w.record(ctx, g.run, g.uid)
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return err
		}
		if err == nil && !g.matches((*schemas.Opening)(record)) {
			if err := w.rejectGroup(ctx, g); err != nil {
				return err
			}
			continue
		}
		g.confirmed = true
	}
	return nil
}

// rejectGroup drops a group that differs from intake's record, and displaces the false copy: moves it from its subject
// to the dead letters.
func (w *worker) rejectGroup(ctx context.Context, g *group) error {
	var o schemas.Opening
	subject := schemas.StoredSubject(schemas.OpeningSubject(g.run, g.spec.Batch, g.uid))
	m, err := w.bus.StoredEvent(ctx, schemas.StreamRewards, subject, &o, nil)
	if err == nil && g.matches(&o) { // otherwise the true one is stored by now
		err = w.bus.Displace(ctx, m, errForeign)
	}
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	w.dropGroup(g)
	return nil
}

// confirmOpen confirms groups that have been open for longer than confirmAfter; a sweep calls it. Without that, a
// group that a false copy opened again under another batch, after its result, would stay open for ever.
func (w *worker) confirmOpen(ctx context.Context, now time.Time) {
	var groups []*group
	n := 0
	for n < len(w.unconfirmed) && len(groups) < maxLookups && now.Sub(w.unconfirmed[n].since) > confirmAfter {
		if g := w.unconfirmed[n].group; w.groups[g.key()] == g && !g.sent && !g.confirmed {
			groups = append(groups, g)
		}
		n++
	}
	if err := w.confirmGroups(ctx, groups); err != nil {
		w.log.Debug().Err(err).Msg("open groups are compared with their records later")
		return
	}
	clear(w.unconfirmed[:n])
	w.unconfirmed = w.unconfirmed[n:]
}
