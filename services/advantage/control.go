package advantage

import (
	"errors"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// heed takes in what holds of a group: one that was cancelled closes with what it has, and
// while its run is paused the time of one without a deadline of its own stands still. A group
// that has its verdict keeps it.
func (w *worker) heed(g *group) {
	h := w.controls.Of(g.run, g.uid)
	if c := h.Cancelled(); c != nil && g.ended == nil && g.verdict == nil && g.result == nil {
		g.ended = errors.New(c.Says())
		w.again = true
	}
	g.paused = h.Paused() != nil
	if r := h.Run; r != nil && r.Action == schemas.ControlResume {
		g.resumed = time.Unix(0, r.Stored)
	}
	g.reckon(w.cfg.GroupTimeout)
}

// reckon is when a group without a deadline of its own closes: timeout after its first reward,
// or after its run was last resumed; never while it is paused.
func (g *group) reckon(timeout time.Duration) {
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

// ended says whether a batch gets no more groups since its run was cancelled: each of those it
// has is decided on.
func (w *worker) ended(b *batch) bool {
	if c := w.controls.Of(b.run, "").Run; c == nil || c.Action != schemas.ControlCancel {
		return false
	}
	for _, g := range b.groups {
		if g.verdict == nil {
			return false
		}
	}
	return true
}
