package client

import (
	"context"
	"fmt"
	"iter"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Cursor is a place among the groups of a store, as text; empty: before them all.
type Cursor = bus.Cursor

// Group is the result of a group.
type Group struct {
	schemas.Advantage
	// Cursor is the group's place: Groups goes on behind it.
	Cursor Cursor
}

// Groups yields the results of a run's groups in the order in which they closed, those
// stored before the call first, then as they close, until ctx ends.
//
// It starts behind the group whose Cursor is after. Each group is stored once and yielded
// once: a reader that keeps the cursor together with what it made of the group, and gives
// the last one kept to the next call, in another process or not, takes each group exactly
// once. The call refuses a cursor that it cannot say so of. ErrCursor: the store is not
// the one that the cursor is of. ErrEvicted: the store's limits of age and size took events
// behind the cursor, groups of this run perhaps among them; an empty cursor begins with
// what is left, of which nothing was read.
func (c *Client) Groups(ctx context.Context, run schemas.Run, after Cursor) iter.Seq2[*Group, error] {
	return func(yield func(*Group, error) bool) {
		events := read[schemas.Advantage](ctx, c.bus, run, schemas.StreamAdvantages, schemas.AdvantageSubject(run, "*"), after)
		for m, err := range events {
			if !yield(&Group{Advantage: m.event, Cursor: m.cursor}, err) {
				return
			}
		}
	}
}

// Trajectories yields the trajectories of a run as they are stored, those stored
// before the call first, until ctx ends.
func (c *Client) Trajectories(ctx context.Context, run schemas.Run) iter.Seq2[*schemas.Trajectory, error] {
	return func(yield func(*schemas.Trajectory, error) bool) {
		for m, err := range read[schemas.Trajectory](ctx, c.bus, run, schemas.StreamTrajectories, schemas.TrajectoryFilter(run, "*"), "") {
			if !yield(&m.event, err) {
				return
			}
		}
	}
}

// placed is an event with its place in the stream.
type placed[T any] struct {
	event  T
	cursor Cursor
}

// read decodes a live stream of a run. What is not the event that its subject is for is left out:
// the services take it off the stream, and its true event comes.
func read[T any, E interface {
	*T
	schemas.Keyed
}](ctx context.Context, b *bus.Bus, run schemas.Run, stream, filter string, after Cursor) iter.Seq2[*placed[T], error] {
	return func(yield func(*placed[T], error) bool) {
		if err := schemas.CheckToken("run", run); err != nil {
			yield(&placed[T]{}, err)
			return
		}
		for m, err := range b.Read(ctx, stream, []string{filter}, bus.ReadOptions{Live: true, After: after}) {
			e := &placed[T]{}
			if err == nil {
				if bus.Fits(m, E(&e.event)) != nil {
					continue
				}
				e.cursor = m.Cursor()
			}
			if ctx.Err() != nil || !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// Trajectory returns one stored trajectory, or ErrNotFound.
func (c *Client) Trajectory(ctx context.Context, run schemas.Run, uid schemas.UID, sample int64) (*schemas.Trajectory, error) {
	m, err := c.bus.Last(ctx, schemas.StreamTrajectories, schemas.TrajectorySubject(run, uid, sample))
	if err != nil {
		return nil, fmt.Errorf("trajectory %s %d of run %s: %w", uid, sample, run, err)
	}
	var t schemas.Trajectory
	return &t, bus.Fits(m, &t)
}

// Steps returns the step events of a trajectory in order, of the steps that ran (Segment),
// with their latents, checked against the digests that it names (ErrCorrupt). Steps that the stream does not have any
// more are ErrNotFound.
func (c *Client) Steps(ctx context.Context, t *schemas.Trajectory) ([]*schemas.Step, error) {
	steps := make([]*schemas.Step, len(t.Steps))
	begin, _ := t.Segment()
	for i := range t.Steps {
		var err error
		if steps[i], err = c.bus.LoadStepOf(ctx, t, i); err != nil {
			return nil, fmt.Errorf("step %d: %w", begin+int64(i), err)
		}
	}
	return steps, nil
}

// Tokens returns the events of tokens of a trajectory of text in order, with what is stored of the logits, checked
// against the digests that it names (ErrCorrupt), and one at a time: full logits are large. Events that the stream does
// not have any more are ErrNotFound.
func (c *Client) Tokens(ctx context.Context, t *schemas.Trajectory) iter.Seq2[*schemas.Tokens, error] {
	return func(yield func(*schemas.Tokens, error) bool) {
		for i := range t.Steps {
			e, err := c.bus.LoadTokensOf(ctx, t, i)
			if err != nil {
				err = fmt.Errorf("tokens %d: %w", i, err)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// Latents returns the states that a trajectory kept, packed [S, C] in row-major order, by
// index: 0 is x_T, k the state before step k, the number of steps the final one. F16 and
// BF16 are widened, which is exact. Errors are those of Steps.
func (c *Client) Latents(ctx context.Context, t *schemas.Trajectory) (map[int64][]float32, error) {
	steps, err := c.Steps(ctx, t)
	if err != nil {
		return nil, err
	}
	out := map[int64][]float32{}
	for _, s := range steps {
		for _, l := range s.Latents {
			width, _ := schemas.DTypeSize(l.Tensor.DType)
			x := make([]float32, len(l.Tensor.Data)/int(max(width, 1)))
			if err := tensor.DType(l.Tensor.DType).DecodeFloats(x, l.Tensor.Data); err != nil {
				return nil, fmt.Errorf("latents %d of sample %d: %w", l.Index, t.SampleIndex, err)
			}
			out[l.Index] = x
		}
	}
	return out, nil
}

// Image returns the bytes of a trajectory's image (PNG), or ErrNoImage.
func (c *Client) Image(ctx context.Context, t *schemas.Trajectory) ([]byte, error) {
	switch {
	case t.Image == nil:
		why := t.StopReason
		if !t.Decoded() {
			why = "stops with noise in it"
		}
		return nil, fmt.Errorf("trajectory %s %d: %w: it %s", t.UID, t.SampleIndex, ErrNoImage, why)
	case t.Image.Ref == nil:
		return t.Image.Data, nil
	}
	return c.bus.GetBlob(ctx, *t.Image.Ref)
}
