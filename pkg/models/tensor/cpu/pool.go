package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Pool is a set of threads that several CPUs may share. A nil Pool is one thread:
// the caller. Results never depend on it.
type Pool struct {
	threads int
	work    chan ticket
	workers sync.WaitGroup
}

// NewPool starts threads-1 workers, the caller of an operation being the last thread; threads <= 0
// means GOMAXPROCS. Close stops them.
func NewPool(threads int) *Pool {
	if threads <= 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	p := &Pool{threads: threads, work: make(chan ticket)}
	for range threads - 1 {
		p.workers.Go(func() {
			for t := range p.work {
				t.joinRun()
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
	task  task
	parts int32
	next  atomic.Int32
	slots atomic.Int32
	fault atomic.Pointer[any]

	// state is the number of the run, odd while it is open, in the upper half and its
	// helpers at work in the lower. A worker that wakes up too late finds another
	// number and leaves, so that no call waits for a sleeping thread.
	state atomic.Uint64
	done  chan struct{} // the last helper of a closed run has finished
}

const oneRun = 1 << 32

// ticket invites a worker to a run of b.
type ticket struct {
	b   *batch
	run uint64 // of b.state
}

// joinRun has a worker help with the run that the ticket names; if the run is over, it returns at
// once. The last helper of a run that the caller has finished tells it so.
func (t ticket) joinRun() {
	for {
		s := t.b.state.Load()
		if s/oneRun != t.run {
			return
		}
		if t.b.state.CompareAndSwap(s, s+1) {
			break
		}
	}
	t.b.runParts()
	if s := t.b.state.Add(^uint64(0)); s%oneRun == 0 && s/oneRun != t.run {
		t.b.done <- struct{}{}
	}
}

// runTask runs t.part(i) for 0 <= i < parts on at most threads threads and returns when all are
// done; every operation of a CPU ends here. It does not wait for busy workers: the caller computes
// the parts that are left. b is the caller's memory for the run. A panic of a part is repeated
// here.
func (p *Pool) runTask(b *batch, t task, parts, threads int) {
	if p == nil || threads <= 1 || parts <= 1 {
		for i := range parts {
			t.part(i, 0)
		}
		return
	}
	if b.done == nil {
		b.done = make(chan struct{}, 1)
	}
	b.task, b.parts = t, int32(parts)
	b.next.Store(0)
	b.slots.Store(0)
	invite := ticket{b, b.state.Add(oneRun) / oneRun}
	for range min(threads, parts, p.threads) - 1 {
		select {
		case p.work <- invite:
		default: // all workers are busy
		}
	}
	b.runParts()
	if b.state.Add(oneRun)%oneRun > 0 {
		<-b.done
	}
	b.task = nil
	if f := b.fault.Swap(nil); f != nil {
		panic(*f)
	}
}

// runParts computes parts of the run, each once among all threads, until none is left. A panic ends
// the run and is kept for the caller, so that misuse surfaces there and not in a worker.
func (b *batch) runParts() {
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
