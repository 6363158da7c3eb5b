package model

import (
	"context"
	"sync"

	"github.com/meander-rl/meander/pkg/tensor"
)

// worker is what one goroutine computes with: operations and their memory. Memory grows
// to the largest shape seen and stays.
type worker struct {
	cpu   *tensor.CPU
	arena tensor.Arena
	ints  []int32
	used  int
	seqs  [][]int32
}

// reset gives the arena's memory back.
func (w *worker) reset() {
	w.arena.Reset()
	w.used, w.seqs = 0, w.seqs[:0]
}

// int32s returns n elements that live until reset.
func (w *worker) int32s(n int) []int32 {
	if w.used+n > len(w.ints) {
		// Slices handed out before keep the old block alive.
		w.ints, w.used = make([]int32, max(2*len(w.ints), n, 256)), 0
	}
	s := w.ints[w.used : w.used+n : w.used+n]
	w.used += n
	return s
}

// crew is the workers of a model: narrow ones of a single thread, for independent work
// side by side, and a wide one whose operations use all threads.
type crew struct {
	threads int
	narrow  chan *worker
	pool    *tensor.Pool
	wideMu  sync.Mutex
	wide    *worker
}

func newCrew(threads int, kernels tensor.Kernels) (*crew, error) {
	c := &crew{threads: threads, narrow: make(chan *worker, threads)}
	for range threads {
		cpu, err := tensor.NewCPUWith(nil, kernels)
		if err != nil {
			return nil, err
		}
		c.narrow <- &worker{cpu: cpu}
	}
	c.pool = tensor.NewPool(threads)
	cpu, err := tensor.NewCPUWith(c.pool, kernels)
	if err != nil {
		c.pool.Close()
		return nil, err
	}
	c.wide = &worker{cpu: cpu}
	return c, nil
}

func (c *crew) close() { c.pool.Close() }

// do runs f with a narrow worker, waiting for a free one.
func (c *crew) do(ctx context.Context, f func(*worker) error) error {
	select {
	case w := <-c.narrow:
		defer func() { c.narrow <- w }()
		w.reset()
		return f(w)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// doWide runs f with the wide worker when it is free, else with a narrow one: when
// several calls compete, one thread each serves them better.
func (c *crew) doWide(ctx context.Context, f func(*worker) error) error {
	if c.threads > 1 && c.wideMu.TryLock() {
		defer c.wideMu.Unlock()
		c.wide.reset()
		return f(c.wide)
	}
	return c.do(ctx, f)
}

// split runs f for parts of 0..n side by side, one narrow worker each. A panic surfaces
// in the caller, who may recover from it.
func (c *crew) split(ctx context.Context, n int, f func(w *worker, from, to int) error) error {
	parts := min(n, c.threads)
	if parts <= 1 {
		return c.do(ctx, func(w *worker) error { return f(w, 0, n) })
	}
	errs, faults := make([]error, parts), make([]any, parts)
	var group sync.WaitGroup
	for i := range parts {
		from, to := i*n/parts, (i+1)*n/parts
		run := func() {
			defer func() { faults[i] = recover() }()
			errs[i] = c.do(ctx, func(w *worker) error { return f(w, from, to) })
		}
		if i == parts-1 {
			run()
			break
		}
		group.Go(run)
	}
	group.Wait()
	for _, f := range faults {
		if f != nil {
			panic(f)
		}
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// bytes returns the memory that the free workers hold.
func (c *crew) bytes() int {
	n := 0
	for range c.threads {
		select {
		case w := <-c.narrow:
			n += w.arena.Bytes() + w.cpu.ScratchBytes()
			c.narrow <- w
		default:
		}
	}
	if c.wideMu.TryLock() {
		n += c.wide.arena.Bytes() + c.wide.cpu.ScratchBytes()
		c.wideMu.Unlock()
	}
	return n
}
