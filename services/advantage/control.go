package advantage

import (
	"errors"
	"time"

	"github.com/meander-rl/meander/schemas"
)

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
