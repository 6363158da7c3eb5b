package sampler

import (
	"context"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// scheduler steps attempts in micro-batches. One goroutine owns it. Requests join and
// leave at any step boundary. It knows neither the mathematics nor where events go.
type scheduler struct {
	batch   int
	joins   <-chan *attempt
	metrics *instruments

	active []*attempt
	ticks  uint64
}

// attempt is one try at one sample. The handler creates and finishes it; between, the
// scheduler owns it.
type attempt struct {
	// ctx is the handler's: when it ends, the attempt is dropped at the next boundary.
	ctx context.Context
	// engine makes the episode.
	engine   Engine
	episode  Episode
	priority int64
	// admitted is called before the first step, when its turn has come; nil: nobody minds.
	admitted func()
	// record takes each event as it is completed; device is the time it took, this attempt's
	// share of it.
	record func(step schemas.StepEvent, device time.Duration) error
	// between is called once all that a Step completed is recorded, while there is more to make; nil: nobody minds.
	between func() error

	tick    uint64
	device  time.Duration // since the last step
	started time.Time     // when its turn first came
	joined  time.Time     // when it came last
	denoise time.Duration

	finished bool
	err      error
	done     chan struct{}
}

// run works until ctx ends; it waits for joiners only when it has nothing to do.
func (s *scheduler) run(ctx context.Context) {
	for {
		if !s.join(ctx) {
			for _, a := range s.active {
				s.finish(a, ctx.Err())
			}
			s.leave()
			return
		}
		s.step(ctx, s.pick())
		s.leave()
	}
}

// join admits waiting attempts up to the batch size; false when ctx ended.
func (s *scheduler) join(ctx context.Context) bool {
	for len(s.active) < s.batch {
		if len(s.active) == 0 {
			select {
			case a := <-s.joins:
				s.admit(a)
			case <-ctx.Done():
				return false
			}
			continue
		}
		select {
		case a := <-s.joins:
			s.admit(a)
		default:
			return ctx.Err() == nil
		}
	}
	return ctx.Err() == nil
}

func (s *scheduler) admit(a *attempt) {
	a.joined = time.Now()
	if a.started.IsZero() {
		a.started = a.joined
		if a.admitted != nil {
			a.admitted()
		}
	}
	s.active = append(s.active, a)
	s.metrics.denoising.Inc()
}

// pick returns the attempts to advance: those of the engine and bucket that has waited longest,
// higher priority first where waits are equal.
func (s *scheduler) pick() []*attempt {
	first := s.active[0]
	for _, a := range s.active[1:] {
		if a.tick < first.tick || a.tick == first.tick && a.priority > first.priority {
			first = a
		}
	}
	s.ticks++
	var batch []*attempt
	for _, a := range s.active {
		if a.engine == first.engine && a.episode.Bucket() == first.episode.Bucket() {
			a.tick = s.ticks
			batch = append(batch, a)
		}
	}
	return batch
}

// step advances a batch by one boundary. An engine judges each episode alone; what it fails at as a whole, were it
// by a panic, ends all of them, not the process.
func (s *scheduler) step(ctx context.Context, batch []*attempt) {
	episodes := make([]Episode, len(batch))
	for i, a := range batch {
		episodes[i] = a.episode
	}
	began := time.Now()
	err := guarded(func() error { return batch[0].engine.Step(ctx, episodes) })
	took := time.Since(began)
	s.metrics.step.Observe(took.Seconds())
	s.metrics.fill.Observe(float64(len(batch)) / float64(s.batch))
	for _, a := range batch {
		if err != nil {
			s.finish(a, err)
			continue
		}
		a.device += took / time.Duration(len(batch))
		if err := guarded(func() error { return s.take(a) }); err != nil || a.episode.Done() || asks(a.episode) != nil {
			s.finish(a, err)
		}
	}
}

// take records what an episode has completed.
func (s *scheduler) take(a *attempt) error {
	steps, err := a.episode.Take()
	for i, step := range steps {
		device := a.device / time.Duration(len(steps)-i)
		a.device -= device
		if err == nil {
			err = a.record(step, device)
		}
	}
	if err == nil && len(steps) > 0 && a.between != nil && !a.episode.Done() {
		err = a.between()
	}
	return err
}

// finish ends an attempt, which leaves with the others of its step: until then it is the scheduler's.
func (s *scheduler) finish(a *attempt, err error) {
	if a.finished {
		return
	}
	a.finished, a.err = true, err
	a.denoise += time.Since(a.joined)
	s.metrics.denoising.Dec()
}

// leave drops attempts that are done, or whose request is no longer ours, and gives them back: one that waits for
// others may join again at once.
func (s *scheduler) leave() {
	kept := s.active[:0]
	var gone []*attempt
	for _, a := range s.active {
		if err := a.ctx.Err(); err != nil {
			s.finish(a, err)
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
