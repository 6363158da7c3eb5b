package sampler

import (
	"slices"
	"sync"
)

// queue has the attempts that wait for a scheduler: the highest priority first; of equal ones, the first that came.
type queue struct {
	mu      sync.Mutex
	waiting []queued
	ready   chan struct{} // has a signal while attempts wait; buffered, 1
}

type queued struct {
	*attempt
	left func() // called when it leaves the queue
}

func newQueue() *queue { return &queue{ready: make(chan struct{}, 1)} }

// push adds an attempt; left is called when it leaves the queue.
func (q *queue) push(a *attempt, left func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := slices.IndexFunc(q.waiting, func(w queued) bool { return w.priority < a.priority })
	if at < 0 {
		at = len(q.waiting)
	}
	q.waiting = slices.Insert(q.waiting, at, queued{a, left})
	q.signal()
}

// pop removes and returns the first attempt; nil where none waits.
func (q *queue) pop() *attempt {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return nil
	}
	a := q.waiting[0].attempt
	q.delete(0)
	return a
}

// remove removes an attempt; false: it does not wait any more.
func (q *queue) remove(a *attempt) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := slices.IndexFunc(q.waiting, func(w queued) bool { return w.attempt == a })
	if at >= 0 {
		q.delete(at)
	}
	return at >= 0
}

// delete removes the attempt at an index and calls its left. Lock held.
func (q *queue) delete(at int) {
	q.waiting[at].left()
	q.waiting = slices.Delete(q.waiting, at, at+1)
	q.signal()
}

// signal refills ready while attempts wait: several schedulers read it. Lock held.
func (q *queue) signal() {
	if len(q.waiting) == 0 {
		return
	}
	select {
	case q.ready <- struct{}{}:
	default:
	}
}
