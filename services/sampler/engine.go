package sampler

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/schemas"
)

// engine denoises attempts in micro-batches. One goroutine owns it. Rows of a
// micro-batch may be at different steps: each carries its own sigma, so requests
// join and leave at any step boundary, and their bits do not depend on company.
type engine struct {
	model model.Model
	card  model.Card
	batch int
	joins <-chan *attempt

	metrics *instruments

	active []*attempt
	ticks  uint64
	rows   rows
}

// rows are the arguments of one velocity call, reused between calls.
type rows struct {
	dst, x [][]float32
	sigma  []float32
	cond   []*model.Conditioning
}

func (r *rows) reset() {
	r.dst, r.x, r.sigma, r.cond = r.dst[:0], r.x[:0], r.sigma[:0], r.cond[:0]
}

func (r *rows) add(dst, x []float32, sigma float32, cond *model.Conditioning) {
	r.dst, r.x = append(r.dst, dst), append(r.x, x)
	r.sigma, r.cond = append(r.sigma, sigma), append(r.cond, cond)
}

// run works until ctx ends; it waits for joiners only when it has nothing to do.
func (e *engine) run(ctx context.Context) {
	for {
		if !e.join(ctx) {
			for _, a := range e.active {
				a.finish(ctx.Err())
			}
			return
		}
		e.step(ctx, e.pick())
		e.leave()
	}
}

// join admits waiting attempts up to the batch size; false when ctx ended.
func (e *engine) join(ctx context.Context) bool {
	for len(e.active) < e.batch {
		if len(e.active) == 0 {
			select {
			case a := <-e.joins:
				e.admit(a)
			case <-ctx.Done():
				return false
			}
			continue
		}
		select {
		case a := <-e.joins:
			e.admit(a)
		default:
			return ctx.Err() == nil
		}
	}
	return ctx.Err() == nil
}

func (e *engine) admit(a *attempt) {
	a.started = time.Now()
	e.active = append(e.active, a)
	e.metrics.denoising.Inc()
}

// pick returns the attempts to advance: those of the picture size that has waited
// longest, higher priority first where waits are equal.
func (e *engine) pick() []*attempt {
	first := e.active[0]
	for _, a := range e.active[1:] {
		if a.tick < first.tick || a.tick == first.tick && a.req.Priority > first.req.Priority {
			first = a
		}
	}
	e.ticks++
	var batch []*attempt
	for _, a := range e.active {
		if a.req.Height == first.req.Height && a.req.Width == first.req.Width {
			a.tick = e.ticks
			batch = append(batch, a)
		}
	}
	return batch
}

// step evaluates the velocity once for the whole batch and advances each attempt.
// A panic of the numerical code ends these attempts, not the process.
func (e *engine) step(ctx context.Context, batch []*attempt) {
	defer func() {
		if p := recover(); p != nil {
			for _, a := range batch {
				a.finish(bus.Terminal("panic", fmt.Errorf("denoise: %v\n%s", p, debug.Stack())))
			}
		}
	}()
	e.rows.reset()
	for _, a := range batch {
		x, sigma := a.rollout.Point()
		e.rows.add(a.velocity, x, sigma, a.cond)
		if a.guided() {
			e.rows.add(a.negVelocity, x, sigma, a.negCond)
		}
	}
	began := time.Now()
	err := e.model.Velocity(ctx, e.rows.dst, e.rows.x, e.rows.sigma, e.rows.cond, int(batch[0].req.Height), int(batch[0].req.Width))
	took := time.Since(began)
	share := took / time.Duration(len(batch))
	e.metrics.step.Observe(took.Seconds())
	e.metrics.fill.Observe(float64(len(batch)) / float64(e.batch))
	if err != nil {
		for _, a := range batch {
			a.finish(fmt.Errorf("evaluate model: %w", err))
		}
		return
	}
	for _, a := range batch {
		a.device += share
		if a.guided() {
			if err := flow.Guide(a.velocity, a.velocity, a.negVelocity, a.req.TrueCFGScale, e.card.LatentChannels); err != nil {
				a.finish(bus.Terminal(schemas.CodeFailed, err))
				continue
			}
		}
		a.advance()
	}
}

// leave drops attempts that are done, or whose request is no longer ours.
func (e *engine) leave() {
	kept := e.active[:0]
	for _, a := range e.active {
		if err := a.ctx.Err(); err != nil && !a.finished {
			a.finish(err)
		}
		if !a.finished {
			kept = append(kept, a)
		}
	}
	clear(e.active[len(kept):])
	e.active = kept
}
