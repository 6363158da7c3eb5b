package bus

import (
	"context"
	"sync"
	"time"
)

// heartbeats tell the server that messages are still worked on: one goroutine for all
// messages in flight, every third of AckWait.
type heartbeats struct {
	mu   sync.Mutex
	held map[uint64]*Message // by stream sequence
}

func newHeartbeats() *heartbeats { return &heartbeats{held: map[uint64]*Message{}} }

// hold adds a message and returns true. It returns false when a delivery of the message is held already (it came
// again because heartbeats were lost): the first handler goes on, and the server accepts an ack of any delivery.
func (h *heartbeats) hold(m *Message) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.held[m.Seq]; ok {
		return false
	}
	h.held[m.Seq] = m
	m.heartbeats = h
	return true
}

// release forgets a message, unless another delivery of it is held by now.
func (h *heartbeats) release(m *Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held[m.Seq] == m {
		delete(h.held, m.Seq)
	}
}

// all returns the messages that are held.
func (h *heartbeats) all() []*Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]*Message, 0, len(h.held))
	for _, m := range h.held {
		out = append(out, m)
	}
	return out
}

// returnAll returns all held messages to the server. One whose return is lost comes again after AckWait.
func (h *heartbeats) returnAll() {
	for _, m := range h.all() {
		_ = m.NakWithDelay(returnDelay)
	}
}

// run sends heartbeats until ctx ends.
func (h *heartbeats) run(ctx context.Context, ackWait time.Duration) {
	tick := time.NewTicker(max(ackWait/3, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, m := range h.all() {
				if !m.Acknowledged() {
					_ = m.InProgress() // a lost heartbeat means a redelivery, which is harmless
				}
			}
		case <-ctx.Done():
			return
		}
	}
}
