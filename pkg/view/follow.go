package view

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

const (
	// maxFollowers is how many runs are followed at once, MaxRows how many groups of each are kept: the newest.
	maxFollowers, MaxRows = 8, 20000
	// idle is how long a run is followed that no page shows.
	idle = time.Minute
	// maxCut is how many bytes of a prompt are in a list.
	maxCut = 240
)

// follower keeps a row for each group of a run, from what is stored, and then from what comes.
type follower struct {
	run schemas.Run
	// epoch names this follower: revisions of another one mean nothing to it.
	epoch string
	end   context.CancelFunc
	ended sync.WaitGroup
	// ready is closed when all that was stored at the start is read.
	ready  chan struct{}
	status Shared[*schemas.RunStatus]
	used   atomic.Int64 // Unix nanoseconds

	mu       sync.Mutex
	rows     map[schemas.UID]*GroupRow
	order    []*GroupRow // as they opened
	opened   int         // rows that ever were
	leftOut  int         // rows that went for space
	revision uint64
	changed  chan struct{}
	fault    string
	rates    map[string]*rate
	// updates are what trainers told, the newest MaxRows; toldUpdates is how many there ever were.
	updates     []*schemas.Update
	toldUpdates int
	alarms      []outcomes.Wait
}

// source is one kind of events that a follower reads.
type source struct {
	stream, filter string
	apply          func(m *bus.Message)
	// outcome is set instead of apply where the outcome that the header says is all that is wanted.
	outcome func(m *bus.Message, outcome string)
	// extra is not needed for the rest: it is left out where the reader may not have it.
	extra bool
}

// follow returns the follower of a run, which it starts if there is none, once it has read what is stored. status is
// that of the run; nil: it is not known.
func (r *Reader) follow(ctx context.Context, run schemas.Run, status *schemas.RunStatus) (*follower, error) {
	if err := ctx.Err(); err != nil { // also where it is followed already
		return nil, err
	}
	r.mu.Lock()
	f := r.followers[run]
	r.mu.Unlock()
	if f == nil {
		if status == nil {
			var err error
			// So that no name costs anything that is not a run's.
			if status, err = r.client.Status(ctx, run); err != nil {
				return nil, err
			}
		}
		f = r.startFollower(run, status)
	}
	f.used.Store(time.Now().UnixNano())
	select {
	case <-f.ready:
		return f, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// follows reports whether a run is followed.
func (r *Reader) follows(run schemas.Run) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.followers[run] != nil
}

// startFollower starts to follow a run of this status, and ends the followers that are idle, or one too many.
func (r *Reader) startFollower(run schemas.Run, status *schemas.RunStatus) *follower {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f := r.followers[run]; f != nil {
		return f
	}
	r.endIdle(maxFollowers - 1)
	ctx, end := context.WithCancel(r.ctx)
	f := &follower{
		run: run, epoch: rand.Text()[:8], end: end, ready: make(chan struct{}), rows: map[schemas.UID]*GroupRow{},
		changed: make(chan struct{}), rates: map[string]*rate{},
	}
	f.status.Read = func(ctx context.Context) (*schemas.RunStatus, error) { return r.client.Status(ctx, run) }
	f.status.put(status, 0)
	f.used.Store(time.Now().UnixNano())
	r.followers[run] = f
	f.ended.Go(func() { f.read(ctx, r.bus, r.Once) })
	return f
}

// endIdle ends followers that no page showed for a while, and the longest unused ones above most. r.mu is held.
func (r *Reader) endIdle(most int) {
	var all []*follower
	for _, f := range r.followers {
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b *follower) int { return cmp.Compare(b.used.Load(), a.used.Load()) })
	for i, f := range all {
		if i >= most || time.Since(time.Unix(0, f.used.Load())) > idle {
			f.end()
			delete(r.followers, f.run)
		}
	}
}

// endWhenIdle ends idle followers from time to time, until ctx ends.
func (r *Reader) endWhenIdle(ctx context.Context) {
	for bus.Pause(ctx, idle/2) == nil {
		r.mu.Lock()
		r.endIdle(maxFollowers)
		r.mu.Unlock()
	}
}

// endFollowers ends all followers, and waits for them.
func (r *Reader) endFollowers() {
	r.mu.Lock()
	all := r.followers
	r.followers = map[schemas.Run]*follower{}
	r.mu.Unlock()
	for _, f := range all {
		f.end()
		f.ended.Wait()
	}
}

// read reads what is stored of the run, then, unless once is enough, what comes, until ctx ends.
func (f *follower) read(ctx context.Context, b *bus.Bus, once bool) {
	all := func(kind string) string { return schemas.Address{Kind: kind, Run: f.run}.Filter() }
	sources := []source{
		{stream: schemas.StreamGroups, filter: schemas.GroupSubject(f.run, "*"), apply: f.takeRecord},
		{stream: schemas.StreamTrajectories, filter: schemas.TrajectoryFilter(f.run, "*"), outcome: f.takeTrajectory},
		{stream: schemas.StreamRewards, filter: schemas.RewardFilter(f.run, "*", "*"), outcome: f.takeReward},
		{stream: schemas.StreamAdvantages, filter: schemas.AdvantageSubject(f.run, "*"), apply: f.takeAdvantage},
		{stream: schemas.StreamUpdates, filter: all(schemas.KindUpdate), apply: f.takeUpdate, extra: true},
		{stream: schemas.StreamUpdates, filter: all(schemas.KindAlarm), apply: f.takeAlarm, extra: true},
	}
	next := make([]uint64, len(sources))
	for i, src := range sources {
		for {
			err := f.readOnce(ctx, b, src, &next[i], false)
			if src.extra && errors.Is(err, bus.ErrPermission) {
				err = nil
			}
			if f.note(err); err == nil {
				break
			}
			if bus.Pause(ctx, time.Second) != nil {
				return
			}
		}
	}
	if close(f.ready); once {
		return
	}
	now := bus.ReadOptions{FromTime: time.Now(), Live: true, HeadersOnly: true}
	for _, kind := range []string{schemas.KindStep, schemas.KindTokens} {
		f.ended.Go(func() {
			for m, err := range b.Read(ctx, schemas.StreamSteps, []string{all(kind)}, now) {
				if err != nil {
					return // the other sources fail too, and say it
				}
				f.count("steps", m.Time)
			}
		})
	}
	for i, src := range sources {
		f.ended.Go(func() {
			for ctx.Err() == nil {
				err := f.readOnce(ctx, b, src, &next[i], true)
				if src.extra && errors.Is(err, bus.ErrPermission) {
					return
				}
				f.note(err)
				_ = bus.Pause(ctx, time.Second)
			}
		})
	}
}

// readOnce reads a source from the sequence next on, to its end or, live, until it fails.
func (f *follower) readOnce(ctx context.Context, b *bus.Bus, src source, next *uint64, live bool) error {
	from := bus.ReadOptions{FromSeq: *next, Live: live, HeadersOnly: src.outcome != nil}
	for m, err := range b.Read(ctx, src.stream, []string{src.filter}, from) {
		if err != nil {
			return err
		}
		if src.outcome == nil {
			src.apply(m)
		} else if outcome, err := b.Outcome(ctx, m); err != nil {
			return err
		} else if outcome != "" {
			src.outcome(m, outcome)
		}
		*next = m.Seq + 1
		if live {
			f.note(nil)
		}
	}
	return ctx.Err()
}

// note keeps what the last read failed with; nil: it did not.
func (f *follower) note(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	says := ""
	if err != nil {
		says = err.Error()
	}
	if says != f.fault {
		f.fault = says
		f.wake()
	}
}

// wake tells the pages that something has changed. f.mu is held.
func (f *follower) wake() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// touch gives a row the next revision. f.mu is held.
func (f *follower) touch(r *GroupRow) {
	f.revision++
	r.revision = f.revision
	f.wake()
}

// rowOf returns the row of a group, which it makes if there is none. f.mu is held.
func (f *follower) rowOf(uid schemas.UID) *GroupRow {
	r := f.rows[uid]
	if r == nil {
		f.opened++
		r = &GroupRow{Number: f.opened, UID: uid, Status: outcomes.Open}
		f.rows[uid], f.order = r, append(f.order, r)
		if len(f.order) > MaxRows {
			delete(f.rows, f.order[0].UID)
			f.order, f.leftOut = f.order[1:], f.leftOut+1
		}
	}
	return r
}

// count counts an event of one kind at the time when it was stored.
func (f *follower) count(kind string, at time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rates[kind] == nil {
		f.rates[kind] = &rate{}
	}
	f.rates[kind].add(at)
	if kind == "steps" {
		f.wake()
	}
}

// since returns copies of the rows that have changed after a revision, at most most, the longest unchanged first, the
// revision that they lead to, and the counts of the same moment.
func (f *follower) since(revision uint64, most int) ([]GroupRow, uint64, *Progress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	counts := f.tally()
	if revision >= f.revision {
		return nil, revision, counts
	}
	var changed []*GroupRow
	for _, r := range f.order {
		if r.revision > revision {
			changed = append(changed, r)
		}
	}
	slices.SortFunc(changed, func(a, b *GroupRow) int { return cmp.Compare(a.revision, b.revision) })
	to := f.revision
	if len(changed) > most {
		changed = changed[:most]
		to = changed[most-1].revision
	}
	out := make([]GroupRow, len(changed))
	for i, r := range changed {
		out[i] = *r
	}
	return out, to, counts
}

// Change is what is new of a run: one of its fields is set.
type Change struct {
	// Reset is the epoch that has begun: all that was read before is to be read again.
	Reset string
	// Rows have changed. ID is EPOCH-REVISION, from where another Following goes on.
	Rows []GroupRow
	ID   string
	// Progress is the counts after all rows, so that a reader of both has none older than its rows.
	Progress *Progress
}

// Following is how far a reader has read the changes of a run.
type Following struct {
	r        *Reader
	run      schemas.Run
	f        *follower
	revision uint64
	since    string
	wake     <-chan struct{}
}

// Follow returns the changes of a run after since, which is the ID of a Change; empty: after now.
func (r *Reader) Follow(run schemas.Run, since string) *Following {
	return &Following{r: r, run: run, since: since}
}

const (
	// maxBundle is how many changed groups one Change has.
	maxBundle = 200
	// startTimeout bounds how long Next waits until what is stored is read, askTimeout the questions after it.
	startTimeout, askTimeout = 30 * time.Second, 5 * time.Second
)

// Next returns what has changed since the last call. While the server is away it fails, and returns rows that came
// before.
func (x *Following) Next(ctx context.Context) (changes []Change, err error) {
	if x.f == nil || x.r.bus.Conn().IsConnected() {
		var f *follower
		if f, err = x.start(ctx); err == nil && f != x.f { // the first one, or a fresh one
			x.f = f
			var reset bool
			if x.revision, reset = f.resume(x.since); reset {
				changes = append(changes, Change{Reset: f.epoch})
			}
			x.since = "another"
		}
	}
	if x.f == nil {
		return nil, err
	}
	x.f.mu.Lock()
	x.wake = x.f.changed
	x.f.mu.Unlock()
	var status *schemas.RunStatus
	var system *System
	if err == nil {
		ctx, done := context.WithTimeout(ctx, askTimeout)
		defer done()
		if system, err = x.r.system.Get(ctx); err == nil {
			status, err = x.f.status.Get(ctx)
		}
	}
	for {
		rows, to, counts := x.f.since(x.revision, maxBundle)
		if x.revision = to; len(rows) > 0 {
			changes = append(changes, Change{Rows: rows, ID: fmt.Sprintf("%s-%d", x.f.epoch, to)})
		}
		switch {
		case to < counts.Revision: // one bundle was not enough
		case err != nil:
			return changes, err
		default:
			x.f.explain(counts, status, system)
			return append(changes, Change{Progress: counts}), nil
		}
	}
}

// start returns the follower of the run once it has read what is stored.
func (x *Following) start(ctx context.Context) (*follower, error) {
	ctx, done := context.WithTimeout(ctx, startTimeout)
	defer done()
	return x.r.follow(ctx, x.run, nil)
}

// Wait waits until the run has changed since Next, at most so long, or until ctx ends.
func (x *Following) Wait(ctx context.Context, most time.Duration) {
	select {
	case <-ctx.Done():
	case <-x.wake:
	case <-time.After(most):
	}
}

// resume returns the revision after which a reader goes on that has seen since, EPOCH-REVISION or empty. reset: it has
// seen another epoch, and must read all again.
func (f *follower) resume(since string) (revision uint64, reset bool) {
	epoch, text, _ := strings.Cut(since, "-")
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && epoch == f.epoch {
		return n, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.revision, since != ""
}
