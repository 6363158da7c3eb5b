package janitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// chunkOf is how many results are judged by one reading of how far durables are, so that a durable that is made
	// during a long look is waited for from the next chunk on.
	chunkOf = 64
	// atOnce is how many groups are freed at the same time: each takes a dozen answers of the server.
	atOnce = 16
)

// address names a group.
type address struct {
	run schemas.Run
	uid schemas.UID
}

// pass is one look at everything.
type pass struct {
	cfg    Config
	b      *bus.Bus
	dry    bool
	blobs  *sweeps
	meters *meters

	// floors are how far durables of others are, by stream; readers is whether one reads results.
	floors  map[string][]bus.ConsumerFloor
	readers bool

	// mu guards what follows: groups are freed side by side.
	mu      sync.Mutex
	report  *Report
	streams map[string]*bus.StreamStats
	// pressing are the streams that were above their mark and are not below four fifths of it yet, left is what each
	// stream holds once what was chosen is freed, about.
	pressing map[string]bool
	left     map[string]uint64
	// inHand is how many groups are being freed, gone those that are, or in a dry run would be.
	inHand uint64
	gone   map[address]bool
}

// groupStreams are those that have events of groups.
var groupStreams = slices.Collect(maps.Keys(schemas.GroupFilters("*", "*", "*")))

// weigh asks how full the streams are.
func (p *pass) weigh(ctx context.Context) error {
	if p.dry && p.streams != nil {
		return nil // nothing has gone
	}
	stats, err := p.b.Stats(ctx)
	if err != nil {
		return err
	}
	p.streams = map[string]*bus.StreamStats{}
	for i := range stats {
		s := &stats[i]
		p.streams[s.Name], p.left[s.Name] = s, s.Bytes
		if p.cfg.Above > 0 && s.MaxBytes > 0 && (s.Bytes > p.mark(s) || s.Name == schemas.StreamSteps && s.Waiting > 0) {
			p.pressing[s.Name] = true
		}
	}
	return nil
}

// mark is the size of a stream from which on groups are freed.
func (p *pass) mark(s *bus.StreamStats) uint64 { return uint64(s.MaxBytes) / 100 * uint64(p.cfg.Above) }

// pressed says whether a stream is fuller than the rule allows, so that what was stored at a time is to go; below four
// fifths of that, it is not. A group that is being freed counts as a mean one. Lock held.
func (p *pass) pressed(at time.Time) bool {
	groups := uint64(1)
	if s := p.streams[schemas.StreamAdvantages]; s != nil {
		groups = max(1, s.Messages)
	}
	for stream := range p.pressing {
		s := p.streams[stream]
		coming := p.inHand * (s.Bytes / groups)
		if p.left[stream] <= p.mark(s)/5*4+coming {
			continue
		}
		// The blobs of younger groups stay for now, and to free such groups would make no room, however many.
		if stream != bus.BlobStream || p.blobs.index != nil && at.Before(p.blobs.swept.Add(-p.cfg.blobGrace())) {
			return true
		}
	}
	return false
}

// due says whether a rule frees what was stored at a time. All that was stored later is not due either, if it is not.
// Lock held.
func (p *pass) due(at time.Time) bool {
	age := time.Since(at)
	return age >= p.cfg.Grace && (p.cfg.Age > 0 && age > p.cfg.Age || p.cfg.Read || p.pressed(at))
}

// results matches the results of groups and batches.
func (p *pass) results() []string {
	run := p.cfg.Run
	if run == "" {
		run = "*"
	}
	return []string{
		schemas.Address{Kind: schemas.KindAdvantage, Run: run}.Filter(), schemas.Address{Kind: schemas.KindBatch, Run: run}.Filter(),
	}
}

// look frees closed groups and their batches, the oldest first, as long as a rule asks for it, with the blobs and
// the prompts that nothing needs any more.
func (p *pass) look(ctx context.Context) error {
	if err := p.weigh(ctx); err != nil {
		return err
	}
	if err := p.sweep(ctx); err != nil {
		return err
	}
	if p.cfg.Rules() {
		if err := p.count(ctx); err != nil {
			return err
		}
		if err := p.groups(ctx); err != nil {
			return err
		}
	}
	if p.report.Groups > 0 {
		return p.prompts(ctx)
	}
	return nil
}

// count says how many groups are due, and since when.
func (p *pass) count(ctx context.Context) error {
	if p.meters == nil {
		return nil
	}
	n, oldest := 0, time.Duration(0)
	for m, err := range p.b.Read(ctx, schemas.StreamAdvantages, p.results()[:1], bus.ReadOptions{HeadersOnly: true}) {
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
	p.meters.due.Set(float64(n))
	p.meters.oldest.Set(oldest.Seconds())
	return nil
}

func (p *pass) groups(ctx context.Context) error {
	var chunk []*bus.Message
	for m, err := range p.b.Read(ctx, schemas.StreamAdvantages, p.results(), bus.ReadOptions{}) {
		if err != nil {
			return err
		}
		if !p.due(m.Time) {
			break
		}
		if chunk = append(chunk, m); len(chunk) == chunkOf {
			if err := p.free(ctx, chunk); err != nil {
				return err
			}
			chunk = nil
		}
	}
	return p.free(ctx, chunk)
}

// free frees a chunk of groups and batches, then the blobs that were theirs alone.
func (p *pass) free(ctx context.Context, chunk []*bus.Message) error {
	if len(chunk) == 0 {
		return ctx.Err()
	}
	if err := p.weigh(ctx); err != nil {
		return err
	}
	if err := p.sweep(ctx); err != nil {
		return err
	}
	if err := p.durables(ctx); err != nil {
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
		g.Go(func() error { return p.group(work, m) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, m := range batches { // a batch is stored behind its groups
		if err := p.batch(ctx, m); err != nil {
			return err
		}
	}
	if p.meters != nil {
		p.meters.due.Sub(float64(p.report.Groups - before))
		p.meters.oldest.Set(time.Since(chunk[0].Time).Seconds())
	}
	return p.freeBlobs(ctx)
}

// durables asks how far those of others are.
func (p *pass) durables(ctx context.Context) error {
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

// keep notes that something keeps a group.
func (p *pass) keep(why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report.Kept[why]++
}

// begin says whether a rule still frees what was stored at a time, and counts it as in hand until end.
func (p *pass) begin(at time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.due(at) {
		return false
	}
	p.inHand++
	return true
}

func (p *pass) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inHand--
}

// group frees one closed group, unless something keeps it.
func (p *pass) group(ctx context.Context, m *bus.Message) error {
	if !p.begin(m.Time) {
		return nil
	}
	defer p.end()
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		p.keep("its result cannot be read")
		return nil
	}
	if a.Batch != string(a.UID) {
		batch, err := p.b.Last(ctx, schemas.StreamAdvantages, schemas.BatchSubject(a.Run, a.Batch))
		if errors.Is(err, bus.ErrNotFound) {
			p.keep("its batch is open")
			return nil
		}
		if err != nil {
			return err
		}
		// Who reads batches reads their groups with them.
		if reader := p.behind(schemas.StreamAdvantages, batch.Subject, batch.Seq); reader != "" {
			p.keep("consumer " + reader + " has not read its batch")
			return nil
		}
	}
	if p.cfg.Read && !p.readers && p.cfg.Age == 0 && p.cfg.Above == 0 {
		p.keep("no durable consumer reads advantages")
		return nil
	}
	filters := schemas.GroupFilters(a.Run, a.UID, a.Batch)
	for stream := range filters {
		reader, err := p.unread(ctx, stream, filters[stream], m)
		if err != nil {
			return err
		}
		if reader != "" {
			p.keep("consumer " + reader + " has not read it")
			return nil
		}
	}
	return p.freeGroup(ctx, &a, m, filters)
}

// behind names a durable that reads a subject and has not acknowledged a sequence.
func (p *pass) behind(stream, subject string, seq uint64) string {
	for _, f := range p.floors[stream] {
		if seq > f.Seq && f.Matches(subject) {
			return f.Name
		}
	}
	return ""
}

// unread names a durable that has not acknowledged all that a stream has of a group.
func (p *pass) unread(ctx context.Context, stream string, filters []string, result *bus.Message) (string, error) {
	for _, filter := range filters {
		if p.behind(stream, filter, math.MaxUint64) == "" {
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
		if reader := p.behind(stream, filter, newest.Seq); reader != "" {
			return reader, nil
		}
	}
	return "", nil
}

// order is that in which the events of a group go: its result, by which it is found, last.
var order = []string{
	schemas.StreamSteps, schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamTrajectories, schemas.StreamGroups, schemas.StreamAdvantages,
}

// went counts events that are freed.
func (p *pass) went(stream string, n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.streams[stream]
	p.add(stream, n, n*(s.Bytes/max(1, s.Messages)))
}

// add counts what is freed of a stream. Lock held.
func (p *pass) add(stream string, messages, bytes uint64) {
	p.report.Messages[stream] += messages
	p.report.Bytes[stream] += bytes
	p.left[stream] -= min(p.left[stream], bytes)
}

// naming are the events of a group that name blobs, where there is an index of those that do.
func (p *pass) naming(ctx context.Context, filters map[string][]string) (events []*bus.Message, err error) {
	if p.blobs.index == nil {
		return nil, nil
	}
	for _, stream := range []string{schemas.StreamTrajectories, schemas.StreamGroups} {
		stored, err := p.b.LastMany(ctx, stream, filters[stream])
		if err != nil {
			return nil, err
		}
		events = append(events, stored...)
	}
	return events, nil
}

// sweep makes an index of the blobs that stored events name, where the last one is old, and frees those that none does.
func (p *pass) sweep(ctx context.Context) (err error) {
	if p.blobs.index != nil && (p.dry || time.Since(p.blobs.swept) < sweepEvery) {
		return nil
	}
	p.blobs.index = nil
	if !p.blobs.due(p) {
		return nil
	}
	if p.blobs.index, err = p.b.IndexBlobs(ctx, p.cfg.blobGrace()); err != nil {
		return err
	}
	return p.freeBlobs(ctx)
}

// freeBlobs frees the blobs that nothing names any more.
func (p *pass) freeBlobs(ctx context.Context) error {
	if p.blobs.index == nil {
		return nil
	}
	n, bytes, err := p.blobs.index.Sweep(ctx, p.dry)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report.Blobs += n
	p.add(bus.BlobStream, 0, bytes)
	return err
}

func (p *pass) freeGroup(ctx context.Context, a *schemas.Advantage, m *bus.Message, filters map[string][]string) error {
	named, err := p.naming(ctx, filters)
	if err != nil {
		return fmt.Errorf("free group %s of run %s: %w", a.UID, a.Run, err)
	}
	for _, stream := range order {
		for _, filter := range filters[stream] {
			if err := p.remove(ctx, stream, filter); err != nil {
				return fmt.Errorf("free group %s of run %s: %w", a.UID, a.Run, err)
			}
		}
	}
	if p.blobs.index != nil {
		p.blobs.index.Forget(named...)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone[address{a.Run, a.UID}] = true
	r := p.report
	if r.Groups++; r.Groups == 1 || m.Time.Before(r.Oldest) {
		r.Oldest = m.Time
	}
	if m.Time.After(r.Newest) {
		r.Newest = m.Time
	}
	return nil
}

// remove purges what a filter matches; dry: it counts.
func (p *pass) remove(ctx context.Context, stream, filter string) error {
	if !p.dry {
		n, err := p.b.PurgeSubject(ctx, stream, filter)
		p.went(stream, n)
		return err
	}
	subjects, err := p.b.Subjects(ctx, stream, filter)
	n := uint64(0)
	for _, c := range subjects {
		n += c
	}
	p.went(stream, n)
	return err
}

// batch frees the result of a batch once none of its groups is stored.
func (p *pass) batch(ctx context.Context, m *bus.Message) error {
	var e schemas.Batch
	if !p.due(m.Time) || bus.Fits(m, &e) != nil || p.behind(m.Stream, m.Subject, m.Seq) != "" {
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
			if a, _ := schemas.ParseSubject(m.Subject); !p.gone[address{a.Run, a.UID}] {
				return nil
			}
		}
	}
	return p.remove(ctx, schemas.StreamAdvantages, m.Subject)
}

// prompts frees those whose group is not stored any more, however often one was published: a prompt has its run alone
// in its subject. Those that intake has not settled stay, and those that a durable of others has not read.
func (p *pass) prompts(ctx context.Context) error {
	floors, err := p.b.Floors(ctx, schemas.StreamPrompts)
	if err != nil {
		return err
	}
	settled := uint64(0)
	for _, f := range floors {
		if f.Name == bus.IntakeConsumer {
			settled = f.Seq
		}
	}
	for _, f := range floors {
		settled = min(settled, f.Seq)
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
		if m.Seq > settled || time.Since(m.Time) < p.cfg.Grace {
			break
		}
		a, _ := schemas.ParseSubject(m.Subject)
		var e schemas.Prompt
		_ = schemas.Decode(m.Data, &e) // what is no prompt has no group
		uid := e.GroupUID(m.Seq)
		if groups[schemas.GroupSubject(a.Run, uid)] > 0 && !p.gone[address{a.Run, uid}] {
			continue
		}
		p.went(schemas.StreamPrompts, 1)
		if !p.dry {
			g.Go(func() error { return p.b.Delete(work, schemas.StreamPrompts, m.Seq) })
		}
	}
	return g.Wait()
}

// Lines say what a report is about, for people.
func (r *Report) Lines(size func(bytes uint64) string, dry bool) []string {
	freed := "freed"
	if dry {
		freed = "would free"
	}
	out := []string{fmt.Sprintf("%s %d groups, about %s, and %d blobs that nothing names", freed, r.Groups, size(r.Total()), r.Blobs)}
	if r.Groups > 0 {
		out = append(out, fmt.Sprintf("closed from %s to %s", r.Oldest.UTC().Format(time.RFC3339), r.Newest.UTC().Format(time.RFC3339)))
	}
	for _, stream := range slices.Sorted(maps.Keys(r.Messages)) {
		if r.Messages[stream] > 0 {
			out = append(out, fmt.Sprintf("  %-18s %8d events %12s", stream, r.Messages[stream], size(r.Bytes[stream])))
		}
	}
	for _, why := range slices.Sorted(maps.Keys(r.Kept)) {
		out = append(out, fmt.Sprintf("  kept: %d groups, %s", r.Kept[why], strings.TrimSpace(why)))
	}
	return out
}
