package qwenimage_test

import (
	"context"
	"fmt"
	"os"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

// A model joins a sampler through three calls: prompts to conditionings, latents to a
// velocity, latents to an image.
func ExampleOpen() {
	if err := paint(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output: qwen-image 8 tokens 64 x 32
}

func paint(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "tiny")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := checkpoint.Write(dir, checkpoint.Config{Height: 32, Width: 64}); err != nil {
		return err
	}
	m, err := qwenimage.Open(dir, qwenimage.Options{Options: model.Options{Threads: 1}})
	if err != nil {
		return err
	}
	defer m.Close()

	card := m.Card()
	cond, err := m.Encode(ctx, []string{"a blue sign"})
	if err != nil {
		return err
	}
	tokens, err := card.Tokens(card.Size)
	if err != nil {
		return err
	}
	latents := make([]float32, tokens*card.LatentChannels)
	velocity := make([]float32, len(latents))
	row := model.Row{X: latents, Sigma: 1, Conditioning: cond[0], Dst: velocity}
	if err := m.Velocity(ctx, []model.Row{row}, card.Size); err != nil {
		return err
	}
	sample, err := m.Decode(ctx, latents, card.Size)
	if err != nil {
		return err
	}
	fmt.Println(card.Family, tokens, "tokens", sample.Size().Width, "x", sample.Size().Height)
	return nil
}
