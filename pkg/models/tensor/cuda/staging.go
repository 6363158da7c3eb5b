package cuda

import (
	"errors"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// staging is page-locked host memory, which copies at full speed. It is kept from session to session.
type staging struct {
	d driver.Driver

	mu   sync.Mutex
	idle [][]byte
}

// allocate returns at least so many bytes of page-locked host memory, through which copies to and
// from the GPU go: the smallest idle piece that is large enough, else a new one. It fails where the
// driver has no more.
func (p *staging) allocate(bytes int) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	best := -1
	for i, b := range p.idle {
		if len(b) >= bytes && (best < 0 || len(b) < len(p.idle[best])) {
			best = i
		}
	}
	if best < 0 {
		return p.d.Host(roundUp(bytes))
	}
	b, last := p.idle[best], len(p.idle)-1
	p.idle[best], p.idle = p.idle[last], p.idle[:last]
	return b, nil
}

// release makes memory idle again. No copy of it may be under way.
func (p *staging) release(bs ...[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, bs...)
}

// close gives the idle memory back to the driver when the device closes, and returns all errors.
func (p *staging) close() (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.idle {
		err = errors.Join(err, p.d.FreeHost(b))
	}
	p.idle = nil
	return err
}

// stopwatch measures how long anything is under way.
type stopwatch struct {
	mu    sync.Mutex
	open  int
	since time.Time
	sum   time.Duration
}

func (w *stopwatch) start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open++; w.open == 1 {
		w.since = time.Now()
	}
}

func (w *stopwatch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open--; w.open == 0 {
		w.sum += time.Since(w.since)
	}
}

// total is what is measured until now.
func (w *stopwatch) total() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open > 0 {
		return w.sum + time.Since(w.since)
	}
	return w.sum
}
