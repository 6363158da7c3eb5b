package texts_test

import (
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
)

// The logits of given tokens have the bits of those of the ids before them, in whatever order they are asked for.
func TestGiven_Logits(t *testing.T) {
	dir := t.TempDir()
	if err := (qwen2test.Random{
		Width: 48, Heads: 3, KVHeads: 1, Vocabulary: 300, MaxPositions: 300,
	}).Write(dir); err != nil {
		t.Fatal(err)
	}
	m, err := qwen2.Open(dir, lm.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	ids := make([]int32, 200)
	for i := range ids {
		ids[i] = int32(i * 7 % 256)
	}
	given := texts.NewGiven(m, ids)
	defer given.Close()
	for _, at := range []int{1, 2, 64, 65, 66, 199, 198, 3, 150, 1} {
		s, want := m.NewSequence(), make([]float32, 300)
		if err := m.Forward(t.Context(), []lm.Row{{Sequence: s, IDs: ids[:at], Logits: want}}); err != nil {
			t.Fatal(err)
		}
		s.Close()
		if got, err := given.Logits(t.Context(), at); err != nil || !slices.Equal(got, want) {
			t.Errorf("token %d: other bits than those after the ids before it, %v", at, err)
		}
	}
	for _, at := range []int{-1, 0, 200} {
		if _, err := given.Logits(t.Context(), at); err == nil {
			t.Errorf("token %d of 200: no error", at)
		}
	}
}
