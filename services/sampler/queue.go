package sampler

import (
	"slices"
	"sync"
)

// queue has what waits for a scheduler: the highest priority first; of equal ones, the first that came.
type queue[T comparable] struct {
	mu      sync.Mutex
	waiting []queued[T]
	ready   chan struct{} // has a signal while something waits; buffered, 1
}

type queued[T comparable] struct {
	item     T
	priority int64
	left     func() // called when it leaves the queue
}

func newQueue[T comparable]() *queue[T] { return &queue[T]{ready: make(chan struct{}, 1)} }

// push adds an item to the queue, behind those of its priority and above; left is called when it leaves the queue.
func (q *queue[T]) push(item T, priority int64, left func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := slices.IndexFunc(q.waiting, func(w queued[T]) bool { return w.priority < priority })
	if at < 0 {
		at = len(q.waiting)
	}
	q.waiting = slices.Insert(q.waiting, at, queued[T]{item, priority, left})
	q.signal()
}

// pop removes and returns the first item; the zero value if none waits.
func (q *queue[T]) pop() (first T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) > 0 {
		first = q.waiting[0].item
		q.delete(0)
	}
	return first
}

// remove removes an item whose work has ended; false: it does not wait any more.
func (q *queue[T]) remove(item T) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := slices.IndexFunc(q.waiting, func(w queued[T]) bool { return w.item == item })
	if at >= 0 {
		q.delete(at)
	}
	return at >= 0
}

// delete removes the item at an index and calls its left. Lock held.
func (q *queue[T]) delete(at int) {
	q.waiting[at].left()
	q.waiting = slices.Delete(q.waiting, at, at+1)
	q.signal()
}

// signal makes ready readable while something waits: several schedulers read it. The caller holds the lock.
func (q *queue[T]) signal() {
	if len(q.waiting) == 0 {
		return
	}
	select {
	case q.ready <- struct{}{}:
	default:
	}
}
