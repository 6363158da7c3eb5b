package janitor

import (
	"cmp"
	"context"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

// inStream is a run in a stream.
type inStream struct {
	stream string
	run    schemas.Run
}

// choose notes what a dry pass would free, to be counted with the rest of the chunk: at once where tooFull has to know.
func (p *pass) choose(ctx context.Context, of inStream, filters []string) error {
	if len(p.pressing) > 0 {
		return p.measureFreed(ctx, of, filters)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.chosen[of] = append(p.chosen[of], filters...)
	return nil
}

// countChosen counts what a dry pass has chosen.
func (p *pass) countChosen(ctx context.Context) error {
	for of, filters := range p.chosen {
		if err := p.measureFreed(ctx, of, filters); err != nil {
			return err
		}
	}
	clear(p.chosen)
	return nil
}

// measureFreed counts events of a run that a dry pass would free. It estimates the bytes by the run's own events: those
// of other runs may be far larger.
func (p *pass) measureFreed(ctx context.Context, of inStream, filters []string) error {
	n, err := p.b.Matching(ctx, of.stream, filters)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.runs == nil {
		if p.runs, err = counters.Look(ctx, p.b, cmp.Or(p.cfg.Run, "*")); err != nil {
			return err
		}
	}
	mean, known := uint64(0), false
	if r := p.runs[of.run]; r != nil {
		mean, known = r.MeanSize(of.stream)
	}
	if !known {
		mean, known = p.means[of]
	}
	if !known && n > 0 {
		if mean, err = p.b.MeanSize(ctx, of.stream, of.run); err != nil {
			return err
		}
		p.means[of] = mean
	}
	p.add(of.stream, n, n*mean)
	return nil
}

// wouldGo reports whether a dry pass has chosen the group that an event is of.
func (p *pass) wouldGo(m *bus.Message) bool {
	a, _ := schemas.ParseSubject(m.Subject)
	return slices.Contains(blobStreams, m.Stream) && p.freedGroups[address{a.Run, a.UID}]
}
