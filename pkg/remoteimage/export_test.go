package remoteimage

import "time"

// DecodeAnswer is decodeAnswer.
var DecodeAnswer = decodeAnswer

// SetPatience changes the patience of a pool.
func (p *Pool) SetPatience(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.config.Patience = d
}
