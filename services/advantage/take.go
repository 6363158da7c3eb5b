package advantage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// receive takes one record or reward; whatever goes wrong is retried by redelivery.
func (w *worker) receive(ctx context.Context, m *bus.Message) {
	w.deliveries.Came(m)
	var err error
	if schemas.IsOpening(m.Subject) {
		err = w.open(ctx, m)
	} else if err = w.decoder.Reward(m.Data, &w.reward); err != nil {
		err = w.refuse(ctx, m, schemas.CodeDecode, err.Error())
	} else if !w.reward.StoredUnder(m.Subject) {
		err = w.refuse(ctx, m, schemas.CodeInvalid, fmt.Sprintf("a reward of %q, stored on another subject", w.reward.Subject()))
	} else {
		err = w.add(ctx, m, &w.reward)
	}
	if hopeless(err) {
		err = w.refuse(ctx, m, bus.Code(err), err.Error())
	}
	if err != nil {
		w.retry(m, err)
	}
}

// ahead takes what else has come already, where the first of it opens a group: the records
// of the groups that are opened side by side are looked up in one go.
func (w *worker) ahead(ctx context.Context, first *bus.Message) error {
	w.taken = append(w.taken[:0], first)
	if !schemas.IsOpening(first.Subject) {
		return nil
	}
	var err error
	for m := first; m != nil && err == nil && len(w.taken) < FetchAhead; {
		if m, err = w.sub.Next(over); m != nil {
			w.taken = append(w.taken, m)
		}
	}
	var records []string
	for _, m := range w.taken {
		a, ok := schemas.ParseSubject(m.Subject)
		if ok && a.Kind == schemas.KindOpening && a.Batch != string(a.UID) && schemas.CheckToken("uid", a.UID) == nil && schemas.CheckToken("run", a.Run) == nil {
			records = append(records, schemas.GroupSubject(a.Run, a.UID))
		}
	}
	w.fetch(ctx, records)
	if errors.Is(err, context.Canceled) { // no more has come
		return nil
	}
	return err
}

// open takes the record of a group. One of an explicit batch is compared with intake's at once, and so
// is one that says otherwise than what has come; others when they close, if need be (see vouched).
func (w *worker) open(ctx context.Context, m *bus.Message) error {
	r := &w.opening
	if err := w.decoder.Opening(m.Data, r); err != nil {
		return w.refuse(ctx, m, schemas.CodeInvalid, err.Error())
	}
	if subject := schemas.StoredSubject(r.Subject()); subject != m.Subject {
		return w.refuse(ctx, m, schemas.CodeInvalid, fmt.Sprintf("the record of %q, stored on another subject", subject))
	}
	g := w.groups[key(r.Run, r.UID)]
	other := g != nil && !g.opens(r)
	now := other || r.Group.BatchGroups > 0
	if now {
		switch record, err := w.record(ctx, r.Run, r.UID); {
		case errors.Is(err, bus.ErrNotFound):
		case err != nil:
			return err
		case !newGroup(r, m.Time).opens((*schemas.Opening)(record)):
			return w.refuse(ctx, m, schemas.CodeInvalid, errForeign.Error())
		}
	}
	if other {
		if g.sent {
			return fmt.Errorf("group %s is about to close", g.uid)
		}
		w.dismiss(g)
		g = nil
	}
	if g == nil {
		shared := w.decoder.Group()
		var err error
		if g, err = w.begin(ctx, r, m.Time); err != nil {
			return err
		}
		if g == nil {
			if _, err := w.resultOf(ctx, r, m.Time); err != nil {
				return err
			}
			w.settle(m.AckAsync())
			return nil
		}
		if shared != nil {
			g.spec = shared
		}
		if m.Delivered > 1 {
			w.seen(g)
		}
	}
	g.proven = g.proven || now
	if g.opening == nil {
		w.metrics.held.Inc()
	}
	g.opening = m
	slim(m)
	return w.progress(ctx, g)
}

// opens says whether the group is that of a record.
func (g *group) opens(r *schemas.Opening) bool {
	return g.refused == r.Error && g.size == r.GroupSize && g.spec.Same(&r.Group)
}

// dismiss drops an open group whose record was displaced by the true one. Its rewards come
// again, and are looked at anew.
func (w *worker) dismiss(g *group) {
	w.log.Warn().Str("run", string(g.run)).Str("uid", string(g.uid)).Msg("open group dropped: its record was not the true one")
	if b := w.batchOf(g); b != nil {
		b.leave(g)
	}
	w.forgetGroup(g)
	if g.opening != nil {
		w.settle(g.opening.AckAsync())
	}
	for i := range g.samples {
		w.settle(g.samples[i].message.NakWithDelay(sweepEvery))
	}
}

// begin makes the group of a record one that is open; nil when its batch has closed.
func (w *worker) begin(ctx context.Context, r *schemas.Opening, opened time.Time) (*group, error) {
	if r.Group.BatchGroups > 0 && w.batches[string(r.Run)+"."+r.Group.Batch] == nil {
		closed, err := w.batchClosed(ctx, r)
		if closed || err != nil {
			return nil, err
		}
	}
	g := newGroup(r, opened)
	w.heed(g)
	w.groups[g.key()] = g
	w.unproven = append(w.unproven, unproven{g, time.Now()})
	w.metrics.openGroups.Inc()
	return g, nil
}

func (w *worker) add(ctx context.Context, m *bus.Message, r *schemas.Reward) error {
	g := w.groups[key(r.Run, r.UID)]
	if g == nil {
		// Its record came before it, but what a worker left behind comes again in any order.
		o, opened, err := w.opener(ctx, r)
		switch {
		case errors.Is(err, bus.ErrNotFound) && m.Delivered > 1: // a replica of the stream may be behind
			return w.refuse(ctx, m, schemas.CodeInvalid, fmt.Sprintf("uid: %s; no prompt has opened this group in batch %s", r.UID, r.Group.Batch))
		case err != nil:
			return fmt.Errorf("look up the group of a reward: %w", err)
		}
		if g, err = w.begin(ctx, o, opened); err != nil {
			return err
		}
		if g == nil {
			return w.afterwards(ctx, m, r, o, opened)
		}
		w.seen(g)
	}
	if fault := g.of(r); fault != nil {
		if !g.proven { // it may be the group that is wrong
			if err := w.prove(ctx, []*group{g}); err != nil {
				return err
			}
			if !g.proven {
				return w.add(ctx, m, r)
			}
		}
		return w.refuse(ctx, m, schemas.CodeInvalid, fault.Error())
	}
	g.foreign = g.foreign || w.decoder.Group() != g.spec && !g.spec.Same(&r.Group)
	before := len(g.samples)
	g.add(r, m, w.cfg.GroupTimeout)
	w.metrics.held.Add(float64(len(g.samples) - before))
	return w.progress(ctx, g)
}

// progress closes a group, and its batch, if what it has now is all.
func (w *worker) progress(ctx context.Context, g *group) error {
	b := w.batchOf(g)
	switch {
	case !g.settled():
		return nil
	case b == nil:
		return w.close(ctx, g)
	}
	if err := w.decide(ctx, b, g, false); err != nil {
		return err
	}
	return w.advance(ctx, b, time.Time{})
}

// key is the group's in worker.groups.
func (g *group) key() string { return key(g.run, g.uid) }

func key(run schemas.Run, uid schemas.UID) string { return string(run) + "." + string(uid) }

// held is how many messages wait for the group's result.
func (g *group) held() int {
	if g.opening != nil {
		return len(g.samples) + 1
	}
	return len(g.samples)
}

// afterwards settles a reward whose batch has closed.
func (w *worker) afterwards(ctx context.Context, m *bus.Message, r *schemas.Reward, o *schemas.Opening, opened time.Time) error {
	a, err := w.resultOf(ctx, o, opened)
	if err != nil {
		return err
	}
	if !part(a, r.SampleIndex) {
		if err := w.late(ctx, m); err != nil {
			return err
		}
	}
	w.settle(m.AckAsync())
	return nil
}

// resultOf is that of a group whose batch has closed. One that has none gets one: whoever
// waits for the group must not wait for ever.
func (w *worker) resultOf(ctx context.Context, r *schemas.Opening, opened time.Time) (*schemas.Advantage, error) {
	a, err := w.bus.Result(ctx, r.Run, r.UID, r.GroupSize, r.Group.Batch)
	if errors.Is(err, bus.ErrNotFound) {
		g := newGroup(r, opened)
		w.heed(g)
		return w.publish(ctx, g.tooLate())
	}
	return a, err
}

// seen notes a group that another worker may have closed.
func (w *worker) seen(g *group) {
	if g.spec.BatchGroups == 0 {
		w.opened = append(w.opened, g)
	}
}

// recognise looks up whether a group that is open here has a result already: it closed
// under another worker, or what is held came too late for it.
func (w *worker) recognise(ctx context.Context, g *group) error {
	a, err := w.bus.Result(ctx, g.run, g.uid, g.size, g.spec.Batch)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if a.RefilledBy != "" {
		// Whoever stored it may have died before it asked.
		if err := w.askAgain(ctx, g.run, g.spec.PromptSeq, a); err != nil {
			return err
		}
	}
	g.result = a
	w.forgetGroup(g)
	w.release(ctx, g)
	return nil
}
