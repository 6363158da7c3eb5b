package sampler

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// A request is begun when the steps that it will store fit in MDR_STEPS (bus.Room): samples
// that have begun could otherwise fill the stream, and none of them end.

// errLeaving ends the waiting of a request that was not begun, when this process is to end.
var errLeaving = errors.New("the sampler stops")

// presence is the entry of this sampler, without its room.
func (s *service) presence() *schemas.Presence {
	serving, loading := s.versions.serving()
	return &schemas.Presence{
		Service: schemas.ServiceSampler, Instance: s.instance(), Lane: s.cfg.Lane, Controls: s.reins.obeys(), Draining: s.stopping.Err() != nil,
		PolicyVersion: &serving.PolicyVersion, WeightsDigest: serving.WeightsDigest, Loading: loading,
	}
}

// instance is the name of this sampler among those that are present: of two with the name of one
// setting, each has its own.
func (s *service) instance() string {
	if name := s.cfg.Instance + "-" + s.token; schemas.CheckToken("instance", name) == nil && s.cfg.Instance != s.unnamed() {
		return name
	}
	return s.unnamed()
}

// unnamed is its name where none is set.
func (s *service) unnamed() string { return "sampler-" + s.token }

// inRoom makes one sample once its steps fit. The room is its own until leave, when the trajectory
// is stored or there is none. work is ctx until a control stops the sample.
func (s *service) inRoom(ctx, work context.Context, req *schemas.Request) (t *schemas.Trajectory, leave func(), err error) {
	claim, err := s.takeRoom(work, req)
	if err != nil {
		return nil, func() {}, err
	}
	seat, stand, err := s.sit()
	if err != nil {
		return nil, claim.Release, err
	}
	defer stand()
	t, err = s.make(ctx, work, seat, req)
	switch {
	case err == nil:
		err = s.keeps(ctx, claim, t)
	case stoppedBy(work) == nil:
		s.lose(ctx, seat, err)
	}
	return t, claim.Release, err
}

// takeRoom waits until the steps of a request fit, or until the process is to end: errLeaving.
func (s *service) takeRoom(ctx context.Context, req *schemas.Request) (*bus.Claim, error) {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(s.stopping, stop)()
	claim, err := s.room.Take(waiting, req.StepBytes(s.network.Policy()))
	if err != nil && ctx.Err() == nil {
		return nil, errLeaving
	}
	return claim, err
}

// keeps says whether the steps that a trajectory names are there. They are, unless others had
// to take the sampler, or that of an earlier attempt, for dead and needed the room.
func (s *service) keeps(ctx context.Context, claim *bus.Claim, t *schemas.Trajectory) error {
	if !claim.Lapsed() && len(t.Attempts()) < 2 {
		return nil
	}
	stored, err := s.bus.Subjects(ctx, schemas.StreamSteps, schemas.StepsFilter(t.Run, t.UID, strconv.FormatInt(t.SampleIndex, 10)))
	if err != nil {
		return fmt.Errorf("look up the steps of the sample: %w", err)
	}
	for i := range t.Steps {
		if stored[t.StepSubject(i)] == 0 {
			return fmt.Errorf("step %d of %d: removed as one of a dead attempt", i+1, len(t.Steps))
		}
	}
	return nil
}

// sweep removes the steps of other attempts at a sample, whose trajectory is stored. There are
// some only where the request has come before, or came to another while made was being made.
func (s *service) sweep(ctx context.Context, m *bus.Message, made, stored *schemas.Trajectory) error {
	if m.Delivered < 2 && len(stored.Attempts()) < 2 && stored.Attempt == made.Attempt { // what was parked comes as new
		return nil
	}
	return s.sweepSteps(ctx, stored)
}

func (s *service) sweepSteps(ctx context.Context, stored *schemas.Trajectory) error {
	n, err := s.bus.SweepSample(ctx, stored)
	s.metrics.superseded.Add(float64(n))
	return err
}
