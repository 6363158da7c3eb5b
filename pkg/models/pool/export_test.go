package pool

import "time"

// SetPatience changes the patience of a pool.
func (p *Pool[S]) SetPatience(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.config.Patience = d
}
