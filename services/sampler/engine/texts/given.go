package texts

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/schemas"
)

// Given evaluates a model at the tokens of a stored sample, many in one call: their logits have the bits of those that
// are evaluated one by one. One goroutine at a time may use it.
type Given struct {
	model    lm.Model
	ids      []int32
	sequence lm.Sequence // of the first tokens of ids
	// logits [n, V] are those of the tokens from on.
	logits  []float32
	from, n int
}

// NewGiven returns the evaluation of tokens, which are below the model's vocabulary, until Close.
func NewGiven(m lm.Model, ids []int32) *Given {
	return &Given{model: m, ids: ids, sequence: m.NewSequence()}
}

// givenTokens and givenBytes bound the logits that a Given holds.
const (
	givenTokens = 64
	givenBytes  = 32 << 20
)

// Logits returns the logits [V] that any token but the first is drawn from, until the next call. It is fast where at
// rises from call to call.
func (g *Given) Logits(ctx context.Context, at int) ([]float32, error) {
	v := g.model.Card().Vocabulary
	if at < 1 || at >= len(g.ids) {
		return nil, fmt.Errorf("token %d: must be between 1 and %d", at, len(g.ids)-1)
	}
	if at < g.from {
		g.sequence.Close()
		g.sequence, g.from, g.n = g.model.NewSequence(), 0, 0
	}
	if at >= g.from+g.n {
		if before := g.ids[g.sequence.Len() : at-1]; len(before) > 0 {
			if err := g.forward(ctx, before, nil); err != nil {
				return nil, err
			}
		}
		n := min(len(g.ids)-at, max(1, min(givenTokens, givenBytes/(4*v))))
		if len(g.logits) < n*v {
			g.logits = make([]float32, n*v)
		}
		if err := g.forward(ctx, g.ids[at-1:at-1+n], g.logits[:n*v]); err != nil {
			return nil, err
		}
		g.from, g.n = at, n
	}
	return g.logits[(at-g.from)*v : (at-g.from+1)*v], nil
}

func (g *Given) forward(ctx context.Context, ids []int32, logits []float32) error {
	if err := g.model.Forward(ctx, []lm.Row{{Sequence: g.sequence, IDs: ids, Logits: logits}}); err != nil {
		return fmt.Errorf("evaluate model: %w", err)
	}
	return nil
}

// IDsOf returns the ids of a stored sequence (schemas.TextResult). One that is not below the vocabulary is an error.
func IDsOf(t *schemas.Tensor, vocabulary int) ([]int32, error) {
	ids := make([]int32, len(t.Data)/4)
	for i := range ids {
		id := binary.LittleEndian.Uint32(t.Data[4*i:])
		if int(id) >= vocabulary {
			return nil, fmt.Errorf("ids[%d]: %d; must be below %d", i, id, vocabulary)
		}
		ids[i] = int32(id)
	}
	return ids, nil
}

// Close frees the sequence's part of the model's cache.
func (g *Given) Close() { g.sequence.Close() }
