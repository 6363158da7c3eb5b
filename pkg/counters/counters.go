// Package counters counts what is stored of runs. A record of each run, in a bucket, holds its counts and
// how far they go in each stream; who looks reads the streams on from there. So a look costs as much as there is new,
// however much is stored.
//
// A record is advanced only by reading the streams, and written only over the revision that was read: two who advance
// it, and one who is killed, count nothing twice. The head says up to where all records have been advanced together.
// Events that were removed since (freed, displaced, too old) are noticed, because the server's count of messages
// differs: the run is then read in full. Who may not write the bucket reads on in memory.
package counters

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// counted are the streams that records count, in the order in which they are read: a result before what it is of, so
// that no result lacks its group.
var counted = [...]string{
	schemas.StreamAdvantages, schemas.StreamRewards, schemas.StreamTrajectories, schemas.StreamVerdicts,
	schemas.StreamGroups, schemas.StreamDead, schemas.StreamPrompts,
}

// filters returns the subjects of a run in a counted stream.
func filters(stream string, run schemas.Run) []string {
	if stream == schemas.StreamDead { // letters stay when a run is purged
		return []string{schemas.Address{Kind: schemas.KindDead, Run: run}.Filter()}
	}
	return schemas.RunFilters(run)[stream]
}

const (
	// prefix begins the keys of records. Another number: records of another form.
	prefix  = "counts9"
	headKey = prefix
	packKey = "pack." + prefix
	// atOnce is how many runs are asked about, or written, side by side.
	atOnce = 16
	// worthwhile is how many events a look has to find before it writes them into records.
	worthwhile = 64
	// maxRecord bounds a record, in bytes. A run with more open groups has a stub, and is read in full.
	maxRecord = 256 << 10
)

// decided is what a record has of a step at which it is known which samples of a group end.
const decided = math.MinInt32

func key(run schemas.Run) string { return prefix + "." + string(run) }

// Mark is how far one stream is counted.
type Mark struct {
	_msgpack struct{} `msgpack:",as_array"` //nolint:unused // says it to the library

	// Seq is the sequence up to which events are counted; Events are so many and take about so many Bytes.
	Seq    uint64 `msgpack:"q"`
	Events uint64 `msgpack:"n"`
	Bytes  uint64 `msgpack:"b"`
	// Newest is when the last of them was stored, Unix nanoseconds.
	Newest int64 `msgpack:"t"`
}

// Sum is a sum of numbers, and of how many.
type Sum struct {
	_msgpack struct{} `msgpack:",as_array"` //nolint:unused // says it to the library

	Of float64
	N  int64
}

// Outcome is how many events of a kind (trajectory, reward, advantage) say an outcome; of trajectories it counts the
// samples that end with them.
type Outcome struct {
	_msgpack struct{} `msgpack:",as_array"` //nolint:unused // says it to the library

	Kind, Outcome string
	N             int64
}

// Run are the counts of one run.
type Run struct {
	Marks [len(counted)]Mark `msgpack:"m"` // of the counted streams
	// Groups have a record.
	Groups   int64     `msgpack:"g,omitempty"`
	Outcomes []Outcome `msgpack:"o,omitempty"`
	// Mean is the sum of the mean rewards of groups, and over how many; Lane made the first sample that has one.
	Mean Sum          `msgpack:"a"`
	Lane schemas.Lane `msgpack:"e,omitempty"`
	// Open groups have a record and no result, Orphans a result and no record.
	Open    map[schemas.UID]bool `msgpack:"u,omitempty"`
	Orphans map[schemas.UID]bool `msgpack:"x,omitempty"`
	// Batches have groups and no result.
	Batches map[string]bool `msgpack:"p,omitempty"`
	// Midway are how many samples of open groups have a reward at a step, by uid and step, decided and more where it is
	// known which of them end there; Saved is how many evaluations those that ended did not take.
	Midway map[schemas.UID]map[string]int64 `msgpack:"w,omitempty"`
	Saved  int64                            `msgpack:"v,omitempty"`
	// Letters are refused prompts without a group: how many dead letters of intake each has.
	Letters map[schemas.UID]int64 `msgpack:"l,omitempty"`
	// Large is a run of which only Marks are kept.
	Large bool `msgpack:"z,omitempty"`
	// Sizes are of a run that has ended; nil: they are not measured yet.
	Sizes *Sizes `msgpack:"s,omitempty"`

	revision uint64
	changed  bool
	// What is found out once a stream is read: openings of batches that may have a result, letters to prompts that may
	// have a group.
	openings map[string]bool
	letters  map[schemas.UID]int64
}

// Of returns how many events of a kind have an outcome; "": whatever it is.
func (r *Run) Of(kind, outcome string) (n int64) {
	for _, o := range r.Outcomes {
		if o.Kind == kind && (o.Outcome == outcome || outcome == "") {
			n += o.N
		}
	}
	return n
}

// Ended returns how many samples have a trajectory, of whatever outcome.
func (r *Run) Ended() int64 { return r.Of(schemas.KindTrajectory, "") }

// Refused returns how many dead letters of intake are of prompts without a group.
func (r *Run) Refused() (n int64) {
	for _, of := range r.Letters {
		n += of
	}
	return n
}

// Events returns how many events are counted in a stream.
func (r *Run) Events(stream string) uint64 { return r.mark(stream).Events }

// Newest returns when the last event was stored.
func (r *Run) Newest() (t time.Time) {
	last := int64(0)
	for _, m := range r.Marks {
		last = max(last, m.Newest)
	}
	if last > 0 {
		t = time.Unix(0, last)
	}
	return t
}

func (r *Run) mark(stream string) *Mark { return &r.Marks[slices.Index(counted[:], stream)] }

// All yields the marks of the streams that have events of the run.
func (r *Run) All() iter.Seq2[string, Mark] {
	return func(yield func(string, Mark) bool) {
		for i, m := range r.Marks {
			if m.Events > 0 && !yield(counted[i], m) {
				return
			}
		}
	}
}

// put sets a key of a map that may be nil.
func put[K comparable, V any](m *map[K]V, key K, value V) {
	if *m == nil {
		*m = map[K]V{}
	}
	(*m)[key] = value
}

// isEmpty reports whether nothing of the run is stored, dead letters aside.
func (r *Run) isEmpty() bool {
	for stream := range r.All() {
		if stream != schemas.StreamDead {
			return false
		}
	}
	return true
}

// Look returns the counts of a run, or with "*" of all runs, those aside of which nothing is stored. It fails if the
// server cannot be read.
func Look(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.Run]*Run, error) {
	k, err := look(ctx, b, run)
	if err != nil {
		return nil, fmt.Errorf("count run %s: %w", run, err)
	}
	if k.read >= worthwhile {
		k.write(ctx)
	}
	for name, r := range k.runs {
		if name == "" || r.isEmpty() {
			delete(k.runs, name)
		}
	}
	return k.runs, nil
}

// Advance brings all records up to date, and measures runs that have ended; a service that is always there calls it
// now and then, so that looks find little new. Without the right to write it does nothing.
func Advance(ctx context.Context, b *bus.Bus) error {
	if !b.MayWrite(schemas.CountBucket) {
		return nil
	}
	k := &book{b: b, run: "*"}
	if err := k.readHead(ctx); err != nil {
		return err
	}
	if k.head != nil && k.head.Measured && k.head.asIs(k.states) {
		return nil
	}
	k, err := look(ctx, b, "*")
	if err != nil {
		return fmt.Errorf("advance counters: %w", err)
	}
	err = k.measureEnded(ctx)
	k.measured = err == nil
	k.write(ctx)
	if k.newer > max(worthwhile, len(k.runs)/8) {
		err = errors.Join(err, k.pack(ctx))
	}
	return err
}

// head says up to which sequence of each stream all records are advanced, and how many messages it had then.
type head struct {
	Marks map[string]Mark `msgpack:"m"`
	// Measured says that all runs that have ended are measured.
	Measured bool `msgpack:"z,omitempty"`
	revision uint64
}

// asIs reports whether no stream has changed since.
func (h *head) asIs(states map[string]state) bool {
	for _, stream := range counted {
		if s := states[stream]; h.Marks[stream].Seq != s.last || h.Marks[stream].Events != s.messages {
			return false
		}
	}
	return true
}

// state is the last sequence of a stream, and how many messages it has.
type state struct{ last, messages uint64 }

// book is one look at a run, or at all.
type book struct {
	b      *bus.Bus
	run    schemas.Run
	head   *head // nil: there is none
	runs   map[schemas.Run]*Run
	states map[string]state
	read   int  // how many events were read
	unsure bool // the streams have changed meanwhile: the head stays

	measured bool // all runs that have ended
	newer    int  // how many records are not in the pack

	mu sync.Mutex // over runs and read, while runs are verified side by side
}

// look reads records, reads the streams on from them, and compares the counts with the server's.
func look(ctx context.Context, b *bus.Bus, run schemas.Run) (*book, error) {
	k := &book{b: b, run: run, runs: map[schemas.Run]*Run{}}
	// The head comes first: records that are read after it have at least what it says.
	if err := k.readHead(ctx); err != nil {
		return nil, err
	}
	if err := k.readRecords(ctx); err != nil {
		return nil, err
	}
	if err := k.readOn(ctx); err != nil {
		return nil, err
	}
	return k, k.verify(ctx)
}

// readHead reads the states of the streams, and the head. A head of other streams counts for nothing.
func (k *book) readHead(ctx context.Context) error {
	e, err := k.b.Entry(ctx, schemas.CountBucket, headKey)
	if err != nil {
		return err
	}
	h := &head{revision: e.Revision}
	if msgpack.Unmarshal(e.Value, h) == nil {
		k.head = h
	}
	states := make([]state, len(counted))
	g, ctx := errgroup.WithContext(ctx)
	for i, stream := range counted {
		g.Go(func() error {
			info, err := k.b.StreamInfo(ctx, stream)
			if err == nil {
				states[i] = state{info.State.LastSeq, info.State.Msgs}
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	k.states = map[string]state{}
	for i, stream := range counted {
		k.states[stream] = states[i]
		if k.head != nil && k.head.Marks[stream].Seq > states[i].last { // the stream was made anew
			k.head = &head{revision: e.Revision}
		}
	}
	return nil
}

// readOn reads the streams from where records end.
func (k *book) readOn(ctx context.Context) error {
	for _, stream := range counted {
		from := uint64(0)
		if k.head != nil {
			from = k.head.Marks[stream].Seq
		}
		subjects := filters(stream, k.run)
		if r := k.runs[k.run]; r != nil {
			from = max(from, r.mark(stream).Seq)
		} else if k.run == "*" {
			subjects = nil
		}
		if err := k.readStream(ctx, stream, subjects, from); err != nil {
			return err
		}
	}
	for _, r := range k.runs {
		maps.DeleteFunc(r.Midway, func(uid schemas.UID, _ map[string]int64) bool { return !r.Open[uid] })
	}
	return nil
}

// readStream counts the events of a stream behind a sequence.
func (k *book) readStream(ctx context.Context, stream string, subjects []string, from uint64) error {
	last := k.states[stream].last
	if last <= from {
		return nil
	}
	for m, err := range k.b.Read(ctx, stream, subjects, bus.ReadOptions{FromSeq: from + 1, HeadersOnly: true}) {
		if err != nil {
			return err
		}
		if m.Seq > last {
			break
		}
		a, _ := schemas.ParseSubject(m.Subject)
		r := k.of(a.Run)
		if m.Seq <= r.mark(stream).Seq {
			continue
		}
		outcome, err := k.b.Outcome(ctx, m)
		if err != nil {
			return err
		}
		r.count(m, a, outcome)
		k.read++
	}
	switch stream {
	case schemas.StreamRewards:
		return k.resolveOpenings(ctx)
	case schemas.StreamDead:
		return k.resolveLetters(ctx)
	}
	return nil
}

// of returns the counts of a run.
func (k *book) of(run schemas.Run) *Run {
	r := k.runs[run]
	if r == nil {
		r = &Run{}
		k.runs[run] = r
	}
	return r
}

// resolveOpenings opens the batches of new openings that have no result.
func (k *book) resolveOpenings(ctx context.Context) error {
	ask := map[string]func(){}
	for run, r := range k.runs {
		for batch := range r.openings {
			ask[schemas.BatchSubject(run, batch)] = func() { put(&r.Batches, batch, true) }
		}
		r.openings = nil
	}
	return k.eachMissing(ctx, schemas.StreamAdvantages, ask)
}

// resolveLetters counts new letters whose prompt has no group.
func (k *book) resolveLetters(ctx context.Context) error {
	ask := map[string]func(){}
	for run, r := range k.runs {
		for uid, n := range r.letters {
			ask[schemas.GroupSubject(run, uid)] = func() { r.Letters = addTo(r.Letters, uid, n) }
		}
		r.letters = nil
	}
	return k.eachMissing(ctx, schemas.StreamGroups, ask)
}

// eachMissing calls the functions of subjects that are not stored.
func (k *book) eachMissing(ctx context.Context, stream string, ask map[string]func()) error {
	for part := range slices.Chunk(slices.Sorted(maps.Keys(ask)), 256) {
		stored, err := k.b.LastMany(ctx, stream, part)
		if err != nil {
			return err
		}
		for _, m := range stored {
			delete(ask, m.Subject)
		}
	}
	for _, missing := range ask {
		missing()
	}
	return nil
}

// verify compares the counts with how many messages the server has, and counts runs anew that lack some.
func (k *book) verify(ctx context.Context) error {
	if k.run != "*" {
		return k.verifyRun(ctx, k.run, counted[:])
	}
	var suspect []string
	for _, stream := range counted {
		if k.sum(stream) != k.states[stream].messages {
			suspect = append(suspect, stream)
		}
	}
	if len(suspect) == 0 {
		return nil
	}
	g, inner := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, run := range slices.Collect(maps.Keys(k.runs)) {
		g.Go(func() error { return k.verifyRun(inner, run, suspect) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, stream := range suspect {
		if k.sum(stream) >= k.states[stream].messages || k.unsure {
			continue
		}
		k.unsure = true
		info, err := k.b.StreamInfo(ctx, stream)
		if err != nil {
			return err
		}
		if (state{info.State.LastSeq, info.State.Msgs}) == k.states[stream] { // a record was lost
			return k.countAnew(ctx)
		}
	}
	return nil
}

// sum returns how many events of a stream are counted.
func (k *book) sum(stream string) (n uint64) {
	for _, r := range k.runs {
		n += r.mark(stream).Events
	}
	return n
}

// countAnew counts all runs from the beginning.
func (k *book) countAnew(ctx context.Context) error {
	old := k.runs
	k.runs, k.unsure = map[schemas.Run]*Run{}, false
	if k.head != nil {
		k.head = &head{revision: k.head.revision}
	}
	for name, r := range old {
		k.of(name).revision, k.of(name).changed = r.revision, true
	}
	return k.readOn(ctx)
}

// verifyRun compares the counts of a run with how many messages of it the server has, and counts it anew where they
// differ.
func (k *book) verifyRun(ctx context.Context, run schemas.Run, streams []string) error {
	var differs atomic.Bool
	g, inner := errgroup.WithContext(ctx)
	for _, stream := range streams {
		k.mu.Lock()
		want := uint64(0)
		if r := k.runs[run]; r != nil {
			want = r.mark(stream).Events
		}
		k.mu.Unlock()
		g.Go(func() error {
			n, err := k.b.Stored(inner, stream, filters(stream, run), 1)
			if err == nil && n != want {
				var newer uint64
				newer, err = k.b.Stored(inner, stream, filters(stream, run), k.states[stream].last+1)
				n -= newer
			}
			if err == nil && n != want {
				differs.Store(true)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil || !differs.Load() {
		return err
	}
	return k.recount(ctx, run)
}

// recount counts a run from the beginning.
func (k *book) recount(ctx context.Context, run schemas.Run) error {
	x := &book{b: k.b, run: run, runs: map[schemas.Run]*Run{}, states: k.states}
	if err := x.readOn(ctx); err != nil {
		return err
	}
	r := x.of(run)
	r.changed = true
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.runs[run]; old != nil {
		r.revision = old.revision
	}
	k.read += max(x.read, worthwhile) // what was found out is kept
	k.newer += len(k.runs)            // the pack may have a record that is there no more
	k.runs[run] = r
	return nil
}
