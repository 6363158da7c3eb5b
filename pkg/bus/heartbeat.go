package bus

import (
	"context"
	"sync"
	"time"
)

// heartbeats tell the server that messages are still worked on: one goroutine for all
// messages in hand, every third of AckWait.
type heartbeats struct {
	mu   sync.Mutex
	held map[uint64]*Message // by stream sequence
}

func newHeartbeats() *heartbeats { return &heartbeats{held: map[uint64]*Message{}} }

// hold takes a message in and returns true. When it is held already (it was delivered
// again because heartbeats were lost), hold returns false: whoever has it goes on,
// and the server takes an ack of any delivery.
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

// all returns what is held.
func (h *heartbeats) all() []*Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]*Message, 0, len(h.held))
	for _, m := range h.held {
		out = append(out, m)
	}
	return out
}

// run sends heartbeats until ctx ends.
func (h *heartbeats) run(ctx context.Context, ackWait time.Duration) {
	tick := time.NewTicker(max(ackWait/3, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, m := range h.all() {
				if !m.Settled() {
					_ = m.InProgress() // lost signs mean a redelivery, which is harmless
				}
			}
		case <-ctx.Done():
			return
		}
	}
}
