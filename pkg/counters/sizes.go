package counters

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Size is how many events of a run there are in a stream, and about how many bytes these take.
type Size struct {
	_msgpack struct{} `msgpack:",as_array"` //nolint:unused // says it to the library

	Stream        string
	Events, Bytes uint64
}

// Sizes are of the streams that no look reads: steps, controls, updates.
type Sizes struct {
	Streams []Size `msgpack:"n"`
	// Counted is how many events were counted in all other streams then.
	Counted uint64 `msgpack:"e"`
}

// events returns how many events are counted.
func (r *Run) events() (n uint64) {
	for _, m := range r.Marks {
		n += m.Events
	}
	return n
}

// Measured returns the sizes of a run that has ended as they were measured, and nil if they are not, or something has
// happened since.
func (r *Run) Measured() *Sizes {
	if s := r.Sizes; s != nil && s.Counted == r.events() && r.ended() {
		return s
	}
	return nil
}

// MeanSize returns how many bytes an event of the run takes in a stream; false: the record does not say.
func (r *Run) MeanSize(stream string) (mean uint64, known bool) {
	for of, m := range r.All() {
		if of == stream {
			return m.Bytes / m.Events, true
		}
	}
	if s := r.Measured(); s != nil {
		for _, of := range s.Streams {
			if of.Stream == stream {
				return of.Bytes / of.Events, true
			}
		}
	}
	return 0, false
}

// ended reports whether no group and no batch of the run is open.
func (r *Run) ended() bool { return r.Groups > 0 && len(r.Open) == 0 && len(r.Batches) == 0 }

// Measure asks the server for the sizes of a run. Bytes are estimated by the mean size of the run's own messages: those
// of other runs may be far larger. It takes a dozen requests.
func Measure(ctx context.Context, b *bus.Bus, run schemas.Run) (*Sizes, error) {
	s := &Sizes{}
	for _, stream := range []string{schemas.StreamSteps, schemas.StreamControl, schemas.StreamUpdates} {
		n, err := b.Stored(ctx, stream, schemas.RunFilters(run)[stream], 1)
		if err != nil && !errors.Is(err, bus.ErrPermission) {
			return nil, err
		}
		if n == 0 {
			continue
		}
		mean, err := b.MeanSize(ctx, stream, run)
		if err != nil {
			return nil, err
		}
		s.Streams = append(s.Streams, Size{Stream: stream, Events: n, Bytes: n * mean})
	}
	return s, nil
}

// MeasureAgain measures a run whose sizes were measured and are so no more: its steps went.
func MeasureAgain(ctx context.Context, b *bus.Bus, run schemas.Run) error {
	k, err := look(ctx, b, run)
	if err != nil {
		return fmt.Errorf("measure run %s again: %w", run, err)
	}
	if r := k.runs[run]; r == nil || r.Measured() == nil {
		return nil
	}
	if err := k.measure(ctx, run); err != nil {
		return err
	}
	k.write(ctx)
	return nil
}

// measureEnded measures the runs that have ended and are not measured yet.
func (k *book) measureEnded(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for name, r := range k.runs {
		if name != "" && r.ended() && r.Measured() == nil {
			g.Go(func() error { return k.measure(ctx, name) })
		}
	}
	return g.Wait()
}

func (k *book) measure(ctx context.Context, run schemas.Run) (err error) {
	r := k.runs[run]
	if r.Sizes, err = Measure(ctx, k.b, run); err != nil {
		return fmt.Errorf("measure run %s: %w", run, err)
	}
	r.Sizes.Counted, r.changed = r.events(), true
	return nil
}

// count counts an event, whose outcome is said.
func (r *Run) count(m *bus.Message, a schemas.Address, outcome string) {
	mark := r.mark(m.Stream)
	mark.Seq, mark.Newest = m.Seq, max(mark.Newest, m.Time.UnixNano())
	mark.Events++
	mark.Bytes += m.StoredSize()
	r.changed = true
	if outcome != "" {
		i := slices.IndexFunc(r.Outcomes, func(o Outcome) bool { return o.Kind == a.Kind && o.Outcome == outcome })
		if i < 0 {
			i, r.Outcomes = len(r.Outcomes), append(r.Outcomes, Outcome{Kind: a.Kind, Outcome: outcome})
		}
		n := int64(1)
		if a.Kind == schemas.KindTrajectory { // samples are counted, not their stages
			n = m.Ends()
		}
		r.Outcomes[i].N += n
	}
	switch a.Kind {
	case schemas.KindTrajectory:
		if r.Lane == "" && outcome != "" {
			r.Lane = schemas.Lane(m.Header.Get(schemas.HeaderLane))
		}
	case schemas.KindAdvantage:
		if outcome == "" { // the true one will replace it
			break
		}
		mean, err := strconv.ParseFloat(m.Header.Get(schemas.HeaderMean), 64)
		if err == nil && !math.IsNaN(mean) && !math.IsInf(mean, 0) {
			r.Mean.Of, r.Mean.N = r.Mean.Of+mean, r.Mean.N+1
		}
		if r.Open[a.UID] {
			delete(r.Open, a.UID)
		} else {
			put(&r.Orphans, a.UID, true)
		}
	case schemas.KindStepReward:
		r.midwayOf(a.UID)[a.Step]++ // of a late sample too: it stays below 0
	case schemas.KindSelection:
		r.midwayOf(a.UID)[a.Step] = decided
		if n, err := strconv.ParseUint(m.Header.Get(schemas.HeaderSaved), 10, 32); err == nil {
			r.Saved += int64(n)
		}
	case schemas.KindGroup:
		r.Groups++
		delete(r.Letters, a.UID)
		if r.Orphans[a.UID] {
			delete(r.Orphans, a.UID)
		} else {
			put(&r.Open, a.UID, true)
		}
	case schemas.KindBatch:
		delete(r.Batches, a.Batch)
	case schemas.KindOpening:
		if a.Batch != string(a.UID) && !r.Batches[a.Batch] { // else the group is a batch by itself
			put(&r.openings, a.Batch, true)
		}
	case schemas.KindDead:
		if a.Service == schemas.ServiceIntake {
			r.letters = addTo(r.letters, a.UID, 1)
		}
	}
}
