package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

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

// decodeControl decodes an entry of the bucket of controls. It returns nil for a removed entry, and for one that
// cannot be read, which it logs.
func (b *Bus) decodeControl(m *Message) *schemas.Control {
	if len(m.Data) == 0 {
		return nil
	}
	c := &schemas.Control{}
	err := schemas.DecodeValid(m.Data, c)
	if key := schemas.BucketSubject(schemas.ControlBucket, c.Key()); err == nil && key != m.Subject {
		err = fmt.Errorf("a control of %q", key)
	}
	if err != nil {
		if b.waitLog.allow() {
			b.log.Warn().Err(err).Str("subject", m.Subject).Msg("control not readable")
		}
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
	key := c.Key()
	for {
		holds = c
		err := b.retryWhileAway(ctx, func(ctx context.Context) error {
			kv, err := b.bucket(ctx, schemas.ControlBucket)
			if err != nil {
				return err
			}
			var revision uint64
			switch e, err := kv.Get(ctx, key); {
			case err == nil:
				old := &schemas.Control{}
				if schemas.DecodeValid(e.Value(), old) == nil &&
					(old.Seq >= c.Seq || old.Action == schemas.ControlCancel) {
					holds = old
					return nil
				}
				revision = e.Revision()
			case !errors.Is(err, jetstream.ErrKeyNotFound):
				return err
			}
			if revision == 0 {
				_, err = kv.Create(ctx, key, data)
			} else {
				_, err = kv.Update(ctx, key, data, revision)
			}
			return err
		})
		switch {
		case err == nil:
			return holds, holds == c || holds.Seq == c.Seq, nil
		case isLostUpdate(err):
			continue // another writer was first
		default:
			return nil, false, fmt.Errorf("hold %s of %q: %w", c.Action, key, err)
		}
	}
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

// Controls has the current controls of all runs, as far as this process has heard. It answers without the server,
// because callers ask it about every message.
type Controls struct {
	bus *Bus

	mu      sync.Mutex
	inForce map[string]*schemas.Control // by ControlKey
	seq     uint64
	changes int
	changed chan struct{}
}

// Controls returns the controls in force once the server has told them; a service keeps it. Its Follow keeps them up
// to date.
func (b *Bus) Controls(ctx context.Context) (*Controls, error) {
	c := &Controls{bus: b, inForce: map[string]*schemas.Control{}, changed: make(chan struct{})}
	var stored []*Message
	err := b.retryUntilReady(ctx, schemas.StreamControlBucket, "controls not known",
		func(ctx context.Context) (err error) {
			stored, err = b.LastMany(ctx, schemas.StreamControlBucket,
				[]string{schemas.BucketSubject(schemas.ControlBucket, ">")})
			return err
		})
	if err != nil {
		return nil, fmt.Errorf("controls: %w", err)
	}
	for _, m := range stored {
		c.applyEntry(m)
	}
	return c, nil
}

// Follow keeps the controls up to date until ctx ends.
func (c *Controls) Follow(ctx context.Context) error {
	c.bus.followEntries(ctx, schemas.StreamControlBucket, schemas.BucketSubject(schemas.ControlBucket, ">"),
		c.applyEntry)
	return nil
}

// applyEntry stores or removes the control of one entry of the bucket of controls, and wakes those who wait for a
// change.
func (c *Controls) applyEntry(m *Message) {
	key := strings.TrimPrefix(m.Subject, schemas.BucketSubject(schemas.ControlBucket, ""))
	control := c.bus.decodeControl(m)
	c.mu.Lock()
	defer c.mu.Unlock()
	if control == nil {
		delete(c.inForce, key)
	} else {
		c.inForce[key] = control
		c.seq = max(c.seq, control.Seq)
	}
	c.changes++
	close(c.changed)
	c.changed = make(chan struct{})
}

// Of returns the controls of a run and of one of its groups.
func (c *Controls) Of(run schemas.Run, uid schemas.UID) InForce {
	c.mu.Lock()
	defer c.mu.Unlock()
	return InForce{c.inForce[schemas.ControlKey(run, "")], c.inForce[schemas.ControlKey(run, uid)]}
}

// Pruned returns the control that ends a sample, or nil.
func (c *Controls) Pruned(run schemas.Run, uid schemas.UID, sample int64) *schemas.Control {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inForce[schemas.PruneKey(run, uid, sample)]
}

// Newest returns the sequence of the newest control, in MDR_CONTROL.
func (c *Controls) Newest() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seq
}

// Changes returns the number of changes so far, so that a caller can tell whether there was a new one.
func (c *Controls) Changes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changes
}

// Changed returns a channel that is closed at the next change.
func (c *Controls) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// AllAnswered reports whether intake has answered all prompts of all runs, as far as whoever asks may see it.
func (b *Bus) AllAnswered(ctx context.Context) bool {
	c, err := b.js.Consumer(ctx, schemas.StreamPrompts, schemas.PromptsDurable().Name)
	return err == nil && c.CachedInfo().NumPending == 0 && c.CachedInfo().NumAckPending == 0
}
