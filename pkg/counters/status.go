package counters

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// groupings counts the groups of the run by what became of them.
func (r *Run) groupings() outcomes.Groups {
	groups := outcomes.Groups{}
	for _, o := range r.Outcomes {
		if o.Kind == schemas.KindAdvantage {
			groups[o.Outcome] = o.N
		}
	}
	if open := len(r.Open); open > 0 {
		groups[outcomes.Open] = int64(open)
	}
	return groups
}

// Unscored returns how many samples have ended, and have no reward of whatever status.
func (r *Run) Unscored() int64 {
	return max(0, r.Ended()-r.Of(schemas.KindReward, ""))
}

// Failed returns how many samples have ended without what they lack: failed and pruned ones.
func (r *Run) Failed() int64 {
	return r.Of(schemas.KindReward, schemas.StatusFailed) + r.Of(schemas.KindReward, schemas.StatusPruned)
}

// midwayOf returns the steps of a group in Midway, to be changed.
func (r *Run) midwayOf(uid schemas.UID) map[string]int64 {
	if r.Midway[uid] == nil {
		put(&r.Midway, uid, map[string]int64{})
	}
	return r.Midway[uid]
}

// midway returns how many samples wait at a step.
func (r *Run) midway() (n int64) {
	for _, steps := range r.Midway {
		for _, of := range steps {
			n += max(0, of)
		}
	}
	return n
}

// Unanswered returns how many prompts intake has neither accepted nor refused. A prompt that was published twice has
// one group: once intake has answered all prompts of all runs, none is open.
func (r *Run) Unanswered(answered bool) int64 {
	if answered {
		return 0
	}
	return max(0, int64(r.Events(schemas.StreamPrompts))-r.Groups-r.Refused())
}

// Counted are the counts of a run, and what they say.
type Counted struct {
	*Run
	// Status is without Cancelled and Lost, which only Status looks for.
	Status *schemas.RunStatus
	// Groupings counts its groups by what became of them.
	Groupings outcomes.Groups
	// Queued are the messages of the run in the queues, by stream.
	Queued map[string]uint64

	control *schemas.Control      // in force for all of the run; nil: none is
	lanes   map[schemas.Lane]bool // that have requests
}

// Status counts what is stored of a run and says how it is doing, or what became of it. It returns bus.ErrNotFound
// when there is no such run.
func Status(ctx context.Context, b *bus.Bus, run schemas.Run) (*schemas.RunStatus, error) {
	c, err := Of(ctx, b, run)
	if err != nil {
		return nil, err
	}
	return c.Status, nil
}

// Of is Status, with the counts.
func Of(ctx context.Context, b *bus.Bus, run schemas.Run) (*Counted, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	all, err := Statuses(ctx, b, run)
	if err != nil {
		return nil, err
	}
	c := all[run]
	if c.Events(schemas.StreamPrompts) == 0 && c.Groups == 0 && c.control == nil {
		return nil, fmt.Errorf("run %q: %w", run, bus.ErrNotFound)
	}
	keys, err := b.Subjects(ctx, schemas.StreamControlBucket,
		schemas.BucketSubject(schemas.ControlBucket, schemas.ControlKey(run, "*")))
	if err == nil {
		c.Status.Cancelled = int64(len(keys))
		c.Status.Lost, err = c.countLost(ctx, b, run)
	}
	if err != nil {
		return nil, fmt.Errorf("status of run %s: %w", run, err)
	}
	return c, nil
}

// Statuses counts what is stored of a run, also where that is nothing, or with "*" of all runs of which something is,
// and says how each is doing, or what became of it.
func Statuses(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*Counted, error) {
	runs, err := Look(ctx, b, run)
	if err != nil {
		return nil, err
	}
	if run != "*" && runs[run] == nil {
		runs[run] = &Run{}
	}
	controls, err := controlsOf(ctx, b, run)
	if err != nil {
		return nil, err
	}
	all, answered := map[schemas.Run]*Counted{}, b.AllAnswered(ctx)
	for name, r := range runs {
		c := &Counted{Run: r, Groupings: r.groupings(), control: controls[name]}
		c.Status, all[name] = r.status(c.Groupings, c.control, answered), c
	}
	for _, stream := range []string{schemas.StreamRequests, schemas.StreamParked} { // queues, which are short
		subjects, err := b.Subjects(ctx, stream, schemas.RunFilters(run)[stream][0])
		if err != nil {
			return nil, err
		}
		for subject, n := range subjects {
			a, _ := schemas.ParseSubject(subject)
			c := all[a.Run]
			if c == nil {
				continue
			}
			put(&c.Queued, stream, c.Queued[stream]+n)
			if stream == schemas.StreamRequests {
				put(&c.lanes, a.Lane, true)
			}
		}
	}
	look := sync.OnceValue(func() *around { return lookAround(ctx, b) })
	for name, c := range all {
		s := c.Status
		s.Waiting, s.Parked = int64(c.Queued[schemas.StreamRequests]), int64(c.Queued[schemas.StreamParked])
		if s.State != schemas.RunRunning {
			continue
		}
		f := c.facts(answered, s.Waiting)
		if f.Unmade == 0 && f.Unscored > 0 {
			open, err := b.GroupsOf(ctx, name, maps.Keys(c.Open))
			if err != nil {
				return nil, err
			}
			if slices.ContainsFunc(open, bus.OpenGroup.WantsVerdict) {
				f.Judged = f.Unscored // as far as counts of the whole run say
			}
		}
		s.WaitsFor = look().heldBy(c.lanes, f)
	}
	return all, nil
}

// controlsOf returns the controls in force for a whole run, or with "*" for each.
func controlsOf(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*schemas.Control, error) {
	if run != "*" {
		h, err := b.ControlsOf(ctx, run, "")
		return map[schemas.Run]*schemas.Control{run: h.Run}, err
	}
	all, err := b.RunControls(ctx)
	controls := map[schemas.Run]*schemas.Control{}
	for _, c := range all {
		controls[c.Run] = c
	}
	return controls, err
}

// status says what the counts of a run mean; control is the one in force for it, answered says that intake has answered
// all prompts.
func (r *Run) status(groups outcomes.Groups, control *schemas.Control, answered bool) *schemas.RunStatus {
	s := &schemas.RunStatus{
		Groups: r.Groups, OpenBatches: int64(len(r.Batches)), Refused: r.Refused(),
		Trajectories: r.Of(schemas.KindTrajectory, schemas.StopCompleted),
		Rewards:      r.Of(schemas.KindReward, schemas.StatusScored), Failed: r.Failed(),
		Midway: r.midway(), SavedEvaluations: r.Saved,
	}
	c := outcomes.Counts{
		Groups: groups, OpenBatches: s.OpenBatches, Unanswered: r.Unanswered(answered), Refused: s.Refused,
	}
	if control != nil && control.Action != schemas.ControlResume {
		c.Control, s.By, s.Reason, s.Since = control.Action, control.By, control.Reason, control.Stored
	}
	for _, outcome := range slices.Sorted(maps.Keys(groups)) {
		s.Outcomes = append(s.Outcomes, schemas.OutcomeCount{Outcome: outcome, Groups: groups[outcome]})
		if outcome != outcomes.Open {
			s.Closed += groups[outcome]
		}
	}
	s.State = c.Run()
	return s
}

// facts returns what decides what holds up the run, as far as its counts say; waiting requests are in a queue or in a
// sampler's hands.
func (r *Run) facts(answered bool, waiting int64) *outcomes.Facts {
	f := &outcomes.Facts{
		Unanswered: r.Unanswered(answered), Unmade: waiting, Midway: r.midway(), Unscored: r.Unscored(),
	}
	if len(r.Open) == 0 {
		f.Batches = int64(len(r.Batches))
	}
	return f
}

// countLost returns how many samples of open groups of the run are lost.
func (r *Run) countLost(ctx context.Context, b *bus.Bus, run schemas.Run) (n int64, err error) {
	if info, err := b.StreamInfo(ctx, schemas.StreamTrajectories); err != nil || info.Config.Mirror != nil {
		return 0, err // an account of mirrors does not see the queue
	}
	open, err := b.GroupsOf(ctx, run, maps.Keys(r.Open))
	if err != nil {
		return 0, err
	}
	lost, err := b.LostSamples(ctx, open)
	for _, l := range lost {
		n += int64(len(l.Samples))
	}
	return n, err
}

// around is what decides for all runs what holds them up: which services run, and whether something is full.
type around struct {
	present []*schemas.Presence
	full    bool
	known   bool // else the caller may not see it
}

// lookAround returns what holds for all runs.
func lookAround(ctx context.Context, b *bus.Bus) *around {
	present, err := b.Present(ctx)
	if err != nil {
		return &around{}
	}
	faults, err := b.Faults(ctx)
	return &around{present, slices.ContainsFunc(faults, bus.Fault.Full), err == nil}
}

// heldBy returns what holds up an open run, whose requests are in these lanes; "": it goes on, or that is not known.
func (a *around) heldBy(lanes map[schemas.Lane]bool, f *outcomes.Facts) string {
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

// addTo adds n to the number of a key.
func addTo[K comparable](m map[K]int64, key K, n int64) map[K]int64 {
	put(&m, key, m[key]+n)
	return m
}

// Check counts the newest runs in full, at most most of them, and compares that with what their records and the events
// since come to. It returns how many it has compared, and the runs that differ. It writes nothing.
func Check(ctx context.Context, b *bus.Bus, most int) (compared int, differ []schemas.Run, err error) {
	k, err := look(ctx, b, "*")
	if err != nil {
		return 0, nil, fmt.Errorf("check counts: %w", err)
	}
	var runs []schemas.Run
	for name, r := range k.runs {
		if name != "" && !r.isEmpty() && !r.Large {
			runs = append(runs, name)
		}
	}
	slices.SortFunc(runs, func(x, y schemas.Run) int {
		return cmp.Or(k.runs[y].Newest().Compare(k.runs[x].Newest()), cmp.Compare(x, y))
	})
	runs = runs[:min(most, len(runs))]
	for _, run := range runs {
		same, err := k.sameInFull(ctx, run)
		if err == nil && !same { // events may have gone meanwhile
			var again *book
			if again, err = look(ctx, b, run); err == nil {
				same, err = again.sameInFull(ctx, run)
			}
		}
		if err != nil {
			return 0, nil, fmt.Errorf("check counts of run %s: %w", run, err)
		}
		if !same {
			differ = append(differ, run)
		}
	}
	return len(runs), differ, nil
}

// sameInFull counts a run from the beginning, and reports whether that is what was found.
func (k *book) sameInFull(ctx context.Context, run schemas.Run) (bool, error) {
	x := &book{b: k.b, run: run, runs: map[schemas.Run]*Run{}, states: k.states}
	if err := x.readOn(ctx); err != nil {
		return false, err
	}
	return k.of(run).saysAs(x.of(run)), nil
}

// saysAs reports whether two counts of a run say the same.
func (r *Run) saysAs(other *Run) bool {
	for _, stream := range counted {
		if r.Events(stream) != other.Events(stream) {
			return false
		}
	}
	return r.Groups == other.Groups && r.Mean.N == other.Mean.N && maps.Equal(r.Open, other.Open) &&
		maps.Equal(r.Orphans, other.Orphans) && maps.Equal(r.Batches, other.Batches) &&
		maps.Equal(r.Letters, other.Letters) && len(r.Outcomes) == len(other.Outcomes) &&
		!slices.ContainsFunc(r.Outcomes, func(o Outcome) bool { return other.Of(o.Kind, o.Outcome) != o.N })
}

// Key is where the record of a run is in schemas.CountBucket. Without a record, the run is counted in full.
func Key(run schemas.Run) string { return key(run) }
