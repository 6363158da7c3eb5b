package bus

import (
	"context"
	"sync"
)

// window bounds the messages that a Publisher has sent and that are not confirmed, by count and by bytes. A full
// window opens again when a quarter of it is free, not at every ack: otherwise each ack would wake the waiting
// callers.
type window struct {
	maxMsgs, maxBytes int64

	mu          sync.Mutex
	msgs, bytes int64
	waiting     int
	open        chan struct{} // closed and replaced when there is space again
}

func newWindow(msgs, bytes int) *window {
	return &window{maxMsgs: int64(max(1, msgs)), maxBytes: int64(max(1, bytes)), open: make(chan struct{})}
}

// reserve takes space for a message of n bytes in a publisher's window, and reports whether it had to wait. A message
// larger than the window enters when the window is empty. The error is that of ctx.
func (w *window) reserve(ctx context.Context, n int64) (waited bool, err error) {
	for {
		w.mu.Lock()
		if w.msgs < w.maxMsgs && (w.bytes+n <= w.maxBytes || w.msgs == 0) {
			w.msgs++
			w.bytes += n
			w.mu.Unlock()
			return waited, nil
		}
		open := w.open
		w.waiting++
		w.mu.Unlock()
		waited = true
		select {
		case <-open:
		case <-ctx.Done():
			err = ctx.Err()
		}
		w.mu.Lock()
		w.waiting--
		w.mu.Unlock()
		if err != nil {
			return waited, err
		}
	}
}

// release gives the space of a message in the window back, and wakes publishers that wait.
func (w *window) release(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.msgs--
	w.bytes -= n
	if w.waiting > 0 && w.msgs <= w.maxMsgs*3/4 && (w.bytes <= w.maxBytes*3/4 || w.msgs == 0) {
		close(w.open)
		w.open = make(chan struct{})
	}
}

func (w *window) load() (msgs, bytes int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.msgs, w.bytes
}
