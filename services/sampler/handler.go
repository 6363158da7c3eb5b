package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// waits are the errors of requests that are put back because they wait for something.
var waits = []error{errParentPending, errStopping, weights.ErrPolicyPending, engine.ErrAway, model.ErrAway}

// handle makes the sample of one request and stores its trajectory. A request that waits is put back, one that is not
// valid is a dead letter; after other errors it comes again.
func (s *service) handle(ctx context.Context, m *bus.Message) error {
	var req schemas.Request
	if err := bus.Fits(m, &req); err != nil {
		return bus.Garbage(schemas.CodeDecode, err)
	}
	defer s.making.add(&req)()
	log := zerolog.Ctx(ctx).With().Str("run", string(req.Run)).Str("uid", string(req.UID)).
		Int64("sample_index", req.SampleIndex).Logger()
	switch record, err := s.bus.Group(ctx, req.Run, req.UID); {
	case errors.Is(err, bus.ErrNotFound): // no prompt to compare it with
	case err != nil:
		return err
	default:
		if fault := checkAgainstGroup(record, &req); fault != nil {
			return bus.Garbage(schemas.CodeInvalid, fault)
		}
	}
	if _, err := s.bus.BranchOff(ctx, &req); err != nil {
		return err
	}
	if policy := s.versions.Newest().Policy; !s.takes(ctx, policy, &req) {
		return s.otherBase.putBack(ctx, m, &req, policy.Checkpoint())
	}
	var made schemas.Trajectory
	fits := func() (fault, err error) { return s.bus.Answers(ctx, &made, &req) }
	switch _, err := s.bus.StoredEvent(ctx, schemas.StreamTrajectories,
		schemas.TrajectorySubject(req.Run, req.UID, req.SampleIndex, req.Stage), &made, fits); {
	case err == nil:
		return s.sweepSteps(ctx, &made) // an earlier attempt stored the trajectory, and its acknowledgement was lost
	case !errors.Is(err, bus.ErrNotFound):
		return fmt.Errorf("look up trajectory: %w", err)
	}
	switch closed, err := s.bus.Result(ctx, req.Run, req.UID, req.GroupSize, req.Group.Batch); {
	case err == nil: // the group closed without it, at its deadline for instance
		log.Info().Str("status", closed.Status).Msg("let go: its group has its result")
		return nil
	case !errors.Is(err, bus.ErrNotFound):
		return err
	}
	work, release := s.controls.track(ctx, &req)
	defer release()
	t, leave, err := s.makeWithSpace(ctx, work, &req)
	defer leave()
	var stored *schemas.Trajectory
	if err == nil {
		stored, err = s.storeTrajectory(ctx, work, t, &req)
	}
	if c := stoppedBy(work); c != nil && err != nil {
		return s.endByControl(ctx, m, &req, c, log)
	}
	if slices.ContainsFunc(waits, func(w error) bool { return errors.Is(err, w) }) {
		return putBack(ctx, m, err)
	}
	if errors.Is(err, model.ErrKills) {
		return bus.Terminal(schemas.CodeFailed, err)
	}
	if err != nil {
		return err
	}
	if err := s.removeSuperseded(ctx, m, t, stored); err != nil {
		return err
	}
	log.Info().Dur("dur_ms", time.Duration(t.Timings.Finished-t.Timings.Started)).Msg("trajectory stored")
	return nil
}

// endByControl ends the request of a sample that a control stopped: of a cancelled group it is acknowledged; of a
// paused run it is parked in a stream of its own until the run is resumed.
func (s *service) endByControl(ctx context.Context, m *bus.Message, req *schemas.Request, c *schemas.Control,
	log zerolog.Logger,
) error {
	if c.Action == schemas.ControlCancel {
		log.Info().Msg("let go: " + c.Sentence())
		return m.AckAsync() // the cancel may have removed it already: no confirmation would come
	}
	same := bus.Against(func(p *schemas.Parked) (fault, err error) {
		return req.SameSample((*schemas.Request)(p)), nil
	})
	_, err := s.bus.Publish(ctx, (*schemas.Parked)(req), same)
	if errors.Is(err, bus.ErrStreamFull) {
		// No space: the request waits in the queue instead.
		log.Warn().Err(err).Msg("not parked: " + c.Sentence() +
			"; give the stream more with 'meander streams limit --max-parked-bytes SIZE'")
		return putBack(ctx, m, err)
	}
	if err != nil {
		return fmt.Errorf("park the request: %w", err)
	}
	log.Info().Msg("parked: " + c.Sentence())
	return nil
}

// checkAgainstGroup returns in what a request differs from the recorded prompt of its uid; nil if they agree.
func checkAgainstGroup(record *schemas.GroupRecord, r *schemas.Request) error {
	if err := record.CheckGroup(r.GroupSize, &r.Group); err != nil {
		return err
	}
	if len(record.Stages) > 0 {
		i := record.Group.StageIndex(r.Stage)
		if of := &record.Stages[i]; r.Lineage() != of.Lineage() || r.ScheduleDigest != of.ScheduleDigest {
			return fmt.Errorf("lane, tenant and schedule_digest: not those of stage %s of uid %s", r.Stage, r.UID)
		}
		return nil
	}
	if r.Lineage() != record.Lineage() || r.Prompt != record.Prompt || r.NegativePrompt != record.NegativePrompt ||
		r.ScheduleDigest != record.ScheduleDigest {
		return fmt.Errorf("lane, tenant, prompt and schedule_digest: not those of the prompt that has uid %s", r.UID)
	}
	return nil
}

// storeFailure publishes a failed trajectory for a request that the bus gives up, so that the group can close.
func (s *service) storeFailure(ctx context.Context, m *bus.Message, cause error) error {
	var req schemas.Request
	if schemas.DecodeValid(m.Data, &req) != nil {
		return nil // it names no sample
	}
	if _, err := s.bus.BranchOff(ctx, &req); err != nil {
		return err
	}
	policy := s.versions.Newest().Policy
	if own := s.versions.NewestOf(req.Tenant); own != nil {
		policy = own.Policy
	}
	stored, err := s.publishTrajectory(ctx, s.newRecorder(&req, s.network.Backend(), policy).Failed(cause), &req)
	if err != nil {
		return err
	}
	return s.sweepSteps(ctx, stored)
}

// storeTrajectory publishes a trajectory and returns the one that is stored. While the stream is full it waits until a
// control stops the sample: a second try would not fit either.
func (s *service) storeTrajectory(ctx, work context.Context, t *schemas.Trajectory, req *schemas.Request,
) (*schemas.Trajectory, error) {
	stored, err := s.publishTrajectory(ctx, t, req)
	if errors.Is(err, bus.ErrStreamFull) {
		stored, err = s.publishTrajectory(work, t, req, bus.WaitForSpace())
	}
	if err != nil {
		return nil, fmt.Errorf("publish trajectory: %w", err)
	}
	return stored, nil
}

// publishTrajectory stores a trajectory and returns the one that is stored: that of another attempt if it was first.
func (s *service) publishTrajectory(
	ctx context.Context, t *schemas.Trajectory, req *schemas.Request, opts ...bus.PublishOption,
) (*schemas.Trajectory, error) {
	its := bus.Against(func(made *schemas.Trajectory) (fault, err error) { return s.bus.Answers(ctx, made, req) })
	ack, err := s.bus.Publish(ctx, t, append(opts, its)...)
	if err != nil {
		return nil, err
	}
	if !ack.Duplicate {
		s.metrics.countTrajectory(t)
		return t, nil
	}
	first := &schemas.Trajectory{}
	return first, bus.Fits(ack.First, first)
}

// removeSuperseded removes the steps of other attempts: there are some if the request came before, or went elsewhere.
func (s *service) removeSuperseded(ctx context.Context, m *bus.Message, made, stored *schemas.Trajectory) error {
	// (the delivery count of a request that was parked starts again)
	if m.Delivered < 2 && len(stored.Attempts()) < 2 && stored.Attempt == made.Attempt {
		return nil
	}
	return s.sweepSteps(ctx, stored)
}

// sweepSteps removes the steps of all attempts at a sample that its stored trajectory does not name.
func (s *service) sweepSteps(ctx context.Context, stored *schemas.Trajectory) error {
	n, err := s.bus.SweepSample(ctx, stored)
	s.metrics.Superseded.Add(float64(n))
	return err
}
