package sampler

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// stopped ends the work on a sample: a control that holds of its run or group.
type stopped struct{ control *schemas.Control }

func (e *stopped) Error() string { return e.control.Says() }

// stoppedBy is the control that ended the work on a sample; nil where it goes on, or ended
// otherwise.
func stoppedBy(work context.Context) *schemas.Control {
	if e, ok := errors.AsType[*stopped](context.Cause(work)); ok {
		return e.control
	}
	return nil
}

// reins hold what this process works on by what operators ask of runs. The context of a
// sample that is to stop ends; the scheduler drops it at the next step boundary.
type reins struct {
	controls *bus.Controls
	// obeyed has room for one word: there is news for the presence.
	obeyed chan struct{}

	mu    sync.Mutex
	hands map[*hand]struct{}
	// seen is the newest control that was looked at, done the newest that has no work left
	// which it stopped.
	seen, done uint64
}

// hand is the work on one sample.
type hand struct {
	run     schemas.Run
	uid     schemas.UID
	stop    context.CancelCauseFunc
	stopped bool
}

func newReins(c *bus.Controls) *reins {
	return &reins{controls: c, obeyed: make(chan struct{}, 1), hands: map[*hand]struct{}{}, seen: c.Newest(), done: c.Newest()}
}

// take puts the work on a sample under control, until release.
func (r *reins) take(ctx context.Context, req *schemas.Request) (work context.Context, release func()) {
	work, stop := context.WithCancelCause(ctx)
	h := &hand{run: req.Run, uid: req.UID, stop: stop}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hands[h] = struct{}{}
	r.check(h)
	return work, func() {
		stop(nil)
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.hands, h)
		r.settle()
	}
}

// check stops the work on a sample that a control is against. Lock held.
func (r *reins) check(h *hand) {
	held := r.controls.Of(h.run, h.uid)
	c := held.Cancelled()
	if c == nil {
		c = held.Paused()
	}
	if c != nil && !h.stopped {
		h.stopped = true
		h.stop(&stopped{c})
	}
}

// settle notes what is obeyed by now. Lock held.
func (r *reins) settle() {
	for h := range r.hands {
		if h.stopped {
			return
		}
	}
	if r.done == r.seen {
		return
	}
	r.done = r.seen
	select {
	case r.obeyed <- struct{}{}:
	default:
	}
}

// follow stops what controls are against, until ctx ends.
func (r *reins) follow(ctx context.Context) error {
	for {
		changed := r.controls.Changed()
		newest := r.controls.Newest()
		r.mu.Lock()
		for h := range r.hands {
			r.check(h)
		}
		r.seen = newest
		r.settle()
		r.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// obeys is the newest control that is obeyed: nothing that it or those before it stopped is
// worked on.
func (r *reins) obeys() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.done
}

// heed settles the request of a sample that was stopped. That of a cancelled group is done
// with. That of a paused run is parked, out of the queue, and only then taken off it; whoever
// resumes the run puts it back.
func (s *service) heed(ctx context.Context, m *bus.Message, req *schemas.Request, c *schemas.Control) error {
	log := zerolog.Ctx(ctx).With().Str("run", string(req.Run)).Str("uid", string(req.UID)).Int64("sample_index", req.SampleIndex).Logger()
	if c.Action == schemas.ControlCancel {
		log.Info().Msg("let go: " + c.Says())
		return m.AckAsync() // it may have been removed already, which nobody confirms
	}
	same := bus.Against(func(p *schemas.Parked) (fault, err error) { return req.SameSample((*schemas.Request)(p)), nil })
	_, err := s.bus.Publish(ctx, (*schemas.Parked)(req), same)
	if errors.Is(err, bus.ErrStreamFull) {
		// It waits in the queue instead, and its place here is for other runs.
		log.Warn().Err(err).Msg("not parked: " + c.Says() + "; give the stream more with 'meander streams limit --max-parked-bytes SIZE'")
		return putBack(ctx, m, err)
	}
	if err != nil {
		return fmt.Errorf("park the request: %w", err)
	}
	log.Info().Msg("parked: " + c.Says())
	return nil
}
