package view

import (
	"context"
	"fmt"
	"sync"

	"github.com/meander-rl/meander/schemas"
)

// maxSeenBytes is how many bytes of predictions a Reader keeps.
const maxSeenBytes = 32 << 20

// seen are the predictions that were asked for, the oldest first.
type seen struct {
	mu    sync.Mutex
	at    map[string][]byte
	order []string
	held  int
}

// Seen is Seen of a client, for a state of StatesOf; what was asked for before is kept for a while.
func (r *Reader) Seen(ctx context.Context, t *schemas.Trajectory, index int64) ([]byte, error) {
	key := fmt.Sprintf("%s %s %d", t.ContentDigest, t.WeightsDigest, index)
	r.seen.mu.Lock()
	data := r.seen.at[key]
	r.seen.mu.Unlock()
	if data != nil {
		return data, nil
	}
	data, err := r.client.Seen(ctx, t, index)
	if err == nil {
		r.seen.keep(key, data)
	}
	return data, err
}

// keep keeps a prediction, and drops the oldest ones that no longer fit.
func (s *seen) keep(key string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[string][]byte{}
	}
	if s.at[key] != nil || len(data) > maxSeenBytes {
		return
	}
	s.at[key], s.order, s.held = data, append(s.order, key), s.held+len(data)
	for s.held > maxSeenBytes {
		s.held -= len(s.at[s.order[0]])
		delete(s.at, s.order[0])
		s.order = s.order[1:]
	}
}
