package synthetic

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

func TestMixtureCache_EvictsLeastRecentlyUsed(t *testing.T) {
	c := newMixtureCache(10)
	computed := map[int]int{}
	get := func(height, size int) {
		c.get(mixtureKey{height: height}, size, func() *Mixture {
			computed[height]++
			return &Mixture{}
		})
	}
	get(1, 4)
	get(2, 4)
	get(1, 4) // 2 is now the older one
	get(3, 4) // 12 elements: 2 goes
	get(1, 4)
	get(3, 4)
	if computed[1] != 1 || computed[3] != 1 {
		t.Errorf("computed %v: want the recently used kept", computed)
	}
	get(2, 4)
	if computed[2] != 2 {
		t.Errorf("computed %v: want 2 evicted", computed)
	}
	get(4, 100) // larger than the limit: kept alone
	get(4, 100)
	if computed[4] != 1 || c.order.Len() != 1 || len(c.entries) != 1 || c.used != 100 {
		t.Errorf("computed %v, %d entries, %d elements: want the large one alone", computed, len(c.entries), c.used)
	}
	get(5, 1)
	if c.order.Len() != 1 || c.used != 1 {
		t.Errorf("%d entries, %d elements: want the large one gone", c.order.Len(), c.used)
	}
}

func TestMixtureCache_ComputesOnce(t *testing.T) {
	c := newMixtureCache(10)
	var computed, calling atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			calling.Add(1)
			c.get(mixtureKey{}, 1, func() *Mixture {
				computed.Add(1)
				for calling.Load() < 8 { // let the others come to find an entry without a value
					runtime.Gosched()
				}
				return &Mixture{}
			})
		})
	}
	wg.Wait()
	if n := computed.Load(); n != 1 {
		t.Errorf("computed %d times, want 1", n)
	}
}
