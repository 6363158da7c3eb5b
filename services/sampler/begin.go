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
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

// startEpisode starts an episode from a state that an earlier attempt stored, or as the request says: from noise, from
// given states or data, or from a parent's state, which may be errParentPending.
func (s *service) startEpisode(
	ctx context.Context, c *worker, e engine.Engine, req *schemas.Request, r *recorder.Recorder,
) (engine.Episode, error) {
	var parent *schemas.Tensor
	if start := req.Start; start != nil && start.Branch != nil {
		var err error
		if parent, err = s.loadBranch(ctx, req); err != nil {
			return nil, err
		}
	}
	if err := r.Begin(parent); err != nil {
		return nil, err
	}
	from, err := r.Resume(ctx)
	switch {
	case err != nil:
		return nil, err
	case from != nil || req.Start == nil:
		return e.Start(ctx, req, from)
	case parent != nil:
		begin, _ := req.Segment()
		return e.Start(ctx, req, &schemas.SegmentStart{StepIndex: begin, Latents: parent})
	}
	// The states of a prompt are for its whole group and may be large: one request at a time loads them.
	select {
	case s.loading <- struct{}{}:
		defer func() { <-s.loading }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	states, err := s.loadStates(ctx, c.can.Encoder, req)
	if err != nil {
		return nil, err
	}
	return e.Start(ctx, req, &schemas.SegmentStart{
		StepIndex: req.Start.StepIndex, Latents: states, Data: req.Start.Data,
	})
}

// loadStates returns the states that the prompt gives, or the latents or the image that noise is added to, as
// [n, S, C] or [1, S, C].
func (s *service) loadStates(ctx context.Context, m engine.Encoder, req *schemas.Request) (*schemas.Tensor, error) {
	start := req.Start
	if start.Data != nil && m == nil {
		return nil, engine.Invalid("start.data: given; the model encodes no images")
	}
	data, field := start.Data, "start.data"
	if data == nil {
		data, field = &schemas.SegmentData{Latents: start.Latents}, "start.latents.ref"
	}
	states, err := images.LoadData(ctx, s.bus, m, data, sampling.SizeOf(&req.Sampling))
	switch {
	case err == nil:
		return states, nil
	case errors.Is(err, images.ErrImage):
		return nil, engine.Invalid("%w", err)
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return nil, engine.Invalid("%s: %w", field, err)
	}
	return nil, fmt.Errorf("load the states to start with: %w", err)
}

// errParentPending says that the parent of a sample has no trajectory yet. The request is put back.
var errParentPending = errors.New("the sample to branch from is not made yet")

// loadBranch loads the state that a request's parent stored. A parent of the same group, as in trees, may not be made
// yet: errParentPending.
func (s *service) loadBranch(ctx context.Context, req *schemas.Request) (*schemas.Tensor, error) {
	at := *req.Start.Branch
	t, err := s.bus.BranchTrajectory(ctx, at)
	var state *schemas.Tensor
	sameGroup := at.Run == req.Run && at.UID == req.UID
	switch {
	case sameGroup && errors.Is(err, bus.ErrNotFound):
		return nil, s.parentError(ctx, req)
	case sameGroup && err == nil && (t.ScheduleDigest != req.ScheduleDigest || !t.Group.Same(&req.Group)):
		return nil, s.parentError(ctx, req) // of an older request; the next attempt at the parent replaces it
	case err == nil:
		state, err = s.bus.LoadBranch(ctx, at, t)
	}
	switch {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt), errors.Is(err, bus.ErrFailed):
		return nil, engine.Invalid("start.branch: %w", err)
	case err != nil:
		return nil, fmt.Errorf("load the state to branch from: %w", err)
	}
	return state, nil
}

// parentError returns errParentPending if the parent is in the queue or parked; else it is probably never made.
func (s *service) parentError(ctx context.Context, req *schemas.Request) error {
	at := req.Start.Branch
	for _, in := range []struct{ stream, subject string }{
		{schemas.StreamRequests, schemas.RequestSubject(at.Run, req.Lane, at.UID, at.SampleIndex, req.Stage)},
		{schemas.StreamParked, schemas.ParkedSubject(at.Run, req.Lane, at.UID, at.SampleIndex, req.Stage)},
	} {
		switch _, err := s.bus.Last(ctx, in.stream, in.subject); {
		case err == nil:
			return errParentPending
		case !errors.Is(err, bus.ErrNotFound):
			return fmt.Errorf("look up the request of the sample to branch from: %w", err)
		}
	}
	// The request may be between queue and parked just now, so this error is tried again.
	return fmt.Errorf("start.branch: sample %d of the group is neither made nor asked for", at.SampleIndex)
}

// putBack puts a request that waits back into the queue, for an eighth of the time that it has waited so far: then the
// waits of a day are fewer than the deliveries that a request may have.
func putBack(ctx context.Context, m *bus.Message, why error) error {
	d := putBackDelay(m)
	zerolog.Ctx(ctx).Debug().Dur("delay", d).Msg("put back: " + why.Error())
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, bus.ErrAcknowledged) {
		return fmt.Errorf("put back: %w", err)
	}
	return nil
}

// putBackDelay returns after how long a request comes again: 200 ms, an eighth more for each delivery.
func putBackDelay(m *bus.Message) time.Duration {
	d := 200 * time.Millisecond
	for range min(m.Delivered, 90) {
		d += d / 8
	}
	return d
}

// takes reports whether the sampler makes the sample of a request, as far as the checkpoint decides it: also of a group
// that another engine has begun, if it is so set and the engine gives what the request asks for.
func (s *service) takes(ctx context.Context, p *schemas.Policy, req *schemas.Request) bool {
	makes, mixed := p.Makes(req.BaseDigest)
	if !mixed {
		return makes
	}
	err := p.Engine.Makes(req)
	if req.Text != nil {
		_, err = p.DrawnBy().Gives(req.Text)
	}
	if err == nil {
		s.mixing.Do(func() {
			zerolog.Ctx(ctx).Warn().Str("run", string(req.Run)).Str("begun", req.BaseDigest).
				Msg("makes samples of groups that another engine has begun (--engine-mix)")
		})
	}
	return err == nil
}

// otherBase notes which other checkpoints requests wait for: for the log and /readyz.
type otherBase struct {
	mu sync.Mutex
	// until has the notes, each with the time when its requests have come again, or are done.
	until map[string]time.Time
}

// putBack puts a request for another checkpoint than have back, and logs each kind of wait once.
func (o *otherBase) putBack(ctx context.Context, m *bus.Message, req *schemas.Request, have string) error {
	why := fmt.Sprintf("requests of lane %q wait for a sampler of the checkpoint %.16s; this one has %.16s", req.Lane,
		req.BaseDigest, have)
	if schemas.IsServed(req.BaseDigest) || schemas.IsServed(have) {
		why += ": another engine has begun their groups, and --engine-mix lets this one make the rest"
	}
	o.mu.Lock()
	if o.until == nil {
		o.until = map[string]time.Time{}
	}
	_, noted := o.until[why]
	o.until[why] = time.Now().Add(2 * putBackDelay(m))
	o.mu.Unlock()
	if !noted {
		zerolog.Ctx(ctx).Warn().Str("run", string(req.Run)).Msg(why)
	}
	return putBack(ctx, m, errors.New(why))
}

// lines returns for /readyz which requests wait for a sampler of another checkpoint, sorted.
func (o *otherBase) lines() (lines []string) {
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
