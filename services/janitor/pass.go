package janitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// pass is one look at everything.
type pass struct {
	cfg    Config
	b      *bus.Bus
	dry    bool
	report *Report

	streams map[string]*bus.StreamStats
	// left is what each stream holds once what was chosen is freed, about.
	left map[string]uint64
	// floors are the durables that have not read all, by stream.
	floors map[string][]bus.ConsumerFloor
	// readers is whether somebody outside of the pipeline reads results.
	readers bool
}

// look asks for the streams and how far their durables are.
func (p *pass) look(ctx context.Context) error {
	stats, err := p.b.Stats(ctx)
	if err != nil {
		return err
	}
	p.streams, p.left, p.floors = map[string]*bus.StreamStats{}, map[string]uint64{}, map[string][]bus.ConsumerFloor{}
	for i := range stats {
		p.streams[stats[i].Name], p.left[stats[i].Name] = &stats[i], stats[i].Bytes
	}
	for stream := range schemas.GroupFilters("*", "*", "*") {
		floors, err := p.b.Floors(ctx, stream)
		if err != nil {
			return err
		}
		if stream == schemas.StreamAdvantages && len(floors) > 0 {
			p.readers = true
		}
		p.floors[stream] = slices.DeleteFunc(floors, func(f bus.ConsumerFloor) bool { return f.Done })
	}
	return nil
}

// above says whether a stream is fuller than the rule allows; below four fifths of that, it is not.
func (p *pass) above(stream string) bool {
	s := p.streams[stream]
	if s == nil || p.cfg.Above == 0 || s.MaxBytes <= 0 {
		return false
	}
	mark := uint64(s.MaxBytes) / 100 * uint64(p.cfg.Above)
	return s.Bytes > mark && p.left[stream] > mark/5*4 || stream == schemas.StreamSteps && s.Waiting > 0 && p.left[stream] > mark/5*4
}

// pressed says whether any stream that groups are in is.
func (p *pass) pressed() bool {
	for stream := range p.left {
		if p.above(stream) {
			return true
		}
	}
	return false
}

// groups frees closed groups, the oldest first, as long as a rule asks for it.
func (p *pass) groups(ctx context.Context) error {
	run := p.cfg.Run
	if run == "" {
		run = "*"
	}
	filter := schemas.Address{Kind: schemas.KindAdvantage, Run: run}.Filter()
	pressed := p.pressed()
	for m, err := range p.b.Read(ctx, schemas.StreamAdvantages, []string{filter}, bus.ReadOptions{}) {
		if err != nil {
			return err
		}
		age := time.Since(m.Time)
		if age < p.cfg.Grace {
			return nil // and so are all that come
		}
		if !(pressed || p.cfg.Age > 0 && age > p.cfg.Age || p.cfg.Read) {
			return nil
		}
		if err := p.group(ctx, m); err != nil {
			return err
		}
		if pressed {
			pressed = p.pressed()
		}
	}
	return nil
}

// group frees one closed group, unless something keeps it.
func (p *pass) group(ctx context.Context, m *bus.Message) error {
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		p.report.Kept["its result cannot be read"]++
		return nil
	}
	if a.Batch != string(a.UID) {
		batch, err := p.b.Last(ctx, schemas.StreamAdvantages, schemas.BatchSubject(a.Run, a.Batch))
		if errors.Is(err, bus.ErrNotFound) {
			p.report.Kept["its batch is open"]++
			return nil
		}
		if err != nil {
			return err
		}
		// Who reads batches reads their groups with them.
		for _, f := range p.floors[schemas.StreamAdvantages] {
			if batch.Seq > f.Seq && f.Matches(batch.Subject) {
				p.report.Kept["consumer "+f.Name+" has not read its batch"]++
				return nil
			}
		}
	}
	if p.cfg.Read && !p.readers && p.cfg.Age == 0 && p.cfg.Above == 0 {
		p.report.Kept["no durable consumer reads advantages"]++
		return nil
	}
	filters := schemas.GroupFilters(a.Run, a.UID, a.Batch)
	for stream := range filters {
		reader, err := p.unread(ctx, stream, filters[stream], m)
		if err != nil {
			return err
		}
		if reader != "" {
			p.report.Kept["consumer "+reader+" has not read it"]++
			return nil
		}
	}
	return p.free(ctx, &a, m, filters)
}

// unread names a durable that has not acknowledged all that a stream has of a group.
func (p *pass) unread(ctx context.Context, stream string, filters []string, result *bus.Message) (string, error) {
	for _, f := range p.floors[stream] {
		for _, filter := range filters {
			if !f.Matches(filter) {
				continue
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
			if newest.Seq > f.Seq {
				return f.Name, nil
			}
		}
	}
	return "", nil
}

// order is that in which the events of a group go: its result, by which it is found, last.
var order = []string{
	schemas.StreamSteps, schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamTrajectories, schemas.StreamGroups, schemas.StreamAdvantages,
}

func (p *pass) free(ctx context.Context, a *schemas.Advantage, m *bus.Message, filters map[string][]string) error {
	r := p.report
	count := func(stream string, n uint64) {
		s := p.streams[stream]
		bytes := n * (s.Bytes / max(1, s.Messages))
		r.Messages[stream] += n
		r.Bytes[stream] += bytes
		p.left[stream] -= min(p.left[stream], bytes)
	}
	if err := p.prompt(ctx, a, count); err != nil {
		return err
	}
	for _, stream := range order {
		for _, filter := range filters[stream] {
			n, err := p.remove(ctx, stream, filter)
			if err != nil {
				return fmt.Errorf("free group %s of run %s: %w", a.UID, a.Run, err)
			}
			count(stream, n)
		}
	}
	if r.Groups++; r.Groups == 1 {
		r.Oldest = m.Time
	}
	r.Newest = m.Time
	return nil
}

// prompt frees the prompt of a group, which shares its subject with the others of the run.
func (p *pass) prompt(ctx context.Context, a *schemas.Advantage, count func(stream string, n uint64)) error {
	record, err := p.b.Group(ctx, a.Run, a.UID)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil || record.Group.PromptSeq == 0 {
		return err
	}
	m, err := p.b.Get(ctx, schemas.StreamPrompts, record.Group.PromptSeq)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil || m.Subject != schemas.PromptSubject(a.Run) {
		return err
	}
	count(schemas.StreamPrompts, 1)
	if p.dry {
		return nil
	}
	return p.b.Delete(ctx, schemas.StreamPrompts, m.Seq)
}

// remove purges what a filter matches; dry: it counts.
func (p *pass) remove(ctx context.Context, stream, filter string) (uint64, error) {
	if !p.dry {
		return p.b.PurgeSubject(ctx, stream, filter)
	}
	subjects, err := p.b.Subjects(ctx, stream, filter)
	n := uint64(0)
	for _, c := range subjects {
		n += c
	}
	return n, err
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
