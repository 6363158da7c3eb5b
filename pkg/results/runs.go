package results

import (
	"context"
	"errors"
	"fmt"
	"time"

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
	// Bytes is estimated from the mean size of the messages of each stream.
	Bytes  uint64    `json:"bytes"`
	Newest time.Time `json:"newest"`

	// Streams is the number of events in each stream.
	Streams map[string]uint64 `json:"-"`
}

// Runs counts what is stored of a run; with "*" of every run, for 'meander runs ls'. Bytes are an estimate from the
// mean size of an event. It fails if the server cannot be read.
func Runs(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*StoredRun, error) {
	stats, err := b.Stats(ctx)
	if err != nil {
		return nil, err
	}
	mean := map[string]uint64{}
	for _, s := range stats {
		mean[s.Name] = s.Bytes / max(1, s.Messages)
	}
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
				r.Bytes += n * mean[stream]
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
	for id, r := range runs {
		for _, kind := range []struct{ stream, filter string }{
			{schemas.StreamAdvantages, schemas.Address{Kind: schemas.KindAdvantage, Run: id}.Filter()},
			{schemas.StreamTrajectories, schemas.TrajectoryFilter(id, "*")},
			{schemas.StreamPrompts, schemas.PromptSubject(id)},
		} {
			m, err := b.Last(ctx, kind.stream, kind.filter)
			if err != nil && !errors.Is(err, bus.ErrNotFound) {
				return nil, err
			}
			if err == nil && m.Time.After(r.Newest) {
				r.Newest = m.Time
			}
		}
	}
	return runs, nil
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
