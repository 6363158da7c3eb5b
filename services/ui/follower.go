package ui

import (
	"cmp"
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

const (
	// maxFollowers is how many runs are followed at once, maxRows how many groups of each are kept: the newest.
	maxFollowers, maxRows = 8, 20000
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
	status snapshot[*schemas.RunStatus]
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
}

// source is one kind of events that a follower reads.
type source struct {
	stream, filter string
	apply          func(m *bus.Message)
	// outcome is set instead of apply where the outcome that the header says is all that is wanted.
	outcome func(m *bus.Message, outcome string)
}

// followerOf returns the follower of a run, which it starts if there is none, once it has read what is stored.
func (s *server) followerOf(ctx context.Context, run schemas.Run) (*follower, error) {
	s.mu.Lock()
	f := s.followers[string(run)]
	s.mu.Unlock()
	if f == nil {
		if _, err := s.client.Status(ctx, run); err != nil { // so that no name costs anything that is not a run's
			return nil, err
		}
		f = s.startFollower(run)
	}
	f.used.Store(time.Now().UnixNano())
	select {
	case <-f.ready:
		return f, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// startFollower starts to follow a run, and ends the followers that are idle, or one too many.
func (s *server) startFollower(run schemas.Run) *follower {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.followers[string(run)]; f != nil {
		return f
	}
	s.endIdle(maxFollowers - 1)
	ctx, end := context.WithCancel(s.ctx)
	f := &follower{
		run: run, epoch: rand.Text()[:8], end: end, ready: make(chan struct{}), rows: map[schemas.UID]*GroupRow{},
		changed: make(chan struct{}), rates: map[string]*rate{},
	}
	f.status.read = func(ctx context.Context) (*schemas.RunStatus, error) { return s.client.Status(ctx, run) }
	f.used.Store(time.Now().UnixNano())
	s.followers[string(run)] = f
	f.ended.Go(func() { f.read(ctx, s.bus) })
	return f
}

// endIdle ends followers that no page showed for a while, and the longest unused ones above most. s.mu is held.
func (s *server) endIdle(most int) {
	var all []*follower
	for _, f := range s.followers {
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b *follower) int { return cmp.Compare(b.used.Load(), a.used.Load()) })
	for i, f := range all {
		if i >= most || time.Since(time.Unix(0, f.used.Load())) > idle {
			f.end()
			delete(s.followers, string(f.run))
		}
	}
}

// endWhenIdle ends idle followers from time to time, until ctx ends.
func (s *server) endWhenIdle(ctx context.Context) {
	for waitFor(ctx, idle/2) {
		s.mu.Lock()
		s.endIdle(maxFollowers)
		s.mu.Unlock()
	}
}

// endFollowers ends all followers, and waits for them.
func (s *server) endFollowers() {
	s.mu.Lock()
	all := s.followers
	s.followers = map[string]*follower{}
	s.mu.Unlock()
	for _, f := range all {
		f.end()
		f.ended.Wait()
	}
}

// read reads what is stored of the run, then what comes, until ctx ends.
func (f *follower) read(ctx context.Context, b *bus.Bus) {
	all := func(kind string) string { return schemas.Address{Kind: kind, Run: f.run}.Filter() }
	sources := []source{
		{schemas.StreamGroups, schemas.GroupSubject(f.run, "*"), f.takeRecord, nil},
		{schemas.StreamTrajectories, schemas.TrajectoryFilter(f.run, "*"), nil, f.takeTrajectory},
		{schemas.StreamRewards, schemas.RewardFilter(f.run, "*", "*"), nil, f.takeReward},
		{schemas.StreamAdvantages, schemas.AdvantageSubject(f.run, "*"), f.takeAdvantage, nil},
	}
	next := make([]uint64, len(sources))
	for i, src := range sources {
		for {
			err := f.readOnce(ctx, b, src, &next[i], false)
			if f.note(err); err == nil {
				break
			}
			if !waitFor(ctx, time.Second) {
				return
			}
		}
	}
	close(f.ready)
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
				f.note(f.readOnce(ctx, b, src, &next[i], true))
				if !waitFor(ctx, time.Second) {
					return
				}
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
		if len(f.order) > maxRows {
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
