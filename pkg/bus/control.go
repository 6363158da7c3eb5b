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

// controlStream is the stream behind the bucket of the controls that hold.
const controlStream = "KV_" + schemas.ControlBucket

// Held is what holds of a group and of its run: the newest controls that intake accepted.
// Both are nil where nobody has asked for anything.
type Held struct{ Run, Group *schemas.Control }

// Cancelled is the control that ended the group, nil when none did.
func (h Held) Cancelled() *schemas.Control {
	for _, c := range []*schemas.Control{h.Run, h.Group} {
		if c != nil && c.Action == schemas.ControlCancel {
			return c
		}
	}
	return nil
}

// Paused is the control that lets the run wait, nil when none does.
func (h Held) Paused() *schemas.Control {
	if h.Run != nil && h.Run.Action == schemas.ControlPause {
		return h.Run
	}
	return nil
}

// Held asks the server for what holds of a group, or of a run (no uid) alone.
func (b *Bus) Held(ctx context.Context, run schemas.Run, uid schemas.UID) (Held, error) {
	var h Held
	ask := func(uid schemas.UID) (*schemas.Control, error) {
		m, err := b.Last(ctx, controlStream, schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, uid)))
		switch {
		case errors.Is(err, ErrNotFound):
			return nil, nil
		case err != nil:
			return nil, fmt.Errorf("controls of run %s: %w", run, err)
		}
		return b.heldControl(m), nil
	}
	var err error
	if h.Run, err = ask(""); err == nil && uid != "" {
		h.Group, err = ask(uid)
	}
	return h, err
}

// PausedRuns are the controls that let runs wait, by run.
func (b *Bus) PausedRuns(ctx context.Context) ([]*schemas.Control, error) {
	stored, err := b.LastMany(ctx, controlStream, []string{schemas.BucketSubject(schemas.ControlBucket, "*")})
	if err != nil {
		return nil, fmt.Errorf("paused runs: %w", err)
	}
	var out []*schemas.Control
	for _, m := range stored {
		if c := b.heldControl(m); c != nil && c.Action == schemas.ControlPause {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b *schemas.Control) int { return cmp.Compare(a.Run, b.Run) })
	return out, nil
}

// heldControl reads an entry of the bucket; nil for one that was taken out, or that nobody
// can have meant.
func (b *Bus) heldControl(m *Message) *schemas.Control {
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

// Hold makes a control the one that holds of its run or group, unless a newer one does, or
// one that is final: what was cancelled stays so. It returns the one that holds then, and
// whether it is this.
func (b *Bus) Hold(ctx context.Context, c *schemas.Control) (holds *schemas.Control, mine bool, err error) {
	data, err := schemas.Encode(c)
	if err != nil {
		return nil, false, err
	}
	key := c.Key()
	for {
		holds = c
		err := b.patiently(ctx, func(ctx context.Context) error {
			kv, err := b.bucket(ctx, schemas.ControlBucket)
			if err != nil {
				return err
			}
			var revision uint64
			switch e, err := kv.Get(ctx, key); {
			case err == nil:
				old := &schemas.Control{}
				if schemas.DecodeValid(e.Value(), old) == nil && (old.Seq >= c.Seq || old.Action == schemas.ControlCancel) {
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
		switch api, _ := errors.AsType[*jetstream.APIError](err); {
		case err == nil:
			return holds, holds == c || holds.Seq == c.Seq, nil
		case errors.Is(err, jetstream.ErrKeyExists) || api != nil && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence:
			continue // somebody was first
		default:
			return nil, false, fmt.Errorf("hold %s of %q: %w", c.Action, key, err)
		}
	}
}

// deleteControls takes out what holds of a run.
func (b *Bus) deleteControls(ctx context.Context, run schemas.Run) error {
	for _, filter := range []string{schemas.ControlKey(run, ""), string(run) + ".>"} {
		if _, err := b.PurgeSubject(ctx, controlStream, schemas.BucketSubject(schemas.ControlBucket, filter)); err != nil {
			return err
		}
	}
	return nil
}

// Controls is what holds of all runs, as far as this process has heard: what is asked of
// every message has to be answered at once.
type Controls struct {
	bus *Bus

	mu      sync.Mutex
	held    map[string]*schemas.Control // by ControlKey
	seq     uint64
	changes int
	changed chan struct{}
}

// Controls returns what holds now, once the server says it; Follow keeps it up to date.
func (b *Bus) Controls(ctx context.Context) (*Controls, error) {
	c := &Controls{bus: b, held: map[string]*schemas.Control{}, changed: make(chan struct{})}
	var stored []*Message
	err := b.insist(ctx, controlStream, "controls not known", func(ctx context.Context) (err error) {
		stored, err = b.LastMany(ctx, controlStream, []string{schemas.BucketSubject(schemas.ControlBucket, ">")})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("controls: %w", err)
	}
	for _, m := range stored {
		c.take(m)
	}
	return c, nil
}

// Follow keeps the controls up to date until ctx ends.
func (c *Controls) Follow(ctx context.Context) error {
	all := []string{schemas.BucketSubject(schemas.ControlBucket, ">")}
	for ctx.Err() == nil && !c.bus.nc.IsClosed() {
		for m, err := range c.bus.Read(ctx, controlStream, all, ReadOptions{Live: true, lastPerSubject: true}) {
			if err != nil {
				if c.bus.waitLog.allow() {
					c.bus.log.Warn().Err(err).Msg("controls not followed, trying again")
				}
				break
			}
			c.take(m)
		}
		_ = pause(ctx, rebindPause)
	}
	return nil
}

// take notes one entry of the bucket.
func (c *Controls) take(m *Message) {
	key := strings.TrimPrefix(m.Subject, schemas.BucketSubject(schemas.ControlBucket, ""))
	control := c.bus.heldControl(m)
	c.mu.Lock()
	defer c.mu.Unlock()
	if control == nil {
		delete(c.held, key)
	} else {
		c.held[key] = control
		c.seq = max(c.seq, control.Seq)
	}
	c.changes++
	close(c.changed)
	c.changed = make(chan struct{})
}

// Of is what holds of a group and its run.
func (c *Controls) Of(run schemas.Run, uid schemas.UID) Held {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Held{c.held[schemas.ControlKey(run, "")], c.held[schemas.ControlKey(run, uid)]}
}

// Pruned is the control that ends a sample, nil when none does.
func (c *Controls) Pruned(run schemas.Run, uid schemas.UID, sample int64) *schemas.Control {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held[schemas.PruneKey(run, uid, sample)]
}

// Newest is the sequence of the newest control, in MDR_CONTROL.
func (c *Controls) Newest() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seq
}

// Changes counts them, so that who looks now and then can tell whether it has to.
func (c *Controls) Changes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changes
}

// Changed is closed with the next change.
func (c *Controls) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// RunStatus says how a run is doing, from what is stored of it; ErrNotFound when nothing is.
func (b *Bus) RunStatus(ctx context.Context, run schemas.Run) (*schemas.RunStatus, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	s := &schemas.RunStatus{State: schemas.RunRunning}
	prompts, err := int64(0), error(nil)
	for _, part := range []struct {
		n            *int64
		stream, kind string
	}{
		{&prompts, schemas.StreamPrompts, schemas.KindPrompt},
		{&s.Groups, schemas.StreamGroups, schemas.KindGroup},
		{&s.Closed, schemas.StreamAdvantages, schemas.KindAdvantage},
		{&s.Trajectories, schemas.StreamTrajectories, schemas.KindTrajectory},
		{&s.Rewards, schemas.StreamRewards, schemas.KindReward},
		{&s.Waiting, schemas.StreamRequests, schemas.KindRequest},
		{&s.Parked, schemas.StreamParked, schemas.KindParked},
	} {
		subjects, err := b.Subjects(ctx, part.stream, schemas.Address{Kind: part.kind, Run: run}.Filter())
		if err != nil {
			return nil, fmt.Errorf("status of run %s: %w", run, err)
		}
		for _, n := range subjects {
			*part.n += int64(n)
		}
	}
	if s.OpenBatches, err = b.openBatches(ctx, run); err != nil {
		return nil, fmt.Errorf("status of run %s: %w", run, err)
	}
	keys, err := b.Subjects(ctx, controlStream, schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, "*")))
	if err != nil {
		return nil, fmt.Errorf("status of run %s: %w", run, err)
	}
	s.Cancelled = int64(len(keys))
	h, err := b.Held(ctx, run, "")
	if err != nil {
		return nil, err
	}
	if c := h.Run; c != nil && c.Action != schemas.ControlResume {
		s.State, s.By, s.Reason, s.Since = schemas.RunPaused, c.By, c.Reason, c.Stored
		if c.Action == schemas.ControlCancel {
			s.State = schemas.RunCancelled
		}
	} else if s.Groups > 0 && s.Closed >= s.Groups && s.OpenBatches == 0 {
		// Prompts that intake has not taken up have no group yet; some are published twice.
		taken := prompts <= s.Groups
		if c, err := b.js.Consumer(ctx, schemas.StreamPrompts, IntakeConsumer); !taken && err == nil {
			taken = c.CachedInfo().NumPending == 0 && c.CachedInfo().NumAckPending == 0
		}
		if taken {
			s.State = schemas.RunDone
		}
	}
	if prompts+s.Groups == 0 && h.Run == nil {
		return nil, fmt.Errorf("run %q: %w", run, ErrNotFound)
	}
	return s, nil
}

// openBatches is how many batches of a run have groups and no result.
func (b *Bus) openBatches(ctx context.Context, run schemas.Run) (int64, error) {
	openings, err := b.Subjects(ctx, schemas.StreamRewards, schemas.Address{Kind: schemas.KindOpening, Run: run}.Filter())
	if err != nil {
		return 0, err
	}
	open := map[string]bool{}
	for subject := range openings {
		if a, _ := schemas.ParseSubject(subject); a.Batch != string(a.UID) { // else it is a batch of its own
			open[schemas.BatchSubject(run, a.Batch)] = true
		}
	}
	closed, err := b.Subjects(ctx, schemas.StreamAdvantages, schemas.BatchSubject(run, "*"))
	if err != nil {
		return 0, err
	}
	for subject := range closed {
		delete(open, subject)
	}
	return int64(len(open)), nil
}
