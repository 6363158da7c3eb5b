package sampler

import (
	"context"
	"errors"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// stopped is the cause that ends the context of a sample: a control on its run or group.
type stopped struct{ control *schemas.Control }

func (e *stopped) Error() string { return e.control.Sentence() }

// stoppedBy returns the control that ended the work on a sample; nil where work goes on or ended for another reason.
func stoppedBy(work context.Context) *schemas.Control {
	if e, ok := errors.AsType[*stopped](context.Cause(work)); ok {
		return e.control
	}
	return nil
}

// controls stop the samples that operators pause or cancel: their contexts end.
type controls struct {
	inForce *bus.Controls
	// news signals that the presence has changed; buffered, 1.
	news chan struct{}

	mu       sync.Mutex
	inFlight map[*inFlight]struct{}
	// seen is the newest control that is applied; done, the newest of which no stopped sample is in flight any more.
	seen, done uint64
}

type inFlight struct {
	run     schemas.Run
	uid     schemas.UID
	stop    context.CancelCauseFunc
	stopped bool
}

func newControls(c *bus.Controls) *controls {
	return &controls{
		inForce: c, news: make(chan struct{}, 1), inFlight: map[*inFlight]struct{}{}, seen: c.Newest(),
		done: c.Newest(),
	}
}

// track returns a context for the work on a sample, until release; a cancel or a pause ends it with a *stopped.
func (c *controls) track(ctx context.Context, req *schemas.Request) (work context.Context, release func()) {
	work, stop := context.WithCancelCause(ctx)
	h := &inFlight{run: req.Run, uid: req.UID, stop: stop}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inFlight[h] = struct{}{}
	c.stopIfControlled(h)
	return work, func() {
		stop(nil)
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.inFlight, h)
		c.noteObeyed()
	}
}

// stopIfControlled stops the work on a sample if its run or group is cancelled or paused. The caller holds the lock.
func (c *controls) stopIfControlled(h *inFlight) {
	held := c.inForce.Of(h.run, h.uid)
	by := held.Cancelled()
	if by == nil {
		by = held.Paused()
	}
	if by != nil && !h.stopped {
		h.stopped = true
		h.stop(&stopped{by})
	}
}

// noteObeyed tells presence that all controls so far are obeyed, once no stopped sample is left. Lock held.
func (c *controls) noteObeyed() {
	for h := range c.inFlight {
		if h.stopped {
			return
		}
	}
	if c.done == c.seen {
		return
	}
	c.done = c.seen
	c.presenceChanged()
}

func (c *controls) presenceChanged() {
	select {
	case c.news <- struct{}{}:
	default:
	}
}

// applyControls applies new controls to the samples in flight until ctx ends.
func (c *controls) applyControls(ctx context.Context) error {
	for {
		changed := c.inForce.Changed()
		newest := c.inForce.Newest()
		c.mu.Lock()
		for h := range c.inFlight {
			c.stopIfControlled(h)
		}
		c.seen = newest
		c.noteObeyed()
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// newestObeyed returns the newest control that is obeyed: no sample is in flight that it or an earlier one stopped.
func (c *controls) newestObeyed() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.done
}
