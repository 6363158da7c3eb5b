package bus

import (
	"context"
	"sync"
	"time"
)

// heartbeats tell the server that messages are still worked on: one goroutine for all
// messages in flight, every third of AckWait.
type heartbeats struct {
	mu       sync.Mutex
	messages map[uint64]*Message // by stream sequence
}

func newHeartbeats() *heartbeats { return &heartbeats{messages: map[uint64]*Message{}} }

// add adds a message to those that get heartbeats, and returns true. It returns false when a delivery of the message
// is there already (it came again because heartbeats were lost): the first handler goes on, and the server accepts an
// ack of any delivery.
func (h *heartbeats) add(m *Message) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.messages[m.Seq]; ok {
		return false
	}
	h.messages[m.Seq] = m
	m.heartbeats = h
	return true
}

func (h *heartbeats) release(m *Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages[m.Seq] == m {
		delete(h.messages, m.Seq)
	}
}

// all returns the messages that get heartbeats: those that were delivered and are not acknowledged.
func (h *heartbeats) all() []*Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]*Message, 0, len(h.messages))
	for _, m := range h.messages {
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

// run sends heartbeats for all messages, every third of ackWait, until ctx ends.
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
