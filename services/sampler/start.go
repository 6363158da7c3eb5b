package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// StartState sets x to the state that a sample begins with: of states, [n, S, C] or, for all
// samples of the group, [1, S, C], the one of its index. The shape is [S, C]. Errors name the
// field of states.
func StartState(x []float32, states *schemas.Tensor, sample int64, shape []int64) error {
	dtype := tensor.DType(states.DType)
	if len(states.Shape) != 3 || !slices.Equal(states.Shape[1:], shape) {
		return fmt.Errorf("shape: %v; must be %v after the samples", states.Shape, shape)
	}
	if states.Shape[0] == 1 {
		sample = 0
	}
	size := int64(len(x) * dtype.Size())
	if end := (sample + 1) * size; sample >= states.Shape[0] || int64(len(states.Data)) < end {
		return fmt.Errorf("data: %d bytes of shape %v; must have a state of sample %d", len(states.Data), states.Shape, sample)
	}
	if err := dtype.DecodeFloats(x, states.Data[sample*size:(sample+1)*size]); err != nil {
		return fmt.Errorf("data: %w", err)
	}
	return nil
}

// begin starts the episode of an attempt: with what an earlier attempt has stored, or as its
// request says.
func (s *service) begin(ctx context.Context, engine Engine, r *recorder) (Episode, error) {
	var parent *schemas.Tensor
	var err error
	if start := r.req.Start; start != nil && start.Branch != nil {
		if parent, err = s.branch(ctx, r.req); err != nil {
			return nil, err
		}
	}
	if r.seal, err = s.sealer.first(r.req, parent, r.backend); err != nil {
		return nil, err
	}
	var from *schemas.SegmentStart
	if r.req.ScheduledSampling == nil { // whose samplers look back; its rollouts are short
		from, err = s.resume(ctx, r)
	}
	switch {
	case err != nil:
		return nil, err
	case from != nil || r.req.Start == nil:
		return engine.Start(ctx, r.req, from)
	case parent != nil:
		begin, _ := r.req.Segment()
		return engine.Start(ctx, r.req, &schemas.SegmentStart{StepIndex: begin, Latents: parent})
	}
	// The states that a prompt gives are those of its whole group: one request at a time has
	// them in memory.
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	defer s.loaded()
	var states *schemas.Tensor
	if data := r.req.Start.Data; data != nil {
		states, err = s.data(ctx, engine, r.req)
	} else {
		states, err = s.states(ctx, r.req)
	}
	if err != nil {
		return nil, err
	}
	return engine.Start(ctx, r.req, &schemas.SegmentStart{StepIndex: r.req.Start.StepIndex, Latents: states, Data: r.req.Start.Data})
}

// load waits until nobody else has stored states in memory; loaded ends that.
func (s *service) load(ctx context.Context) error {
	select {
	case s.loading <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *service) loaded() { <-s.loading }

// states are those that a prompt gives, [n, S, C] or [1, S, C].
func (s *service) states(ctx context.Context, req *schemas.Request) (*schemas.Tensor, error) {
	states := req.Start.Latents
	if states.Ref == nil {
		return states, nil
	}
	data, err := s.bus.GetBlob(ctx, *states.Ref)
	switch {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("start.latents.ref: %w", err))
	case err != nil:
		return nil, fmt.Errorf("load the states to start with: %w", err)
	}
	return &schemas.Tensor{DType: states.DType, Shape: states.Shape, Data: data}, nil
}

// errUnborn says that the parent of a sample has no trajectory yet, and will have one.
var errUnborn = errors.New("the sample to branch from is not made yet")

// branch loads the state that a request's parent stored. A parent of the same group, as trees
// have them, may still be on its way: errUnborn.
func (s *service) branch(ctx context.Context, req *schemas.Request) (*schemas.Tensor, error) {
	at := *req.Start.Branch
	t, err := s.bus.Made(ctx, at)
	var state *schemas.Tensor
	its := at.Run == req.Run && at.UID == req.UID
	switch {
	case its && errors.Is(err, bus.ErrNotFound):
		return nil, s.unborn(ctx, req)
	case its && err == nil && (t.ScheduleDigest != req.ScheduleDigest || !t.Group.Same(&req.Group)):
		return nil, s.unborn(ctx, req) // whoever makes the parent displaces it
	case err == nil:
		state, err = s.bus.LoadBranch(ctx, at, t)
	}
	switch {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt), errors.Is(err, bus.ErrFailed):
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("start.branch: %w", err))
	case err != nil:
		return nil, fmt.Errorf("load the state to branch from: %w", err)
	}
	return state, nil
}

// unborn is errUnborn while the parent of a sample is asked for, in the queue or parked.
func (s *service) unborn(ctx context.Context, req *schemas.Request) error {
	at := req.Start.Branch
	for stream, subject := range map[string]string{
		schemas.StreamRequests: schemas.RequestSubject(at.Run, req.Lane, at.UID, at.SampleIndex),
		schemas.StreamParked:   schemas.ParkedSubject(at.Run, req.Lane, at.UID, at.SampleIndex),
	} {
		switch _, err := s.bus.Last(ctx, stream, subject); {
		case err == nil:
			return errUnborn
		case !errors.Is(err, bus.ErrNotFound):
			return fmt.Errorf("look up the request of the sample to branch from: %w", err)
		}
	}
	// It may be on its way from one place to another; the last of the tries says that it is not.
	return fmt.Errorf("start.branch: sample %d of the group is neither made nor asked for", at.SampleIndex)
}

// putBack hands back a request that waits, for its parent for instance. It comes again after an eighth of
// the time that it has waited, so that the waits of a day are fewer than the deliveries that
// end without a result.
func putBack(ctx context.Context, m *bus.Message, why error) error {
	d := putBackDelay(m)
	zerolog.Ctx(ctx).Debug().Dur("delay", d).Msg("put back: " + why.Error())
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, bus.ErrSettled) {
		return fmt.Errorf("put back: %w", err)
	}
	return nil
}

// putBackDelay is after how long a request comes again.
func putBackDelay(m *bus.Message) time.Duration {
	d := 200 * time.Millisecond
	for range min(m.Delivered, 90) {
		d += d / 8
	}
	return d
}

// otherBase is what is known of requests for other checkpoints than the sampler has.
type otherBase struct {
	mu sync.Mutex
	// until is when a note on requests for a checkpoint is out of date: they have come again by then, or are done.
	until map[string]time.Time
}

// putBack leaves a request to samplers of its checkpoint.
func (o *otherBase) putBack(ctx context.Context, m *bus.Message, req *schemas.Request, have string) error {
	why := fmt.Sprintf("requests of lane %q wait for a sampler of the checkpoint %.16s; this one has %.16s", req.Lane,
		req.BaseDigest, have)
	o.mu.Lock()
	if o.until == nil {
		o.until = map[string]time.Time{}
	}
	_, told := o.until[why]
	o.until[why] = time.Now().Add(2 * putBackDelay(m))
	o.mu.Unlock()
	if !told {
		zerolog.Ctx(ctx).Warn().Str("run", string(req.Run)).Msg(why)
	}
	return putBack(ctx, m, errors.New(why))
}

// notes are what requests wait for.
func (o *otherBase) notes() (lines []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for why, until := range o.until {
		if time.Now().Before(until) {
			lines = append(lines, why)
		}
	}
	slices.Sort(lines)
	return lines
}
