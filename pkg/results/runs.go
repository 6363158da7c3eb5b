package results

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// StoredRun counts what is stored of a run.
type StoredRun struct {
	Run     schemas.Run `json:"run"`
	Groups  int         `json:"groups"`
	Open    int         `json:"open_groups"`
	Samples int         `json:"samples"`
	Events  uint64      `json:"events"`
	// Bytes is set by EstimateBytes.
	Bytes  uint64    `json:"bytes"`
	Newest time.Time `json:"newest"`

	// Streams is the number of events in each stream.
	Streams map[string]uint64 `json:"-"`
}

// Runs counts what is stored of a run; with "*" of every run, for 'meander runs ls'. It fails if the server cannot be
// read.
func Runs(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*StoredRun, error) {
	runs := map[schemas.Run]*StoredRun{}
	type group struct {
		run schemas.Run
		uid schemas.UID
	}
	accepted, closed := map[group]bool{}, map[group]bool{}
	for stream, filters := range schemas.RunFilters(run) {
		for _, filter := range filters {
			subjects, err := b.Subjects(ctx, stream, filter)
			if err != nil {
				return nil, err
			}
			for subject, n := range subjects {
				a, _ := schemas.ParseSubject(subject)
				r := runs[a.Run]
				if r == nil {
					r = &StoredRun{Run: a.Run, Streams: map[string]uint64{}}
					runs[a.Run] = r
				}
				r.Events += n
				r.Streams[stream] += n
				switch a.Kind {
				case schemas.KindGroup:
					r.Groups++
					accepted[group{a.Run, a.UID}] = true
				case schemas.KindAdvantage:
					closed[group{a.Run, a.UID}] = true
				case schemas.KindTrajectory:
					r.Samples++
				}
			}
		}
	}
	for g := range accepted {
		if !closed[g] { // a result without a record is of a group that is not counted
			runs[g.run].Open++
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, r := range runs {
		g.Go(func() error { return r.findNewest(ctx, b) })
	}
	return runs, g.Wait()
}

// atOnce is how many runs are looked at side by side.
const atOnce = 8

// EstimateBytes sets Bytes of runs by the mean size of their own messages: those of other runs may be far larger. It
// takes a dozen requests for each run; those that have as many events as in before, an earlier answer or nil, keep its
// estimate. It fails if the server cannot be read.
func EstimateBytes(ctx context.Context, b *bus.Bus, runs, before map[schemas.Run]*StoredRun) error {
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
func (r *StoredRun) estimateBytes(ctx context.Context, b *bus.Bus) error {
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
func (r *StoredRun) findNewest(ctx context.Context, b *bus.Bus) error {
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
