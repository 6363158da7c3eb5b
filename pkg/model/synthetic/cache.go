package synthetic

import (
	"container/list"
	"errors"
	"sync"
)

// cacheElements bounds the floats of all cached means: 128 MiB.
const cacheElements = 32 << 20

// mixtureKey is all that a mixture depends on, besides the model's config.
type mixtureKey struct {
	embeds        [embedWidth]float32
	height, width int
}

// digest recovers the prompt's SHA-256 from the embeds, and checks them: they may have
// come from elsewhere.
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

// mixtureCache keeps the mixtures used last. One that is not there is computed once,
// however many ask for it at the same time.
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

// get returns the mixture of key, of size elements. One mixture larger than the limit
// is kept alone.
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

// bytes is the memory of the means held.
func (c *mixtureCache) bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return 4 * c.used
}
