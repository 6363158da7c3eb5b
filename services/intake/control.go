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
	"github.com/meander-rl/meander/schemas"
)

// Intake rules on controls, as it does on prompts: what it accepts holds from when it is in
// the bucket of controls, where every service sees it, and what it refuses is a dead letter
// with the reason. The samplers stop and park by what holds; intake removes the requests that
// nobody has taken, and puts parked ones back.

const (
	// controlSlots is how many controls are worked on at once: one that waits for room in the
	// queue of requests must not keep a pause waiting.
	controlSlots = 16
	// strayEvery is how often intake looks for parked requests of runs that are not paused:
	// those that were parked while the run was resumed.
	strayEvery = 2 * time.Second
)

// control rules on one control.
func (s *service) control(ctx context.Context, m *bus.Message) error {
	var c schemas.Control
	if err := bus.Fits(m, &c); err != nil {
		return bus.Garbage(schemas.CodeDecode, err)
	}
	c.Seq, c.Stored = m.Seq, m.Time.UnixNano()
	r := &schemas.ControlReceipt{Accepted: true, Run: c.Run, UID: c.UID, Seq: c.Seq}
	why, err := s.unchanged(ctx, &c)
	if err != nil {
		return err
	}
	r.Unchanged = why
	if why == "" && c.Action != schemas.ControlStatus {
		holds, mine, err := s.bus.Hold(ctx, &c)
		switch {
		case err != nil:
			return err
		case !mine:
			r.Unchanged = "superseded: " + holds.Says()
		case c.Action == schemas.ControlCancel:
			if r.Requests, err = s.sweep(ctx, c.Run, c.UID); err != nil {
				return err
			}
		}
	}
	resumed := c.Action == schemas.ControlResume && r.Unchanged == ""
	if resumed {
		if err := s.dropClosed(ctx, schemas.KindParked, c.Run); err != nil {
			return err
		}
	}
	if r.Status, err = s.bus.RunStatus(ctx, c.Run); err != nil {
		return err
	}
	if resumed {
		r.Requests = r.Status.Parked
	}
	zerolog.Ctx(ctx).Info().Str("run", string(c.Run)).Str("uid", string(c.UID)).Str("action", c.Action).Str("by", c.By).
		Str("unchanged", r.Unchanged).Int64("requests", r.Requests).Msg("control accepted")
	if err := s.reply(m, r); err != nil || !resumed {
		return err
	}
	_, err = s.unpark(ctx, c.Run) // which waits while the queue is full
	return err
}

// refuseControl tells who asked that a control is refused.
func (s *service) refuseControl(_ context.Context, m *bus.Message, cause error) error {
	r := &schemas.ControlReceipt{Run: runOf(m.Subject), Seq: m.Seq, Code: bus.Code(cause), Error: cause.Error()}
	return s.reply(m, r)
}

// unchanged says why a control would change nothing, "" where it would. A control of what
// does not exist is refused. One that was taken up before, by a process that died, goes on.
func (s *service) unchanged(ctx context.Context, c *schemas.Control) (string, error) {
	switch err := s.bus.Controllable(ctx, c); {
	case errors.Is(err, bus.ErrNotFound):
		return "", bus.Terminal(schemas.CodeInvalid, err)
	case err != nil:
		return "", err
	}
	status, err := s.bus.RunStatus(ctx, c.Run)
	if err != nil {
		return "", err
	}
	h, err := s.bus.Held(ctx, c.Run, c.UID)
	if err != nil {
		return "", err
	}
	if c.Action == schemas.ControlPrune {
		return s.prunable(ctx, c, h)
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
			return run.Says(), nil
		}
	case schemas.ControlResume:
		if cancelled {
			return run.Says() + "; what was cancelled stays so: choose another run", nil
		}
		if h.Paused() == nil {
			return "the run is not paused", nil
		}
	case schemas.ControlCancel:
		switch {
		case cancelled:
			return run.Says(), nil
		case c.UID != "" && h.Group != nil:
			return h.Group.Says(), nil
		case c.UID != "":
			return s.finished(ctx, c)
		case status.State == schemas.RunDone:
			return fmt.Sprintf("each of its %d groups has its result", status.Groups), nil
		}
	}
	return "", nil
}

// finished says what result a group has, "" while it has none.
func (s *service) finished(ctx context.Context, c *schemas.Control) (string, error) {
	a := &schemas.Advantage{}
	_, err := s.bus.Claimed(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(c.Run, c.UID), a, nil)
	switch {
	case err == nil && a.RefilledBy != "":
		return fmt.Sprintf("%s; group %s stands in for it", closedAs(a), a.RefilledBy), nil
	case err == nil:
		return closedAs(a), nil
	case !errors.Is(err, bus.ErrNotFound):
		return "", err
	}
	return "", nil
}

// prunable says why there is nothing to prune of a sample, "" where there is.
func (s *service) prunable(ctx context.Context, c *schemas.Control, h bus.Held) (string, error) {
	if ended := h.Cancelled(); ended != nil {
		return ended.Says(), nil
	}
	switch why, err := s.finished(ctx, c); {
	case why != "" || err != nil:
		return why, err
	}
	t := &schemas.Trajectory{}
	_, err := s.bus.Claimed(ctx, schemas.StreamTrajectories, schemas.TrajectorySubject(c.Run, c.UID, *c.SampleIndex), t, nil)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return "", nil
	case err != nil:
		return "", err
	}
	return fmt.Sprintf("sample %d of group %s has its trajectory, %s", *c.SampleIndex, c.UID, t.StopReason), nil
}

// sweep removes the requests of what was cancelled, those that wait and those that are
// parked. What a sampler has in hand it lets go of by itself.
func (s *service) sweep(ctx context.Context, run schemas.Run, uid schemas.UID) (int64, error) {
	removed := int64(0)
	for stream, kind := range map[string]string{schemas.StreamRequests: schemas.KindRequest, schemas.StreamParked: schemas.KindParked} {
		n, err := s.bus.PurgeSubject(ctx, stream, schemas.Address{Kind: kind, Run: run, UID: uid}.Filter())
		removed += int64(n)
		if err != nil {
			return removed, fmt.Errorf("remove the requests of run %s: %w", run, err)
		}
	}
	return removed, nil
}

// unpark puts the parked requests of a run that is not paused back into their queues. A
// request whose other copy is still in the queue, or in the hands of the sampler that parks
// it, stays parked until that copy is gone.
func (s *service) unpark(ctx context.Context, run schemas.Run) (int64, error) {
	n := int64(0)
	for m, err := range s.bus.Read(ctx, schemas.StreamParked, []string{schemas.Address{Kind: schemas.KindParked, Run: run}.Filter()}, bus.ReadOptions{}) {
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
		h, err := s.bus.Held(ctx, p.Run, p.UID)
		if err != nil {
			return n, err
		}
		if h.Paused() != nil {
			return n, nil // once more
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

// strays puts back, until ctx ends, what was parked while its run was resumed, or resumed by
// a process that died.
func (s *service) strays(ctx context.Context) error {
	for {
		t := time.NewTimer(strayEvery)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
		if err := s.unparkAll(ctx); err != nil && ctx.Err() == nil {
			zerolog.Ctx(ctx).Debug().Err(err).Msg("parked requests not looked at")
		}
	}
}

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
		h, err := s.bus.Held(ctx, run, "")
		if err == nil && h.Paused() == nil {
			_, err = s.unpark(ctx, run)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ended gives the group of a prompt that was cancelled before it was taken up its result.
func (s *service) ended(ctx context.Context, m *bus.Message, p *schemas.Prompt, c *schemas.Control) error {
	r := refused(p, m, errors.New(c.Says()))
	r.Cancelled = true
	if r.Validate() == nil { // else it names no uid that somebody could wait for
		ack, err := s.bus.Publish(ctx, r, bus.WaitForSpace())
		if err == nil && ack.Duplicate { // it was taken up, and has a record
			first := &schemas.GroupRecord{}
			_, err = s.bus.Claimed(ctx, schemas.StreamGroups, r.Subject(), first, nil)
			r = first
		}
		if err == nil {
			_, err = s.bus.Publish(ctx, (*schemas.Opening)(r), bus.WaitForSpace())
		}
		if err != nil {
			return fmt.Errorf("store the end of %s: %w", p.UID, err)
		}
	}
	return s.reply(m, &schemas.Receipt{Run: runOf(m.Subject), UID: p.UID, Code: schemas.CodeCancelled, Error: c.Says()})
}

// ask publishes the requests of a group, into the queue or, of a paused run, beside it.
func (s *service) ask(ctx context.Context, run schemas.Run, uid schemas.UID, requests []*schemas.Request) error {
	h, err := s.bus.Held(ctx, run, uid)
	if err != nil {
		return err
	}
	parked := h.Paused() != nil
	for _, r := range requests {
		if parked {
			err = s.park(ctx, r)
		} else {
			err = s.publish(ctx, r)
		}
		if err != nil {
			return fmt.Errorf("publish request %d: %w", r.SampleIndex, err)
		}
	}
	// Whoever ruled meanwhile has not seen these requests.
	if h, err = s.bus.Held(ctx, run, uid); err != nil {
		return err
	}
	switch {
	case h.Cancelled() != nil:
		_, err = s.sweep(ctx, run, uid)
	case parked && h.Paused() == nil:
		_, err = s.unpark(ctx, run)
	}
	return err
}

// park stores a request of a paused run where no sampler takes it.
func (s *service) park(ctx context.Context, r *schemas.Request) error {
	mine := bus.Against(func(waiting *schemas.Parked) (fault, err error) {
		return r.SameSample((*schemas.Request)(waiting)), nil
	})
	_, err := s.bus.Publish(ctx, (*schemas.Parked)(r), mine)
	return parkedFull(r.Run, err)
}
