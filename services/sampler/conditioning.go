package sampler

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// negativePrefix is what diffusers puts before the names of the negative prompt's tensors.
const negativePrefix = "negative_"

// ConditioningName is the name in events of a tensor that a family names so.
func ConditioningName(name string, negative bool) string {
	if negative {
		return negativePrefix + name
	}
	return name
}

// Conditioning is what events have of encoded texts: the tensors of the prompt in F32 and, where it is not
// nil, of the negative prompt. Embeddings of a family that pads none get a mask [tokens] of ones in U8.
func Conditioning(cond, negative *model.Conditioning) []schemas.NamedTensor {
	list := named(cond, false)
	if negative != nil {
		list = append(list, named(negative, true)...)
	}
	return list
}

func named(c *model.Conditioning, negative bool) (list []schemas.NamedTensor) {
	has := map[string]bool{}
	for _, t := range c.Tensors {
		has[t.Name] = true
	}
	for _, t := range c.Tensors {
		x := schemas.Tensor{DType: string(tensor.F32), Data: tensor.F32.AppendFloats(nil, t.Data)}
		for _, n := range t.Shape {
			x.Shape = append(x.Shape, int64(n))
		}
		list = append(list, schemas.NamedTensor{Name: ConditioningName(t.Name, negative), Tensor: x})
		if mask := t.Name + "_mask"; strings.HasSuffix(t.Name, "_embeds") && len(t.Shape) == 2 && !has[mask] {
			list = append(list, schemas.NamedTensor{Name: ConditioningName(mask, negative), Tensor: schemas.Tensor{
				DType: "U8", Shape: []int64{int64(t.Shape[0])}, Data: bytes.Repeat([]byte{1}, t.Shape[0]),
			}})
		}
	}
	return list
}

// Texter is an episode whose encoded texts can be stored: those of the prompt, and of the negative prompt where there
// is guidance, else nil.
type Texter interface {
	Texts() (cond, negative *model.Conditioning)
}

// texts are those that were stored a short while ago: the samples of a prompt have them in common.
type texts struct {
	mu     sync.Mutex
	stored map[textPair]*storedTexts
}

// textPair names the encoded texts of a prompt, by what they were made of: weights that are pushed are not
// the text encoder's.
type textPair struct {
	prompt, negative string
	cut, negativeCut int
	guided           bool
}

func pairOf(cond, negative *model.Conditioning) textPair {
	p := textPair{prompt: cond.Prompt, cut: cond.Cut}
	if negative != nil {
		p.negative, p.negativeCut, p.guided = negative.Prompt, negative.Cut, true
	}
	return p
}

type storedTexts struct {
	mu   sync.Mutex // held by whoever stores them
	list []schemas.NamedTensor
	at   atomic.Int64 // Unix nanoseconds; 0: not yet
}

// textsFresh is how long stored texts are named without a word: the janitor leaves them alone for longer.
const textsFresh = bus.BlobGrace / 4

func (s *storedTexts) fresh() bool { return time.Since(time.Unix(0, s.at.Load())) < textsFresh }

// of is the entry of a pair. Those that nobody asked for in a while go.
func (x *texts) of(pair textPair) *storedTexts {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.stored == nil {
		x.stored = map[textPair]*storedTexts{}
	}
	s := x.stored[pair]
	if s == nil {
		maps.DeleteFunc(x.stored, func(_ textPair, s *storedTexts) bool { return s.at.Load() > 0 && !s.fresh() })
		s = &storedTexts{}
		x.stored[pair] = s
	}
	return s
}

// storeTexts puts the texts of an episode into the object store, where the request asks for that, and returns their
// tensors: once for all samples of a prompt that end in the same while.
func (r *recorder) storeTexts(ctx context.Context, e Episode) ([]schemas.NamedTensor, error) {
	t, ok := e.(Texter)
	if !ok || !r.req.ReturnConditioning {
		return nil, nil
	}
	cond, negative := t.Texts()
	s := r.s.texts.of(pairOf(cond, negative))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fresh() {
		return s.list, nil
	}
	list, began := Conditioning(cond, negative), time.Now()
	for i := range list {
		x := &list[i].Tensor
		ref, err := r.s.bus.PutBlob(ctx, x.Data)
		if err != nil {
			return nil, fmt.Errorf("store %s: %w", list[i].Name, err)
		}
		x.Ref, x.Data = &ref, nil
	}
	s.list = list
	s.at.Store(began.UnixNano())
	return list, nil
}
