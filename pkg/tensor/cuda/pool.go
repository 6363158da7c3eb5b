package cuda

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"

	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cuda/internal/driver"
)

// pool keeps what was given back, by size, and takes new memory only up to a ceiling.
// Launches are in one order, so memory can be handed out again while a kernel that uses
// it is still to run.
type pool struct {
	d driver.Driver

	mu    sync.Mutex
	usage tensor.Usage
	idle  map[int][]driver.Pointer
	used  map[driver.Pointer]int // sizes
}

func newPool(d driver.Driver, ceiling int) *pool {
	return &pool{d: d, usage: tensor.Usage{Ceiling: ceiling}, idle: map[int][]driver.Pointer{}, used: map[driver.Pointer]int{}}
}

// roundUp is the size that serves a request: at most a quarter more.
func roundUp(bytes int) int {
	step := max(256, 1<<max(bits.Len(uint(bytes))-3, 0))
	return (bytes + step - 1) / step * step
}

// take returns at least so many bytes.
func (p *pool) take(bytes int) (driver.Pointer, error) { return p.takeExactly(roundUp(bytes)) }

// takeExactly is take for what stays: weights leave no gaps. What no longer has an owner
// on the host is collected before it fails.
func (p *pool) takeExactly(bytes int) (driver.Pointer, error) {
	at, err := p.try(bytes)
	if errors.Is(err, driver.ErrMemory) {
		runtime.GC() // weights that nobody holds
		at, err = p.try(bytes)
	}
	if errors.Is(err, driver.ErrMemory) {
		err = p.full(bytes, err)
	}
	return at, err
}

// full is the error when there is no memory for so many bytes, with what helps.
func (p *pool) full(bytes int, err error) error {
	free, total, unknown := p.d.Memory()
	if err = fmt.Errorf("%w: %s more than the %s in use", err, mib(bytes), mib(p.now().Used)); unknown == nil {
		err = fmt.Errorf("%w, with %s free of %s", err, mib(free), mib(total))
	}
	if c := p.now().Ceiling; c > 0 {
		err = fmt.Errorf("%w and a ceiling of %s", err, mib(c))
	}
	return fmt.Errorf("%w; must fit: take a smaller batch, smaller images, or a GPU with more memory that no other process uses", err)
}

func mib(bytes int) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

func (p *pool) try(size int) (driver.Pointer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if list := p.idle[size]; len(list) > 0 {
		at := list[len(list)-1]
		p.idle[size] = list[:len(list)-1]
		p.usage.Idle -= size
		p.hand(at, size)
		return at, nil
	}
	if c := p.usage.Ceiling; c > 0 && p.usage.Used+p.usage.Idle+size > c {
		if err := p.release(); err != nil {
			return 0, err
		}
		if p.usage.Used+size > c {
			return 0, driver.ErrMemory
		}
	}
	at, err := p.d.Alloc(size)
	if errors.Is(err, driver.ErrMemory) && p.usage.Idle > 0 {
		if err := p.release(); err != nil {
			return 0, err
		}
		at, err = p.d.Alloc(size)
	}
	if err != nil {
		return 0, err
	}
	p.hand(at, size)
	return at, nil
}

func (p *pool) hand(at driver.Pointer, size int) {
	p.used[at] = size
	p.usage.Used += size
	p.usage.Blocks++
}

// give takes back what take returned.
func (p *pool) give(at driver.Pointer) {
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

// release frees what is idle, all of it whatever fails.
func (p *pool) release() (err error) {
	for size, list := range p.idle {
		for _, at := range list {
			err = errors.Join(err, p.d.Free(at))
			p.usage.Idle -= size
		}
		delete(p.idle, size)
	}
	return err
}

// close frees everything.
func (p *pool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.release()
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
