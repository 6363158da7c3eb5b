package view

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Run is one run in the list: what is stored of it.
type Run struct {
	Run schemas.Run `json:"run"`
	// State is as in schemas.RunStatus: running, paused, or what became of it.
	State   string `json:"state"`
	Groups  int    `json:"groups"`
	Open    int    `json:"open_groups"`
	Samples int    `json:"samples"`
	// Outcomes counts the groups by what became of them.
	Outcomes outcomes.Groups `json:"outcomes"`
	// Counted groups have advantages.
	Counted int64 `json:"counted"`
	// OpenBatches have groups and no result.
	OpenBatches int64 `json:"open_batches,omitempty"`
	// Scored samples have a reward; Failed ones have ended without what they lack.
	Scored int `json:"scored"`
	Failed int `json:"failed"`
	// Refused is how many of its prompts intake has refused, as far as their dead letters are stored.
	Refused int       `json:"refused,omitempty"`
	Events  uint64    `json:"events"`
	Bytes   uint64    `json:"bytes"` // set by EstimateBytes
	Newest  time.Time `json:"newest"`
	// Steps is how many step events are stored of it.
	Steps uint64 `json:"steps"`
	// Held says in a few words what a running one waits for.
	Held string `json:"held,omitempty"`
	// Progress has its stages, where a view reads them; nil: it does not, or not yet.
	Progress *Progress `json:"progress,omitempty"`

	// Streams is the number of events in each stream.
	Streams map[string]uint64 `json:"-"`

	accepted map[schemas.UID]bool // groups with a record; true: with a result, too
	batches  map[string]bool      // with a result
	opened   []string             // those that groups of the run are in
	control  string
	judged   bool  // what is not scored waits for a verdict
	unread   int64 // refused prompts without a record
}

// storedRuns are runs by name.
type storedRuns map[schemas.Run]*Run

// of returns the counts of a run.
func (s storedRuns) of(run schemas.Run) *Run {
	r := s[run]
	if r == nil {
		r = &Run{
			Run: run, Streams: map[string]uint64{}, Outcomes: outcomes.Groups{}, accepted: map[schemas.UID]bool{},
			batches: map[string]bool{},
		}
		s[run] = r
	}
	return r
}

// Count counts what is stored of a run; with "*" of every run.
func Count(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*Run, error) {
	runs := storedRuns{}
	for stream, filters := range schemas.RunFilters(run) {
		for _, filter := range filters {
			subjects, err := b.Subjects(ctx, stream, filter)
			if err != nil {
				return nil, err
			}
			for subject, n := range subjects {
				a, _ := schemas.ParseSubject(subject)
				runs.of(a.Run).count(stream, a, n)
			}
		}
	}
	// Questions about a run that there is not, and requests to control it, are no run.
	maps.DeleteFunc(runs, func(_ schemas.Run, r *Run) bool {
		return r.Events == r.Streams[schemas.StreamControl]
	})
	if err := runs.decide(ctx, b, run); err != nil {
		return nil, err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, r := range runs {
		g.Go(func() error { return r.findNewest(ctx, b) })
	}
	return runs, g.Wait()
}

// count counts events of a subject.
func (r *Run) count(stream string, a schemas.Address, n uint64) {
	r.Events += n
	r.Streams[stream] += n
	switch a.Kind {
	case schemas.KindGroup:
		r.Groups++
		r.accepted[a.UID] = false
	case schemas.KindOpening:
		if a.Batch != string(a.UID) { // else the group is a batch by itself
			r.opened = append(r.opened, a.Batch)
		}
	case schemas.KindBatch:
		r.batches[a.Batch] = true
	}
}

// decide finds out what became of the runs, their groups and samples.
func (s storedRuns) decide(ctx context.Context, b *bus.Bus, run schemas.Run) error {
	for kind, each := range map[string]func(r *Run, uid schemas.UID, outcome string){
		schemas.KindAdvantage: func(r *Run, uid schemas.UID, outcome string) {
			r.Outcomes[outcome]++
			if _, counted := r.accepted[uid]; counted { // a result without a record is of a group that is not
				r.accepted[uid] = true
			}
		},
		schemas.KindTrajectory: func(r *Run, _ schemas.UID, outcome string) {
			if outcome == schemas.StopCompleted {
				r.Samples++
			}
		},
		schemas.KindReward: func(r *Run, _ schemas.UID, outcome string) {
			if outcome == schemas.StatusScored {
				r.Scored++
			} else {
				r.Failed++
			}
		},
	} {
		err := b.Outcomes(ctx, kind, run, func(a schemas.Address, outcome string) {
			if r := s[a.Run]; r != nil && outcome != "" {
				each(r, a.UID, outcome)
			}
		})
		if err != nil {
			return err
		}
	}
	letters, err := b.Subjects(ctx, schemas.StreamDead,
		schemas.Address{Kind: schemas.KindDead, Stage: schemas.ServiceIntake, Run: run}.Filter())
	if err != nil {
		return err
	}
	for subject, n := range letters {
		a, _ := schemas.ParseSubject(subject)
		if r := s[a.Run]; r != nil {
			r.Refused++
			if _, has := r.accepted[a.UID]; !has {
				r.unread += int64(n)
			}
		}
	}
	controls, err := b.RunControls(ctx)
	if err != nil {
		return err
	}
	for _, c := range controls {
		if r := s[c.Run]; r != nil && c.Action != schemas.ControlResume {
			r.control = c.Action
		}
	}
	answered := b.AllAnswered(ctx)
	for _, r := range s {
		r.decide(answered)
	}
	return nil
}

// decide says what became of the run; answered says that intake has answered all prompts.
func (r *Run) decide(answered bool) {
	c := outcomes.Counts{Groups: r.Outcomes, Refused: int64(r.Refused), Control: r.control}
	for _, closed := range r.accepted {
		if !closed {
			r.Open++
		}
	}
	if r.Open > 0 {
		r.Outcomes[outcomes.Open] = int64(r.Open)
	}
	for outcome, n := range r.Outcomes {
		if outcomes.HasAdvantages(outcome) {
			r.Counted += n
		}
	}
	for _, batch := range r.opened {
		if !r.batches[batch] {
			r.OpenBatches++
		}
	}
	c.OpenBatches = r.OpenBatches
	if prompts := int64(r.Streams[schemas.StreamPrompts]); !answered {
		c.Unanswered = max(0, prompts-int64(r.Groups)-r.unread)
	}
	r.State, r.Steps = c.Run(), r.Streams[schemas.StreamSteps]
}

// atOnce is how many runs are looked at side by side.
const atOnce = 8

// EstimateBytes sets Bytes of runs by the mean size of their own messages: those of other runs may be far larger. It
// takes a dozen requests for each run; those that have as many events as in before, an earlier answer or nil, keep its
// estimate.
func EstimateBytes(ctx context.Context, b *bus.Bus, runs, before map[schemas.Run]*Run) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, r := range runs {
		if had := before[r.Run]; had != nil && had.Events == r.Events {
			r.Bytes = had.Bytes
		} else {
			g.Go(func() error { return r.estimateBytes(ctx, b) })
		}
	}
	return g.Wait()
}

// estimateBytes is EstimateBytes of one run.
func (r *Run) estimateBytes(ctx context.Context, b *bus.Bus) error {
	for stream, n := range r.Streams {
		mean, err := b.MeanSize(ctx, stream, r.Run)
		if err != nil {
			return err
		}
		r.Bytes += n * mean
	}
	return nil
}

// findNewest sets Newest.
func (r *Run) findNewest(ctx context.Context, b *bus.Bus) error {
	for _, kind := range []struct{ stream, filter string }{
		{schemas.StreamAdvantages, schemas.Address{Kind: schemas.KindAdvantage, Run: r.Run}.Filter()},
		{schemas.StreamTrajectories, schemas.TrajectoryFilter(r.Run, "*")},
		{schemas.StreamPrompts, schemas.PromptSubject(r.Run)},
	} {
		m, err := b.Last(ctx, kind.stream, kind.filter)
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return err
		}
		if err == nil && m.Time.After(r.Newest) {
			r.Newest = m.Time
		}
	}
	return nil
}

// LatestRun returns the run of the newest trajectory, else of the newest prompt: the one that commands mean when none
// is given. bus.ErrNotFound: neither is stored.
func LatestRun(ctx context.Context, b *bus.Bus) (schemas.Run, error) {
	for _, stream := range []string{schemas.StreamTrajectories, schemas.StreamPrompts} {
		m, err := b.Newest(ctx, stream)
		if err == nil {
			run, _ := schemas.RunOf(m.Subject)
			return run, nil
		}
		if !errors.Is(err, bus.ErrNotFound) {
			return "", fmt.Errorf("latest run: %w", err)
		}
	}
	return "", bus.ErrNotFound
}

// maxRuns is how many runs a list has, the newest.
const maxRuns = 500

// readRuns reads the list of runs, the newest first.
func (r *Reader) readRuns(ctx context.Context) ([]*Run, error) {
	before := map[schemas.Run]*Run{}
	if last := r.runs.peek(); last != nil {
		for _, run := range *last {
			before[run.Run] = run
		}
	}
	stored, err := Count(ctx, r.bus, "*")
	if err == nil {
		err = EstimateBytes(ctx, r.bus, stored, before)
	}
	if err != nil {
		return nil, err
	}
	runs := slices.SortedFunc(maps.Values(stored), func(a, b *Run) int {
		return cmp.Or(b.Newest.Compare(a.Newest), cmp.Compare(a.Run, b.Run))
	})
	for _, run := range runs {
		if run.State == schemas.RunRunning && run.Streams[schemas.StreamRequests] == 0 &&
			run.Samples > run.Scored+run.Failed {
			if run.judged, err = r.bus.WantsVerdicts(ctx, run.Run); err != nil {
				return nil, err
			}
		}
	}
	return runs, nil
}

// Runs is the list of runs, the newest first, and what holds up the whole pipeline.
type Runs struct {
	Runs  []*Run          `json:"runs"`
	Total int             `json:"total"`
	Waits []outcomes.Wait `json:"waits"`
	// Dead is how many dead letters are stored.
	Dead uint64 `json:"dead"`

	system *System
}

// Runs returns the list of runs.
func (r *Reader) Runs(ctx context.Context) (*Runs, error) {
	runs, err := r.runs.Get(ctx)
	if err != nil {
		return nil, err
	}
	system, err := r.system.Get(ctx)
	if err != nil {
		return nil, err
	}
	shown := make([]*Run, min(len(runs), maxRuns))
	for i := range shown { // the runs are shared
		run := *runs[i]
		if run.State == schemas.RunRunning {
			run.Held = heldInList(&run, system).Held()
		}
		shown[i] = &run
	}
	return &Runs{shown, len(runs), system.Waits, system.Dead, system}, nil
}
