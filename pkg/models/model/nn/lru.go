package nn

import (
	"container/list"
	"sync"
)

// LRU is a cache with a limit on the bytes of its values; it drops the least recently used
// first. It is safe for concurrent use. The zero value with a Limit is ready; a Limit of 0
// keeps nothing.
type LRU[K comparable, V any] struct {
	// Limit is the most bytes that it holds.
	Limit int

	mu    sync.Mutex
	held  int
	order list.List // of *entry[K, V], newest first
	items map[K]*list.Element
}

type entry[K comparable, V any] struct {
	key   K
	value V
	bytes int
}

// Get returns the value of a key, and whether it is held.
func (c *LRU[K, V]) Get(key K) (V, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.items[key]; ok {
		c.order.MoveToFront(e)
		return e.Value.(*entry[K, V]).value, true
	}
	var none V
	return none, false
}

// Put adds a value of so many bytes. It ignores a value beyond the limit and a key that is already there.
func (c *LRU[K, V]) Put(key K, value V, bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.items[key]; ok || bytes > c.Limit {
		return
	}
	for c.held+bytes > c.Limit {
		last := c.order.Back()
		e := c.order.Remove(last).(*entry[K, V])
		delete(c.items, e.key)
		c.held -= e.bytes
	}
	if c.items == nil {
		c.items = make(map[K]*list.Element)
	}
	c.items[key] = c.order.PushFront(&entry[K, V]{key, value, bytes})
	c.held += bytes
}

// Bytes returns the bytes of all values in the cache.
func (c *LRU[K, V]) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held
}
