package intake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// Intake accepts or refuses controls, as it does prompts. An accepted control is in force once it is in the bucket of
// controls, where every service sees it; a refused one is a dead letter with the reason. Samplers stop and park
// samples; intake removes requests that wait, and puts parked ones back.

const (
	// controlSlots is how many controls are handled at once: one that waits because the queue of
	// requests is full must not delay a pause.
	controlSlots = 16
	// parkedEvery is how often intake looks for parked requests of runs that are not paused: they
	// were parked while the run was resumed.
	parkedEvery = 2 * time.Second
)

// handleControl handles one control of an operator: it puts the control into the bucket of controls in force if it
// changes something, removes requests of what is cancelled, returns parked requests of a run that is resumed, and
// replies with a receipt.
func (s *service) handleControl(ctx context.Context, m *bus.Message) error {
	var c schemas.Control
	if err := bus.Fits(m, &c); err != nil {
		return bus.Garbage(schemas.CodeDecode, err)
	}
	c.Seq, c.Stored = m.Seq, m.Time.UnixNano()
	r := &schemas.ControlReceipt{Accepted: true, Run: c.Run, UID: c.UID, Seq: c.Seq}
	switch err := s.bus.Controllable(ctx, &c); {
	case errors.Is(err, bus.ErrNotFound): // answered and not kept: asking makes no run
		if err := s.bus.Delete(ctx, m.Stream, m.Seq); err != nil {
			return err
		}
		return s.refuseControl(ctx, m, bus.Terminal(schemas.CodeInvalid, err))
	case err != nil:
		return err
	}
	why, err := s.whyUnchanged(ctx, &c)
	if err != nil {
		return err
	}
	r.Unchanged = why
	if why == "" && c.Action != schemas.ControlStatus {
		holds, mine, err := s.bus.PutControl(ctx, &c)
		switch {
		case err != nil:
			return err
		case !mine:
			r.Unchanged = "superseded: " + holds.Sentence()
		case c.Action == schemas.ControlCancel:
			if r.Requests, err = s.removeRequests(ctx, c.Run, c.UID); err != nil {
				return err
			}
		}
	}
	resumed := c.Action == schemas.ControlResume && r.Unchanged == ""
	if resumed {
		if err := s.dropClosedRequests(ctx, schemas.KindParked, c.Run); err != nil {
			return err
		}
	}
	if r.Status, err = counters.Status(ctx, s.bus, c.Run); err != nil {
		return err
	}
	if resumed {
		r.Requests = r.Status.Parked
	}
	zerolog.Ctx(ctx).Info().Str("run", string(c.Run)).Str("uid", string(c.UID)).Str("action", c.Action).Str("by", c.By).
		Str("unchanged", r.Unchanged).Int64("requests", r.Requests).Msg("control accepted")
	if c.Action == schemas.ControlStatus { // a question is not kept
		if err := s.bus.Delete(ctx, m.Stream, m.Seq); err != nil {
			return err
		}
	}
	if err := s.sendReceipt(m, r); err != nil || !resumed {
		return err
	}
	_, err = s.unparkRun(ctx, c.Run) // it waits while the queue is full
	return err
}

// refuseControl replies that a control is refused, before the control becomes a dead letter.
func (s *service) refuseControl(_ context.Context, m *bus.Message, cause error) error {
	r := &schemas.ControlReceipt{Run: runOf(m.Subject), Seq: m.Seq, Code: bus.Code(cause), Error: cause.Error()}
	return s.sendReceipt(m, r)
}

// whyUnchanged returns why a control of something that exists would change nothing, or "" if it changes something. ""
// also for a control that is in force already: a process died while it handled the control, so the rest must still be
// done.
func (s *service) whyUnchanged(ctx context.Context, c *schemas.Control) (string, error) {
	status, err := counters.Status(ctx, s.bus, c.Run)
	if err != nil {
		return "", err
	}
	h, err := s.bus.ControlsOf(ctx, c.Run, c.UID)
	if err != nil {
		return "", err
	}
	if c.Action == schemas.ControlPrune {
		return s.whyNotPrunable(ctx, c, h)
	}
	run := h.Run
	if run != nil && run.Seq == c.Seq || h.Group != nil && h.Group.Seq == c.Seq {
		return "", nil
	}
	cancelled := run != nil && run.Action == schemas.ControlCancel
	switch c.Action {
	case schemas.ControlStatus:
		return "", nil
	case schemas.ControlPause:
		if h.Paused() != nil || cancelled {
			return run.Sentence(), nil
		}
	case schemas.ControlResume:
		if cancelled {
			return run.Sentence() + "; what was cancelled stays so: choose another run", nil
		}
		if h.Paused() == nil {
			return "the run is not paused", nil
		}
	case schemas.ControlCancel:
		switch {
		case cancelled:
			return run.Sentence(), nil
		case c.UID != "" && h.Group != nil:
			return h.Group.Sentence(), nil
		case c.UID != "":
			return s.whyFinished(ctx, c)
		case outcomes.HasEnded(status.State):
			return fmt.Sprintf("each of its %d groups has its result", status.Groups), nil
		}
	}
	return "", nil
}

// whyFinished returns a sentence about the result that the control's group has, or "" without a result. An error is
// of the server.
func (s *service) whyFinished(ctx context.Context, c *schemas.Control) (string, error) {
	a := &schemas.Advantage{}
	_, err := s.bus.StoredEvent(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(c.Run, c.UID), a, nil)
	switch {
	case err == nil && a.RefilledBy != "":
		return fmt.Sprintf("%s; group %s stands in for it", describeResult(a), a.RefilledBy), nil
	case err == nil:
		return describeResult(a), nil
	case !errors.Is(err, bus.ErrNotFound):
		return "", err
	}
	return "", nil
}

// whyNotPrunable returns why the control's sample cannot be pruned (ended early), or "" if it can: its group was
// cancelled or has its result, or the sample has its trajectory, of several stages the one that ends it.
func (s *service) whyNotPrunable(ctx context.Context, c *schemas.Control, h bus.InForce) (string, error) {
	if ended := h.Cancelled(); ended != nil {
		return ended.Sentence(), nil
	}
	switch why, err := s.whyFinished(ctx, c); {
	case why != "" || err != nil:
		return why, err
	}
	record, err := s.bus.Group(ctx, c.Run, c.UID)
	if err == nil && len(record.Stages) > 0 {
		made, err := s.bus.Made(ctx, c.Run, c.UID)
		if err != nil {
			return "", err
		}
		_, of, open := stages.Open(&record.Group, *c.SampleIndex,
			func(at stages.Place) *schemas.Trajectory { return made[at].Trajectory })
		if open {
			return "", nil
		}
		return whyEnded(c, of[len(of)-1]), nil
	}
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return "", err
	}
	t := &schemas.Trajectory{}
	_, err = s.bus.StoredEvent(ctx, schemas.StreamTrajectories,
		schemas.TrajectorySubject(c.Run, c.UID, *c.SampleIndex, schemas.StageMain),
		t, nil)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return "", nil
	case err != nil:
		return "", err
	}
	return whyEnded(c, t), nil
}

func whyEnded(c *schemas.Control, t *schemas.Trajectory) string {
	return fmt.Sprintf("sample %d of group %s has its trajectory, %s", *c.SampleIndex, c.UID, t.StopReason)
}

// removeRequests removes the requests of a group, or of a whole run if uid is empty: those that wait and those that
// are parked. It returns how many, also beside an error of the server. Samplers stop by themselves what they work on.
func (s *service) removeRequests(ctx context.Context, run schemas.Run, uid schemas.UID) (int64, error) {
	removed := int64(0)
	for _, kind := range []string{schemas.KindRequest, schemas.KindParked} {
		n, err := s.bus.PurgeSubject(ctx, requestStream(kind), schemas.Address{Kind: kind, Run: run, UID: uid}.Filter())
		removed += int64(n)
		if err != nil {
			return removed, fmt.Errorf("remove the requests of run %s: %w", run, err)
		}
	}
	return removed, nil
}

// unparkRun puts the parked requests of a run back into their queues, unless the run is paused, and returns how many.
// A request that is also still in its queue, or in flight in the sampler that parks it, stays parked until that copy
// is gone; unparkRegularly tries again. An error is of the server or of ctx.
func (s *service) unparkRun(ctx context.Context, run schemas.Run) (int64, error) {
	n := int64(0)
	for m, err := range s.bus.Read(ctx, schemas.StreamParked,
		[]string{schemas.Address{Kind: schemas.KindParked, Run: run}.Filter()}, bus.ReadOptions{}) {
		if err != nil {
			return n, fmt.Errorf("parked requests of run %s: %w", run, err)
		}
		p := &schemas.Parked{}
		if fault := bus.Fits(m, p); fault != nil {
			if err := s.bus.Displace(ctx, m, fault); err != nil {
				return n, err
			}
			continue
		}
		h, err := s.bus.ControlsOf(ctx, p.Run, p.UID)
		if err != nil {
			return n, err
		}
		if h.Paused() != nil {
			return n, nil // it was paused again
		}
		if h.Cancelled() == nil {
			r := (*schemas.Request)(p)
			mine := bus.Against(func(waiting *schemas.Request) (fault, err error) { return r.SameSample(waiting), nil })
			ack, err := s.bus.Publish(ctx, r, mine, bus.WaitForSpace())
			if err != nil {
				return n, fmt.Errorf("put back request %d of %s: %w", p.SampleIndex, p.UID, err)
			}
			if ack.Duplicate {
				continue
			}
			n++
		}
		if err := s.bus.Delete(ctx, m.Stream, m.Seq); err != nil {
			return n, err
		}
	}
	return n, ctx.Err()
}

// unparkRegularly puts back requests of runs that are not paused, every parkedEvery until ctx ends: they were parked
// while the run was resumed, or the process that resumed it died.
func (s *service) unparkRegularly(ctx context.Context) error {
	return regularly(ctx, parkedEvery, zerolog.DebugLevel, "parked requests not looked at, trying again", s.unparkAll)
}

// unparkAll puts back the parked requests of all runs that are not paused. An error is of the server.
func (s *service) unparkAll(ctx context.Context) error {
	info, err := s.bus.StreamInfo(ctx, schemas.StreamParked)
	if err != nil || info.State.Msgs == 0 {
		return err
	}
	subjects, err := s.bus.Subjects(ctx, schemas.StreamParked, schemas.Address{Kind: schemas.KindParked}.Filter())
	if err != nil {
		return err
	}
	runs := map[schemas.Run]bool{}
	for subject := range subjects {
		runs[runOf(subject)] = true
	}
	for _, run := range slices.Sorted(maps.Keys(runs)) {
		h, err := s.bus.ControlsOf(ctx, run, "")
		if err == nil && h.Paused() == nil {
			_, err = s.unparkRun(ctx, run)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// storeCancelled stores the record of a prompt that was cancelled before intake handled it, and opens its group, which
// then closes at once with the result cancelled. c is the control that cancelled it.
func (s *service) storeCancelled(ctx context.Context, m *bus.Message, p *schemas.Prompt, c *schemas.Control) error {
	r := refusalRecord(p, m, errors.New(c.Sentence()))
	r.Cancelled = true
	if r.Validate() == nil { // otherwise it names no uid that a client could wait for
		ack, err := s.bus.Publish(ctx, r, bus.WaitForSpace())
		if err == nil && ack.Duplicate { // it has a record already
			first := &schemas.GroupRecord{}
			_, err = s.bus.StoredEvent(ctx, schemas.StreamGroups, r.Subject(), first, nil)
			r = first
		}
		if err == nil {
			_, err = s.bus.Publish(ctx, opening(r), bus.WaitForSpace())
		}
		if err != nil {
			return fmt.Errorf("store that %s is cancelled: %w", p.UID, err)
		}
	}
	return s.sendReceipt(m, &schemas.Receipt{
		Run: runOf(m.Subject), UID: p.UID, Code: schemas.CodeCancelled,
		Error: c.Sentence(),
	})
}

// publishRequests publishes the requests of a group to their queue, or parks them if the run is paused. Then it looks
// at the controls again: one that came meanwhile did not find these requests.
func (s *service) publishRequests(ctx context.Context, run schemas.Run, uid schemas.UID,
	requests []*schemas.Request,
) error {
	h, err := s.bus.ControlsOf(ctx, run, uid)
	if err != nil {
		return err
	}
	parked := h.Paused() != nil
	for _, r := range requests {
		if parked {
			err = s.park(ctx, r)
		} else {
			err = s.publishRequest(ctx, r)
		}
		if err != nil {
			return fmt.Errorf("publish request %d: %w", r.SampleIndex, err)
		}
	}
	if h, err = s.bus.ControlsOf(ctx, run, uid); err != nil {
		return err
	}
	switch {
	case h.Cancelled() != nil:
		_, err = s.removeRequests(ctx, run, uid)
	case parked && h.Paused() == nil:
		_, err = s.unparkRun(ctx, run)
	}
	return err
}

// park stores a request of a paused run in the stream of parked requests, which samplers do not read.
func (s *service) park(ctx context.Context, r *schemas.Request) error {
	mine := bus.Against(func(waiting *schemas.Parked) (fault, err error) {
		return r.SameSample((*schemas.Request)(waiting)), nil
	})
	_, err := s.bus.Publish(ctx, (*schemas.Parked)(r), mine)
	return explainFull(r.Run, err)
}
