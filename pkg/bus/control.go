package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// InForce are the newest controls (pause, resume, cancel) of a group and of its run that intake accepted. Each is nil
// when there is none.
type InForce struct{ Run, Group *schemas.Control }

// Cancelled returns the control that ended the group, or nil.
func (h InForce) Cancelled() *schemas.Control {
	for _, c := range []*schemas.Control{h.Run, h.Group} {
		if c != nil && c.Action == schemas.ControlCancel {
			return c
		}
	}
	return nil
}

// Paused returns the control that pauses the run, or nil.
func (h InForce) Paused() *schemas.Control {
	if h.Run != nil && h.Run.Action == schemas.ControlPause {
		return h.Run
	}
	return nil
}

// ControlsOf asks the server for the controls in force of a run and of one of its groups; with no uid, of the run
// alone.
func (b *Bus) ControlsOf(ctx context.Context, run schemas.Run, uid schemas.UID) (InForce, error) {
	var h InForce
	ask := func(uid schemas.UID) (*schemas.Control, error) {
		m, err := b.Last(ctx, schemas.StreamControlBucket,
			schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, uid)))
		switch {
		case errors.Is(err, ErrNotFound):
			return nil, nil
		case err != nil:
			return nil, fmt.Errorf("controls of run %s: %w", run, err)
		}
		return b.decodeControl(m), nil
	}
	var err error
	if h.Run, err = ask(""); err == nil && uid != "" {
		h.Group, err = ask(uid)
	}
	return h, err
}

// PausedRuns returns the controls that pause runs, sorted by run.
func (b *Bus) PausedRuns(ctx context.Context) ([]*schemas.Control, error) {
	all, err := b.RunControls(ctx)
	return slices.DeleteFunc(all, func(c *schemas.Control) bool { return c.Action != schemas.ControlPause }), err
}

// RunControls returns the controls in force of all runs that were ever paused or cancelled, sorted by run.
func (b *Bus) RunControls(ctx context.Context) ([]*schemas.Control, error) {
	stored, err := b.LastMany(ctx, schemas.StreamControlBucket,
		[]string{schemas.BucketSubject(schemas.ControlBucket, "*")})
	if err != nil {
		return nil, fmt.Errorf("controls of runs: %w", err)
	}
	var out []*schemas.Control
	for _, m := range stored {
		if c := b.decodeControl(m); c != nil {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b *schemas.Control) int { return cmp.Compare(a.Run, b.Run) })
	return out, nil
}

func (b *Bus) decodeControl(m *Message) *schemas.Control {
	c := &schemas.Control{}
	at := func() []string { return []string{schemas.BucketSubject(schemas.ControlBucket, c.Key())} }
	if !b.decodeEntry(m, c, at) {
		return nil
	}
	return c
}

// PutControl stores c as the control in force of its run or group; intake calls it for a control that it accepts. It
// does not replace a newer control, or a cancel, which is final. It returns the control that is in force afterwards,
// and whether that is c.
func (b *Bus) PutControl(ctx context.Context, c *schemas.Control) (holds *schemas.Control, mine bool, err error) {
	data, err := schemas.Encode(c)
	if err != nil {
		return nil, false, err
	}
	err = b.updateKey(ctx, schemas.ControlBucket, c.Key(), func(_ context.Context, value []byte) ([]byte, error) {
		old := &schemas.Control{}
		if schemas.DecodeValid(value, old) == nil && (old.Seq >= c.Seq || old.Action == schemas.ControlCancel) {
			holds = old
			return nil, nil
		}
		holds = c
		return data, nil
	})
	if err != nil {
		return nil, false, fmt.Errorf("hold %s of %q: %w", c.Action, c.Key(), err)
	}
	return holds, holds == c || holds.Seq == c.Seq, nil
}

// deleteControls removes all controls of a run, of its groups and of its samples, when the run is purged.
func (b *Bus) deleteControls(ctx context.Context, run schemas.Run) error {
	for _, filter := range []string{schemas.ControlKey(run, ""), string(run) + ".>"} {
		if _, err := b.PurgeSubject(ctx, schemas.StreamControlBucket,
			schemas.BucketSubject(schemas.ControlBucket, filter)); err != nil {
			return err
		}
	}
	return nil
}

// Controls has the current controls of all runs, by ControlKey, as far as this process has heard.
type Controls struct{ *mirror[schemas.Control] }

// Controls returns the controls in force once the server has told them; a service keeps it. Its Follow keeps them up
// to date.
func (b *Bus) Controls(ctx context.Context) (*Controls, error) {
	r, err := newMirror(ctx, b, "controls", schemas.ControlBucket, b.decodeControl)
	return &Controls{r}, err
}

// Of returns the controls of a run and of one of its groups.
func (c *Controls) Of(run schemas.Run, uid schemas.UID) InForce {
	return InForce{c.get(schemas.ControlKey(run, "")), c.get(schemas.ControlKey(run, uid))}
}

// Pruned returns the control that ends a sample, or nil. A stage of samples ends when all that it leads to are to: of
// their controls it is the one that asks for the latest step.
func (c *Controls) Pruned(r *schemas.Request) (last *schemas.Control) {
	n := int64(1)
	if i := r.Group.StageIndex(r.Stage); i >= 0 {
		n = r.Group.Stages[i].Every
	}
	for i := range n {
		one := c.get(schemas.PruneKey(r.Run, r.UID, r.SampleIndex+i))
		if one == nil {
			return nil
		}
		if last == nil || one.StepIndex > last.StepIndex {
			last = one
		}
	}
	return last
}

// Newest returns the sequence of the newest control, in MDR_CONTROL.
func (c *Controls) Newest() (seq uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, control := range c.entries {
		seq = max(seq, control.Seq)
	}
	return seq
}

// AllAnswered reports whether intake has answered all prompts of all runs, as far as the caller may see it.
func (b *Bus) AllAnswered(ctx context.Context) bool {
	c, err := b.js.Consumer(ctx, schemas.StreamPrompts, schemas.PromptsDurable().Name)
	return err == nil && c.CachedInfo().NumPending == 0 && c.CachedInfo().NumAckPending == 0
}
