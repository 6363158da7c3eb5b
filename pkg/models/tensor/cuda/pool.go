package cuda

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// pool allocates device memory. It keeps released memory by size, and asks the driver for more only up
// to a ceiling. Kernels run in the order of their launches, so memory can be allocated again before a
// kernel that used it has run.
type pool struct {
	d driver.Driver

	mu    sync.Mutex
	usage tensor.Usage
	idle  map[int][]driver.Pointer
	used  map[driver.Pointer]int // sizes
}

func newPool(d driver.Driver, ceiling int) *pool {
	return &pool{
		d: d, usage: tensor.Usage{Ceiling: ceiling}, idle: map[int][]driver.Pointer{},
		used: map[driver.Pointer]int{},
	}
}

// roundUp is the size that serves a request: at most a quarter more.
func roundUp(bytes int) int {
	step := max(256, 1<<max(bits.Len(uint(bytes))-3, 0))
	return (bytes + step - 1) / step * step
}

// allocate returns at least so many bytes.
func (p *pool) allocate(bytes int) (driver.Pointer, error) { return p.allocateExactly(roundUp(bytes)) }

// allocateExactly returns memory for weights, which live long and leave no gaps. Before it fails it
// collects weights that are no longer referenced, twice: what a first collection finds may refer to more.
func (p *pool) allocateExactly(bytes int) (driver.Pointer, error) {
	at, err := p.tryAlloc(bytes)
	for try := 0; try < 2 && errors.Is(err, driver.ErrMemory); try++ {
		collect()
		at, err = p.tryAlloc(bytes)
	}
	if errors.Is(err, driver.ErrMemory) {
		err = p.memoryError(bytes, err)
	}
	return at, err
}

// collect releases what is no longer referenced. The collector starts cleanups and does not wait for them: those of all
// objects that became garbage before this one are started before its own, so it waits for that, and lets others end.
func collect() {
	cleaned, marker := make(chan struct{}), new([64]byte) // tiny objects share a block, which may be in use
	runtime.AddCleanup(marker, func(done chan struct{}) { close(done) }, cleaned)
	runtime.GC()
	select {
	case <-cleaned:
	case <-time.After(time.Second): // it is only a hint
	}
	runtime.Gosched()
}

// memoryError is the error when the GPU has no memory for so many bytes: err with what is in use,
// what is free, and what helps.
func (p *pool) memoryError(bytes int, err error) error {
	free, total, unknown := p.d.Memory()
	if err = fmt.Errorf("%w: %s more than the %s in use", err, mib(bytes), mib(p.now().Used)); unknown == nil {
		err = fmt.Errorf("%w, with %s free of %s", err, mib(free), mib(total))
	}
	if c := p.now().Ceiling; c > 0 {
		err = fmt.Errorf("%w and a ceiling of %s", err, mib(c))
	}
	return fmt.Errorf("%w; must fit: use a smaller batch, smaller images, or a GPU with more memory that no other "+
		"process uses", err)
}

func mib(bytes int) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// tryAlloc returns an idle block of that size or allocates one. If memory is short, it first frees all idle blocks;
// driver.ErrMemory says that this was not enough.
func (p *pool) tryAlloc(size int) (driver.Pointer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if list := p.idle[size]; len(list) > 0 {
		at := list[len(list)-1]
		p.idle[size] = list[:len(list)-1]
		p.usage.Idle -= size
		p.markUsed(at, size)
		return at, nil
	}
	if c := p.usage.Ceiling; c > 0 && p.usage.Used+p.usage.Idle+size > c {
		if err := p.trim(); err != nil {
			return 0, err
		}
		if p.usage.Used+size > c {
			return 0, driver.ErrMemory
		}
	}
	at, err := p.d.Alloc(size)
	if errors.Is(err, driver.ErrMemory) && p.usage.Idle > 0 {
		if err := p.trim(); err != nil {
			return 0, err
		}
		at, err = p.d.Alloc(size)
	}
	if err != nil {
		return 0, err
	}
	p.markUsed(at, size)
	return at, nil
}

func (p *pool) markUsed(at driver.Pointer, size int) {
	p.used[at] = size
	p.usage.Used += size
	p.usage.Blocks++
}

// release makes the memory at that address, which allocate returned, idle: it stays with the pool
// for the next allocation of its size. After close it does nothing.
func (p *pool) release(at driver.Pointer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	size, ok := p.used[at]
	if !ok {
		return // after close
	}
	delete(p.used, at)
	p.usage.Used -= size
	p.usage.Blocks--
	p.usage.Idle += size
	p.idle[size] = append(p.idle[size], at)
}

// trim gives all idle memory back to the driver: when memory is short, and at close. The pool must
// be locked. It goes on after an error and returns all of them.
func (p *pool) trim() (err error) {
	for size, list := range p.idle {
		for _, at := range list {
			err = errors.Join(err, p.d.Free(at))
			p.usage.Idle -= size
		}
		delete(p.idle, size)
	}
	return err
}

// close gives all memory, in use or idle, back to the driver when the device closes. It goes on
// after an error and returns all.
func (p *pool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.trim()
	for at := range p.used {
		err = errors.Join(err, p.d.Free(at))
	}
	clear(p.used)
	p.usage = tensor.Usage{Ceiling: p.usage.Ceiling}
	return err
}

func (p *pool) now() tensor.Usage {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.usage
}

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
