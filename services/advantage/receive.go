package advantage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// handleMessage handles one message, a record or a reward. It makes a message that is not valid a dead letter. After
// other errors the server delivers the message again.
func (w *worker) handleMessage(ctx context.Context, m *bus.Message) {
	w.deliveries.Received(m)
	t, _ := tracing.Of(m.Header)
	ctx = tracing.With(ctx, t)
	var err error
	began := time.Now()
	defer func() { w.work.Done(ctx, began, err) }()
	if schemas.IsOpening(m.Subject) {
		err = w.handleOpening(ctx, m)
	} else if err = w.decoder.Reward(m.Data, &w.reward); err != nil {
		err = w.deadLetter(ctx, m, schemas.CodeDecode, err.Error())
	} else if !w.reward.StoredUnder(m.Subject) {
		err = w.deadLetter(ctx, m, schemas.CodeInvalid,
			fmt.Sprintf("a reward of %q, stored on another subject", w.reward.Subject()))
	} else {
		err = w.handleReward(ctx, m, &w.reward)
	}
	if permanent(err) {
		err = w.deadLetter(ctx, m, bus.Code(err), err.Error())
	}
	if err != nil {
		w.retry(m, err)
	}
}

// readAhead puts first into received. If first opens a group, it adds all messages that are there by now, and loads
// the records of the groups that they open with one request instead of one each. The error is that of the
// subscription.
func (w *worker) readAhead(ctx context.Context, first *bus.Message) error {
	w.received = append(w.received[:0], first)
	if !schemas.IsOpening(first.Subject) {
		return nil
	}
	var err error
	for m := first; m != nil && err == nil && len(w.received) < FetchAhead; {
		if m, err = w.sub.Next(noWait); m != nil {
			w.received = append(w.received, m)
		}
	}
	var records []string
	for _, m := range w.received {
		a, ok := schemas.ParseSubject(m.Subject)
		if ok && a.Kind == schemas.KindOpening && a.Batch != string(a.UID) &&
			schemas.CheckToken("uid", a.UID) == nil && schemas.CheckToken("run", a.Run) == nil {
			records = append(records, schemas.GroupSubject(a.Run, a.UID))
		}
	}
	w.loadRecords(ctx, records)
	if errors.Is(err, context.Canceled) { // no more has come
		return nil
	}
	return err
}

// handleOpening handles the record of a group: it opens the group. The record is compared with intake's at once if it
// names an explicit batch or contradicts an open group. Others are compared before the group closes, if needed (see
// needsConfirmation). After an error the record is delivered again.
func (w *worker) handleOpening(ctx context.Context, m *bus.Message) error {
	r := &w.opening
	if err := w.decoder.Opening(m.Data, r); err != nil {
		return w.deadLetter(ctx, m, schemas.CodeInvalid, err.Error())
	}
	if subject := schemas.StoredSubject(r.Subject()); subject != m.Subject {
		return w.deadLetter(ctx, m, schemas.CodeInvalid,
			fmt.Sprintf("the record of %q, stored on another subject", subject))
	}
	g := w.groups[key(r.Run, r.UID)]
	other := g != nil && !g.matches(r)
	now := other || r.Group.BatchGroups > 0
	if now {
		switch record, err := w.record(ctx, r.Run, r.UID); {
		case errors.Is(err, bus.ErrNotFound):
		case err != nil:
			return err
		case !newGroup(r, m.Time).matches((*schemas.Opening)(record)):
			return w.deadLetter(ctx, m, schemas.CodeInvalid, errForeign.Error())
		}
	}
	if other {
		if g.sent {
			return fmt.Errorf("group %s is about to close", g.uid)
		}
		w.dropGroup(g)
		g = nil
	}
	if g == nil {
		shared := w.decoder.Group()
		var err error
		if g, err = w.openGroup(ctx, r, m.Time); err != nil {
			return err
		}
		if g == nil {
			if _, err := w.resultOf(ctx, r, m.Time); err != nil {
				return err
			}
			w.logAck(m.AckAsync())
			return nil
		}
		if shared != nil {
			g.spec = shared
		}
		if m.Delivered > 1 {
			w.lookUpLater(g)
		}
	}
	g.confirmed = g.confirmed || now
	if g.opening == nil {
		w.metrics.Held.Inc()
	}
	g.opening = m
	dropBytes(m)
	return w.closeIfComplete(ctx, g)
}

func (g *group) matches(r *schemas.Opening) bool {
	return g.refused == r.Error && g.size == r.GroupSize && g.spec.Same(&r.Group)
}

// dropGroup forgets an open group whose record was not the true one. The server delivers its rewards again, to the
// true group.
func (w *worker) dropGroup(g *group) {
	w.log.Warn().Str("run", string(g.run)).Str("uid", string(g.uid)).
		Msg("open group dropped: its record was not the true one")
	if b := w.batchOf(g); b != nil {
		b.removeGroup(g)
	}
	w.removeGroup(g)
	if g.opening != nil {
		w.logAck(g.opening.AckAsync())
	}
	for i := range g.samples {
		w.logAck(g.samples[i].message.NakWithDelay(sweepEvery))
	}
}

// openGroup opens the group of a record. It returns nil if the group's batch has closed. An error means that this
// could not be looked up.
func (w *worker) openGroup(ctx context.Context, r *schemas.Opening, opened time.Time) (*group, error) {
	if r.Group.BatchGroups > 0 && w.batches[string(r.Run)+"."+r.Group.Batch] == nil {
		closed, err := w.batchClosed(ctx, r)
		if closed || err != nil {
			return nil, err
		}
	}
	g := newGroup(r, opened)
	g.trace = tracing.In(ctx)
	w.applyControl(g)
	w.groups[g.key()] = g
	w.unconfirmed = append(w.unconfirmed, unconfirmed{g, time.Now()})
	w.metrics.OpenGroups.Inc()
	return g, nil
}

// handleReward handles one reward: it opens the group if its record was not delivered here yet, adds the reward, and
// closes the group if that is complete. A reward that no group asked for is a dead letter. After an error the reward
// is delivered again.
func (w *worker) handleReward(ctx context.Context, m *bus.Message, r *schemas.Reward) error {
	g := w.groups[key(r.Run, r.UID)]
	if g == nil {
		// Its record was stored before, but messages that another worker left are delivered in any order.
		o, opened, err := w.storedOpening(ctx, r)
		switch {
		case errors.Is(err, bus.ErrNotFound) && m.Delivered > 1: // a replica of the stream may be behind
			return w.deadLetter(ctx, m, schemas.CodeInvalid,
				fmt.Sprintf("uid: %s; no prompt has opened this group in batch %s", r.UID, r.Group.Batch))
		case err != nil:
			return fmt.Errorf("look up the group of a reward: %w", err)
		}
		if g, err = w.openGroup(ctx, o, opened); err != nil {
			return err
		}
		if g == nil {
			return w.afterBatch(ctx, m, r, o, opened)
		}
		w.lookUpLater(g)
	}
	if fault := g.checkReward(r); fault != nil {
		if !g.confirmed { // perhaps the group is wrong and the reward is not
			if err := w.confirmGroups(ctx, []*group{g}); err != nil {
				return err
			}
			if !g.confirmed {
				return w.handleReward(ctx, m, r)
			}
		}
		return w.deadLetter(ctx, m, schemas.CodeInvalid, fault.Error())
	}
	g.contradicted = g.contradicted || w.decoder.Group() != g.spec && !g.spec.Same(&r.Group)
	before := len(g.samples)
	g.addReward(r, m, w.cfg.GroupTimeout)
	w.metrics.Held.Add(float64(len(g.samples) - before))
	return w.closeIfComplete(ctx, g)
}

// closeIfComplete closes a group if it is complete, and then its batch if that is complete; it runs after each record
// and reward. After an error the message is delivered again.
func (w *worker) closeIfComplete(ctx context.Context, g *group) error {
	b := w.batchOf(g)
	switch {
	case !g.complete():
		return nil
	case b == nil:
		return w.closeGroup(ctx, g)
	}
	if err := w.decideOutcome(ctx, b, g, false); err != nil {
		return err
	}
	return w.closeBatchIfReady(ctx, b, time.Time{})
}

func (g *group) key() string { return key(g.run, g.uid) }

func key(run schemas.Run, uid schemas.UID) string { return string(run) + "." + string(uid) }

func (g *group) held() int {
	if g.opening != nil {
		return len(g.samples) + 1
	}
	return len(g.samples)
}

// afterBatch acknowledges a reward whose batch has closed. If its group's result does not count it, it is a dead
// letter.
func (w *worker) afterBatch(
	ctx context.Context, m *bus.Message, r *schemas.Reward, o *schemas.Opening, opened time.Time,
) error {
	a, err := w.resultOf(ctx, o, opened)
	if err != nil {
		return err
	}
	if !isMember(a, r.SampleIndex) {
		if err := w.deadLetterLate(ctx, m); err != nil {
			return err
		}
	}
	w.logAck(m.AckAsync())
	return nil
}

// resultOf returns the stored result of a group whose batch has closed. If there is none, it stores one that says the
// group came too late, as clients wait for a result.
func (w *worker) resultOf(ctx context.Context, r *schemas.Opening, opened time.Time) (*schemas.Advantage, error) {
	a, err := w.bus.Result(ctx, r.Run, r.UID, r.GroupSize, r.Group.Batch)
	if errors.Is(err, bus.ErrNotFound) {
		g := newGroup(r, opened)
		w.applyControl(g)
		return w.publishAndWait(ctx, g.lateResult())
	}
	return a, err
}

// lookUpLater makes the next sweep look whether another worker has closed the group.
func (w *worker) lookUpLater(g *group) {
	if g.spec.BatchGroups == 0 {
		w.lookUps = append(w.lookUps, g)
	}
}

// closeIfStored ends a group that is open here and has a stored result: another worker closed it, or its rewards came
// too late.
func (w *worker) closeIfStored(ctx context.Context, g *group) error {
	a, err := w.bus.Result(ctx, g.run, g.uid, g.size, g.spec.Batch)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx = tracing.With(ctx, g.trace)
	if a.RefilledBy != "" {
		// The worker that stored the result may have died before it asked for the other group.
		if err := w.requestRefill(ctx, g.run, g.spec.PromptSeq, a); err != nil {
			return err
		}
	}
	g.result = a
	w.removeGroup(g)
	w.acknowledge(ctx, g)
	return nil
}

// applyControl applies the controls in force to a group, when it opens and when controls change. A cancelled group
// closes with the rewards that it has, unless it has its outcome already. While the run is paused, a group whose
// prompt has no deadline does not close by time.
func (w *worker) applyControl(g *group) {
	h := w.controls.Of(g.run, g.uid)
	if c := h.Cancelled(); c != nil && g.cancelled == nil && g.outcome == nil && g.result == nil {
		g.cancelled = errors.New(c.Sentence())
		w.retryClosing = true
	}
	g.paused = h.Paused() != nil
	if r := h.Run; r != nil && r.Action == schemas.ControlResume {
		g.resumed = time.Unix(0, r.Stored)
	}
	g.setDeadline(w.cfg.GroupTimeout)
}

// setDeadline sets when a group whose prompt has no deadline closes: timeout after its first reward, or after its run
// was last resumed if that is later; never while the run is paused.
func (g *group) setDeadline(timeout time.Duration) {
	switch {
	case g.spec.Deadline > 0 || g.due.IsZero():
	case g.paused:
		g.deadline = time.Time{}
	case g.resumed.After(g.due):
		g.deadline = g.resumed.Add(timeout)
	default:
		g.deadline = g.due.Add(timeout)
	}
}

// cancelledAndDecided reports whether the batch can close because its run was cancelled: each of its groups has an
// outcome, and no more will come.
func (w *worker) cancelledAndDecided(b *batch) bool {
	if c := w.controls.Of(b.run, "").Run; c == nil || c.Action != schemas.ControlCancel {
		return false
	}
	for _, g := range b.groups {
		if g.outcome == nil {
			return false
		}
	}
	return true
}
