// Package view reads what is stored of a pipeline, and what runs, as models: runs with their progress and what they
// wait for, groups, samples, lanes and the rest of the system. Their JSON is that of the page; commands show the same
// models as text. Nothing else reads streams to show them. What became of something is said by package outcomes.
//
// A [Reader] makes the models. It follows a run that is looked at, and keeps one row for each of its groups; answers
// that several ask for are shared for a moment. Both have bounds, so a long run costs no more than a short one.
// Messages that are not valid events are skipped: services remove them. Unless a comment says more, an error is of the
// server.
package view

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Options are what a Reader needs besides the bus.
type Options struct {
	// Advise says why a stream stores nothing, and what to do; Scarce that it soon will not, or nothing.
	Advise func(bus.Fault) (what, fix string)
	Scarce func(*bus.StreamStats) (what, fix string)
	// Piece returns the text of a token; nil: samples have numbers.
	Piece func(id int32) string
	// Again says how a run is made again by these prompts of it, whole: by all of them; nil: settings do not say it.
	Again func(run schemas.Run, prompts []Given, whole bool) *Again
	// Once says that models are read a single time: what comes later is not followed.
	Once bool
	// Brief says that a complete run that lost nothing and raised no alarm needs no Progress in an overview.
	Brief bool
	Log   zerolog.Logger
}

// Reader reads a pipeline. Its methods may be called at once.
type Reader struct {
	Options
	bus     *bus.Bus
	client  *client.Client
	ctx     context.Context
	end     context.CancelFunc
	looking sync.WaitGroup
	runs    Shared[[]*Run]
	system  Shared[*System]
	seen    seen

	mu        sync.Mutex
	followers map[schemas.Run]*follower
}

// NewReader returns a reader of the pipeline on b. Close ends it.
func NewReader(ctx context.Context, b *bus.Bus, o Options) *Reader {
	ctx, end := context.WithCancel(ctx)
	r := &Reader{
		Options: o, bus: b, client: client.New(b), ctx: ctx, end: end, followers: map[schemas.Run]*follower{},
	}
	r.runs.Read = func(ctx context.Context) ([]*Run, error) { return Stored(ctx, b) }
	r.system.Read = r.readSystem
	r.looking.Go(func() { r.endWhenIdle(ctx) })
	return r
}

// Close ends the reader, and waits until it reads nothing more.
func (r *Reader) Close() {
	r.end()
	r.looking.Wait()
	r.endFollowers()
}

// System returns what runs, and how full the streams are.
func (r *Reader) System(ctx context.Context) (*System, error) { return r.system.Get(ctx) }

// Dead returns how many dead letters the last look at the system found; false: there was none yet.
func (r *Reader) Dead() (n uint64, known bool) {
	if last := r.system.peek(); last != nil {
		return (*last).Dead, true
	}
	return 0, false
}

// MaxFollowed is how many runs an overview has the progress of. One more may be followed for its groups.
const MaxFollowed = maxFollowers - 1

// Overview is what a pipeline does: its runs, and what runs them.
type Overview struct {
	// Runs has the newest runs, Total is how many are stored. The newest of all has its Progress, and so have those
	// that go on or did when they were first seen, at most MaxFollowed in all, unless it is still being read.
	Runs  []*Run `json:"runs"`
	Total int    `json:"total"`
	*System
}

// Overview reads what the pipeline does now. Progress that is not read when within ends is left out. It fails while
// the server of the pipeline does not answer.
func (r *Reader) Overview(ctx, within context.Context) (*Overview, error) {
	list, err := r.Runs(ctx, RunList{})
	if err != nil {
		return nil, err
	}
	o := &Overview{Runs: list.Runs, Total: list.Total, System: list.system}
	var reading sync.WaitGroup
	followed := 0
	for i, run := range list.Runs {
		if followed == MaxFollowed || i > 0 && outcomes.HasEnded(run.State) && !r.follows(run.Run) ||
			r.Brief && run.known != nil && r.isPlain(ctx, run.Run, run.known) {
			continue
		}
		followed++
		reading.Go(func() {
			if p, err := r.Progress(within, run.Run, run.known); err == nil { // else not read yet, or has been removed
				run.Progress = p
			}
		})
	}
	reading.Wait()
	return o, ctx.Err()
}

// isPlain reports whether a run of this status is complete, lost nothing and raised no alarm.
func (r *Reader) isPlain(ctx context.Context, run schemas.Run, s *schemas.RunStatus) bool {
	if s.State != schemas.StatusComplete || s.Failed > 0 || s.Refused > 0 {
		return false
	}
	alarms := schemas.Address{Kind: schemas.KindAlarm, Run: run}.Filter()
	n, err := r.bus.Stored(ctx, schemas.StreamUpdates, []string{alarms}, 1)
	return n == 0 && err == nil
}

// Shared is an answer that readers share for a moment: at least refresh, and longer if it takes long to make.
type Shared[T any] struct {
	Read func(context.Context) (T, error)
	last atomic.Pointer[T] // peek reads it while another answer is made
	mu   sync.Mutex
	at   time.Time
	took time.Duration
}

const (
	// refresh is the least age of an answer before it is made anew. Making it takes at most a fifth of the time.
	refresh = time.Second
	share   = 4
)

// peek returns the last answer, however old; nil: there was none. It does not wait.
func (s *Shared[T]) peek() *T { return s.last.Load() }

// Get returns the answer, which is made anew if it is old. Others wait meanwhile.
func (s *Shared[T]) Get(ctx context.Context) (T, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		var none T
		return none, err
	}
	if !s.at.IsZero() && time.Since(s.at) < max(refresh, share*s.took) {
		return *s.last.Load(), nil
	}
	began := time.Now()
	v, err := s.Read(ctx)
	if err != nil {
		return v, err
	}
	s.put(v, time.Since(began))
	return v, nil
}

// put makes an answer the last one. It took so long to make.
func (s *Shared[T]) put(v T, took time.Duration) {
	s.last.Store(&v)
	s.at, s.took = time.Now(), took
}

// milliseconds returns a moment for the page; 0 for none.
func milliseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
