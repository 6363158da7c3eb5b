package remote

import "time"

// SetPatience has calls count as lost after least, however slow the calls before were.
func SetPatience(m *Model, least time.Duration) {
	m.link.mu.Lock()
	defer m.link.mu.Unlock()
	m.link.least, m.link.slowest = least, 0
}
