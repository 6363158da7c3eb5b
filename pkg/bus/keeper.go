package bus

import (
	"context"
	"sync"
	"time"
)

// keeper tells the server that messages are still worked on: one goroutine for all
// messages in hand, every third of AckWait.
type keeper struct {
	mu   sync.Mutex
	held map[uint64]*Message // by stream sequence
}

func newKeeper() *keeper { return &keeper{held: map[uint64]*Message{}} }

// hold takes a message in and returns true. When it is held already (it was delivered
// again because signs of life were lost), hold returns false: whoever has it goes on,
// and the server takes an ack of any delivery.
func (k *keeper) hold(m *Message) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.held[m.Seq]; ok {
		return false
	}
	k.held[m.Seq] = m
	m.keeper = k
	return true
}

// release forgets a message, unless another delivery of it is held by now.
func (k *keeper) release(m *Message) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[m.Seq] == m {
		delete(k.held, m.Seq)
	}
}

// all returns what is held.
func (k *keeper) all() []*Message {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]*Message, 0, len(k.held))
	for _, m := range k.held {
		out = append(out, m)
	}
	return out
}

// run gives signs of life until ctx ends.
func (k *keeper) run(ctx context.Context, ackWait time.Duration) {
	tick := time.NewTicker(max(ackWait/3, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, m := range k.all() {
				if !m.Settled() {
					_ = m.InProgress() // lost signs mean a redelivery, which is harmless
				}
			}
		case <-ctx.Done():
			return
		}
	}
}
