package synthetic

import (
	"container/list"
	"errors"
	"math"
	"sync"
)

// Mixture is a Gaussian mixture over latents of D = S*C elements,
//
//	x0 ~ sum_k Weights[k] * N(Means[k], Stds[k]^2 I)
//
// With a = 1-sigma and V[k] = a^2*Stds[k]^2 + sigma^2, the noisy latents
// x = a*x0 + sigma*eps are the mixture of N(a*Means[k], V[k] I) with the same weights.
type Mixture struct {
	Weights []float64   // [K], sum 1
	Means   [][]float32 // [K][D]
	Stds    []float64   // [K], above 0
}

// Responsibilities sets dst[k], k < K, to the probability that x [D] at sigma came from
// component k:
//
//	r[k] = Weights[k]*exp(-E[k]) / sum_j Weights[j]*exp(-E[j])
//	E[k] = D/2*log V[k] + sum_i (x[i]-a*Means[k][i])^2 / (2*V[k])
//
// The least energy is subtracted from all before exp: in many dimensions every density is
// too small for a float64.
func (m *Mixture) Responsibilities(dst []float64, x []float32, sigma float64) {
	m.responsibilities(dst, x, 1-sigma, sigma)
}

// responsibilities is Responsibilities for x = a*x0 + u*eps.
func (m *Mixture) responsibilities(dst []float64, x []float32, a, u float64) {
	least := math.Inf(1)
	for k, mean := range m.Means {
		v := m.variance(k, a, u)
		dst[k] = float64(float64(len(x))/2*math.Log(v)) + distance(x, mean, a)/(2*v)
		least = math.Min(least, dst[k]) // NaN if any is
	}
	var total float64
	for k, w := range m.Weights {
		dst[k] = float64(w * math.Exp(least-dst[k]))
		total += dst[k]
	}
	for k := range m.Weights {
		dst[k] /= total
	}
}

// Velocity sets dst [D] to E[eps - x0 | x] at sigma in [0, 1]. Given the component,
// x0 and eps are linear in x, so with r the responsibilities
//
//	dst[i] = sum_k r[k] * ((sigma - a*Stds[k]^2)/V[k] * (x[i] - a*Means[k][i]) - Means[k][i])
//
// It computes in float64 and rounds once. The result depends only on the arguments.
func (m *Mixture) Velocity(dst, x []float32, sigma float64) {
	a := 1 - sigma
	r := make([]float64, len(m.Means))
	m.Responsibilities(r, x, sigma)
	// dst[i] = scale*x[i] - sum_k r[k]*Means[k][i], after collecting terms.
	var scale float64
	for k, s := range m.Stds {
		c := (sigma - float64(a*s*s)) / m.variance(k, a, sigma)
		scale += float64(r[k] * c)
		r[k] *= 1 + float64(a*c)
	}
	m.linear(dst, x, scale, r)
}

// Epsilon sets dst [D] to E[eps | x] of x = a*x0 + u*eps, u > 0: with r the responsibilities
//
//	dst[i] = sum_k r[k] * u/V[k] * (x[i] - a*Means[k][i])
func (m *Mixture) Epsilon(dst, x []float32, a, u float64) {
	r := make([]float64, len(m.Means))
	m.responsibilities(r, x, a, u)
	var scale float64
	for k := range m.Stds {
		c := u / m.variance(k, a, u)
		scale += float64(r[k] * c)
		r[k] = float64(r[k] * a * c)
	}
	m.linear(dst, x, scale, r)
}

// V sets dst [D] to E[a*eps - u*x0 | x] of x = a*x0 + u*eps: with r the responsibilities
//
//	dst[i] = sum_k r[k] * (a*u*(1 - Stds[k]^2)/V[k] * (x[i] - a*Means[k][i]) - u*Means[k][i])
func (m *Mixture) V(dst, x []float32, a, u float64) {
	r := make([]float64, len(m.Means))
	m.responsibilities(r, x, a, u)
	var scale float64
	for k, s := range m.Stds {
		c := float64(a*u*(1-float64(s*s))) / m.variance(k, a, u)
		scale += float64(r[k] * c)
		r[k] = float64(r[k] * (u + float64(a*c)))
	}
	m.linear(dst, x, scale, r)
}

// linear sets dst[i] = scale*x[i] - sum_k weights[k]*Means[k][i].
func (m *Mixture) linear(dst, x []float32, scale float64, weights []float64) {
	var sum [256]float64
	for from := 0; from < len(x); from += len(sum) {
		part := x[from:min(from+len(sum), len(x))]
		acc := sum[:len(part)]
		for i, xi := range part {
			acc[i] = float64(scale * float64(xi))
		}
		for k, mean := range m.Means {
			w := weights[k]
			if w == 0 {
				continue // most components, in many dimensions
			}
			mean := mean[from : from+len(part)]
			for i := range acc {
				acc[i] -= float64(w * float64(mean[i]))
			}
		}
		out := dst[from : from+len(part)]
		for i, s := range acc {
			out[i] = float32(s)
		}
	}
}

// variance returns V[k].
func (m *Mixture) variance(k int, a, u float64) float64 {
	a *= m.Stds[k]
	return float64(a*a) + float64(u*u)
}

// distance returns sum_i (x[i]-a*mean[i])^2, in one order of summation: four
// interleaved sums, then their total.
func distance(x, mean []float32, a float64) float64 {
	var s0, s1, s2, s3 float64
	mean = mean[:len(x)]
	i := 0
	for ; i+4 <= len(x); i += 4 {
		xs, ms := x[i:i+4:i+4], mean[i:i+4:i+4]
		d0 := float64(xs[0]) - float64(a*float64(ms[0]))
		d1 := float64(xs[1]) - float64(a*float64(ms[1]))
		d2 := float64(xs[2]) - float64(a*float64(ms[2]))
		d3 := float64(xs[3]) - float64(a*float64(ms[3]))
		s0 += float64(d0 * d0)
		s1 += float64(d1 * d1)
		s2 += float64(d2 * d2)
		s3 += float64(d3 * d3)
	}
	for ; i < len(x); i++ {
		d := float64(x[i]) - float64(a*float64(mean[i]))
		s0 += float64(d * d)
	}
	return (s0 + s1) + (s2 + s3)
}

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
