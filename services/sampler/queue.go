package sampler

import (
	"slices"
	"sync"
)

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
