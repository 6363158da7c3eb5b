package reward

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// sharedText is the text of a sample for all its functions, loaded once.
type sharedText struct {
	bus *bus.Bus
	t   *schemas.Trajectory

	mu   sync.Mutex
	read *scorer.Text
}

// load returns the sample's text with its log-probs and entropies, which it reads from the object store the first
// time. Lists have one value for each generated token. The error is bus.ErrNotFound if a tensor is not stored any
// more, and terminal if it is not valid.
func (x *sharedText) load(ctx context.Context) (*scorer.Text, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.read != nil {
		return x.read, nil
	}
	of := x.t.Text
	text := &scorer.Text{
		Answer: of.Answer(), Vocabulary: int(of.Settings.Vocabulary), Trajectory: x.t.Subject(), TopLogits: x.topLogits,
	}
	for _, m := range of.Messages() {
		text.Messages = append(text.Messages, scorer.Message(m))
	}
	for _, t := range of.Turns {
		if t.Generated && of.Settings.Interaction != nil {
			text.TurnScores = append(text.TurnScores, t.Score)
		}
	}
	mask := new(*of.Mask)
	if err := x.bus.LoadTensors(ctx, mask); err != nil {
		return nil, fmt.Errorf("load the text: %w", err)
	}
	for _, list := range []struct {
		to   *[]float32
		from *schemas.Tensor
	}{{&text.LogProbs, of.LogProbs}, {&text.Entropies, of.Entropies}, {&text.TopLogProbs, of.TopLogProbs}} {
		if list.from == nil { // the engine does not give them
			continue
		}
		t := new(*list.from)
		if err := x.bus.LoadTensors(ctx, t); err != nil {
			return nil, fmt.Errorf("load the text: %w", err)
		}
		all := make([]float32, len(mask.Data))
		if err := tensor.F32.DecodeFloats(all, t.Data); err != nil {
			return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("text: %w", err))
		}
		for i, generated := range mask.Data {
			if generated == 1 {
				*list.to = append(*list.to, all[i])
			}
		}
		if slices.ContainsFunc(all, func(v float32) bool { return math.IsNaN(float64(v)) }) {
			*list.to = nil // the engine does not give them all
		}
	}
	x.read = text
	return text, nil
}

// topLogits returns, for each generated token, the k largest stored logits and the log-sum-exp of all; functions of
// texts call it. It reads the events of the text one by one, as logits may be large. It fails if fewer logits are
// stored, or an event is gone.
func (x *sharedText) topLogits(ctx context.Context, k int) (logits [][]float32, lse []float32, err error) {
	settings := &x.t.Text.Settings
	if err := settings.HasTop(int64(k)); err != nil {
		return nil, nil, err
	}
	for i := range x.t.Steps {
		e, err := x.bus.LoadTokensOf(ctx, x.t, i)
		if err != nil {
			return nil, nil, fmt.Errorf("load the logits: %w", err)
		}
		if e.Logits == nil {
			continue
		}
		v := &e.Logits.Values
		row := make([]float32, v.Shape[1])
		size := int(v.Shape[1]) * tensor.DType(v.DType).Size()
		for at := range e.IDs {
			if err := tensor.DType(v.DType).DecodeFloats(row, v.Data[at*size:(at+1)*size]); err != nil {
				return nil, nil, fmt.Errorf("logits: %w", err)
			}
			logits, lse = append(logits, largest(row, k)), append(lse, e.LogSumExps[at])
		}
	}
	return logits, lse, nil
}

// largest returns the k largest values of a row, the largest first.
func largest(row []float32, k int) []float32 {
	sorted := slices.Clone(row)
	slices.SortFunc(sorted, func(a, b float32) int { return cmp.Compare(b, a) })
	return slices.Clip(sorted[:min(k, len(sorted))])
}
