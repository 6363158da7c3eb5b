package checkpoint_test

import (
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

func TestDir_loadsAndPaints(t *testing.T) {
	for _, c := range []checkpoint.Config{
		{},
		{
			DType: tensor.BF16, Heads: 3, HeadDim: 12, Depth: 2, TextWidth: 24, TextDepth: 2, Base: 6, Height: 16, Width: 48,
			Steps: 7,
		},
	} {
		m, err := qwenimage.Open(checkpoint.Dir(t, c), qwenimage.Options{})
		if err != nil {
			t.Fatal(err)
		}
		card := m.Card()
		if c.Steps != 0 && card.NumInferenceSteps != c.Steps {
			t.Errorf("%d steps, want %d", card.NumInferenceSteps, c.Steps)
		}
		tokens, err := card.Tokens(card.Size)
		if err != nil {
			t.Fatal(err)
		}
		sample, err := m.Decode(t.Context(), make([]float32, tokens*card.LatentChannels), card.Size)
		if err != nil {
			t.Fatal(err)
		}
		if size := sample.Size(); size != card.Size {
			t.Errorf("media of %v, the model's are of %v", size, card.Size)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
