package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

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

const maxNamed = 12

// Controllable returns nil when the run, group or sample that a control names exists; clients and intake ask before
// they accept a control. Otherwise it returns an error that is ErrNotFound and lists what exists.
func (b *Bus) Controllable(ctx context.Context, c *schemas.Control) error {
	is, err := b.isRun(ctx, c.Run)
	switch {
	case err != nil:
		return err
	case !is:
		return b.noSuchRun(ctx, c.Run)
	case c.UID == "":
		return nil
	}
	g, err := b.Group(ctx, c.Run, c.UID)
	switch {
	case err == nil && c.SampleIndex != nil && *c.SampleIndex >= g.GroupSize:
		return notThere("sample_index: %d; must be below %d, the samples of group %s", *c.SampleIndex, g.GroupSize,
			c.UID)
	case !errors.Is(err, ErrNotFound):
		return err
	}
	if asked, err := b.isPrompted(ctx, c.Run, c.UID); asked || err != nil {
		return err
	}
	names, err := b.Subjects(ctx, schemas.StreamGroups, schemas.Address{Kind: schemas.KindGroup, Run: c.Run}.Filter())
	if err != nil {
		return err
	}
	var uids []string
	for subject := range names {
		a, _ := schemas.ParseSubject(subject)
		uids = append(uids, string(a.UID))
	}
	return notThere("uid: %s; must be one of the %d groups of run %s: %s", c.UID, len(uids), c.Run, listNames(uids))
}

// isRun reports whether a prompt or a group of the run is stored, or a control of it is in force.
func (b *Bus) isRun(ctx context.Context, run schemas.Run) (bool, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return false, err
	}
	for _, at := range [][2]string{
		{schemas.StreamPrompts, schemas.PromptSubject(run)},
		{schemas.StreamGroups, schemas.GroupSubject(run, "*")},
	} {
		if n, err := b.Stored(ctx, at[0], []string{at[1]}, 1); n > 0 || err != nil {
			return n > 0, err
		}
	}
	h, err := b.ControlsOf(ctx, run, "")
	return h.Run != nil, err
}

// isPrompted reports whether the run has a prompt with this uid that intake has not accepted yet.
func (b *Bus) isPrompted(ctx context.Context, run schemas.Run, uid schemas.UID) (bool, error) {
	for m, err := range b.Read(ctx, schemas.StreamPrompts, []string{schemas.PromptSubject(run)}, ReadOptions{}) {
		if err != nil {
			return false, err
		}
		var p schemas.Prompt
		if schemas.Decode(m.Data, &p) == nil && p.GroupUID(m.Seq) == uid {
			return true, nil
		}
	}
	return false, ctx.Err()
}

// noSuchRun returns the error for a run that does not exist (ErrNotFound), with the names of those that do.
func (b *Bus) noSuchRun(ctx context.Context, run schemas.Run) error {
	names, err := b.Subjects(ctx, schemas.StreamPrompts, schemas.PromptSubject("*"))
	if err != nil {
		return err
	}
	var runs []string
	for subject := range names {
		name, _ := schemas.RunOf(subject)
		runs = append(runs, string(name))
	}
	if len(runs) == 0 {
		return notThere("run: %s; there is no run yet", run)
	}
	return notThere("run: %s; must be one of the %d there are: %s", run, len(runs), listNames(runs))
}

type notThereError struct{ error }

func (notThereError) Is(target error) bool { return target == ErrNotFound }

func notThere(format string, args ...any) error { return notThereError{fmt.Errorf(format, args...)} }

func listNames(names []string) string {
	slices.Sort(names)
	if len(names) > maxNamed {
		return strings.Join(names[:maxNamed], " ") + " ..."
	}
	return strings.Join(names, " ")
}
