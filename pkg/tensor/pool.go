package tensor

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Pool is a set of threads that several CPUs may share. A nil Pool is one thread:
// the caller. Results never depend on it.
type Pool struct {
	threads int
	work    chan *batch
	workers sync.WaitGroup
}

// NewPool starts threads-1 workers, the caller being the last thread; threads <= 0
// means GOMAXPROCS. Close stops them.
func NewPool(threads int) *Pool {
	if threads <= 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	p := &Pool{threads: threads, work: make(chan *batch)}
	for range threads - 1 {
		p.workers.Go(func() {
			for b := range p.work {
				b.run()
				b.helpers.Done()
			}
		})
	}
	return p
}

// Threads returns the number of threads, the caller included.
func (p *Pool) Threads() int {
	if p == nil {
		return 1
	}
	return p.threads
}

// Close waits for the workers to end. No CPU may use the pool any more.
func (p *Pool) Close() {
	if p == nil {
		return
	}
	close(p.work)
	p.workers.Wait()
}

// task is one operation split in independent parts. slot tells threads that work at
// the same time apart: 0 <= slot < Threads().
type task interface {
	part(i, slot int)
}

// batch is one run of a task; it is reused by its CPU.
type batch struct {
	task    task
	parts   int32
	next    atomic.Int32
	slots   atomic.Int32
	helpers sync.WaitGroup
	fault   atomic.Pointer[any]
}

// do runs t.part(i) for 0 <= i < parts on at most threads threads and returns when
// all are done. Busy workers are not waited for: the caller does what nobody takes.
func (p *Pool) do(b *batch, t task, parts, threads int) {
	if p == nil || threads <= 1 || parts <= 1 {
		for i := range parts {
			t.part(i, 0)
		}
		return
	}
	b.task, b.parts = t, int32(parts)
	b.next.Store(0)
	b.slots.Store(0)
	for range min(threads, parts, p.threads) - 1 {
		b.helpers.Add(1)
		select {
		case p.work <- b:
		default:
			b.helpers.Done()
		}
	}
	b.run()
	b.helpers.Wait()
	b.task = nil
	if f := b.fault.Swap(nil); f != nil {
		panic(*f)
	}
}

// run takes parts until none is left. A panic is kept for the caller, so that misuse
// surfaces there and not in a worker.
func (b *batch) run() {
	defer func() {
		if f := recover(); f != nil {
			fault := f // of its own, so that only a panic allocates
			b.fault.CompareAndSwap(nil, &fault)
			b.next.Store(b.parts)
		}
	}()
	slot := int(b.slots.Add(1)) - 1
	for {
		i := b.next.Add(1) - 1
		if i >= b.parts {
			return
		}
		b.task.part(int(i), slot)
	}
}
