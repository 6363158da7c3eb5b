package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/outcomes"
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
	if !b.decodeEntry(m, c, func() []string { return []string{schemas.BucketSubject(schemas.ControlBucket, c.Key())} }) {
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

// Pruned returns the control that ends a sample, or nil.
func (c *Controls) Pruned(run schemas.Run, uid schemas.UID, sample int64) *schemas.Control {
	return c.get(schemas.PruneKey(run, uid, sample))
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

// RunStatus counts what is stored of a run and says how it is doing, or what became of it. It returns ErrNotFound when
// there is no such run.
func (b *Bus) RunStatus(ctx context.Context, run schemas.Run) (*schemas.RunStatus, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	s, err := b.runStatus(ctx, run)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, fmt.Errorf("status of run %s: %w", run, err)
	}
	return s, err
}

func (b *Bus) runStatus(ctx context.Context, run schemas.Run) (*schemas.RunStatus, error) {
	s, counts := &schemas.RunStatus{}, &outcomes.Counts{Groups: outcomes.Groups{}}
	prompts, uids, lanes := int64(0), map[schemas.UID]bool{}, map[schemas.Lane]bool{}
	for _, part := range []struct {
		n            *int64
		stream, kind string
	}{
		{&prompts, schemas.StreamPrompts, schemas.KindPrompt},
		{&s.Groups, schemas.StreamGroups, schemas.KindGroup},
		{&s.Waiting, schemas.StreamRequests, schemas.KindRequest},
		{&s.Parked, schemas.StreamParked, schemas.KindParked},
	} {
		subjects, err := b.Subjects(ctx, part.stream, schemas.Address{Kind: part.kind, Run: run}.Filter())
		if err != nil {
			return nil, err
		}
		for subject, n := range subjects {
			*part.n += int64(n)
			switch a, _ := schemas.ParseSubject(subject); a.Kind {
			case schemas.KindGroup:
				uids[a.UID] = true
			case schemas.KindRequest:
				lanes[a.Lane] = true
			}
		}
	}
	h, err := b.ControlsOf(ctx, run, "")
	if err != nil {
		return nil, err
	}
	if prompts+s.Groups == 0 && h.Run == nil {
		return nil, fmt.Errorf("run %q: %w", run, ErrNotFound)
	}
	ended, err := b.countOutcomes(ctx, run, s, counts.Groups)
	if err != nil {
		return nil, err
	}
	if s.OpenBatches, err = b.openBatches(ctx, run); err != nil {
		return nil, err
	}
	if s.Lost, err = b.countLost(ctx, run); err != nil {
		return nil, err
	}
	keys, err := b.Subjects(ctx, schemas.StreamControlBucket,
		schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, "*")))
	if err != nil {
		return nil, err
	}
	s.Cancelled = int64(len(keys))
	counts.OpenBatches = s.OpenBatches
	if counts.Unanswered, s.Refused, err = b.answered(ctx, run, prompts, uids); err != nil {
		return nil, err
	}
	counts.Refused = s.Refused
	if c := h.Run; c != nil && c.Action != schemas.ControlResume {
		counts.Control, s.By, s.Reason, s.Since = c.Action, c.By, c.Reason, c.Stored
	}
	s.State = counts.Run()
	if s.State == schemas.RunRunning {
		f := &outcomes.Facts{
			Unanswered: counts.Unanswered, Unmade: s.Waiting, Unscored: max(0, ended-s.Rewards-s.Failed),
		}
		if s.Groups == s.Closed {
			f.Batches = s.OpenBatches
		}
		s.WaitsFor = b.heldBy(ctx, run, lanes, f)
	}
	return s, nil
}

func (b *Bus) countLost(ctx context.Context, run schemas.Run) (n int64, err error) {
	if info, err := b.StreamInfo(ctx, schemas.StreamTrajectories); err != nil || info.Config.Mirror != nil {
		return 0, err // an account of mirrors does not see the queue
	}
	open, err := b.OpenGroups(ctx, run)
	if err != nil {
		return 0, err
	}
	lost, err := b.LostSamples(ctx, open)
	for _, l := range lost {
		n += int64(len(l.Samples))
	}
	return n, err
}

// countOutcomes counts the samples and groups of a run by what became of them; ended samples have a trajectory, of
// whatever outcome.
func (b *Bus) countOutcomes(
	ctx context.Context, run schemas.Run, s *schemas.RunStatus, groups outcomes.Groups,
) (ended int64, err error) {
	err = b.Outcomes(ctx, schemas.KindAdvantage, run, func(_ schemas.Address, outcome string) {
		if outcome != "" {
			groups[outcome]++
			s.Closed++
		}
	})
	if err == nil {
		err = b.Outcomes(ctx, schemas.KindTrajectory, run, func(_ schemas.Address, outcome string) {
			if ended++; outcome == schemas.StopCompleted {
				s.Trajectories++
			}
		})
	}
	if err == nil {
		err = b.Outcomes(ctx, schemas.KindReward, run, func(_ schemas.Address, outcome string) {
			switch outcome {
			case schemas.StatusScored:
				s.Rewards++
			case schemas.StatusFailed, schemas.StatusPruned:
				s.Failed++
			}
		})
	}
	if open := s.Groups - s.Closed; open > 0 {
		groups[outcomes.Open] = open
	}
	for _, outcome := range slices.Sorted(maps.Keys(groups)) {
		s.Outcomes = append(s.Outcomes, schemas.OutcomeCount{Outcome: outcome, Groups: groups[outcome]})
	}
	return ended, err
}

// WantsVerdicts reports whether groups of a run are scored by people or batch jobs.
func (b *Bus) WantsVerdicts(ctx context.Context, run schemas.Run) (bool, error) {
	records, err := b.LastMany(ctx, schemas.StreamGroups, []string{schemas.GroupSubject(run, "*")})
	if err != nil {
		return false, fmt.Errorf("groups of run %s: %w", run, err)
	}
	return slices.ContainsFunc(records, func(m *Message) bool {
		var g schemas.GroupRecord
		return Fits(m, &g) == nil && slices.ContainsFunc(g.Group.Reward, schemas.RewardSpec.IsVerdict)
	}), nil
}

// answered returns how many prompts of a run intake has not answered, as far as that is known, and how many it has
// refused without a group. A prompt that was published twice has one group, and one that cannot be read has none.
func (b *Bus) answered(
	ctx context.Context, run schemas.Run, prompts int64, groups map[schemas.UID]bool,
) (open, refused int64, err error) {
	open = prompts - int64(len(groups))
	letters, err := b.Subjects(ctx, schemas.StreamDead,
		schemas.Address{Kind: schemas.KindDead, Service: schemas.ServiceIntake, Run: run}.Filter())
	for subject, n := range letters {
		if a, _ := schemas.ParseSubject(subject); !groups[a.UID] {
			refused += int64(n)
		}
	}
	open -= refused
	if open > 0 && err == nil && b.AllAnswered(ctx) {
		open = 0
	}
	return max(0, open), refused, err
}

// AllAnswered reports whether intake has answered all prompts of all runs, as far as whoever asks may see it.
func (b *Bus) AllAnswered(ctx context.Context) bool {
	c, err := b.js.Consumer(ctx, schemas.StreamPrompts, schemas.PromptsDurable().Name)
	return err == nil && c.CachedInfo().NumPending == 0 && c.CachedInfo().NumAckPending == 0
}

// heldBy returns what holds up an open run, whose requests are in these lanes; "": it goes on, or whoever asks may not
// see it.
func (b *Bus) heldBy(ctx context.Context, run schemas.Run, lanes map[schemas.Lane]bool, f *outcomes.Facts) string {
	present, err := b.Present(ctx)
	if err != nil {
		return ""
	}
	faults, err := b.Faults(ctx)
	if err != nil {
		return ""
	}
	f.Full = slices.ContainsFunc(faults, Fault.Full)
	if f.Unmade == 0 && f.Unscored > 0 {
		judged, err := b.WantsVerdicts(ctx, run)
		if err != nil {
			return ""
		}
		if judged {
			f.Judged = f.Unscored // as far as counts of the whole run say
		}
	}
	for _, p := range present {
		f.Sampler = f.Sampler || p.Service == schemas.ServiceSampler || p.Service == schemas.ServiceStarting
		f.Reward = f.Reward || p.Service == schemas.ServiceReward
		delete(lanes, p.Lane)
	}
	f.Unserved = len(lanes) > 0
	return string(f.HeldBy())
}

func (b *Bus) openBatches(ctx context.Context, run schemas.Run) (int64, error) {
	openings, err := b.Subjects(ctx, schemas.StreamRewards,
		schemas.Address{Kind: schemas.KindOpening, Run: run}.Filter())
	if err != nil {
		return 0, err
	}
	open := map[string]bool{}
	for subject := range openings {
		if a, _ := schemas.ParseSubject(subject); a.Batch != string(a.UID) { // else the group is a batch by itself
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
