package recorder

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// texts remembers the encoded texts that were stored a short while ago: the samples of a prompt share them.
type texts struct {
	mu     sync.Mutex
	stored map[textPair]*storedTexts
}

// textPair is the key of encoded texts. Weights are no part of it: policies do not change the text encoder.
type textPair struct {
	prompt, negative string
	further          [2]string // texts for further text encoders
	cut, negativeCut int
	guided           bool
}

// pairOf returns the key of a sample's encoded prompt and negative prompt; negative is nil without guidance.
func pairOf(s *schemas.Sampling, cond, negative *model.Conditioning) textPair {
	p := textPair{prompt: cond.Prompt, cut: cond.Cut, further: [2]string{s.Prompt2, s.Prompt3}}
	if negative != nil {
		p.negative, p.negativeCut, p.guided = negative.Prompt, negative.Cut, true
	}
	return p
}

// storedTexts are the tensors of one pair, once they are stored.
type storedTexts struct {
	mu   sync.Mutex // held while the tensors are being stored
	list []schemas.NamedTensor
	at   atomic.Int64 // when, in Unix nanoseconds; 0: not stored yet
}

// textsFresh is how long stored texts are used without a look: the janitor keeps unnamed blobs longer.
const textsFresh = bus.BlobGrace / 4

func (s *storedTexts) fresh() bool { return time.Since(time.Unix(0, s.at.Load())) < textsFresh }

// entryOf returns the entry of a pair of texts, which it may make; it forgets those that are no longer fresh.
func (x *texts) entryOf(pair textPair) *storedTexts {
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

// storeTexts stores the encoded texts of an episode, once for the samples of a prompt that end within textsFresh; nil:
// the request does not ask for them.
func (r *Recorder) storeTexts(ctx context.Context, e engine.Episode) ([]schemas.NamedTensor, error) {
	t, ok := e.(engine.Texter)
	if !ok || !r.req.ReturnConditioning {
		return nil, nil
	}
	card, cond, negative := t.Texts()
	s := r.store.texts.entryOf(pairOf(&r.req.Sampling, cond, negative))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fresh() {
		return s.list, nil
	}
	list, began := images.Conditioning(card, cond, negative), time.Now()
	for i := range list {
		if err := r.storeTensors(ctx, 0, field{list[i].Name, &list[i].Tensor}); err != nil {
			return nil, err
		}
	}
	s.list = list
	s.at.Store(began.UnixNano())
	return list, nil
}
