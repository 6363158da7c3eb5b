package sampler

import (
	"context"
	"time"

	"github.com/meander-rl/meander/services/sampler/engine"
)

// scheduler steps attempts in micro-batches. It knows neither the mathematics nor where events go. One goroutine runs
// it.
type scheduler struct {
	batch   int
	queue   *queue
	metrics *instruments

	active []*attempt
	ticks  uint64
}

// run steps attempts until ctx ends, and waits only while none is active.
func (s *scheduler) run(ctx context.Context) {
	for {
		if !s.admitWaiting(ctx) {
			for _, a := range s.active {
				s.endAttempt(a, ctx.Err())
			}
			s.removeEnded()
			return
		}
		s.stepBatch(ctx, s.pickBatch())
		s.removeEnded()
	}
}

// admitWaiting moves waiting attempts into the micro-batch, and waits if there are none at all; false: ctx has ended.
func (s *scheduler) admitWaiting(ctx context.Context) bool {
	for len(s.active) < s.batch {
		if a := s.queue.pop(); a != nil {
			s.metrics.Joining.Dec()
			s.admit(a)
			continue
		}
		if len(s.active) > 0 {
			return ctx.Err() == nil
		}
		select {
		case <-s.queue.ready:
		case <-ctx.Done():
			return false
		}
	}
	return ctx.Err() == nil
}

// admit makes an attempt active. The first time, that is when its denoising started.
func (s *scheduler) admit(a *attempt) {
	a.joined = time.Now()
	if a.started.IsZero() {
		a.started = a.joined
		if a.onAdmitted != nil {
			a.onAdmitted()
		}
	}
	s.active = append(s.active, a)
	s.metrics.Denoising.Inc()
}

// pickBatch returns the attempts to step next, of one bucket: those that have waited longest, then those of
// the highest priority.
func (s *scheduler) pickBatch() []*attempt {
	first := s.active[0]
	for _, a := range s.active[1:] {
		if a.tick < first.tick || a.tick == first.tick && a.priority > first.priority {
			first = a
		}
	}
	s.ticks++
	var batch []*attempt
	for _, a := range s.active {
		if a.episode.Bucket() == first.episode.Bucket() {
			a.tick = s.ticks
			batch = append(batch, a)
		}
	}
	return batch
}

// stepBatch steps a batch by one boundary and records the events. Faults of single episodes come by their Take; an
// error or panic of the whole call ends all attempts of the batch, not the process.
func (s *scheduler) stepBatch(ctx context.Context, batch []*attempt) {
	episodes := make([]engine.Episode, len(batch))
	for i, a := range batch {
		episodes[i] = a.episode
	}
	began := time.Now()
	err := engine.Guarded(func() error { return batch[0].engine.Step(ctx, episodes) })
	took := time.Since(began)
	s.metrics.countEvaluation(batch, s.batch, took)
	for _, a := range batch {
		if err != nil {
			s.endAttempt(a, err)
			continue
		}
		a.device += took / time.Duration(len(batch))
		err := engine.Guarded(func() error { return s.recordEvents(a) })
		if err != nil || a.episode.Done() || a.isJudged() || engine.Asks(a.episode) != nil {
			s.endAttempt(a, err)
		}
	}
}

// recordEvents records the events that an episode has completed, each with an equal share of the device's time.
func (s *scheduler) recordEvents(a *attempt) error {
	steps, err := a.episode.Take()
	for i, step := range steps {
		device := a.device / time.Duration(len(steps)-i)
		a.device -= device
		if err == nil {
			err = a.recordStep(step, device)
		}
	}
	if err == nil && len(steps) > 0 && a.betweenSteps != nil && !a.episode.Done() {
		err = a.betweenSteps()
	}
	return err
}

// endAttempt marks an attempt as ended. It stays active until removeEnded, after the whole batch.
func (s *scheduler) endAttempt(a *attempt, err error) {
	if a.finished {
		return
	}
	a.finished, a.err = true, err
	a.denoised += time.Since(a.joined)
	s.metrics.Denoising.Dec()
}

// removeEnded removes the attempts that have ended, or whose work was stopped, then wakes their handlers.
func (s *scheduler) removeEnded() {
	kept := s.active[:0]
	var gone []*attempt
	for _, a := range s.active {
		if err := a.expired(); err != nil {
			s.endAttempt(a, err)
		}
		if a.finished {
			gone = append(gone, a)
		} else {
			kept = append(kept, a)
		}
	}
	clear(s.active[len(kept):])
	s.active = kept
	for _, a := range gone {
		close(a.done)
	}
}
