package advantage

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// batch is an explicit batch: groups that are normalised or reported together. Each group fills one of the expected
// places; a group that replaces another (refill) fills the same place. The rewards are acknowledged only after the
// Batch event is stored, so a crash loses nothing.
//
// Its content depends only on what is stored, and at which times the server stored it. When it closes at a deadline,
// everything stored before that has been received. So a worker that takes over while a batch closes computes the same.
type batch struct {
	run      schemas.Run
	id       string
	expected int64                  // how many places there are: the prompts say it
	groups   map[schemas.UID]*group // by uid; more than expected where some replace others
	roots    map[schemas.UID]bool   // the places that the groups fill, by group.root
	// earliest is the earliest deadline of its groups, zero while none has one. What was stored before it is in time
	// whatever the batch's deadline will be.
	earliest time.Time
	// decided counts its groups that have an outcome: with fewer than expected it cannot be complete.
	decided int64
	step    *int64
	epoch   *int64
}

// batchOf returns the explicit batch that a group's prompt names, with the group in it; nil if the prompt names none.
// It creates the batch for the first group. Called again for a group it changes nothing.
func (w *worker) batchOf(g *group) *batch {
	if g.spec.BatchGroups == 0 {
		return nil
	}
	key := string(g.run) + "." + g.spec.Batch
	b, ok := w.batches[key]
	if !ok {
		b = &batch{
			run: g.run, id: g.spec.Batch, expected: g.spec.BatchGroups, groups: map[schemas.UID]*group{},
			roots: map[schemas.UID]bool{},
		}
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

// groupsInTime returns the groups that belong to the batch, by uid, and the batch's deadline. The groups are those that
// fill one of the expected places and opened before the deadline. The deadline starts as the one that was set first,
// and moves to a later one of another group only if that was set before it; zero while no group has one.
func (b *batch) groupsInTime() (groups []*group, deadline time.Time) {
	places := map[schemas.UID]bool{}
	for _, g := range oldestFirst(b.groups) {
		if int64(len(places)) < b.expected || places[g.root()] {
			places[g.root()] = true
			groups = append(groups, g)
		}
	}
	for _, g := range slices.SortedFunc(slices.Values(groups), func(x, y *group) int { return x.due.Compare(y.due) }) {
		if g.deadline.After(deadline) && g.deadlineSetBefore(deadline) {
			deadline = g.deadline
		}
	}
	groups = slices.DeleteFunc(groups, func(g *group) bool { return !deadline.IsZero() && g.opened.After(deadline) })
	slices.SortFunc(groups, func(x, y *group) int { return cmp.Compare(x.uid, y.uid) })
	return groups, deadline
}

// deadlineSetBefore reports whether the group has a deadline that was set before the batch's deadline. One that was set
// later must not change the batch.
func (g *group) deadlineSetBefore(deadline time.Time) bool {
	return !g.deadline.IsZero() && (deadline.IsZero() || !g.due.After(deadline))
}

// removeGroup removes a group from its batch, because the group is dropped.
func (b *batch) removeGroup(g *group) {
	delete(b.groups, g.uid)
	if g.decided {
		b.decided--
	}
	clear(b.roots)
	for _, rest := range b.groups {
		b.roots[rest.root()] = true
	}
}

// isFilled reports whether a batch is complete: each place has a group, no group is open, and for every refill both
// the replaced and the new group are here. The latter is checked because messages that a killed worker left may be
// delivered after later ones.
func (b *batch) isFilled(groups []*group) bool {
	places := map[schemas.UID]bool{}
	for _, g := range groups {
		if g.outcome == nil || g.outcome.RefilledBy != "" && b.groups[g.outcome.RefilledBy] == nil {
			return false
		}
		if r := g.spec.Refill; r != nil && b.groups[refillUID(r.Root, r.Round-1)] == nil {
			return false
		}
		places[g.root()] = true
	}
	return int64(len(places)) == b.expected
}

// decideOutcome sets the outcome of a group of a batch that is complete or overdue. It publishes the outcome at once,
// unless the group counts and its advantages depend on the rest of the batch. A group that may not belong to the
// batch is left until the batch closes. last: the batch closes now, so that a new group in its place would come too
// late. After an error the caller tries again.
func (w *worker) decideOutcome(ctx context.Context, b *batch, g *group, last bool) error {
	if g.result != nil || g.sent {
		return nil
	}
	stands := g.paused && g.spec.Deadline == 0 // its time, so that it has no deadline and is not late
	if !stands && !g.deadlineSetBefore(b.earliest) || int64(len(b.roots)) > b.expected {
		groups, deadline := b.groupsInTime()
		if !slices.Contains(groups, g) ||
			!stands && g.refused == "" && g.cancelled == nil && !g.deadlineSetBefore(deadline) {
			return nil // it gets its result when the batch closes
		}
	}
	a := g.outcome
	if a == nil {
		if err := w.setStale(ctx, g); err != nil {
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
		err = w.publishUncounted(ctx, g, a, last || g.overdue())
	case !g.batchWide():
		err = w.publishResult(ctx, g, a)
	}
	if err != nil {
		return err
	}
	if g.outcome == nil {
		g.outcome = a
	}
	if !g.decided {
		g.decided = true
		b.decided++
	}
	return nil
}

// closeBatchIfReady closes the batch if every place is filled, or if its deadline has passed and everything stored
// before it has been received. Everything stored before caughtUp has been received; zero: not known. A batch of a
// cancelled run closes with the groups that it has.
func (w *worker) closeBatchIfReady(ctx context.Context, b *batch, caughtUp time.Time) error {
	ended := w.cancelledAndDecided(b)
	if caughtUp.IsZero() && b.decided < b.expected && !ended {
		return nil
	}
	groups, deadline := b.groupsInTime()
	filled := b.isFilled(groups)
	if !filled && !ended {
		if deadline.IsZero() || !caughtUp.After(deadline) {
			return nil
		}
		for _, g := range groups {
			if !g.deadlineSetBefore(deadline) {
				g.due, g.deadline = deadline, deadline // no reward of it was stored in time
			}
		}
	}
	return w.closeBatch(ctx, b, groups, !filled)
}

// publishUncounted stores the result of a group that does not count. If the group's rules ask for another group in
// its place, and tooLate is false, it requests that one. After an error, a temporary one, the caller tries again.
func (w *worker) publishUncounted(ctx context.Context, g *group, a *schemas.Advantage, tooLate bool) error {
	ctx = tracing.With(ctx, g.trace)
	if err := w.planRefill(ctx, g, a, tooLate); err != nil {
		return err
	}
	stored, err := w.publishAndWait(ctx, a)
	if permanent(err) {
		return w.deadLetterGroup(ctx, g, a, err)
	}
	if err != nil {
		return err
	}
	a = stored
	if a.RefilledBy != "" { // before its rewards are acknowledged
		if err := w.requestRefill(ctx, g.run, g.spec.PromptSeq, a); err != nil {
			return err
		}
	}
	w.setResult(ctx, g, a)
	return nil
}

// closeBatch stores the results of the batch's groups that are not stored yet, then the Batch event, then the results
// of groups that came too late. Last it acknowledges all messages. partial: some places are not filled. After an error
// the next sweep tries again and goes on where it stopped.
func (w *worker) closeBatch(ctx context.Context, b *batch, groups []*group, partial bool) error {
	var wide []*group
	var outlines []*schemas.Advantage
	for _, g := range groups {
		if err := w.decideOutcome(ctx, b, g, true); err != nil {
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
		if err := w.publishResult(ctx, g, outlines[i]); err != nil {
			return err
		}
	}
	w.collectResults(ctx, ctx)
	for _, g := range groups {
		if g.result == nil {
			return fmt.Errorf("advantage of %s is not stored yet", g.uid)
		}
	}
	e := summary(b, groups, time.Now(), seconds)
	if partial {
		e.Status = schemas.StatusPartial
	}
	_, err := w.bus.Publish(tracing.With(ctx, traceOf(groups)), e)
	switch {
	case permanent(err):
		for _, g := range oldestFirst(b.groups) { // a later try would fail as well
			if err := w.deadLetterGroup(ctx, g, g.outline(), fmt.Errorf("batch %s: %w", b.id, err)); err != nil {
				return err
			}
		}
	case err != nil:
		return fmt.Errorf("publish batch %s: %w", b.id, err)
	default:
		w.metrics.batch(e)
		w.log.Info().Str("run", string(b.run)).Str("batch", b.id).Str("status", e.Status).Int64("groups", e.Groups).
			Int("dropped", len(e.Dropped)).Msg("batch closed")
	}
	for _, g := range oldestFirst(b.groups) {
		if g.result == nil {
			if err := w.storeLateResult(ctx, g); err != nil {
				return err
			}
		}
	}
	delete(w.batches, string(b.run)+"."+b.id)
	for _, g := range oldestFirst(b.groups) {
		w.removeGroup(g)
		w.acknowledge(ctx, g)
	}
	return nil
}

// traceOf returns the trace context of a batch: that of the first of its groups, by uid, which has one.
func traceOf(groups []*group) (t tracing.Context) {
	first := schemas.UID("")
	for _, g := range groups {
		if g.trace != (tracing.Context{}) && (first == "" || g.uid < first) {
			t, first = g.trace, g.uid
		}
	}
	return t
}

// storeLateResult stores the result of a group that came after its batch had closed.
func (w *worker) storeLateResult(ctx context.Context, g *group) error {
	late := g.lateResult()
	a, err := w.publishAndWait(tracing.With(ctx, g.trace), late)
	switch {
	case permanent(err):
		return w.deadLetterGroup(ctx, g, late, err)
	case err == nil:
		w.setResult(ctx, g, a)
	}
	return err
}

// lateResult returns the result of a group that came after its batch had closed: failed, or cancelled. Clients wait
// for a result of it too.
func (g *group) lateResult() *schemas.Advantage {
	a := g.outline()
	for i := range a.Members {
		a.Members[i] = schemas.Member{SampleIndex: a.Members[i].SampleIndex, Status: schemas.StatusMissing}
	}
	a.Status, a.Error = schemas.StatusFailed, fmt.Sprintf("batch %s had closed without the group", g.spec.Batch)
	if g.cancelled != nil {
		a.Status, a.Error = schemas.StatusCancelled, g.cancelled.Error()
	}
	a.Mean, a.Std = nil, nil
	a.PolicyVersionMin, a.PolicyVersionMax = 0, 0
	return a
}

// batchClosed reports whether the batch that a group's record names has closed, which is when its Batch event is
// stored.
func (w *worker) batchClosed(ctx context.Context, r *schemas.Opening) (bool, error) {
	_, err := w.bus.StoredEvent(ctx, schemas.StreamAdvantages, schemas.BatchSubject(r.Run, r.Group.Batch),
		&schemas.Batch{}, nil)
	if errors.Is(err, bus.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up batch %s: %w", r.Group.Batch, err)
	}
	return true, nil
}

// planRefill sets a.RefilledBy, the uid of a new group that replaces g, if g's rules ask for that; a is the result of
// g, which does not count. It gives up if no rounds are left, if the prompt is no longer stored, or if tooLate: a new
// group would miss the deadline. requestRefill asks for the new group after a is stored.
func (w *worker) planRefill(ctx context.Context, g *group, a *schemas.Advantage, tooLate bool) error {
	policy := policyOf(g.spec)
	wanted := a.Status == schemas.StatusFiltered && policy.ZeroStd == schemas.GroupRefill ||
		slices.Contains([]string{schemas.StatusFailed, schemas.StatusMixed, schemas.StatusStale}, a.Status) &&
			policy.Failed == schemas.GroupRefill
	if !wanted || g.spec.SourceRun != "" {
		return nil
	}
	round := int64(0)
	if g.spec.Refill != nil {
		round = g.spec.Refill.Round
	}
	giveUp := func(reason, why string) error {
		w.metrics.gaveUp(reason)
		w.log.Warn().Str("run", string(g.run)).Str("uid", string(g.uid)).Int64("rounds", round).
			Str("status", a.Status).Msg(why)
		return nil
	}
	if tooLate {
		return giveUp("deadline", "there is no time left to refill the group")
	}
	if round >= *policy.RefillRounds {
		return giveUp("rounds", "no rounds are left to refill the group")
	}
	switch _, err := w.bus.Get(ctx, schemas.StreamPrompts, g.spec.PromptSeq); {
	case errors.Is(err, bus.ErrNotFound):
		return giveUp("prompt", "the prompt is no longer stored, the group cannot be refilled")
	case err != nil:
		return fmt.Errorf("look up the prompt of %s: %w", g.uid, err)
	}
	a.RefilledBy = refillUID(g.root(), round+1)
	return nil
}

// refillUID returns the uid of the group of a round: root, the uid of the first one (round 0), and the round. A long
// root is cut, and gets a part of its hash.
func refillUID(root schemas.UID, round int64) schemas.UID {
	if round == 0 {
		return root
	}
	suffix := "-r" + strconv.FormatInt(round, 10)
	if len(root)+len(suffix) <= schemas.MaxToken {
		return root + schemas.UID(suffix)
	}
	sum := sha256.Sum256([]byte(root))
	suffix = "-" + hex.EncodeToString(sum[:4]) + suffix
	return root[:schemas.MaxToken-len(suffix)] + schemas.UID(suffix)
}

// requestRefill publishes the prompt of the group that replaces the one of result a, with the uid a.RefilledBy. To do
// so twice is harmless: the message id is the same, and intake recognises the uid. A prompt that is no longer stored,
// or cannot be stored again, is no error: its place in the batch stays empty.
func (w *worker) requestRefill(ctx context.Context, run schemas.Run, promptSeq uint64, a *schemas.Advantage) error {
	m, err := w.bus.Get(ctx, schemas.StreamPrompts, promptSeq)
	if errors.Is(err, bus.ErrNotFound) {
		return nil // it was deleted just now; its place in the batch stays empty until the deadline
	}
	if err != nil {
		return fmt.Errorf("read the prompt of %s: %w", a.UID, err)
	}
	var p schemas.Prompt
	if err := schemas.Decode(m.Data, &p); err != nil {
		return fmt.Errorf("stored prompt %d: %w", promptSeq, err)
	}
	root, round := a.UID, int64(1)
	if a.Refill != nil {
		root, round = a.Refill.Root, a.Refill.Round+1
	}
	p.Substitute(round)
	p.UID, p.Refill = a.RefilledBy, &schemas.Refill{Root: root, Round: round}
	data, err := schemas.Encode(&p)
	if err != nil {
		return fmt.Errorf("encode the prompt of %s: %w", p.UID, err)
	}
	header := nats.Header{jetstream.MsgIDHeader: {"prompt." + string(run) + "." + string(p.UID)}}
	_, err = w.bus.PublishPrompt(ctx, run, data, header, bus.WaitForSpace())
	if permanent(err) { // its place in the batch stays empty until the deadline
		w.metrics.gaveUp("prompt")
		w.log.Error().Err(err).Str("run", string(run)).Str("uid", string(p.UID)).
			Msg("the fresh group cannot be asked for")
		return w.bus.Dead(ctx, "advantage", bus.Code(err),
			fmt.Sprintf("cannot be asked for again as %s: %v", p.UID, err), m)
	}
	if err != nil {
		return fmt.Errorf("ask for group %s: %w", p.UID, err)
	}
	w.metrics.Refilled.Inc()
	w.log.Info().Str("run", string(run)).Str("uid", string(a.UID)).Str("status", a.Status).
		Str("refilled_by", string(p.UID)).Int64("round", round).Msg("asked for a fresh group")
	return nil
}
