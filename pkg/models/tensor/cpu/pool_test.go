package cpu

import (
	"sync/atomic"
	"testing"
)

// countTask counts its parts and fails in one of them.
type countTask struct {
	done []atomic.Int32
	fail int
	busy []atomic.Int32 // by slot
	bad  atomic.Bool
}

func (c *countTask) part(i, slot int) {
	if c.busy[slot].Add(1) != 1 {
		c.bad.Store(true) // two threads in one slot
	}
	c.done[i].Add(1)
	c.busy[slot].Add(-1)
	if i == c.fail {
		panic("part failed")
	}
}

func TestPool_EveryPartOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 5} {
		p := NewPool(threads)
		var b batch
		for _, parts := range []int{0, 1, 2, 3, 1000} {
			c := &countTask{done: make([]atomic.Int32, parts), busy: make([]atomic.Int32, threads), fail: -1}
			p.runTask(&b, c, parts, threads)
			for i := range c.done {
				if n := c.done[i].Load(); n != 1 {
					t.Errorf("%d threads: part %d of %d ran %d times", threads, i, parts, n)
				}
			}
			if c.bad.Load() {
				t.Errorf("%d threads: two shared a slot", threads)
			}
		}
		p.Close()
	}
}

func TestPool_PanicReachesTheCaller(t *testing.T) {
	p := NewPool(4)
	defer p.Close()
	var b batch
	for fail := range 40 {
		c := &countTask{done: make([]atomic.Int32, 40), busy: make([]atomic.Int32, 4), fail: fail}
		func() {
			defer func() {
				if v := recover(); v != "part failed" {
					t.Errorf("part %d: recovered %v", fail, v)
				}
			}()
			p.runTask(&b, c, 40, 4)
		}()
	}
	c := &countTask{done: make([]atomic.Int32, 40), busy: make([]atomic.Int32, 4), fail: -1}
	p.runTask(&b, c, 40, 4) // the pool is still usable
	for i := range c.done {
		if c.done[i].Load() != 1 {
			t.Errorf("after a panic part %d did not run", i)
		}
	}
}
