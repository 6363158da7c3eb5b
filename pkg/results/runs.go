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
	// Bytes is an estimate, from a few messages of the run in each stream.
	Bytes  uint64    `json:"bytes"`
	Newest time.Time `json:"newest"`

	// Streams is the number of events in each stream.
	Streams map[string]uint64 `json:"-"`
}

// Runs counts what is stored of a run; with "*" of every run, for 'meander runs ls'. Runs that have as many events as
// before, an earlier answer or nil, keep its estimate of bytes: to make it takes a dozen requests for each run. It
// fails if the server cannot be read.
func Runs(
	ctx context.Context, b *bus.Bus, run schemas.Run, before map[schemas.Run]*StoredRun,
) (map[schemas.Run]*StoredRun, error) {
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
		g.Go(func() error {
			if had := before[r.Run]; had != nil && had.Events == r.Events {
				r.Bytes = had.Bytes
			} else if err := r.estimateBytes(ctx, b); err != nil {
				return err
			}
			return r.findNewest(ctx, b)
		})
	}
	return runs, g.Wait()
}

// atOnce is how many runs Runs looks at side by side.
const atOnce = 8

// estimateBytes sets Bytes by the mean size of the run's own messages: those of other runs may be far larger.
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
