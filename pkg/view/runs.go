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
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Run is one run in the list: what is stored of it.
type Run struct {
	Run schemas.Run `json:"run"`
	// State is as in schemas.RunStatus: running, paused, or what became of it.
	State string `json:"state"`
	// WaitsFor is what a running one waits for, as in schemas.RunStatus.
	WaitsFor string `json:"waits_for,omitempty"`
	Groups   int    `json:"groups"`
	Open     int    `json:"open_groups"`
	Samples  int    `json:"samples"`
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
	Refused int    `json:"refused,omitempty"`
	Events  uint64 `json:"events"`
	// Bytes and Steps are complete, and Events and Streams, after AddSizes.
	Bytes  uint64    `json:"bytes"`
	Newest time.Time `json:"newest"`
	Steps  uint64    `json:"steps"`
	// Updates is how many updates of weights trainers have told, after AddSizes.
	Updates uint64 `json:"updates,omitempty"`
	// Held says in a few words what a running one waits for.
	Held string `json:"held,omitempty"`
	// Progress has its stages, where a view reads them; nil: it does not, or not yet.
	Progress *Progress `json:"progress,omitempty"`

	// Streams is the number of events in each stream.
	Streams map[string]uint64 `json:"-"`

	counted  uint64 // events in records
	measured *counters.Sizes
}

// Count counts what is stored of a run; with "*" of every run.
func Count(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*Run, error) {
	all, err := counters.Statuses(ctx, b, run)
	if err != nil {
		return nil, err
	}
	runs := map[schemas.Run]*Run{}
	for name, c := range all {
		if r := runOf(name, c); r.counted > 0 {
			runs[name] = r
		}
	}
	return runs, nil
}

// runOf says what counts mean.
func runOf(name schemas.Run, c *counters.Counted) *Run {
	s := c.Status
	r := &Run{
		Run: name, State: s.State, WaitsFor: s.WaitsFor, Groups: int(s.Groups), Open: len(c.Open),
		Samples: int(s.Trajectories), Outcomes: c.Groupings(), OpenBatches: s.OpenBatches, Scored: int(s.Rewards),
		Failed: int(s.Failed), Refused: int(s.Refused), Newest: c.Newest(), Streams: c.Queued,
	}
	for outcome, n := range r.Outcomes {
		if outcomes.HasAdvantages(outcome) {
			r.Counted += n
		}
	}
	for stream, m := range c.Marks {
		if stream != schemas.StreamDead && m.Events > 0 { // letters are not of the run
			r.Streams[stream] = m.Events
			r.Events, r.Bytes = r.Events+m.Events, r.Bytes+m.Bytes
		}
	}
	r.counted, r.measured = r.Events, c.Measured()
	r.Events += uint64(s.Waiting + s.Parked)
	return r
}

// atOnce is how many runs are looked at side by side.
const atOnce = 8

// AddSizes adds what no record counts (steps, verdicts, controls) and the bytes of it. Those of a run that has ended
// are in its record; else it takes a dozen requests for a run.
func AddSizes(ctx context.Context, b *bus.Bus, runs map[schemas.Run]*Run) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, r := range runs {
		if r.measured != nil {
			r.add(r.measured)
		} else {
			g.Go(func() error { return r.Measure(ctx, b) })
		}
	}
	return g.Wait()
}

// Measure is AddSizes of one run, as it is now.
func (r *Run) Measure(ctx context.Context, b *bus.Bus) error {
	sizes, err := counters.Measure(ctx, b, r.Run)
	if err != nil {
		return err
	}
	r.add(sizes)
	for _, stream := range []string{schemas.StreamRequests, schemas.StreamParked} {
		if n := r.Streams[stream]; n > 0 {
			mean, err := b.MeanSize(ctx, stream, r.Run)
			if err != nil {
				return err
			}
			r.Bytes += n * mean
		}
	}
	return nil
}

// add adds sizes.
func (r *Run) add(s *counters.Sizes) {
	for stream, n := range s.Streams {
		r.Events, r.Streams[stream] = r.Events+n, n
	}
	r.Bytes += s.Bytes
	r.Steps, r.Updates = r.Streams[schemas.StreamSteps], r.Streams[schemas.StreamUpdates]
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
	stored, err := Count(ctx, r.bus, "*")
	if err == nil {
		err = AddSizes(ctx, r.bus, stored)
	}
	if err != nil {
		return nil, err
	}
	runs := slices.SortedFunc(maps.Values(stored), func(a, b *Run) int {
		return cmp.Or(b.Newest.Compare(a.Newest), cmp.Compare(a.Run, b.Run))
	})
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
		run.Held = outcomes.For(run.WaitsFor).Held()
		shown[i] = &run
	}
	return &Runs{shown, len(runs), system.Waits, system.Dead, system}, nil
}
