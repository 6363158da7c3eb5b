package ui

import (
	"context"
	"sync"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Reader reads what the page shows, for a program that shows it in another way. Its methods may be called at once.
type Reader struct {
	s   *server
	end func()
}

// NewReader returns a reader of the pipeline on b. Close ends it.
func NewReader(ctx context.Context, b *bus.Bus) *Reader {
	s, end := newServer(ctx, b, Config{}, zerolog.Nop())
	return &Reader{s, end}
}

// Close ends the reader, and waits until it reads nothing more.
func (r *Reader) Close() { r.end() }

// MaxFollowed is how many runs an overview has the progress of. One more may be followed for its groups.
const MaxFollowed = maxFollowers - 1

// Overview is what a pipeline does: its runs, and what runs them.
type Overview struct {
	// Runs has the newest runs, Total is how many are stored.
	Runs  []*RunOverview `json:"runs"`
	Total int            `json:"total"`
	*System
}

// RunOverview is one run of an overview.
type RunOverview struct {
	*RunLine
	// Progress is of the newest MaxFollowed runs; nil while it is still being read, and of all others.
	Progress *Progress `json:"progress,omitempty"`
}

// Overview reads what the pipeline does now. Progress that is not read when within ends is left out. It fails while
// the server of the pipeline does not answer.
func (r *Reader) Overview(ctx, within context.Context) (*Overview, error) {
	release, err := r.s.admit(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	list, err := r.s.listRuns(ctx)
	if err != nil {
		return nil, err
	}
	system, err := r.s.system.get(ctx)
	if err != nil {
		return nil, err
	}
	o := &Overview{Runs: make([]*RunOverview, len(list.Runs)), Total: list.Total, System: system}
	var reading sync.WaitGroup
	for i, line := range list.Runs {
		run := &RunOverview{RunLine: line}
		if o.Runs[i] = run; i >= MaxFollowed {
			continue
		}
		reading.Go(func() {
			f, err := r.s.followerOf(within, line.Run)
			if err != nil {
				return // it is not read yet, or the run has been removed
			}
			if p, err := f.describe(within, system); err == nil {
				run.Progress = p
			}
		})
	}
	reading.Wait()
	return o, ctx.Err()
}

// Waits returns what holds up the whole pipeline.
func (r *Reader) Waits(ctx context.Context) ([]outcomes.Wait, error) {
	system, err := r.s.system.get(ctx)
	if err != nil {
		return nil, err
	}
	return system.Waits, nil
}

// Progress returns how far a run is, and what it waits for, or what ended it.
func (r *Reader) Progress(ctx context.Context, run schemas.Run) (*Progress, error) {
	release, err := r.s.admit(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	system, err := r.s.system.get(ctx)
	if err != nil {
		return nil, err
	}
	f, err := r.s.followerOf(ctx, run)
	if err != nil {
		return nil, err
	}
	return f.describe(ctx, system)
}

// Groups returns the newest groups of a run, at most most, the newest first, and how many are listed in all.
func (r *Reader) Groups(ctx context.Context, run schemas.Run, most int) (groups []GroupRow, total int, err error) {
	release, err := r.s.admit(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer release()
	f, err := r.s.followerOf(ctx, run)
	if err != nil {
		return nil, 0, err
	}
	groups, total = f.rowsOf(list{order: "newest", limit: most})
	return groups, total, nil
}
