package janitor

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

// readSteps is how far the looks for steps that may go have come in the stream of results.
type readSteps struct {
	// readers are the names of the durables of results. A new one may read what had no reader: then all is read again.
	readers string
	// from is the first result that may have steps to free. freed are those behind it whose steps are gone.
	from  uint64
	freed map[uint64]bool
}

// freeReadSteps frees the steps of closed groups whose prompts say so (schemas.Prompt.FreeReadSteps) and that a durable
// of another program has acknowledged, and every one that reads them. All else that is stored of the groups stays. No
// other rule is needed, and no grace.
func (p *pass) freeReadSteps(ctx context.Context) error {
	s := p.steps
	if s == nil || p.dry {
		return nil
	}
	if err := p.readFloors(ctx); err != nil {
		return err
	}
	newest, readers := uint64(0), []string{}
	for _, f := range p.floors[schemas.StreamAdvantages] {
		newest, readers = max(newest, f.Seq), append(readers, f.Name)
	}
	if len(readers) == 0 {
		return nil
	}
	slices.Sort(readers)
	if names := strings.Join(readers, " "); s.readers != names {
		*s = readSteps{readers: names, freed: map[uint64]bool{}}
	}
	info, err := p.b.StreamInfo(ctx, schemas.StreamSteps)
	if err != nil || info.State.Msgs == 0 || newest < s.from {
		return err
	}
	// A result is stored after the steps of its group.
	at := bus.ReadOptions{FromSeq: s.from, FromTime: info.State.FirstTime}
	kept, runs := uint64(0), map[schemas.Run]bool{}
	for m, err := range p.b.Read(ctx, schemas.StreamAdvantages, p.resultFilters()[:1], at) {
		if err != nil {
			return err
		}
		if m.Seq > newest {
			break
		}
		freed, err := p.freeStepsIfRead(ctx, m, runs)
		if err != nil {
			return err
		}
		if !freed && kept == 0 {
			kept = m.Seq
		}
	}
	if s.from = newest + 1; kept > 0 {
		s.from = kept
	}
	for seq := range s.freed {
		if seq < s.from {
			delete(s.freed, seq)
		}
	}
	for run := range runs {
		if err := counters.MeasureAgain(ctx, p.b, run); err != nil {
			return err
		}
	}
	return nil
}

// freeStepsIfRead frees the steps of a closed group, given its result, and reports whether it has none to free any
// more. It adds the run of steps that went to runs.
func (p *pass) freeStepsIfRead(ctx context.Context, m *bus.Message, runs map[schemas.Run]bool) (done bool, err error) {
	var a schemas.Advantage
	if p.steps.freed[m.Seq] || bus.Fits(m, &a) != nil || !a.FreeReadSteps || a.SourceRun != "" {
		return true, nil
	}
	reads := func(f bus.ConsumerFloor) bool {
		return f.Matches(m.Subject) ||
			a.Batch != string(a.UID) && f.Matches(schemas.BatchSubject(a.Run, a.Batch))
	}
	if !slices.ContainsFunc(p.floors[schemas.StreamAdvantages], reads) {
		return true, nil // until a reader comes
	}
	filters := schemas.GroupFilters(a.Run, a.UID, a.Batch)
	if why, err := p.whyKept(ctx, &a, m, filters); err != nil || why != "" {
		return false, err
	}
	if err := p.purge(ctx, inStream{schemas.StreamSteps, a.Run}, filters[schemas.StreamSteps]); err != nil {
		return false, err
	}
	p.steps.freed[m.Seq], runs[a.Run] = true, true
	return true, nil
}

// whyKept says what keeps a closed group: an open batch, or a durable that has not read all of it; "": nothing does. a
// is its decoded result, m the message of that, filters match the group's events by stream.
func (p *pass) whyKept(
	ctx context.Context, a *schemas.Advantage, m *bus.Message, filters map[string][]string,
) (string, error) {
	if a.Batch != string(a.UID) {
		batch, err := p.resultOf(ctx, schemas.BatchSubject(a.Run, a.Batch))
		if errors.Is(err, bus.ErrNotFound) {
			return "its batch is open", nil
		}
		if err != nil {
			return "", err
		}
		// A reader of batches reads the groups with them.
		if reader := p.lateReader(schemas.StreamAdvantages, batch.Subject, batch.Seq); reader != "" {
			return "consumer " + reader + " has not read its batch", nil
		}
	}
	for stream := range filters {
		if reader, err := p.unread(ctx, stream, filters[stream], m); err != nil {
			return "", err
		} else if reader != "" {
			return "consumer " + reader + " has not read it", nil
		}
	}
	return "", nil
}

// resultOf returns the result of a batch, which its groups ask for one after the other.
func (p *pass) resultOf(ctx context.Context, subject string) (*bus.Message, error) {
	p.mu.Lock()
	m := p.closed[subject]
	p.mu.Unlock()
	if m != nil {
		return m, nil
	}
	m, err := p.b.Last(ctx, schemas.StreamAdvantages, subject)
	if err == nil {
		p.mu.Lock()
		if len(p.closed) == chunkSize {
			clear(p.closed)
		}
		p.closed[subject] = m
		p.mu.Unlock()
	}
	return m, err
}
