package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// chooseWorker returns the worker with the fewest attempts whose device works, or may come back; the attempt calls the
// function when it leaves the worker.
func (s *service) chooseWorker() (*worker, func(), error) {
	var best *worker
	bestAway := false
	for _, c := range s.workers {
		away := c.why() != nil
		if !c.lost.Load() && (best == nil || bestAway && !away ||
			bestAway == away && c.load.Load() < best.load.Load()) {
			best, bestAway = c, away
		}
	}
	if best == nil {
		return nil, nil, fmt.Errorf("no device is left: %w", tensor.ErrDeviceLost)
	}
	best.load.Add(1)
	return best, func() { best.load.Add(-1) }, nil
}

// why says why a worker cannot make samples now; nil: it can.
func (c *worker) why() error {
	switch {
	case c.can.Away != nil:
		return c.can.Away()
	case c.can.Servers != nil:
		return engine.Away(c.can.Servers)
	}
	return nil
}

// engineOf returns the engine of a worker for weights. An error says that its device was lost before they were loaded.
func (c *worker) engineOf(w *weights.Loaded) (engine.Engine, error) {
	if e := w.Engines[c.index]; e != nil {
		return e, nil
	}
	return nil, fmt.Errorf("%s has no version %d: %w", c.id, w.Version(), tensor.ErrDeviceLost)
}

// onDeviceLost stops using a worker if err says that its device is lost. The service ends with the last one.
func (s *service) onDeviceLost(ctx context.Context, c *worker, err error) {
	if !errors.Is(err, tensor.ErrDeviceLost) || c.lost.Swap(true) {
		return
	}
	s.metrics.Lost.Inc()
	zerolog.Ctx(ctx).Error().Err(err).Str("device", c.id).Msg("device lost; its samples go elsewhere")
	for _, other := range s.workers {
		if !other.lost.Load() {
			return
		}
	}
	select {
	case s.ended <- fmt.Errorf("no device is left: %w", err):
	default: // two devices may be the last at once
	}
}

// queue has the attempts that wait for a scheduler: the highest priority first; of equal ones, the first that came.
type queue struct {
	mu      sync.Mutex
	waiting []*attempt
	ready   chan struct{} // has a signal while something waits; buffered, 1
}

func newQueue() *queue { return &queue{ready: make(chan struct{}, 1)} }

// push adds an attempt behind those of its priority and above.
func (q *queue) push(a *attempt) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := slices.IndexFunc(q.waiting, func(w *attempt) bool { return w.priority < a.priority })
	if at < 0 {
		at = len(q.waiting)
	}
	q.waiting = slices.Insert(q.waiting, at, a)
	q.signal()
}

// pop removes and returns the first attempt; nil if none waits.
func (q *queue) pop() *attempt {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return nil
	}
	first := q.waiting[0]
	q.waiting = slices.Delete(q.waiting, 0, 1)
	q.signal()
	return first
}

// remove removes an attempt whose work has ended; false: it does not wait any more.
func (q *queue) remove(a *attempt) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	before := len(q.waiting)
	q.waiting = slices.DeleteFunc(q.waiting, func(w *attempt) bool { return w == a })
	q.signal()
	return len(q.waiting) < before
}

// signal makes ready readable while something waits: several schedulers read it. The caller holds the lock.
func (q *queue) signal() {
	if len(q.waiting) == 0 {
		return
	}
	select {
	case q.ready <- struct{}{}:
	default:
	}
}
