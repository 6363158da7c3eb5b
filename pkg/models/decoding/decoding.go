// Package decoding is the mathematics of one token of a language model. A Distribution is
// made from logits and Params; it draws a token from a seed, and returns the numbers that
// are recorded of a token (Choice), such as its log-prob. Filters (top-k, top-p, min-p)
// leave out unlikely tokens.
//
// All of it is a pure function of the logits, the parameters, a seed and the token's position,
// so that retries, batching and resumption never change a token. schemas/noise.md states every
// bit.
package decoding

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// Params say how a token is drawn. The zero value is greedy: it chooses the likeliest token.
type Params struct {
	// Temperature divides the logits; 0 chooses the likeliest token.
	Temperature float64 `json:"temperature"`
	// TopK keeps the k likeliest tokens; 0 keeps all.
	TopK int `json:"top_k"`
	// TopP keeps the smallest set of likeliest tokens with at least this probability together;
	// 1 and 0 keep all.
	TopP float64 `json:"top_p"`
	// MinP keeps the tokens with at least this share of the probability of the likeliest one.
	MinP float64 `json:"min_p"`
	// MinPFirst uses the order of vLLM: MinP before TopK and TopP, so that TopP is a share of the tokens that both
	// keep, and all tokens with the logit of the last of the k are kept. Otherwise the order is TopK, TopP, MinP,
	// and of equal logits the lower id comes first, as noise.md specifies.
	MinPFirst bool `json:"-"`
}

// MaxTemperature bounds temperatures: beyond it all tokens are as likely, to a rounding.
const MaxTemperature = 1000

// Validate joins all faults of the parameters; each names its field. Readers of a model's defaults
// call it; schemas checks those of prompts.
func (p Params) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(p.Temperature == 0 || p.Temperature >= 1e-3 && p.Temperature <= MaxTemperature,
		"temperature: %g; must be 0.001 to %d, or 0 for the likeliest token", p.Temperature, MaxTemperature)
	check(p.TopK >= 0, "top_k: %d; must be at least 0", p.TopK)
	check(p.TopP >= 0 && p.TopP <= 1, "top_p: %g; must be 0 to 1", p.TopP)
	check(p.MinP >= 0 && p.MinP <= 1, "min_p: %g; must be 0 to 1", p.MinP)
	return errors.Join(errs...)
}

// Greedy reports whether the likeliest token is chosen without a random draw.
func (p Params) Greedy() bool { return p.Temperature == 0 }

// filters reports whether some tokens may be left out.
func (p Params) filters() bool { return p.TopK > 0 || p.TopP > 0 && p.TopP < 1 || p.MinP > 0 }

// ErrLogits is wrapped by the error for values that cannot be logits.
var ErrLogits = errors.New("no logits")

// Check counts the logits that are -Inf: tokens that a mask leaves out. It returns an ErrLogits for
// NaN, for +Inf, if all logits are masked and if all are 0: a broken model, from whose output no
// token must be drawn.
func Check(logits []float32) (masked int, err error) {
	zeros := 0
	for i, z := range logits {
		switch {
		case z != z || math.IsInf(float64(z), 1):
			return 0, fmt.Errorf("%w: token %d: %v; must be a number, or -Inf where it is masked", ErrLogits, i, z)
		case math.IsInf(float64(z), -1):
			masked++
		case z == 0:
			zeros++
		}
	}
	if masked == len(logits) || zeros == len(logits) && len(logits) > 1 {
		return 0, fmt.Errorf("%w: of %d tokens %d are masked, %d are 0; must differ", ErrLogits, len(logits), masked,
			zeros)
	}
	return masked, nil
}

// streamTokens is the third word of the counter of draws of tokens; others are in pkg/flow.
const streamTokens = 3

// leastExp is the exponent below which e^x counts as 0: no draw reaches such an unlikely token.
const leastExp = -700

// Distribution is the distribution of the next token, from logits and parameters. Reset fills it, and may be called
// again: memory is reused. It is not safe for concurrent use.
type Distribution struct {
	logits []float32
	params Params
	masked int

	best        int32     // the likeliest token, of equal ones the lowest
	top         float64   // its logit
	lse         float64   // of the logits
	entropy     float64   // of the softmax of the logits
	temperature float64   // 1 where greedy
	weight      []float64 // e^((z - top)/T)
	kept        []bool    // nil: all
	total       float64   // of the weights that are kept
	totalLn     float64
	count       int // how many are kept

	keptMemory []bool // of kept
	list       []int32
	candidates candidates
}

// Choice holds the numbers that are recorded of a token.
type Choice struct {
	ID int32
	// All are of the softmax of the unprocessed logits, in nats. LogProb is ln of the probability of the token, LSE
	// the log of the sum of exponentials of the logits, Entropy the entropy.
	LogProb, LSE, Entropy float32
	// Processed is ln of the probability that the token was drawn with, after temperature and filters; -Inf if they
	// leave it out.
	Processed float32
	// ProcessedLSE is the log of the sum of exponentials of the processed logits: divided by
	// the temperature, without the tokens that the filters leave out.
	ProcessedLSE float32
}

// Reset computes the distribution of the next token for logits, which must not change while it is
// in use, and valid parameters. The text engine and verify call it for each token; a Distribution
// is used again to save memory. Errors are those of Check.
func (d *Distribution) Reset(logits []float32, p Params) error {
	masked, err := Check(logits)
	if err != nil {
		return err
	}
	d.logits, d.params, d.masked = logits, p, masked
	d.best = 0
	for i, z := range logits {
		if z > logits[d.best] {
			d.best = int32(i)
		}
	}
	d.top = float64(logits[d.best])
	d.weight = slices.Grow(d.weight[:0], len(logits))[:len(logits)]
	sum := d.fillWeights(1)
	d.lse = d.top + portable.Ln(sum)
	mean := 0.0
	for i, w := range d.weight {
		if w > 0 {
			mean += float64(w * (float64(logits[i]) - d.top))
		}
	}
	d.entropy = portable.Ln(sum) - mean/sum
	d.applyParams(sum)
	return nil
}

// fillWeights sets the weight of each token, exp((logit - largest)/t), at temperature t and returns
// their sum. Weights that are too small for float64 are 0.
func (d *Distribution) fillWeights(t float64) float64 {
	sum := 0.0
	for i, z := range d.logits {
		w := 0.0
		if x := (float64(z) - d.top) / t; x > leastExp {
			w = portable.Exp(x)
		}
		d.weight[i] = w
		sum += w
	}
	return sum
}

// applyParams applies temperature and filters to the weights for Reset; sum is their sum at
// temperature 1. With temperature 0 only the likeliest token is left.
func (d *Distribution) applyParams(sum float64) {
	p := d.params
	d.kept, d.total, d.count, d.temperature = nil, sum, len(d.logits)-d.masked, 1
	switch {
	case p.Greedy():
		d.keepOnly(d.best)
		return
	case p.Temperature != 1:
		d.temperature = p.Temperature
		d.total = d.fillWeights(p.Temperature)
	}
	if p.filters() {
		d.applyFilters()
	}
	d.totalLn = portable.Ln(d.total)
}

// keepOnly leaves out all tokens but ids, and adds up the weights of ids in ascending order, so that the sum has
// the same bits in every order of ids.
func (d *Distribution) keepOnly(ids ...int32) {
	d.keptMemory = slices.Grow(d.keptMemory[:0], len(d.logits))[:len(d.logits)]
	clear(d.keptMemory)
	for _, id := range ids {
		d.keptMemory[id] = true
	}
	d.kept, d.total, d.count = d.keptMemory, 0, len(ids)
	for i, w := range d.weight {
		if d.kept[i] {
			d.total += w
		}
	}
	d.totalLn = portable.Ln(d.total)
}

// applyFilters applies top-k, top-p and min-p, in this order, or with MinPFirst min-p, top-k,
// top-p, as the engine has it that the parameters come from. Tokens are sorted by logit, the
// largest first, equal ones by id; a filter keeps the first tokens of this list.
func (d *Distribution) applyFilters() {
	p := d.params
	h := &d.candidates
	h.logits, h.ids = d.logits, h.ids[:0]
	for i, z := range d.logits {
		if !math.IsInf(float64(z), -1) {
			h.ids = append(h.ids, int32(i))
		}
	}
	heap.Init(h)
	all := h.Len()
	most := all
	if p.TopK > 0 {
		most = min(most, p.TopK)
	}
	// The list is read from the heap only as far as it is needed.
	list := d.list[:0]
	at := func(n int) float64 {
		for n >= len(list) {
			list = append(list, heap.Pop(h).(int32))
		}
		return d.weight[list[n]]
	}
	cut := most == p.TopK // top-p is a share of the tokens that top-k keeps
	if p.MinPFirst && (p.TopK > 0 || p.MinP > 0) {
		cut = true
		stays := func(n int) bool {
			return at(n) >= p.MinP && (p.TopK == 0 || n < p.TopK || d.logits[list[n]] == d.logits[list[n-1]])
		}
		for most = 1; most < all && stays(most); {
			most++
		}
	}
	limit := math.Inf(1)
	if p.TopP > 0 && p.TopP < 1 {
		left := d.total
		if cut {
			left = 0
			for n := range most {
				left += at(n)
			}
		}
		limit = float64(p.TopP * left)
	}
	mass, n := at(0), 1
	for ; n < most && mass < limit && at(n) >= p.MinP; n++ {
		mass += at(n)
	}
	d.list = list
	d.keepOnly(list[:n]...)
}

// candidates is a heap of ids, the likeliest first.
type candidates struct {
	logits []float32
	ids    []int32
}

func (h *candidates) Len() int { return len(h.ids) }

func (h *candidates) Less(i, j int) bool { return before(h.logits, h.ids[i], h.ids[j]) }

// before reports whether token a is likelier than b, or equally likely with a lower id.
func before(logits []float32, a, b int32) bool {
	if logits[a] != logits[b] {
		return logits[a] > logits[b]
	}
	return a < b
}

func (h *candidates) Swap(i, j int) { h.ids[i], h.ids[j] = h.ids[j], h.ids[i] }

func (h *candidates) Push(x any) { h.ids = append(h.ids, x.(int32)) }

func (h *candidates) Pop() any {
	last := len(h.ids) - 1
	id := h.ids[last]
	h.ids = h.ids[:last]
	return id
}

// Draw returns the token at a position of the sequence, counted from the first token of the prompt,
// after Reset. It inverts the cumulative probability of the kept tokens, in the order of their ids.
// Equal arguments give the same token, so that verify draws it again.
func (d *Distribution) Draw(seed uint64, position uint32) int32 {
	if d.params.Greedy() {
		return d.best
	}
	w := portable.Philox4x32([4]uint32{0, position, streamTokens, 0}, [2]uint32{uint32(seed), uint32(seed >> 32)})
	u := float64((uint64(w[1])<<32|uint64(w[0]))>>11) * 0x1p-53
	target := float64(u * d.total)
	last := d.best
	sum := 0.0
	for i, weight := range d.weight {
		if weight == 0 || d.kept != nil && !d.kept[i] {
			continue
		}
		last = int32(i)
		if sum += weight; sum > target {
			return last
		}
	}
	return last // rounding: u is almost 1
}

// At returns the numbers that are recorded of a token, drawn or given, after Reset; id must be in
// [0, vocabulary).
func (d *Distribution) At(id int32) Choice {
	z := float64(d.logits[id])
	c := Choice{
		ID: id, LogProb: float32(z - d.lse), LSE: float32(d.lse), Entropy: float32(d.entropy),
		Processed: float32(math.Inf(-1)),
	}
	c.ProcessedLSE = float32(d.top/d.temperature + d.totalLn)
	if d.kept == nil || d.kept[id] {
		c.Processed = float32((z-d.top)/d.temperature - d.totalLn)
	}
	return c
}

// Process writes the processed logits to dst, for events that carry them: divided by the
// temperature, -Inf for a token that is left out. dst may alias the logits.
func (d *Distribution) Process(dst []float32) {
	for i, z := range d.logits {
		if d.kept != nil && !d.kept[i] {
			dst[i] = float32(math.Inf(-1))
			continue
		}
		dst[i] = float32(float64(z) / d.temperature)
	}
}

// Top returns the k likeliest tokens of logits, the likeliest first, equal ones by id, for events
// that carry a few logits of each token. Masked tokens are among them only if there are too few
// others.
func Top(logits []float32, k int) []int32 {
	k = min(k, len(logits))
	if k <= 0 {
		return nil
	}
	// The worst of the k best is at the root.
	worst := worstFirst{candidates{logits: logits, ids: make([]int32, k)}}
	for i := range worst.ids {
		worst.ids[i] = int32(i)
	}
	heap.Init(&worst)
	least := logits[worst.ids[0]]
	for i, z := range logits[k:] {
		if z > least { // of equal ones the earlier stays
			worst.ids[0] = int32(k + i)
			heap.Fix(&worst, 0)
			least = logits[worst.ids[0]]
		}
	}
	slices.SortFunc(worst.ids, func(a, b int32) int {
		if before(logits, a, b) {
			return -1
		}
		return 1
	})
	return worst.ids
}

// worstFirst is candidates in the opposite order.
type worstFirst struct{ candidates }

func (h *worstFirst) Less(i, j int) bool { return h.candidates.Less(j, i) }
