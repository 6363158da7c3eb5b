package view

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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
	// Midway samples wait at a step for the others of their group; those that ended there saved so many evaluations.
	Midway           int64 `json:"midway,omitempty"`
	SavedEvaluations int64 `json:"saved_evaluations,omitempty"`
	// Refused is how many of its prompts intake has refused: groups with that outcome, and dead letters without one.
	Refused int    `json:"refused,omitempty"`
	Events  uint64 `json:"events"`
	// Bytes and Steps are complete, and Events, after AddSizes.
	Bytes  uint64    `json:"bytes"`
	Newest time.Time `json:"newest"`
	Steps  uint64    `json:"steps"`
	// Mean is that of the mean rewards of all groups that have one; Model is the lane.
	Mean  *float64     `json:"mean_reward"`
	Model schemas.Lane `json:"model,omitempty"`
	// Notes are what people say of it.
	*bus.Notes
	// Updates is how many updates of weights trainers have told, after AddSizes.
	Updates uint64 `json:"updates,omitempty"`
	// Held says in a few words what a running one waits for.
	Held string `json:"held,omitempty"`
	// Progress has its stages, where a view reads them; nil: it does not, or not yet.
	Progress *Progress `json:"progress,omitempty"`

	// known is the status of a run that has no open group, of which none is lost; nil: another one.
	known   *schemas.RunStatus
	counted uint64 // events in records
	of      *counters.Counted
	sizes   *counters.Sizes // after AddSizes
}

// Streams returns the number of events in each stream, of all after AddSizes.
func (r *Run) Streams() map[string]uint64 {
	n := map[string]uint64{}
	maps.Copy(n, r.of.Queued)
	for stream, m := range r.of.All() {
		if stream != schemas.StreamDead { // letters are not of the run
			n[stream] = m.Events
		}
	}
	for _, of := range r.sizes.Streams {
		n[of.Stream] = of.Events
	}
	return n
}

// Count counts what is stored of a run; with "*" of every run.
func Count(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*Run, error) {
	all, err := counters.Statuses(ctx, b, run)
	if err != nil {
		return nil, err
	}
	runs := map[schemas.Run]*Run{}
	notes, err := b.Notes(ctx, run)
	if err != nil {
		return nil, err
	}
	for name, c := range all {
		if r := runOf(name, c); r.counted > 0 {
			runs[name] = r
			if r.Notes = notes[name]; r.Notes == nil {
				r.Notes = &bus.Notes{Tags: []string{}}
			}
		}
	}
	return runs, nil
}

// runOf says what counts mean.
func runOf(name schemas.Run, c *counters.Counted) *Run {
	s := c.Status
	r := &Run{
		Run: name, State: s.State, WaitsFor: s.WaitsFor, Groups: int(s.Groups), Open: len(c.Open),
		Samples: int(s.Trajectories), Outcomes: c.Groupings, OpenBatches: s.OpenBatches, Scored: int(s.Rewards),
		Midway: s.Midway, SavedEvaluations: s.SavedEvaluations, Failed: int(s.Failed), Newest: c.Newest(),
		Model: c.Lane, of: c, sizes: &counters.Sizes{},
	}
	r.Refused = int(s.Refused + r.Outcomes[schemas.StatusRefused])
	if c.Mean.N > 0 {
		r.Mean = new(c.Mean.Of / float64(c.Mean.N))
	}
	for outcome, n := range r.Outcomes {
		if outcomes.HasAdvantages(outcome) {
			r.Counted += n
		}
	}
	for stream, m := range c.All() {
		if stream != schemas.StreamDead { // letters are not of the run
			r.Events, r.Bytes = r.Events+m.Events, r.Bytes+m.Bytes
		}
	}
	r.counted = r.Events
	if outcomes.HasEnded(s.State) && len(c.Open) == 0 {
		r.known = s
	}
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
		if sizes := r.of.Measured(); sizes != nil {
			r.add(sizes)
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
		if n := r.of.Queued[stream]; n > 0 {
			mean, err := b.MeanSize(ctx, stream, r.Run)
			if err != nil {
				return err
			}
			r.Bytes += n * mean
		}
	}
	return nil
}

// add adds what was measured of the run.
func (r *Run) add(s *counters.Sizes) {
	r.sizes = s
	for _, of := range s.Streams {
		r.Events, r.Bytes = r.Events+of.Events, r.Bytes+of.Bytes
		switch of.Stream {
		case schemas.StreamSteps:
			r.Steps = of.Events
		case schemas.StreamUpdates:
			r.Updates = of.Events
		}
	}
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

// maxRuns is how many runs a list has unless told.
const maxRuns = 500

// RunList says which runs a list has.
type RunList struct {
	// Run is the name of the only one.
	Run schemas.Run
	// Text is part of the name, the model, a tag or the note, in any case; State, Model and Tag are equal; empty: all.
	Text, State, Model, Tag string
	// Order is one of RunOrders, with - before it the other way round; empty: the newest first.
	Order         string
	Offset, Limit int
}

// runOrders compare runs, the names of the columns of a list.
var runOrders = map[string]func(a, b *Run) int{
	"run":     func(a, b *Run) int { return cmp.Compare(a.Run, b.Run) },
	"state":   func(a, b *Run) int { return cmp.Compare(a.State, b.State) },
	"model":   func(a, b *Run) int { return cmp.Compare(a.Model, b.Model) },
	"mean":    func(a, b *Run) int { return compareNumbers(a.Mean, b.Mean) },
	"groups":  func(a, b *Run) int { return cmp.Compare(a.Groups, b.Groups) },
	"samples": func(a, b *Run) int { return cmp.Compare(a.Samples, b.Samples) },
	"scored":  func(a, b *Run) int { return cmp.Compare(a.Scored, b.Scored) },
	"steps":   func(a, b *Run) int { return cmp.Compare(a.Steps, b.Steps) },
	"bytes":   func(a, b *Run) int { return cmp.Compare(a.Bytes, b.Bytes) },
	"newest":  func(a, b *Run) int { return a.Newest.Compare(b.Newest) },
}

// RunOrders returns the orders of a list of runs.
func RunOrders() []string { return slices.Sorted(maps.Keys(runOrders)) }

// compareNumbers orders numbers, one that is not there before all others.
func compareNumbers(a, b *float64) int {
	if a == nil || b == nil {
		return map[bool]int{true: 1}[a != nil] - map[bool]int{true: 1}[b != nil]
	}
	return cmp.Compare(*a, *b)
}

// matches reports whether a list has the run.
func (l *RunList) matches(r *Run) bool {
	if l.Run != "" && l.Run != r.Run || l.State != "" && l.State != r.State ||
		l.Model != "" && l.Model != string(r.Model) ||
		l.Tag != "" && !slices.Contains(r.Tags, l.Tag) {
		return false
	}
	has := func(text string) bool { return strings.Contains(strings.ToLower(text), strings.ToLower(l.Text)) }
	return l.Text == "" || has(string(r.Run)) || has(string(r.Model)) || has(r.Note) || slices.ContainsFunc(r.Tags, has)
}

// Stored returns all runs with their sizes, the newest first.
func Stored(ctx context.Context, b *bus.Bus) ([]*Run, error) {
	stored, err := Count(ctx, b, "*")
	if err == nil {
		err = AddSizes(ctx, b, stored)
	}
	if err != nil {
		return nil, err
	}
	runs := slices.SortedFunc(maps.Values(stored), func(a, b *Run) int {
		return cmp.Or(b.Newest.Compare(a.Newest), cmp.Compare(a.Run, b.Run))
	})
	return runs, nil
}

// Runs is a list of runs, and what holds up the whole pipeline.
type Runs struct {
	Runs []*Run `json:"runs"`
	// Total are stored, and Matched of them are like what the list was asked for.
	Total   int `json:"total"`
	Matched int `json:"matched"`
	// States, Models and Tags are those of all runs.
	States []string        `json:"states"`
	Models []string        `json:"models"`
	Tags   []string        `json:"tags"`
	Waits  []outcomes.Wait `json:"waits"`
	// Dead is how many dead letters are stored.
	Dead uint64 `json:"dead"`

	system *System
}

// Runs returns a list of runs.
func (r *Reader) Runs(ctx context.Context, l RunList) (*Runs, error) {
	runs, err := r.runs.Get(ctx)
	if err != nil {
		return nil, err
	}
	system, err := r.system.Get(ctx)
	if err != nil {
		return nil, err
	}
	x := &Runs{Total: len(runs), Waits: system.Waits, Dead: system.Dead, system: system}
	states, models, tags := map[string]bool{}, map[string]bool{}, map[string]bool{}
	var shown []*Run
	for _, run := range runs {
		states[run.State], models[string(run.Model)] = true, true
		for _, tag := range run.Tags {
			tags[tag] = true
		}
		if l.matches(run) {
			shown = append(shown, run)
		}
	}
	delete(models, "")
	x.States, x.Models, x.Tags = sortedNames(states), sortedNames(models), sortedNames(tags)
	order, back := strings.CutPrefix(cmp.Or(l.Order, "-newest"), "-")
	if compare := runOrders[order]; compare != nil && l.Order != "" {
		slices.SortStableFunc(shown, func(a, b *Run) int {
			if back {
				a, b = b, a
			}
			return compare(a, b)
		})
	}
	x.Matched = len(shown)
	from := min(l.Offset, len(shown))
	shown = shown[from:min(from+cmp.Or(l.Limit, maxRuns), len(shown))]
	x.Runs = make([]*Run, len(shown))
	for i := range shown { // the runs are shared
		run := *shown[i]
		run.Held = outcomes.For(run.WaitsFor).Held()
		x.Runs[i] = &run
	}
	return x, nil
}

// sortedNames returns the keys of a set; not nil.
func sortedNames(set map[string]bool) []string {
	return append([]string{}, slices.Sorted(maps.Keys(set))...)
}
