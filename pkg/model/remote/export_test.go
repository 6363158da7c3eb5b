package remote

import (
	"testing"
	"time"
)

// SetWaiting sets, for the length of a test, when it is told what is waited for, and how long a worker may take to
// listen.
func SetWaiting(t *testing.T, tell, ready time.Duration) {
	first, every, patience := tellFirst, tellEvery, readyPatience
	t.Cleanup(func() { tellFirst, tellEvery, readyPatience = first, every, patience })
	tellFirst, tellEvery, readyPatience = tell, tell, ready
}

// SetPatience has calls count as lost after least, however slow the calls before were.
func SetPatience(m *Model, least time.Duration) {
	m.link.mu.Lock()
	defer m.link.mu.Unlock()
	m.link.least, m.link.slowest = least, 0
}
