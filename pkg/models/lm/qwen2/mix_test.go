package qwen2_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Sequences of several versions in one call have the logits that each has alone, prompts of any length and then token
// by token; each is in the cache of its own version.
func TestForward_MixesVersions(t *testing.T) {
	t.Parallel()
	for i, r := range []qwen2test.Random{
		{Width: 48, Heads: 3, KVHeads: 1, DType: tensor.F32, Seed: 5, MaxPositions: 1200},
		{Width: 48, Heads: 3, KVHeads: 1, DType: tensor.BF16, Seed: 5, MaxPositions: 1200},
		{Width: 128, Heads: 4, KVHeads: 2, Vocabulary: 34000, DType: tensor.F32, Seed: 6, MaxPositions: 1200},
	} {
		threads := []int{1, 3, 3}[i] // the last is computed in one pass, the others in a part for each thread
		m := open(t, folder(t, r), lm.Options{Options: model.Options{Threads: threads}})
		table := m.Modules()
		first, second := adapter(t, 1, 3, table), adapter(t, 2, 3, lora.Table{
			"model.layers.1.self_attn.v_proj": table["model.layers.1.self_attn.v_proj"],
		})
		mixes(t, []lm.Model{
			m, withAdapters(t, m, lora.Weighted{Adapter: first, Weight: 1}),
			withAdapters(t, m, lora.Weighted{Adapter: second, Weight: 1}),
		}, threads)
	}
}

// mixes compares calls with sequences of all models with calls of one.
func mixes(t *testing.T, of []lm.Model, threads int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	var ids [][]int32
	var rows []lm.Row
	for i, n := range []int{1, 9, 400, 33, 200, 2, 5} {
		s := of[i%len(of)].NewSequence()
		defer s.Close()
		ids = append(ids, randomIDs(rng, n+3))
		rows = append(rows, lm.Row{Sequence: s, IDs: ids[i][:n], Logits: make([]float32, of[0].Card().Vocabulary)})
	}
	for step := range 4 { // the prompt, then three tokens
		if step > 0 {
			for i := range rows {
				n := rows[i].Sequence.Len()
				rows[i].IDs = ids[i][n : n+1]
			}
		}
		forward(t, of[(step+1)%len(of)], rows...)
		for i, r := range rows {
			n := r.Sequence.Len()
			if n != len(ids[i])-3+step {
				t.Fatalf("sequence %d has %d tokens", i, n)
			}
			if !slices.Equal(r.Logits, logits(t, of[i%len(of)], ids[i][:n])) {
				t.Errorf("%d threads, step %d: sequence %d has other bits than alone", threads, step, i)
			}
			if slices.Equal(r.Logits, logits(t, of[(i+1)%len(of)], ids[i][:n])) {
				t.Errorf("sequence %d: another version gives the same", i)
			}
		}
	}
}

// A call in which the cache of one version is full changes no sequence of any, and models of another checkpoint are
// refused.
func TestForward_MixedIsFull(t *testing.T) {
	t.Parallel()
	dir := folder(t, qwen2test.Random{Width: 48, Heads: 3, KVHeads: 1, MaxPositions: 1200})
	m := open(t, dir, lm.Options{CacheBytes: 4 * 2 * 2 * 16 * 64})
	n := withAdapters(t, m, lora.Weighted{Adapter: adapter(t, 1, 3, m.Modules()), Weight: 1})
	large, small, free := n.NewSequence(), n.NewSequence(), m.NewSequence()
	for _, s := range []lm.Sequence{large, small, free} {
		defer s.Close()
	}
	most := n.Card().CacheTokens
	forward(t, m, lm.Row{Sequence: large, IDs: make([]int32, most)})
	err := m.Forward(t.Context(), []lm.Row{
		{Sequence: free, IDs: []int32{1, 2}}, {Sequence: small, IDs: []int32{3}},
	})
	if !errors.Is(err, lm.ErrFull) || free.Len() != 0 || small.Len() != 0 || large.Len() != most {
		t.Errorf("%v; %d, %d, %d tokens; the cache has %d", err, free.Len(), small.Len(), large.Len(), most)
	}
	forward(t, n, lm.Row{Sequence: free, IDs: []int32{1, 2}})
	other := open(t, dir, lm.Options{}).NewSequence()
	defer other.Close()
	err = m.Forward(t.Context(), []lm.Row{{Sequence: other, IDs: []int32{1}}})
	if err == nil || !strings.Contains(err.Error(), "of another checkpoint") {
		t.Errorf("a sequence of a model that was opened anew: %v", err)
	}
}
