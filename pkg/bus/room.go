package bus

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// Room reserves space in MDR_STEPS: a sample begins when all of its steps fit, beside what is
// stored and what the samples in hand of all samplers may store yet. Without it, samples
// that have begun fill the stream and none of them can end.
//
// Where there is ample space, a sampler takes what is a small part of its even share at once, and says so: all that is taken so
// is less than what others leave. Nobody then reads what all the others hold, which a thousand samplers could not. Else each asks:
//
// Each sampler's entry in schemas.PresenceBucket says what its samples hold and what it
// waits for. A claim is announced before the claims of others are read, and yields to those that
// were announced before, by the revisions of the bucket: of two that are made at once, one sees the
// other. So at each grant the stored bytes and all that is held fit in the limit, and who
// came first is never overtaken. What is held counts whole until its sample ends, also where a part of
// it is stored: a little less begins at once than could.
//
// The one who is first gets what it wants once it fits beside what is stored, when nobody holds
// anything; what dead attempts stored is then removed where it is in the way (SweepDead). So there
// is always one that ends, unless its steps alone exceed the limit, or what ended fills the
// stream; then everybody waits for room, and Faults says so.
type Room struct {
	b     *Bus
	entry *Announcement
	base  func() *schemas.Presence
	disk  func() (free int64, err error)
	wake  chan struct{}

	mu sync.Mutex
	// held is of the samples in hand, told what the entry says of it at least.
	held, told int64
	queue      []*Claim
	// wants is what the entry asks for, of turn on: no more is granted than others know of.
	wants int64
	turn  uint64
	// telling is the entry on its way.
	telling schemas.Room
	// limit and space are the stream's when they were last seen: its size, and what of it
	// was not spoken for.
	limit, space int64
	// onDisk says that the disk had less room than the stream.
	onDisk bool
	waited time.Duration
	// unused is the part of the stream and of the disk that nothing was stored in, when it was seen last; samplers is
	// how many there were when they were counted last.
	unused, samplers int64
	seen, counted    time.Time
	// idle is since when nobody has held anything while the first in turn did not fit.
	idle time.Time
	log  limiter
}

// Claim is the room of one sample, until Release.
type Claim struct {
	r      *Room
	bytes  int64
	since  time.Time
	ready  chan struct{}
	lapses int64
	done   bool
}

const (
	// roomPoll and roomPollMax bound the pause between two looks for room.
	roomPoll, roomPollMax = 50 * time.Millisecond, time.Second
	// diskMargin is what stays free of a disk: the server writes in blocks.
	diskMargin = 16 << 20
	// roomAmple is from when on space is ample. A sampler takes one part in roomShare of its even share of it without asking,
	// beside roomNewcomers that were not counted; who asks leaves one part in roomLeave of the whole.
	roomAmple, roomShare, roomLeave, roomNewcomers = 1 << 30, 32, 16, 16
	// roomLook and roomCount are for how long it is good enough what was seen of the stream and of the number of samplers.
	roomLook, roomCount = time.Second, 10 * time.Second
	// roomSpare is how long what a sample has given back is kept for the next one.
	roomSpare = 100 * time.Millisecond
	// roomAlarm is how long a sample waits for room before that is a fault.
	roomAlarm = 2 * time.Second
)

// NewRoom is the room of a sampler whose entry, but for the room, base returns; changed has a word when
// that changes. disk says how
// much of the server's disk is free; nil: nobody knows.
func (b *Bus) NewRoom(base func() *schemas.Presence, changed <-chan struct{}, disk func() (free int64, err error)) *Room {
	r := &Room{b: b, base: base, disk: disk, wake: make(chan struct{}, 1)}
	r.entry = b.Announcement(r.presence, changed)
	r.entry.stored = r.announced
	return r
}

// presence is the entry as of now.
func (r *Room) presence() *schemas.Presence {
	p := r.base()
	r.mu.Lock()
	defer r.mu.Unlock()
	room := schemas.Room{Held: r.held, Wants: r.wants, Turn: r.turn, Waiting: int64(len(r.queue))}
	if len(r.queue) > 0 {
		room.Need, room.Since, room.Disk = r.queue[0].bytes, r.queue[0].since.UnixNano(), r.onDisk
	}
	r.telling, r.told = room, min(r.told, r.held)
	if room != (schemas.Room{}) {
		p.Room = &room
	}
	return p
}

// announced notes the entry that presence made.
func (r *Room) announced(revision uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = r.telling.Held
	if r.turn == 0 && r.telling.Turn == 0 && r.wants > 0 && r.telling.Wants == r.wants {
		r.turn = revision
	}
}

// Run announces the sampler and serves what is taken, until ctx ends.
func (r *Room) Run(ctx context.Context) error {
	announced := make(chan error, 1)
	go func() { announced <- r.entry.Run(ctx) }()
	t := time.NewTimer(roomPollMax)
	defer t.Stop()
	for wait := roomPoll; ; {
		settle := false
		select {
		case err := <-announced:
			return err
		case <-r.wake:
			wait = roomPoll
		case <-t.C:
			settle = true
		}
		if ctx.Err() != nil {
			return <-announced
		}
		waiting, err := r.serve(ctx, settle)
		if err != nil && ctx.Err() == nil && r.b.waitLog.allow() {
			r.b.log.Warn().Err(err).Msg("room for steps cannot be asked for, trying again")
		}
		if err == nil && !waiting {
			if !settle {
				t.Reset(roomSpare)
			}
			continue
		}
		r.say()
		t.Reset(wait)
		wait = min(2*wait, roomPollMax)
	}
}

// say logs that samples wait, now and then.
func (r *Room) say() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) > 0 && time.Since(r.queue[0].since) > roomAlarm && r.log.allow() {
		r.b.log.Warn().Int("samples", len(r.queue)).Int64("need_bytes", r.queue[0].bytes).Int64("free_bytes", max(0, r.space)).Int64("max_bytes", r.limit).Bool("disk", r.onDisk).
			Msg("samples wait for room; meander streams says for what")
	}
}

// RoomStats is how a room is used.
type RoomStats struct {
	// Held is the bytes of the samples in hand, Waiting the samples that wait, Waited how long
	// those that have begun did so, all together.
	Held    int64
	Waiting int
	Waited  time.Duration
}

// Stats returns how the room is used.
func (r *Room) Stats() RoomStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return RoomStats{Held: r.held, Waiting: len(r.queue), Waited: r.waited}
}

// Take waits for room for a sample whose steps take that many bytes. It is an error only when
// ctx ends first.
func (r *Room) Take(ctx context.Context, bytes int64) (*Claim, error) {
	c := &Claim{r: r, bytes: bytes, since: time.Now(), ready: make(chan struct{})}
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

// Release gives the room back: what the sample stored counts as stored, and the rest is free. It
// may be called more than once.
func (c *Claim) Release() {
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

// Lapsed says whether the claim was not known to others for a time, so that the steps of its
// sample may have been taken for those of a dead attempt.
func (c *Claim) Lapsed() bool { return c.lapses != c.r.entry.lapsed() }

// serve grants what fits, in the order in which it was taken, and says whether some waits. To
// settle is to give back what the entry holds and no sample does.
func (r *Room) serve(ctx context.Context, settle bool) (waiting bool, err error) {
	r.mu.Lock()
	n, stale := len(r.queue), r.told != r.held
	if n == 0 {
		r.turn, r.wants, r.idle = 0, 0, time.Time{}
	}
	r.mu.Unlock()
	if n == 0 {
		if stale && settle {
			_, err = r.entry.renew(ctx)
		}
		return false, err
	}
	ample, err := r.ample(ctx)
	others := int64(0)
	switch {
	case err != nil:
	case ample:
		err = r.serveAll(ctx)
	default:
		others, err = r.serveInTurn(ctx)
	}
	if err != nil {
		return true, err
	}
	r.mu.Lock()
	waiting = len(r.queue) > 0
	dead := r.dead(waiting && others == 0 && r.held == 0)
	r.mu.Unlock()
	if dead {
		err = r.b.SweepDead(ctx)
	}
	return waiting, err
}

// serveAll grants all that can be placed. What the entry holds already is used again.
func (r *Room) serveAll(ctx context.Context) error {
	r.mu.Lock()
	r.wants = r.placeable()
	known := r.telling.Wants == 0 && r.held+r.wants <= r.told && r.entry.age() < schemas.PresenceTTL/2
	r.mu.Unlock()
	return r.begin(ctx, r.grant(math.MaxInt64, false), known)
}

// serveInTurn asks for what waits, and grants of it what fits beside what others hold, and wait for longer.
func (r *Room) serveInTurn(ctx context.Context) (others int64, err error) {
	r.mu.Lock()
	if r.turn == 0 {
		r.wants = r.placeable()
	}
	spare := r.turn == 0 && len(r.queue) > 0 && r.told-r.held >= r.queue[0].bytes && r.entry.age() < schemas.PresenceTTL/2
	r.mu.Unlock()
	if !spare {
		if _, err := r.entry.renew(ctx); err != nil {
			return 0, err
		}
	}
	free, others, err := r.free(ctx, spare)
	if err != nil {
		return 0, err
	}
	return others, r.begin(ctx, r.grant(free, spare), spare)
}

// begin has granted samples begin, once the others know of them.
func (r *Room) begin(ctx context.Context, granted []*Claim, known bool) error {
	if len(granted) > 0 && !known {
		if _, err := r.entry.renew(ctx); err != nil {
			r.revoke(granted)
			return err
		}
	}
	for _, c := range granted {
		close(c.ready)
	}
	return nil
}

// placeable is the bytes of all that wait, but for what can never fit: that must not keep others out.
func (r *Room) placeable() (bytes int64) {
	for _, c := range r.queue {
		if c.bytes <= r.limit {
			bytes += c.bytes
		}
	}
	return bytes
}

// dead says that nobody has held anything for as long as a process may be thought alive.
func (r *Room) dead(idle bool) bool {
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

// ample says whether all that the sampler holds and waits for is so little that it need not ask.
func (r *Room) ample(ctx context.Context) (bool, error) {
	r.mu.Lock()
	seen, counted := time.Since(r.seen) < roomLook, time.Since(r.counted) < roomCount
	r.mu.Unlock()
	if !seen {
		if _, err := r.look(ctx); err != nil {
			return false, err
		}
	}
	if !counted {
		info, err := r.b.StreamInfo(ctx, "KV_"+schemas.PresenceBucket)
		if err != nil {
			return false, err
		}
		r.mu.Lock()
		r.samplers, r.counted = int64(info.State.Msgs), time.Now() // more than those that are left
		r.mu.Unlock()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unused >= roomAmple && r.held+r.placeable() <= r.unused/roomShare/(r.samplers+roomNewcomers), nil
}

// look is how much of the stream and of the disk nothing is stored in.
func (r *Room) look(ctx context.Context) (unused int64, err error) {
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
		notify(r.wake) // more or less of what waits can be placed
	}
	r.limit, r.unused, r.onDisk, r.seen = limit, unused, onDisk, time.Now()
	return unused, nil
}

// free is how much may be granted now. With spare, what the entry holds already is used
// again, and yields to everybody who waits. others is what the other samplers hold.
func (r *Room) free(ctx context.Context, spare bool) (free, others int64, err error) {
	r.mu.Lock()
	held, turn := r.held, r.turn
	if spare {
		held = r.told
	}
	r.mu.Unlock()
	own := r.base().Instance
	// First who holds what, then what is stored: a step that is stored in between counts twice.
	present, revisions, err := r.b.present(ctx)
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
	unused, err := r.look(ctx)
	if err != nil {
		return 0, 0, err
	}
	space := unused - others - held
	r.mu.Lock()
	r.space = space
	r.mu.Unlock()
	if unused >= roomAmple && others+held > 0 {
		space -= unused / roomLeave
	}
	return space - ahead, others, nil
}

// grant takes from the queue what fits in free bytes; of what the entry holds already, with
// spare.
func (r *Room) grant(free int64, spare bool) (granted []*Claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if spare {
		if free < 0 {
			r.told = r.held // others wait for it: so does this one, in turn
			notify(r.wake)
			return nil
		}
		free = r.told - r.held
	} else {
		free = min(free, r.wants)
	}
	var rest []*Claim
	ahead := false // somebody waits whom nobody overtakes
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
		r.turn, r.wants = 0, 0 // the rest waits behind those who wait already
		notify(r.wake)
	}
	return granted
}

// revoke puts granted claims back, which could not be announced.
func (r *Room) revoke(granted []*Claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var back []*Claim
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

// waiting adds to the stream of steps what the samplers say of it: while samples have waited for
// a while for room that there is not, it is full.
func (b *Bus) waiting(ctx context.Context, s *StreamStats) error {
	present, _, err := b.present(ctx)
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
		if p.Room.Waiting > 0 && p.Room.Since < first {
			first, s.Need, s.OnDisk = p.Room.Since, p.Room.Need, p.Room.Disk
		}
	}
	// What fits is only slow to be granted, on a busy machine.
	fits := !s.OnDisk && (s.MaxBytes <= 0 || int64(s.Bytes)+s.Held+s.Need <= s.MaxBytes)
	if s.Waiting > 0 && !fits && time.Since(time.Unix(0, first)) > roomAlarm {
		s.State = StateFull
	}
	return nil
}
