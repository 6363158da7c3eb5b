package sampler

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// A sample begins when all its steps fit in MDR_STEPS: else begun samples could fill the stream so that none can end.

// errStopping ends the wait of a request that has not begun when the process is to end. The request is put back.
var errStopping = errors.New("the sampler stops")

// presence returns the sampler's presence, without its space for steps.
func (s *service) presence() *schemas.Presence {
	serving, loading, tenants := s.versions.Serving()
	return &schemas.Presence{
		Service: schemas.ServiceSampler, Instance: s.instance(), Lane: s.cfg.Lane, Controls: s.controls.newestObeyed(),
		Draining:      s.stopping(),
		PolicyVersion: &serving.PolicyVersion, WeightsDigest: serving.WeightsDigest, Loading: loading,
		Tenants: tenants,
		Backend: s.network.Backend(), Evaluation: s.metrics.newest.Load(), Making: s.making.list(),
		Waiting: s.waiting(),
	}
}

// waiting says why no device makes samples now; empty: one does.
func (s *service) waiting() string {
	var why error
	for _, w := range s.workers {
		err := w.why()
		if err == nil {
			return ""
		}
		why = err
	}
	return why.Error()
}

// instance returns the sampler's unique name: two samplers may have one setting.
func (s *service) instance() string {
	if name := s.cfg.Instance + "-" + s.token; schemas.CheckToken("instance", name) == nil &&
		s.cfg.Instance != s.defaultInstance() {
		return name
	}
	return s.defaultInstance()
}

// defaultInstance returns the sampler's name where none is configured.
func (s *service) defaultInstance() string { return "sampler-" + s.token }

// makeWithSpace makes one sample once there is space for its steps, which stays reserved until release: the trajectory
// is stored then. work is ctx until a control stops the sample.
func (s *service) makeWithSpace(ctx, work context.Context, req *schemas.Request,
) (t *schemas.Trajectory, release func(), err error) {
	claim, err := s.reserveSpace(work, req)
	if err != nil {
		return nil, func() {}, err
	}
	w, leave, err := s.chooseWorker()
	if err != nil {
		return nil, claim.Release, err
	}
	defer leave()
	t, err = s.makeSample(ctx, work, w, req)
	switch {
	case err == nil:
		err = s.checkStored(ctx, claim, t)
	case stoppedBy(work) == nil:
		s.onDeviceLost(ctx, w, err)
	}
	return t, claim.Release, err
}

// reserveSpace waits until the steps of a request fit into their stream; errStopping: the process ends before.
func (s *service) reserveSpace(ctx context.Context, req *schemas.Request) (*bus.Reservation, error) {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	defer s.onStop(stop)()
	claim, err := s.space.Reserve(waiting, req.StepBytes(s.network.Policy()))
	if err != nil && ctx.Err() == nil {
		return nil, errStopping
	}
	return claim, err
}

// checkStored returns an error if a step of a trajectory is missing: other samplers may have held this attempt, or an
// earlier one, for dead and removed its steps to get the space.
func (s *service) checkStored(ctx context.Context, claim *bus.Reservation, t *schemas.Trajectory) error {
	if !claim.Lapsed() && len(t.Attempts()) < 2 {
		return nil
	}
	stored, err := s.bus.Subjects(ctx, schemas.StreamSteps,
		schemas.StepsFilter(t.Run, t.UID, strconv.FormatInt(t.SampleIndex, 10), t.Stage))
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

// making is the samples whose requests this sampler has in hand, and how many requests of each: intake asks for none of
// them again.
type making struct {
	mu sync.Mutex
	of map[schemas.Making]int
}

func newMaking() *making { return &making{of: map[schemas.Making]int{}} }

// add notes a request, until done is called.
func (m *making) add(req *schemas.Request) (done func()) {
	of := schemas.Making{Run: req.Run, UID: req.UID, SampleIndex: req.SampleIndex}
	change := func(by int) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.of[of] += by; m.of[of] == 0 {
			delete(m.of, of)
		}
	}
	change(1)
	return func() { change(-1) }
}

// list returns the samples in hand, for the sampler's entry of presence; nil for none.
func (m *making) list() []schemas.Making {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.Collect(maps.Keys(m.of))
	return all[:min(len(all), schemas.MaxMaking)]
}
