package synthetic

import (
	"container/list"
	"errors"
	"sync"
)

// cacheElements bounds the floats of all cached means: 128 MiB.
const cacheElements = 32 << 20

// mixtureKey is what a mixture depends on, besides the model's config.
type mixtureKey struct {
	embeds        [embedWidth]float32
	height, width int
}

// digest returns the SHA-256 of the prompt that the embeds hold. Embeds of another model are
// an error.
func (k *mixtureKey) digest() ([32]byte, error) {
	var d [32]byte
	for i, e := range k.embeds {
		if !(e >= -1 && e <= 1) {
			return d, errors.New("conditioning is not of the synthetic model")
		}
		if i < len(d) {
			d[i] = byte((e + 1) * 128)
			if digestEmbed(d[i]) != e {
				return d, errors.New("conditioning is not of the synthetic model")
			}
		}
	}
	return d, nil
}

// mixtureCache keeps the most recently used mixtures. Concurrent calls for one mixture compute
// it once.
type mixtureCache struct {
	mu      sync.Mutex
	limit   int        // of used
	used    int        // elements
	order   *list.List // of *mixtureEntry, last used first
	entries map[mixtureKey]*list.Element
}

type mixtureEntry struct {
	key     mixtureKey
	size    int // elements
	mixture func() *Mixture
}

func newMixtureCache(limit int) *mixtureCache {
	return &mixtureCache{limit: limit, order: list.New(), entries: map[mixtureKey]*list.Element{}}
}

// get returns the mixture of key, of size elements; compute makes it if it is not cached. A
// mixture larger than the limit is kept alone.
func (c *mixtureCache) get(key mixtureKey, size int, compute func() *Mixture) *Mixture {
	c.mu.Lock()
	element, ok := c.entries[key]
	if ok {
		c.order.MoveToFront(element)
	} else {
		element = c.order.PushFront(&mixtureEntry{key: key, size: size, mixture: sync.OnceValue(compute)})
		c.entries[key] = element
		c.used += size
		for c.used > c.limit && c.order.Len() > 1 {
			last := c.order.Remove(c.order.Back()).(*mixtureEntry)
			delete(c.entries, last.key)
			c.used -= last.size
		}
	}
	c.mu.Unlock()
	return element.Value.(*mixtureEntry).mixture()
}

// bytes returns the memory of the cached means.
func (c *mixtureCache) bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return 4 * c.used
}
