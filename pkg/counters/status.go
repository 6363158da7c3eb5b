package counters

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Groupings counts the groups of the run by what became of them.
func (r *Run) Groupings() outcomes.Groups {
	groups := outcomes.Groups{}
	maps.Copy(groups, r.Outcomes[schemas.KindAdvantage])
	if open := len(r.Open); open > 0 {
		groups[outcomes.Open] = int64(open)
	}
	return groups
}

// Unscored returns how many samples have ended, and have no reward of whatever status.
func (r *Run) Unscored() int64 {
	n := r.Ended()
	for _, of := range r.Outcomes[schemas.KindReward] {
		n -= of
	}
	return max(0, n)
}

// Failed returns how many samples have ended without what they lack: failed and pruned ones.
func (r *Run) Failed() int64 {
	return r.Of(schemas.KindReward, schemas.StatusFailed) + r.Of(schemas.KindReward, schemas.StatusPruned)
}

// Unanswered returns how many prompts intake has neither accepted nor refused. A prompt that was published twice has
// one group: once intake has answered all prompts of all runs, none is open.
func (r *Run) Unanswered(answered bool) int64 {
	if answered {
		return 0
	}
	return max(0, int64(r.Events(schemas.StreamPrompts))-r.Groups-r.Refused())
}

// Outcome says what became of the run; control is the action in force for it, answered says that intake has answered
// all prompts.
func (r *Run) Outcome(control string, answered bool) string {
	if control == schemas.ControlResume {
		control = ""
	}
	c := outcomes.Counts{
		Groups: r.Groupings(), OpenBatches: int64(len(r.Batches)), Unanswered: r.Unanswered(answered),
		Refused: r.Refused(), Control: control,
	}
	return c.Run()
}

// Facts returns what decides what holds up the run, as far as its counts say; waiting requests are in a queue or in a
// sampler's hands.
func (r *Run) Facts(answered bool, waiting int64) *outcomes.Facts {
	f := &outcomes.Facts{Unanswered: r.Unanswered(answered), Unmade: waiting, Unscored: r.Unscored()}
	if len(r.Open) == 0 {
		f.Batches = int64(len(r.Batches))
	}
	return f
}

// Status counts what is stored of a run and says how it is doing, or what became of it. It returns bus.ErrNotFound
// when there is no such run.
func Status(ctx context.Context, b *bus.Bus, run schemas.Run) (*schemas.RunStatus, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	runs, err := Look(ctx, b, run)
	if err != nil {
		return nil, err
	}
	h, err := b.ControlsOf(ctx, run, "")
	if err != nil {
		return nil, err
	}
	r := runs[run]
	if (r == nil || r.Events(schemas.StreamPrompts) == 0 && r.Groups == 0) && h.Run == nil {
		return nil, fmt.Errorf("run %q: %w", run, bus.ErrNotFound)
	}
	if r == nil {
		r = &Run{}
	}
	s, err := r.status(ctx, b, run, h.Run)
	if err != nil {
		return nil, fmt.Errorf("status of run %s: %w", run, err)
	}
	return s, nil
}

// status is Status of a run with these counts and control.
func (r *Run) status(
	ctx context.Context, b *bus.Bus, run schemas.Run, control *schemas.Control,
) (*schemas.RunStatus, error) {
	s := &schemas.RunStatus{
		Groups: r.Groups, OpenBatches: int64(len(r.Batches)), Refused: r.Refused(),
		Trajectories: r.Of(schemas.KindTrajectory, schemas.StopCompleted),
		Rewards:      r.Of(schemas.KindReward, schemas.StatusScored), Failed: r.Failed(),
	}
	for _, n := range r.Outcomes[schemas.KindAdvantage] {
		s.Closed += n
	}
	groups := r.Groupings()
	for _, outcome := range slices.Sorted(maps.Keys(groups)) {
		s.Outcomes = append(s.Outcomes, schemas.OutcomeCount{Outcome: outcome, Groups: groups[outcome]})
	}
	answered, action := b.AllAnswered(ctx), ""
	if c := control; c != nil && c.Action != schemas.ControlResume {
		action, s.By, s.Reason, s.Since = c.Action, c.By, c.Reason, c.Stored
	}
	s.State = r.Outcome(action, answered)
	lanes := map[schemas.Lane]bool{}
	for stream, n := range map[string]*int64{
		schemas.StreamRequests: &s.Waiting, schemas.StreamParked: &s.Parked,
	} {
		subjects, err := b.Subjects(ctx, stream, schemas.RunFilters(run)[stream][0])
		if err != nil {
			return nil, err
		}
		for subject := range subjects {
			*n++
			if a, _ := schemas.ParseSubject(subject); a.Kind == schemas.KindRequest {
				lanes[a.Lane] = true
			}
		}
	}
	keys, err := b.Subjects(ctx, schemas.StreamControlBucket,
		schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, "*")))
	if err != nil {
		return nil, err
	}
	s.Cancelled = int64(len(keys))
	open, err := b.GroupsOf(ctx, run, maps.Keys(r.Open))
	if err != nil {
		return nil, err
	}
	if s.Lost, err = countLost(ctx, b, open); err != nil || s.State != schemas.RunRunning {
		return s, err
	}
	f := r.Facts(answered, s.Waiting)
	if f.Unmade == 0 && slices.ContainsFunc(open, bus.OpenGroup.WantsVerdict) {
		f.Judged = f.Unscored // as far as counts of the whole run say
	}
	s.WaitsFor = LookAround(ctx, b).HeldBy(lanes, f)
	return s, nil
}

// countLost returns how many samples of open groups are lost.
func countLost(ctx context.Context, b *bus.Bus, open []bus.OpenGroup) (n int64, err error) {
	if info, err := b.StreamInfo(ctx, schemas.StreamTrajectories); err != nil || info.Config.Mirror != nil {
		return 0, err // an account of mirrors does not see the queue
	}
	lost, err := b.LostSamples(ctx, open)
	for _, l := range lost {
		n += int64(len(l.Samples))
	}
	return n, err
}

// Around is what decides for all runs what holds them up: which services run, and whether something is full.
type Around struct {
	present []*schemas.Presence
	full    bool
	known   bool // else the caller may not see it
}

// LookAround returns what holds for all runs.
func LookAround(ctx context.Context, b *bus.Bus) *Around {
	present, err := b.Present(ctx)
	if err != nil {
		return &Around{}
	}
	faults, err := b.Faults(ctx)
	return &Around{present, slices.ContainsFunc(faults, bus.Fault.Full), err == nil}
}

// HeldBy returns what holds up an open run, whose requests are in these lanes; "": it goes on, or that is not known.
func (a *Around) HeldBy(lanes map[schemas.Lane]bool, f *outcomes.Facts) string {
	if !a.known {
		return ""
	}
	served := map[schemas.Lane]bool{}
	for _, p := range a.present {
		f.Sampler = f.Sampler || p.Service == schemas.ServiceSampler || p.Service == schemas.ServiceStarting
		f.Reward = f.Reward || p.Service == schemas.ServiceReward
		served[p.Lane] = true
	}
	f.Full = a.full
	for lane := range lanes {
		f.Unserved = f.Unserved || !served[lane]
	}
	return string(f.HeldBy())
}
