package remote

import (
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// SetWaiting sets, for the length of a test, when it is told what is waited for, and how long a worker may take to
// listen.
func SetWaiting(t *testing.T, tell, ready time.Duration) {
	first, every, patience := tellFirst, tellEvery, readyPatience
	t.Cleanup(func() { tellFirst, tellEvery, readyPatience = first, every, patience })
	tellFirst, tellEvery, readyPatience = tell, tell, ready
}

// SetRetry sets, for the length of a test, after how long a worker that is lost again and again is looked for.
func SetRetry(t *testing.T, first, most time.Duration) {
	f, m := retryFirst, retryMost
	t.Cleanup(func() { retryFirst, retryMost = f, m })
	retryFirst, retryMost = first, most
}

// SetPatience has calls count as lost after least, however slow the calls before were.
func SetPatience(m *Model, least time.Duration) {
	m.link.mu.Lock()
	defer m.link.mu.Unlock()
	m.link.least, m.link.slowest = least, 0
}

// Digest returns the digest of the model in a folder, as Open computes it. It reads all weights.
func Digest(dir string) (string, error) {
	return nn.Open(dir, func(f *safetensors.Folder) (string, error) { return digestOf(f, nil, nil) })
}
