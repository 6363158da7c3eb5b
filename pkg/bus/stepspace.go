package bus

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// StepSpace reserves space in MDR_STEPS for the samples of one sampler. A sample begins when all of its steps fit
// beside what is stored, and beside what the samples in flight of all samplers may still store. Otherwise samples
// that have begun would fill the stream, and none of them could end. Each sampler has an entry in
// schemas.PresenceBucket that says how many bytes its samples hold and how many it waits for.
//
// With ample space, a sampler reserves a small part of its even share without asking, and announces it: all such
// reservations together are less than what others leave free. Otherwise a sampler announces what it wants, then reads
// what others want, and lets those go first that announced earlier, by the revisions of the bucket. Of two that
// announce at once, one sees the other. So at each grant the stored bytes and all held bytes fit in the limit, and no
// sampler overtakes another. The bytes of a sample count as held until it ends, even if a part is stored already.
//
// When no sampler holds anything, the first one in turn gets its space once it fits beside what is stored. What dead
// attempts stored is removed when it is in the way (SweepDead). So one sample can always end, unless its steps alone
// exceed the limit, or finished samples fill the stream. Then all wait, and Faults reports it.
type StepSpace struct {
	b     *Bus
	entry *Announcement
	base  func() *schemas.Presence
	disk  func() (free int64, err error)
	wake  chan struct{}

	mu sync.Mutex
	// held is the bytes of the samples in flight, announced the least that the stored entry says of it.
	held, announced int64
	queue           []*Reservation
	// wants is what the entry asks for, and turn the revision of the entry that asked for it first (0: not announced
	// yet). No more is granted than was announced.
	wants int64
	turn  uint64
	// pending is the entry that is being stored.
	pending schemas.Room
	// limit is the stream's size, space what was not reserved of it, when they were last read.
	limit, space int64
	// onDisk means that the disk had less free space than the stream.
	onDisk bool
	waited time.Duration
	// unused is the free part of the stream and of the disk when they were last read (seen), samplers the number of
	// samplers when they were last counted.
	unused, samplers int64
	seen, counted    time.Time
	// idle is since when no sampler has held anything although the first in turn did not fit.
	idle time.Time
	log  limiter
}

// Reservation is the space of one sample. Release gives it back.
type Reservation struct {
	r      *StepSpace
	bytes  int64
	since  time.Time
	ready  chan struct{}
	lapses int64
	done   bool
}

const (
	// spacePoll and spacePollMax bound the pause between two tries to grant space.
	spacePoll, spacePollMax = 50 * time.Millisecond, time.Second
	// diskMargin is what stays free on a disk: the server writes in blocks.
	diskMargin = 16 << 20
	// Space is ample from spaceAmple bytes on. Then a sampler reserves 1/spaceShare of its even share without asking;
	// the even share also counts spaceNewcomers samplers that have no entry yet. A sampler that asks leaves
	// 1/spaceLeave of the whole free.
	spaceAmple, spaceShare, spaceLeave, spaceNewcomers = 1 << 30, 32, 16, 16
	// spaceLook and spaceCount are how long the state of the stream and the number of samplers may be reused.
	spaceLook, spaceCount = time.Second, 10 * time.Second
	// spaceSpare is how long the space of an ended sample is kept for the next one.
	spaceSpare = 100 * time.Millisecond
	// spaceAlarm is how long a sample waits for space before that is a fault.
	spaceAlarm = 2 * time.Second
)

// NewStepSpace returns the space of a sampler; Run serves it. base returns the sampler's entry without its space, and
// changed receives when base has changed. disk returns how much of the server's disk is free; nil: not known.
func (b *Bus) NewStepSpace(
	base func() *schemas.Presence, changed <-chan struct{}, disk func() (free int64, err error),
) *StepSpace {
	r := &StepSpace{b: b, base: base, disk: disk, wake: make(chan struct{}, 1)}
	r.entry = b.Announcement(r.presence, changed)
	r.entry.stored = r.noteAnnounced
	return r
}

// presence returns the sampler's entry of presence with what it holds and waits for, and notes that it is being
// stored.
func (r *StepSpace) presence() *schemas.Presence {
	p := r.base()
	r.mu.Lock()
	defer r.mu.Unlock()
	room := schemas.Room{Held: r.held, Wants: r.wants, Turn: r.turn, Waiting: int64(len(r.queue))}
	if len(r.queue) > 0 {
		room.Need, room.Since, room.Disk = r.queue[0].bytes, r.queue[0].since.UnixNano(), r.onDisk
	}
	r.pending, r.announced = room, min(r.announced, r.held)
	if room != (schemas.Room{}) {
		p.Room = &room
	}
	return p
}

// noteAnnounced notes that the entry made by presence is stored, with its revision.
func (r *StepSpace) noteAnnounced(revision uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.announced = r.pending.Held
	if r.turn == 0 && r.pending.Turn == 0 && r.wants > 0 && r.pending.Wants == r.wants {
		r.turn = revision
	}
}

// Run announces the sampler and grants space to its samples until ctx ends. Faults of the server are logged and tried
// again; an error is of the announcement.
func (r *StepSpace) Run(ctx context.Context) error {
	announced := make(chan error, 1)
	go func() { announced <- r.entry.Run(ctx) }()
	t := time.NewTimer(spacePollMax)
	defer t.Stop()
	for wait := spacePoll; ; {
		giveBack := false
		select {
		case err := <-announced:
			return err
		case <-r.wake:
			wait = spacePoll
		case <-t.C:
			giveBack = true
		}
		if ctx.Err() != nil {
			return <-announced
		}
		waiting, err := r.grantWaiting(ctx, giveBack)
		if err != nil && ctx.Err() == nil && r.b.waitLog.allow(logEvery) {
			r.b.log.Warn().Err(err).Msg("space for steps cannot be asked for, trying again")
		}
		if err == nil && !waiting {
			if !giveBack {
				t.Reset(spaceSpare)
			}
			continue
		}
		r.logWaiting()
		t.Reset(wait)
		wait = min(2*wait, spacePollMax)
	}
}

// logWaiting logs, now and then, that samples wait for space in the stream of steps.
func (r *StepSpace) logWaiting() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) > 0 && time.Since(r.queue[0].since) > spaceAlarm && r.log.allow(logEvery) {
		r.b.log.Warn().Int("samples", len(r.queue)).Int64("need_bytes", r.queue[0].bytes).
			Int64("free_bytes", max(0, r.space)).Int64("max_bytes", r.limit).Bool("disk", r.onDisk).
			Msg("samples wait for space; meander streams says for what")
	}
}

// StepSpaceStats is how the space is used.
type StepSpaceStats struct {
	// Held is the bytes of the samples in flight. Waiting is how many samples wait, Waited how long all samples that
	// have begun waited before that.
	Held    int64
	Waiting int
	Waited  time.Duration
}

// Stats returns how the space is used.
func (r *StepSpace) Stats() StepSpaceStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return StepSpaceStats{Held: r.held, Waiting: len(r.queue), Waited: r.waited}
}

// Reserve waits for space for a sample whose steps take that many bytes; Release gives it back. It fails only when
// ctx ends first.
func (r *StepSpace) Reserve(ctx context.Context, bytes int64) (*Reservation, error) {
	c := &Reservation{r: r, bytes: bytes, since: time.Now(), ready: make(chan struct{})}
	r.mu.Lock()
	r.queue = append(r.queue, c)
	r.mu.Unlock()
	notify(r.wake)
	select {
	case <-c.ready:
		return c, nil
	case <-ctx.Done():
		c.Release()
		return nil, ctx.Err()
	}
}

// Release gives the space of a sample back: what the sample stored counts as stored, and the rest is free. Later
// calls do nothing.
func (c *Reservation) Release() {
	r := c.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.done {
		return
	}
	c.done = true
	for i, other := range r.queue {
		if other == c {
			r.queue = append(r.queue[:i:i], r.queue[i+1:]...)
			return
		}
	}
	r.held -= c.bytes
	notify(r.wake)
}

// Lapsed reports whether the entry expired for a time. Then others did not know of the reservation, and may have
// removed the steps of its sample as those of a dead attempt.
func (c *Reservation) Lapsed() bool { return c.lapses != c.r.entry.lapsed() }

// grantWaiting grants space to the waiting samples that fit, in the order of the calls of Reserve, and reports
// whether samples still wait. With giveBack it also announces that bytes are free again which no sample holds.
func (r *StepSpace) grantWaiting(ctx context.Context, giveBack bool) (waiting bool, err error) {
	r.mu.Lock()
	n, stale := len(r.queue), r.announced != r.held
	if n == 0 {
		r.turn, r.wants, r.idle = 0, 0, time.Time{}
	}
	r.mu.Unlock()
	if n == 0 {
		if stale && giveBack {
			_, err = r.entry.storeEntry(ctx)
		}
		return false, err
	}
	ample, err := r.isAmple(ctx)
	others := int64(0)
	switch {
	case err != nil:
	case ample:
		err = r.grantAll(ctx)
	default:
		others, err = r.grantInTurn(ctx)
	}
	if err != nil {
		return true, err
	}
	r.mu.Lock()
	waiting = len(r.queue) > 0
	dead := r.shouldSweepDead(waiting && others == 0 && r.held == 0)
	r.mu.Unlock()
	if dead {
		err = r.b.SweepDead(ctx)
	}
	return waiting, err
}

// grantAll grants all that can ever fit: space is ample. It stores the entry first, unless that holds enough already.
func (r *StepSpace) grantAll(ctx context.Context) error {
	r.mu.Lock()
	r.wants = r.placeable()
	known := r.pending.Wants == 0 && r.held+r.wants <= r.announced && r.entry.age() < schemas.PresenceTTL/2
	r.mu.Unlock()
	return r.announceAndStart(ctx, r.takeGrantable(math.MaxInt64, false), known)
}

// grantInTurn announces to the other samplers what waits, and grants what fits beside what they hold and what they
// asked for earlier. It returns the bytes that others hold.
func (r *StepSpace) grantInTurn(ctx context.Context) (others int64, err error) {
	r.mu.Lock()
	if r.turn == 0 {
		r.wants = r.placeable()
	}
	spare := r.turn == 0 && len(r.queue) > 0 && r.announced-r.held >= r.queue[0].bytes &&
		r.entry.age() < schemas.PresenceTTL/2
	r.mu.Unlock()
	if !spare {
		if _, err := r.entry.storeEntry(ctx); err != nil {
			return 0, err
		}
	}
	free, others, err := r.grantableBytes(ctx, spare)
	if err != nil {
		return 0, err
	}
	return others, r.announceAndStart(ctx, r.takeGrantable(free, spare), spare)
}

// announceAndStart lets granted samples begin, after it has announced what they take; known means that others know
// already. When that fails, they wait again.
func (r *StepSpace) announceAndStart(ctx context.Context, granted []*Reservation, known bool) error {
	if len(granted) > 0 && !known {
		if _, err := r.entry.storeEntry(ctx); err != nil {
			r.putBack(granted)
			return err
		}
	}
	for _, c := range granted {
		close(c.ready)
	}
	return nil
}

// placeable returns the bytes of all samples that wait, without those larger than the whole stream: these must not
// keep others out.
func (r *StepSpace) placeable() (bytes int64) {
	for _, c := range r.queue {
		if c.bytes <= r.limit {
			bytes += c.bytes
		}
	}
	return bytes
}

// shouldSweepDead reports, once in schemas.PresenceTTL, that no sampler has held anything for that long although
// samples wait. A dead process no longer has an entry by then. The caller holds the lock.
func (r *StepSpace) shouldSweepDead(idle bool) bool {
	switch now := time.Now(); {
	case !idle:
		r.idle = time.Time{}
	case r.idle.IsZero():
		r.idle = now
	case now.Sub(r.idle) > schemas.PresenceTTL && r.wants > 0:
		r.idle = now
		return true
	}
	return false
}

// isAmple reports whether what the sampler holds and waits for is so little, of what is free, that it need not ask the
// other samplers.
func (r *StepSpace) isAmple(ctx context.Context) (bool, error) {
	r.mu.Lock()
	seen, counted := time.Since(r.seen) < spaceLook, time.Since(r.counted) < spaceCount
	r.mu.Unlock()
	if !seen {
		if _, err := r.readUnused(ctx); err != nil {
			return false, err
		}
	}
	if !counted {
		info, err := r.b.StreamInfo(ctx, schemas.StreamPresenceBucket)
		if err != nil {
			return false, err
		}
		r.mu.Lock()
		r.samplers, r.counted = int64(info.State.Msgs), time.Now() // at least as many as run
		r.mu.Unlock()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unused >= spaceAmple && r.held+r.placeable() <= r.unused/spaceShare/(r.samplers+spaceNewcomers), nil
}

// readUnused returns how many bytes of the stream of steps are free, or of the disk if that has less, and notes them.
func (r *StepSpace) readUnused(ctx context.Context) (unused int64, err error) {
	info, err := r.b.StreamInfo(ctx, schemas.StreamSteps)
	if err != nil {
		return 0, err
	}
	limit, unused := info.Config.MaxBytes, info.Config.MaxBytes-int64(info.State.Bytes)
	if limit <= 0 {
		const unlimited = 1 << 62
		limit, unused = unlimited, unlimited
	}
	onDisk := false
	if r.disk != nil {
		disk, err := r.disk()
		if err != nil {
			return 0, fmt.Errorf("free space of the disk: %w", err)
		}
		if onDisk = disk-diskMargin < unused; onDisk {
			unused = disk - diskMargin
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.limit != limit {
		notify(r.wake) // other samples may fit now
	}
	r.limit, r.unused, r.onDisk, r.seen = limit, unused, onDisk, time.Now()
	return unused, nil
}

// grantableBytes returns how many bytes may be granted now, and in others how many the other samplers hold. With
// spare, the space comes from what this sampler's entry holds already, and everyone who waits goes first.
func (r *StepSpace) grantableBytes(ctx context.Context, spare bool) (free, others int64, err error) {
	r.mu.Lock()
	held, turn := r.held, r.turn
	if spare {
		held = r.announced
	}
	r.mu.Unlock()
	own := r.base().Instance
	// Read what is held before what is stored: then a step that is stored in between counts twice,
	// rather than not at all.
	present, revisions, err := r.b.PresentAt(ctx)
	if err != nil {
		return 0, 0, err
	}
	ahead := int64(0)
	for i, p := range present {
		if p.Room == nil || p.Instance == own {
			continue
		}
		others += p.Room.Held
		theirs := p.Room.Turn
		if theirs == 0 {
			theirs = revisions[i]
		}
		if spare || theirs < turn {
			ahead += p.Room.Wants
		}
	}
	unused, err := r.readUnused(ctx)
	if err != nil {
		return 0, 0, err
	}
	space := unused - others - held
	r.mu.Lock()
	r.space = space
	r.mu.Unlock()
	if unused >= spaceAmple && others+held > 0 {
		space -= unused / spaceLeave
	}
	return space - ahead, others, nil
}

// takeGrantable removes from the queue the samples that fit in free bytes, in order, and returns them. With spare, it
// uses what the entry holds already; a negative free then means that others wait for it.
func (r *StepSpace) takeGrantable(free int64, spare bool) (granted []*Reservation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if spare {
		if free < 0 {
			r.announced = r.held // others wait for the space; this sampler asks, too, in turn
			notify(r.wake)
			return nil
		}
		free = r.announced - r.held
	} else {
		free = min(free, r.wants)
	}
	var rest []*Reservation
	ahead := false // a sample waits that must not be overtaken
	for _, c := range r.queue {
		if ahead || c.bytes > min(free, r.limit) {
			ahead = ahead || c.bytes <= r.limit
			rest = append(rest, c)
			continue
		}
		free -= c.bytes
		r.held += c.bytes
		c.lapses = r.entry.lapsed()
		r.waited += time.Since(c.since)
		granted = append(granted, c)
	}
	if r.queue = rest; len(granted) > 0 {
		r.turn, r.wants = 0, 0 // the rest asks again, behind the samplers that wait already
		notify(r.wake)
	}
	return granted
}

// putBack puts granted samples back to the front of the queue when they could not be announced.
func (r *StepSpace) putBack(granted []*Reservation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var back []*Reservation
	for _, c := range granted {
		r.held -= c.bytes
		if !c.done {
			back = append(back, c)
		} else {
			r.held += c.bytes // Release has done so
		}
	}
	r.queue = append(back, r.queue...)
}

// addWaitingSamples adds to the stats of MDR_STEPS what samplers hold, and what they and intakes wait for, by their
// entries of presence. The
// stream counts as full when samples have waited for spaceAlarm for space that is not there.
func (b *Bus) addWaitingSamples(ctx context.Context, s *StreamStats) error {
	present, _, err := b.PresentAt(ctx)
	if err != nil {
		return err
	}
	first := int64(math.MaxInt64)
	for _, p := range present {
		if p.Room == nil {
			continue
		}
		s.Held += p.Room.Held
		s.Waiting += p.Room.Waiting
		s.Enough = max(s.Enough, p.Room.Enough)
		if p.Room.Waiting > 0 && p.Room.Since < first {
			first, s.Need, s.OnDisk = p.Room.Since, p.Room.Need, p.Room.Disk
		}
	}
	// If it fits, a busy machine is only slow to grant it.
	fits := !s.OnDisk && (s.MaxBytes <= 0 || max(s.Enough, int64(s.Bytes)+s.Held+s.Need) <= s.MaxBytes)
	if s.Waiting > 0 && !fits && time.Since(time.Unix(0, first)) > spaceAlarm {
		s.State = StateFull
	}
	return nil
}
