package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

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
