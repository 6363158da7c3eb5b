package janitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/weightsdir"
	"github.com/meander-rl/meander/schemas"
)

const (
	// chunkSize is how many results are judged by one reading of the durables' positions. A durable that is made
	// during a long pass is respected from the next chunk on.
	chunkSize = 64
	// atOnce is how many groups are freed at the same time: each waits for a dozen answers of the server.
	atOnce = 16
)

type address struct {
	run schemas.Run
	uid schemas.UID
}

type pass struct {
	cfg     Config
	b       *bus.Bus
	dry     bool
	blobs   *blobSweeps
	steps   *readSteps
	metrics *metrics

	// floors are the positions of other programs' durables, by stream; readers says that one of them reads results.
	floors  map[string][]bus.ConsumerFloor
	readers bool
	// weightsFault says what is wrong with the shared folder of weights. It keeps nothing else from being freed.
	weightsFault error

	// mu guards the fields below: groups are freed side by side.
	mu      sync.Mutex
	report  *Report
	streams map[string]*bus.StreamStats
	// pressing are the streams that were above their mark and are not yet below four fifths of it. bytesLeft is about
	// how many bytes each stream will hold once the chosen groups are freed.
	pressing  map[string]bool
	bytesLeft map[string]uint64
	// inFlight is how many groups are being freed. freedGroups are the freed ones; in a dry pass, those that would be.
	inFlight    uint64
	freedGroups map[address]bool
	// runs are the counts of runs, of dry passes; means are mean sizes that they do not have, by stream and run.
	runs  map[schemas.Run]*counters.Run
	means map[inStream]uint64
	// chosen are filters that a dry pass has not counted yet, by stream and run.
	chosen map[inStream][]string
	// closed are results of batches, by subject: some of those that were asked for last.
	closed map[string]*bus.Message
}

var groupStreams = slices.Collect(maps.Keys(schemas.GroupFilters("*", "*", "*")))

// readSizes reads the sizes of the streams, and notes those that are pressing.
func (p *pass) readSizes(ctx context.Context) error {
	if p.dry && p.streams != nil {
		return nil // a dry pass frees nothing, so the sizes are the same
	}
	stats, err := p.b.Stats(ctx)
	if err != nil {
		return err
	}
	p.streams = map[string]*bus.StreamStats{}
	for i := range stats {
		s := &stats[i]
		p.streams[s.Name], p.bytesLeft[s.Name] = s, s.Bytes
		if p.cfg.Above > 0 && s.MaxBytes > 0 && (s.Bytes > p.mark(s) || s.Name == schemas.StreamSteps &&
			s.Waiting > 0) {
			p.pressing[s.Name] = true
		}
	}
	return nil
}

func (p *pass) mark(s *bus.StreamStats) uint64 { return uint64(s.MaxBytes) / 100 * uint64(p.cfg.Above) }

// tooFull reports whether some stream is too full, so that an event stored at the given time should go. A stream
// counts as too full until it is down to four fifths of its mark. A group that is being freed counts with the mean
// size of a group. p.mu is held.
func (p *pass) tooFull(at time.Time) bool {
	groups := uint64(1)
	if s := p.streams[schemas.StreamAdvantages]; s != nil {
		groups = max(1, s.Messages)
	}
	for stream := range p.pressing {
		s := p.streams[stream]
		beingFreed := p.inFlight * (s.Bytes / groups)
		if p.bytesLeft[stream] <= p.mark(s)/5*4+beingFreed {
			continue
		}
		// Blobs of newer groups stay for now, so freeing those groups would not make the object store smaller.
		if stream != schemas.StreamBlobBucket || p.blobs.index != nil &&
			at.Before(p.blobs.swept.Add(-p.cfg.blobGrace())) {
			return true
		}
	}
	return false
}

// due reports whether a rule frees what was stored at the given time. If not, nothing that was stored later is due.
// p.mu is held, or no group is being freed.
func (p *pass) due(at time.Time) bool {
	age := time.Since(at)
	return age >= p.cfg.Grace && (p.cfg.Age > 0 && age > p.cfg.Age || p.cfg.Read || p.tooFull(at))
}

// resultFilters returns two subject filters of the run: for results of groups, and for results of batches.
func (p *pass) resultFilters() []string {
	run := p.cfg.Run
	if run == "" {
		run = "*"
	}
	return []string{
		schemas.Address{Kind: schemas.KindAdvantage, Run: run}.Filter(), schemas.Address{
			Kind: schemas.KindBatch,
			Run:  run,
		}.Filter(),
	}
}

// run makes the pass: unnamed blobs first, then due groups with their batches, oldest first, then prompts of groups
// that are gone. It ends at the first error of the server; the next pass goes on.
func (p *pass) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, p.weightsFault) }()
	if err := p.readSizes(ctx); err != nil {
		return err
	}
	// A dry pass whose choice does not depend on blobs reads their events once, without those that it has chosen.
	late := p.dry && len(p.pressing) == 0 && p.cfg.WeightsDir == ""
	if !late {
		if err := p.sweep(ctx); err != nil {
			return err
		}
	}
	if p.cfg.Rules() {
		if err := p.countDue(ctx); err != nil {
			return err
		}
		if err := p.freeDue(ctx); err != nil {
			return err
		}
	}
	if late {
		if err := p.sweep(ctx); err != nil {
			return err
		}
	}
	if p.report.Groups > 0 {
		if err := p.freePrompts(ctx); err != nil {
			return err
		}
	}
	return p.freeReadSteps(ctx)
}

// countDue sets the metrics of the groups that are due: how many, and how old the oldest is.
func (p *pass) countDue(ctx context.Context) error {
	if p.metrics == nil {
		return nil
	}
	n, oldest := 0, time.Duration(0)
	for m, err := range p.b.Read(ctx, schemas.StreamAdvantages, p.resultFilters()[:1],
		bus.ReadOptions{HeadersOnly: true}) {
		if err != nil {
			return err
		}
		if !p.due(m.Time) {
			break
		}
		if n++; n == 1 {
			oldest = time.Since(m.Time)
		}
	}
	p.metrics.due.Set(float64(n))
	p.metrics.oldest.Set(oldest.Seconds())
	return nil
}

// freeDue reads the results of groups and batches, the oldest first, until one is not due, and frees in chunks all
// that is stored of these groups and batches.
func (p *pass) freeDue(ctx context.Context) error {
	var chunk []*bus.Message
	for m, err := range p.b.Read(ctx, schemas.StreamAdvantages, p.resultFilters(), bus.ReadOptions{}) {
		if err != nil {
			return err
		}
		if !p.due(m.Time) {
			break
		}
		if chunk = append(chunk, m); len(chunk) == chunkSize {
			if err := p.freeChunk(ctx, chunk); err != nil {
				return err
			}
			chunk = nil
		}
	}
	return p.freeChunk(ctx, chunk)
}

// freeChunk frees the groups and batches of a chunk of results, then the blobs that only they named.
func (p *pass) freeChunk(ctx context.Context, chunk []*bus.Message) error {
	if len(chunk) == 0 {
		return ctx.Err()
	}
	if err := p.readSizes(ctx); err != nil {
		return err
	}
	if !p.dry { // its index stays as it is
		if err := p.sweep(ctx); err != nil {
			return err
		}
	}
	if err := p.readFloors(ctx); err != nil {
		return err
	}
	before := p.report.Groups
	var batches []*bus.Message
	g, work := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, m := range chunk {
		if a, _ := schemas.ParseSubject(m.Subject); a.Kind == schemas.KindBatch {
			batches = append(batches, m)
			continue
		}
		g.Go(func() error { return p.freeIfRead(work, m) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, m := range batches { // a batch is stored behind its groups
		if err := p.freeBatch(ctx, m); err != nil {
			return err
		}
	}
	if err := p.countChosen(ctx); err != nil {
		return err
	}
	if p.metrics != nil {
		p.metrics.due.Sub(float64(p.report.Groups - before))
		p.metrics.oldest.Set(time.Since(chunk[0].Time).Seconds())
	}
	return p.freeBlobs(ctx)
}

// readFloors reads how far the durable consumers of other programs have acknowledged each stream of groups. freeIfRead
// keeps what they have not read.
func (p *pass) readFloors(ctx context.Context) error {
	if p.dry && p.floors != nil {
		return nil
	}
	p.floors = map[string][]bus.ConsumerFloor{}
	for _, stream := range groupStreams {
		floors, err := p.b.Floors(ctx, stream)
		if err != nil {
			return err
		}
		p.floors[stream] = slices.DeleteFunc(floors, func(f bus.ConsumerFloor) bool { return f.Own })
	}
	p.readers = len(p.floors[schemas.StreamAdvantages]) > 0
	return nil
}

func (p *pass) countKept(why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report.Kept[why]++
}

// beginGroup reports whether a rule still frees what was stored at the given time. If so the group is in flight until
// endGroup.
func (p *pass) beginGroup(at time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.due(at) {
		return false
	}
	p.inFlight++
	return true
}

func (p *pass) endGroup() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight--
}

// freeIfRead frees one closed group, given its result, unless something keeps it: an open batch, or a durable that
// has not read all of it. What keeps it is counted in the report, and is no error.
func (p *pass) freeIfRead(ctx context.Context, m *bus.Message) error {
	if !p.beginGroup(m.Time) {
		return nil
	}
	defer p.endGroup()
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		p.countKept("its result cannot be read")
		return nil
	}
	filters := schemas.GroupFilters(a.Run, a.UID, a.Batch)
	why, err := p.whyKept(ctx, &a, m, filters)
	if err != nil {
		return err
	}
	if why == "" && p.cfg.Read && !p.readers && p.cfg.Age == 0 && p.cfg.Above == 0 {
		why = "no durable consumer reads advantages"
	}
	if why != "" {
		p.countKept(why)
		return nil
	}
	return p.freeGroup(ctx, &a, m, filters)
}

// lateReader returns the name of a durable that reads the subject and has not acknowledged sequence seq; "" if there is
// none.
func (p *pass) lateReader(stream, subject string, seq uint64) string {
	for _, f := range p.floors[stream] {
		if seq > f.Seq && f.Matches(subject) {
			return f.Name
		}
	}
	return ""
}

// unread returns the name of a durable that has not acknowledged all events of a group in the stream; "" if there is
// none. filters match the group's events, result is the group's result.
func (p *pass) unread(ctx context.Context, stream string, filters []string, result *bus.Message) (string, error) {
	for _, filter := range filters {
		if p.lateReader(stream, filter, math.MaxUint64) == "" {
			continue // it has no readers
		}
		newest := result
		if stream != schemas.StreamAdvantages {
			var err error
			if newest, err = p.b.Last(ctx, stream, filter); errors.Is(err, bus.ErrNotFound) {
				continue
			} else if err != nil {
				return "", err
			}
		}
		if reader := p.lateReader(stream, filter, newest.Seq); reader != "" {
			return reader, nil
		}
	}
	return "", nil
}

// freeOrder is the order in which the streams of a group are freed. The result goes last: the group is found by it.
var freeOrder = []string{
	schemas.StreamSteps, schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamTrajectories,
	schemas.StreamGroups, schemas.StreamAdvantages,
}

func (p *pass) countFreed(stream string, n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.streams[stream]
	p.add(stream, n, n*(s.Bytes/max(1, s.Messages)))
}

func (p *pass) add(stream string, messages, bytes uint64) {
	p.report.Messages[stream] += messages
	p.report.Bytes[stream] += bytes
	p.bytesLeft[stream] -= min(p.bytesLeft[stream], bytes)
}

// blobStreams have the events of a group that may name blobs.
var blobStreams = []string{schemas.StreamTrajectories, schemas.StreamGroups}

// blobEvents returns the events of a group that may name blobs; nil while there is no index, or it has no blobs. The
// index forgets them once the group is freed.
func (p *pass) blobEvents(ctx context.Context, filters map[string][]string) (events []*bus.Message, err error) {
	if p.blobs.index == nil || !p.blobs.index.Counts() {
		return nil, nil
	}
	for _, stream := range blobStreams {
		stored, err := p.b.LastMany(ctx, stream, filters[stream])
		if err != nil {
			return nil, err
		}
		events = append(events, stored...)
	}
	return events, nil
}

// sweep makes a new index of the blobs that events name if the last one is old, and frees the blobs that are not in
// it.
func (p *pass) sweep(ctx context.Context) (err error) {
	if p.blobs.index != nil && (p.dry || time.Since(p.blobs.swept) < sweepEvery) {
		return nil
	}
	p.blobs.index = nil
	if !p.blobs.startSweep(p) {
		return nil
	}
	var gone func(*bus.Message) bool
	if p.dry {
		gone = p.wouldGo
	}
	if p.blobs.index, err = p.b.IndexBlobs(ctx, p.cfg.blobGrace(), gone); err != nil {
		return err
	}
	p.weightsFault = errors.Join(p.weightsFault, p.freeWeights(ctx))
	return p.freeBlobs(ctx)
}

// freeWeights frees the files that pushes by path have copied and that no event needs. The index is new: a version that
// was pushed since would not count.
func (p *pass) freeWeights(ctx context.Context) (err error) {
	if p.cfg.WeightsDir == "" {
		return nil
	}
	store, err := p.b.StoreID(ctx)
	if err != nil {
		return err
	}
	needed, err := p.blobs.index.Needed(ctx)
	if err != nil {
		return err
	}
	dir, err := weightsdir.Open(p.cfg.WeightsDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	n, bytes, err := dir.Sweep(store, p.blobs.index.Before(), needed, p.dry)
	p.report.WeightsFiles += n
	p.report.WeightsBytes += bytes
	if policies := p.streams[schemas.StreamPolicies]; err == nil && policies != nil {
		p.blobs.versions = policies.Messages
	}
	return err
}

// freeBlobs frees the blobs that no event names any more; without an index it does nothing.
func (p *pass) freeBlobs(ctx context.Context) error {
	if p.blobs.index == nil {
		return nil
	}
	n, bytes, err := p.blobs.index.Sweep(ctx, p.dry)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report.Blobs += n
	p.add(schemas.StreamBlobBucket, 0, bytes)
	return err
}

// freeGroup removes all events of a group and notes it in the report. a is the decoded result, m its message, filters
// the subjects of the group by stream. After an error the result is still stored, so that the next pass frees the
// rest.
func (p *pass) freeGroup(ctx context.Context, a *schemas.Advantage, m *bus.Message, filters map[string][]string) error {
	named, err := p.blobEvents(ctx, filters)
	if err != nil {
		return fmt.Errorf("free group %s of run %s: %w", a.UID, a.Run, err)
	}
	for _, stream := range freeOrder {
		if err := p.purge(ctx, inStream{stream, a.Run}, filters[stream]); err != nil {
			return fmt.Errorf("free group %s of run %s: %w", a.UID, a.Run, err)
		}
	}
	if p.blobs.index != nil {
		p.blobs.index.Forget(named...)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.freedGroups[address{a.Run, a.UID}] = true
	p.blobs.freed = time.Now()
	r := p.report
	if r.Groups++; r.Groups == 1 || m.Time.Before(r.Oldest) {
		r.Oldest = m.Time
	}
	if m.Time.After(r.Newest) {
		r.Newest = m.Time
	}
	return nil
}

// purge removes the events of a run that filters match, and counts them; in a dry pass it only counts.
func (p *pass) purge(ctx context.Context, of inStream, filters []string) error {
	if p.dry {
		return p.choose(ctx, of, filters)
	}
	for _, filter := range filters {
		n, err := p.b.PurgeSubject(ctx, of.stream, filter)
		p.countFreed(of.stream, n)
		if err != nil {
			return err
		}
	}
	return nil
}

// freeBatch frees the result of a batch, whose message is m, once none of its groups is stored.
func (p *pass) freeBatch(ctx context.Context, m *bus.Message) error {
	var e schemas.Batch
	if !p.due(m.Time) || bus.Fits(m, &e) != nil || p.lateReader(m.Stream, m.Subject, m.Seq) != "" {
		return nil
	}
	openings := []string{schemas.Address{Kind: schemas.KindOpening, Run: e.Run, Batch: e.Batch}.Filter()}
	var results []string
	for _, uid := range slices.Concat(e.UIDs, e.Dropped) {
		results = append(results, schemas.AdvantageSubject(e.Run, uid))
	}
	for _, of := range []struct {
		stream  string
		filters []string
	}{{schemas.StreamRewards, openings}, {schemas.StreamAdvantages, results}} {
		stored, err := p.b.LastMany(ctx, of.stream, of.filters)
		if err != nil {
			return fmt.Errorf("free batch %s of run %s: %w", e.Batch, e.Run, err)
		}
		for _, m := range stored {
			if a, _ := schemas.ParseSubject(m.Subject); !p.freedGroups[address{a.Run, a.UID}] {
				return nil
			}
		}
	}
	return p.purge(ctx, inStream{schemas.StreamAdvantages, e.Run}, []string{m.Subject})
}

// freePrompts frees the prompts whose group is gone, at the end of a pass. A subject of a prompt has only the run, so
// each is read to find its group. Prompts that intake or another durable has not acknowledged stay.
func (p *pass) freePrompts(ctx context.Context) error {
	floors, err := p.b.Floors(ctx, schemas.StreamPrompts)
	if err != nil {
		return err
	}
	acknowledged := uint64(0)
	for _, f := range floors {
		if f.Name == schemas.PromptsDurable().Name {
			acknowledged = f.Seq
		}
	}
	for _, f := range floors {
		acknowledged = min(acknowledged, f.Seq)
	}
	run := p.cfg.Run
	if run == "" {
		run = "*"
	}
	groups, err := p.b.Subjects(ctx, schemas.StreamGroups, schemas.GroupSubject(run, "*"))
	if err != nil {
		return err
	}
	g, work := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for m, err := range p.b.Read(ctx, schemas.StreamPrompts, []string{schemas.PromptSubject(run)}, bus.ReadOptions{}) {
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		if m.Seq > acknowledged || time.Since(m.Time) < p.cfg.Grace {
			break
		}
		a, _ := schemas.ParseSubject(m.Subject)
		var e schemas.Prompt
		_ = schemas.Decode(m.Data, &e) // bytes that are not a prompt have no group
		uid := e.GroupUID(m.Seq)
		if groups[schemas.GroupSubject(a.Run, uid)] > 0 && !p.freedGroups[address{a.Run, uid}] {
			continue
		}
		p.countFreed(schemas.StreamPrompts, 1)
		if !p.dry {
			g.Go(func() error { return p.b.Delete(work, schemas.StreamPrompts, m.Seq) })
		}
	}
	return g.Wait()
}
