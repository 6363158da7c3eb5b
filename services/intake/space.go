package intake

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Retention frees no group before its batch has closed, so two batches that are begun side by side and do not fit
// together in the stream of steps would both stand still. Intake therefore begins a batch, which may be one group, when
// all of its steps fit beside what is stored and what the batches that are begun may still store. Until then its
// prompts are accepted and claimed, and no sample is asked for; later groups of a batch that is begun go on. Of intakes
// side by side one at a time begins a batch while space is short (see turn.go).

// spaceAge is how long what other batches may still store may be reused: it is read group by group.
const spaceAge = time.Second

// stepSpace is what this intake begins and what waits for space.
type stepSpace struct {
	mu sync.Mutex
	// begun are batches whose requests may not be stored yet, with what they take.
	begun map[batchID]begunBatch
	// waiting are the prompts that wait for space, by their sequence.
	waiting map[uint64]spaceNeed
	// toStore is what the open batches might still store, at the given time.
	toStore map[batchID]int64
	read    time.Time
	turn    turn
}

type batchID struct {
	run   schemas.Run
	batch string
}

type begunBatch struct {
	bytes int64
	at    time.Time
}

// spaceNeed is what a prompt waits for: the space of its batch. The limit of the stream would be enough.
type spaceNeed struct {
	of            batchID
	group         schemas.Making
	samples       int64
	bytes, enough int64
	// first says that it fits once the batches that are begun have ended and their steps are freed.
	first, onDisk  bool
	since, renewed time.Time
}

const (
	// diskMargin is what stays free on a disk: the server writes in blocks.
	diskMargin = 16 << 20
	// announcing is how long a batch counts as begun before a request of it is seen.
	announcing = 30 * time.Second
	// forgetWaiting is how long a prompt that was put back counts as waiting.
	forgetWaiting = time.Minute
)

// beginBatch returns what the group of a prompt waits for before it may begin. seq is the sequence of
// the prompt, bytes the most that the steps of the group take. An error is of the server.
func (s *service) beginBatch(ctx context.Context, seq uint64, requests []*schemas.Request,
	bytes int64,
) (waiting wait, err error) {
	if len(requests) == 0 {
		return wait{}, nil
	}
	first := requests[0]
	of := batchID{first.Run, first.Group.Batch}
	need := max(1, first.Group.BatchGroups) * bytes
	if err := s.open.await(ctx); err != nil {
		return wait{}, err
	}
	x := &s.space
	x.mu.Lock()
	defer x.mu.Unlock()
	x.dropBegun(s.open.has)
	if _, mine := x.begun[of]; mine {
		x.wait(seq, nil)
		return wait{}, nil
	}
	room, err := s.stepRoom(ctx)
	if err != nil {
		return wait{}, err
	}
	others, err := s.openBytes(ctx, room.limit-room.stored-need)
	if err != nil {
		return wait{}, err
	}
	if x.toStore[of] > 0 { // it is begun
		x.wait(seq, nil)
		return wait{}, nil
	}
	begins := room.fits(need, others) && x.isNext(seq)
	if begins {
		if begins, room, others, err = s.stillFits(ctx, seq, room, need); err != nil {
			x.turn.give(ctx, s.bus, seq)
			return wait{}, err
		}
	}
	if begins {
		if x.begun == nil {
			x.begun = map[batchID]begunBatch{}
		}
		x.begun[of] = begunBatch{need, time.Now()}
		x.wait(seq, nil)
		return wait{}, nil
	}
	x.turn.give(ctx, s.bus, seq)
	n := spaceNeed{
		of: of, group: schemas.Making{Run: first.Run, UID: first.UID, SampleIndex: -1}, samples: first.GroupSize,
		bytes: need, enough: room.stored + others + need,
		first: others > 0 && room.stored+need <= room.limit, onDisk: room.onDisk,
		since: time.Now(), renewed: time.Now(),
	}
	x.wait(seq, &n)
	return forSpace.waits("%s", n.sentence(room, others)), nil
}

// stillFits reports whether a batch that seems to fit does: this process may not have heard yet what other intakes have
// claimed, or begun. Where space is short it takes the turn. It returns what it found. The caller holds the lock of
// s.space.
func (s *service) stillFits(ctx context.Context, seq uint64, room stepRoom, need int64) (
	begins bool, now stepRoom, others int64, err error,
) {
	x := &s.space
	if err = s.hearClaims(ctx); err == nil {
		others, err = s.openBytes(ctx, room.limit-room.stored-need)
	}
	if err != nil || !room.fits(need, others) || x.read.IsZero() {
		return err == nil && room.fits(need, others), room, others, err
	}
	if begins, err = x.turn.take(ctx, s.bus, seq); err != nil || !begins {
		return false, room, others, err
	}
	x.read = time.Time{} // the intake whose turn it was may have begun one
	if others, err = s.openBytes(ctx, 0); err == nil {
		room, err = s.stepRoom(ctx) // last: what was stored meanwhile counts twice, and not never
	}
	return err == nil && room.fits(need, others), room, others, err
}

// sentence says what a batch waits for, in the words of status.
func (n *spaceNeed) sentence(room stepRoom, others int64) string {
	w := outcomes.Wait{For: outcomes.ForSpace, Says: fmt.Sprintf(
		"%s is full: batch %s takes up to %s, and %s are stored",
		schemas.StreamSteps, n.of.batch, mib(n.bytes), mib(room.stored))}
	if others > 0 {
		w.Says += fmt.Sprintf(", up to %s to be stored by batches that are begun", mib(others))
	}
	if n.onDisk {
		w.Says += fmt.Sprintf(", of %s that the server's disk has for it", mib(room.limit))
		w.Fix = "Make room on its disk"
		return w.Text()
	}
	w.Says += fmt.Sprintf(", of %s; it begins when others are done and freed", mib(room.limit))
	w.Fix = fmt.Sprintf("Give it more with 'meander streams limit --max-steps-bytes %s', or free what is not needed "+
		"with 'meander gc' or 'meander runs rm RUN'. A batch of which prompts are still to come keeps its space until "+
		"it is complete or cancelled ('meander status')", wholeMiB(n.enough))
	return w.Text()
}

// wait notes what a prompt waits for; nil: nothing more. The caller holds the lock.
func (x *stepSpace) wait(seq uint64, n *spaceNeed) {
	old, waited := x.waiting[seq]
	switch {
	case n == nil && waited:
		delete(x.waiting, seq)
	case n == nil:
		return
	default:
		if x.waiting == nil {
			x.waiting = map[uint64]spaceNeed{}
		}
		if waited {
			n.since = old.since
		}
		x.waiting[seq] = *n
	}
}

// dropBegun forgets batches whose requests are stored by now, and those that have ended: what they may store is read,
// or nothing. The caller holds the lock.
func (x *stepSpace) dropBegun(isOpen func(batchID) bool) {
	for id, b := range x.begun {
		if age := time.Since(b.at); x.toStore[id] > 0 || age > announcing || age > 2*spaceAge && !isOpen(id) {
			delete(x.begun, id)
		}
	}
}

// groups returns the groups that wait for space.
func (x *stepSpace) groups() (out []schemas.Making) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, n := range x.waiting {
		if len(out) < schemas.MaxMaking {
			out = append(out, n.group)
		}
	}
	return out
}

// awaitSpace waits until the batch of a claimed group may begin. Errors are those of await.
func (s *service) awaitSpace(ctx context.Context, m *bus.Message, run schemas.Run, p *schemas.Prompt,
	todo []*schemas.Request, a *asked,
) (done func(), err error) {
	_, err = s.await(ctx, m, run, p, func(bool) (*schemas.Policy, wait, error) {
		waiting, err := s.beginBatch(ctx, m.Seq, todo, a.stepBytes())
		return a.policy(), waiting, err
	})
	if err == nil {
		return s.startResolving(ctx)
	}
	if !errors.Is(err, errPutBack) {
		s.space.forget(m.Seq)
	}
	return func() {}, err
}

// forget notes that a prompt waits no more.
func (x *stepSpace) forget(seq uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.wait(seq, nil)
}

// isNext reports whether no earlier prompt waits for the batches that are begun: small ones must not keep a large one
// out. One that waits for stored events to be freed keeps out no other. The caller holds the lock.
func (x *stepSpace) isNext(seq uint64) bool {
	for other, n := range x.waiting {
		if other < seq && n.first && time.Since(n.renewed) < 2*spaceAge {
			return false
		}
	}
	return true
}

// stepRoom is how much the stream of steps holds and may hold, or its disk if that is less.
type stepRoom struct {
	stored, limit int64
	onDisk        bool
}

// fits reports whether a batch that takes so many bytes fits beside what others may store. Alone it begins with what it
// takes at least, as a group does that is not refused (checkLimits).
func (r stepRoom) fits(need, others int64) bool {
	if others == 0 {
		need = need / boundOver * boundUnder
	}
	return r.stored+others+need <= r.limit
}

// stepRoom reads the size of the stream of steps.
func (s *service) stepRoom(ctx context.Context) (stepRoom, error) {
	info, err := s.bus.StreamInfo(ctx, schemas.StreamSteps)
	if err != nil {
		return stepRoom{}, err
	}
	r := stepRoom{stored: int64(info.State.Bytes), limit: info.Config.MaxBytes}
	if r.limit <= 0 {
		r.limit = math.MaxInt64 / 2
	}
	if s.cfg.DiskFree != nil {
		free, err := s.cfg.DiskFree()
		if err != nil {
			return r, fmt.Errorf("free space of the disk: %w", err)
		}
		if most := r.stored + free - diskMargin; most < r.limit {
			r.limit, r.onDisk = most, true
		}
	}
	return r, nil
}

// openBytes returns how much the batches that are begun might still store. If all open batches might take no more than
// free bytes, those count as 0 of which requests are stored: there is space for any of them. Else it reads what they
// have stored, and uses that for spaceAge. The caller holds the lock of s.space.
func (s *service) openBytes(ctx context.Context, free int64) (sum int64, err error) {
	x := &s.space
	if s.open.mayStore() <= free {
		x.read, x.toStore = time.Time{}, nil
	} else if time.Since(x.read) > spaceAge {
		closed, err := s.claimedGroups(ctx) // less those that are open
		if err != nil {
			return 0, err
		}
		open, err := s.open.list(ctx)
		if err != nil {
			return 0, err
		}
		x.toStore = map[batchID]int64{}
		groups := map[batchID][]bus.OpenGroup{}
		for _, g := range open {
			id := batchID{g.Run, g.Group.Batch}
			groups[id] = append(groups[id], g)
			delete(closed[id], g.UID)
		}
		for id, of := range groups {
			if x.toStore[id], err = s.batchBytes(ctx, of, int64(len(closed[id]))); err != nil {
				return 0, err
			}
		}
		x.read = time.Now()
	}
	for _, bytes := range x.toStore {
		sum += bytes
	}
	for id, b := range x.begun {
		if x.toStore[id] == 0 {
			sum += b.bytes
		}
	}
	return sum, nil
}

// claimedGroups returns which groups of the batches with open groups were claimed. It has heard of all of them when it
// returns: one that is not open then has closed. Batches of which all groups are open are left out.
func (s *service) claimedGroups(ctx context.Context) (map[batchID]map[schemas.UID]bool, error) {
	open, err := s.open.list(ctx)
	if err != nil {
		return nil, err
	}
	known := map[batchID]int64{}
	for _, g := range open {
		known[batchID{g.Run, g.Group.Batch}]++
	}
	claimed := map[batchID]map[schemas.UID]bool{}
	for _, g := range open {
		id := batchID{g.Run, g.Group.Batch}
		if claimed[id] != nil || known[id] >= g.Group.BatchGroups {
			continue
		}
		subjects, err := s.bus.Subjects(ctx, schemas.StreamRewards,
			schemas.Address{Kind: schemas.KindOpening, Run: id.run, Batch: id.batch}.Filter())
		if err != nil {
			return nil, err
		}
		claimed[id] = map[schemas.UID]bool{}
		for subject := range subjects {
			of, _ := schemas.ParseSubject(subject)
			claimed[id][of.UID] = true
		}
	}
	return claimed, s.hearClaims(ctx) // a record is stored before the opening of its group
}

// batchBytes returns how much a batch might still store, 0 if none of its samples was asked for: the samples of its
// open groups that are not made, and the groups that are still to come, each as large as the largest. So many of its
// groups have closed.
func (s *service) batchBytes(ctx context.Context, open []bus.OpenGroup, closed int64) (bytes int64, err error) {
	largest, begun := int64(0), closed > 0
	for _, g := range open {
		largest = max(largest, g.StepBytes)
		for _, kind := range []string{schemas.KindRequest, schemas.KindParked} {
			if begun {
				break
			}
			asked, err := s.bus.Subjects(ctx, requestStream(kind),
				schemas.Address{Kind: kind, Run: g.Run, UID: g.UID}.Filter())
			if err != nil {
				return 0, err
			}
			begun = len(asked) > 0
		}
		// Behind the requests: one goes only when its trajectory is stored.
		made, err := s.bus.Subjects(ctx, schemas.StreamTrajectories, schemas.TrajectoryFilter(g.Run, g.UID))
		if err != nil {
			return 0, err
		}
		begun = begun || len(made) > 0
		most := g.Group.MostTrajectories(g.GroupSize)
		bytes += g.StepBytes / most * max(0, most-int64(len(made)))
	}
	bytes += largest * max(0, open[0].Group.BatchGroups-int64(len(open))-closed)
	if !begun {
		return 0, nil
	}
	return max(1, bytes), nil
}

// wanted returns what waits for space, for presence; nil: nothing. others is what open batches may still store. The
// caller holds the lock.
func (x *stepSpace) wanted(room stepRoom, others int64) *schemas.Room {
	out, batches := &schemas.Room{Enough: room.stored + others, Disk: room.onDisk}, map[batchID]bool{}
	for _, seq := range slices.Sorted(maps.Keys(x.waiting)) {
		n := x.waiting[seq]
		if time.Since(n.renewed) > forgetWaiting {
			delete(x.waiting, seq)
			continue
		}
		if out.Waiting += n.samples; out.Need == 0 {
			out.Need, out.Since = n.bytes, n.since.UnixNano()
		}
		if !batches[n.of] {
			batches[n.of] = true
			out.Enough += n.bytes
		}
	}
	if out.Waiting == 0 {
		return nil
	}
	return out
}

// spaceWanted returns what waits for space here, and the limit that would be enough for it and all that is begun. While
// samplers wait it has that limit alone: they know no batches. nil: nothing waits.
func (s *service) spaceWanted(ctx context.Context) (*schemas.Room, error) {
	v, err := s.lanes.view(ctx, false)
	if err != nil {
		return nil, err
	}
	samplers := slices.ContainsFunc(v.samplerSpaces, func(r *schemas.Room) bool { return r.Waiting > 0 })
	x := &s.space
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.waiting) == 0 && !samplers {
		return nil, nil
	}
	room, err := s.stepRoom(ctx)
	if err != nil {
		return nil, err
	}
	others, err := s.openBytes(ctx, -1)
	if err != nil {
		return nil, err
	}
	out := x.wanted(room, others)
	if out == nil && samplers {
		out = &schemas.Room{Enough: room.stored + others}
	}
	return out, nil
}

// announceSpace keeps in presence what waits for space here, until ctx ends: status, doctor and the page read it there.
func (s *service) announceSpace(ctx context.Context) error {
	said := &schemas.Presence{
		Service: schemas.ServiceIntake, Instance: "intake-" + strings.ToLower(rand.Text()[:8]),
	}
	var mu sync.Mutex
	stop := func() error { return nil }
	changed := make(chan struct{}, 1)
	for ctx.Err() == nil {
		room, err := s.spaceWanted(ctx)
		mu.Lock()
		was := said.Room
		if err == nil {
			said.Room, said.Making = room, s.space.groups()
		}
		mu.Unlock()
		switch {
		case err != nil && ctx.Err() == nil:
			zerolog.Ctx(ctx).Debug().Err(err).Msg("space that is waited for not known")
		case err != nil:
		case was == nil && room != nil:
			stop = s.bus.Announcing(ctx, func() *schemas.Presence {
				mu.Lock()
				defer mu.Unlock()
				return new(*said)
			}, changed)
		case was != nil && room == nil:
			if err := stop(); err != nil {
				return err
			}
			stop = func() error { return nil }
		case was != nil && *was != *room:
			select {
			case changed <- struct{}{}:
			default:
			}
		}
		_ = bus.Pause(ctx, spaceAge)
	}
	return stop()
}

// turnKey is the entry of schemas.CountBucket, beside those of runs, that says whose turn it is: its name and until
// when, Unix nanoseconds.
const turnKey = "begins-batches"

// turn is the right to begin batches while space is short. One intake has it, from before it looks how much space there
// is until the requests of what it began are stored, where others count them. An intake that dies has it for the time
// that a batch counts as begun.
type turn struct {
	name string
	// by are the prompts, by their sequence, that begin batches in this turn.
	by map[uint64]bool
}

// take takes the turn for a prompt, and reports whether it could.
func (t *turn) take(ctx context.Context, b *bus.Bus, seq uint64) (bool, error) {
	if t.name == "" {
		t.name, t.by = rand.Text(), map[uint64]bool{}
	}
	e, err := b.Entry(ctx, schemas.CountBucket, turnKey)
	if err != nil {
		return false, err
	}
	holder, until, _ := strings.Cut(string(e.Value), " ")
	if end, _ := strconv.ParseInt(until, 10, 64); holder != t.name && time.Now().UnixNano() < end {
		return false, nil
	}
	if stored, err := t.store(ctx, b, time.Now().Add(announcing), e.Revision); err != nil || !stored {
		return false, err
	}
	t.by[seq] = true
	return true, nil
}

// give ends the turn of a prompt, and that of this intake with the last one.
func (t *turn) give(ctx context.Context, b *bus.Bus, seq uint64) {
	if !t.by[seq] {
		return
	}
	if delete(t.by, seq); len(t.by) > 0 {
		return
	}
	e, err := b.Entry(ctx, schemas.CountBucket, turnKey)
	if err == nil && strings.HasPrefix(string(e.Value), t.name+" ") {
		_, err = t.store(ctx, b, time.Unix(0, 0), e.Revision)
	}
	if err != nil { // it ends by itself
		zerolog.Ctx(ctx).Debug().Err(err).Msg("other intakes begin batches later")
	}
}

func (t *turn) store(ctx context.Context, b *bus.Bus, until time.Time, revision uint64) (stored bool, err error) {
	value := t.name + " " + strconv.FormatInt(until.UnixNano(), 10)
	return b.SwapEntry(ctx, schemas.CountBucket, turnKey, []byte(value), revision)
}

// endTurn is called when the requests of a prompt are stored, or could not be.
func (x *stepSpace) endTurn(ctx context.Context, b *bus.Bus, seq uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.turn.give(ctx, b, seq)
}
