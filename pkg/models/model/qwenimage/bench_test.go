package qwenimage_test

import (
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

// signsSize is the size of the checkpoint that ships.
var signsSize = checkpoint.Config{
	TextWidth: 128, TextDepth: 2, Heads: 4, HeadDim: 32, Depth: 4, Base: 16, Height: 64, Width: 128,
}

func openBench(b *testing.B, threads int) *qwenimage.Model {
	b.Helper()
	m, err := qwenimage.Open(checkpoint.Dir(b, signsSize),
		qwenimage.Options{Options: model.Options{Threads: threads, PromptCacheBytes: -1}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = m.Close() })
	return m
}

func BenchmarkVelocity(b *testing.B) {
	for _, threads := range []int{1, 2} {
		m := openBench(b, threads)
		for _, rows := range []int{1, 2, 16} {
			b.Run(fmt.Sprintf("threads=%d/rows=%d", threads, rows), func(b *testing.B) {
				batch := make([]model.Row, rows)
				for i := range batch {
					x := make([]float32, 32*64)
					for j := range x {
						x[j] = float32(j%17)/8 - 1
					}
					tokens := []int{20, 6}[i%2] // a prompt and the empty one of guidance
					embeds := make([]float32, tokens*128)
					for j := range embeds {
						embeds[j] = float32(j%13)/6 - 1
					}
					batch[i] = model.Row{
						X: x, Sigma: 0.5, Conditioning: conditioning([]int{tokens, 128}, embeds), Dst: make([]float32, len(x)),
					}
				}
				for b.Loop() {
					if err := m.Velocity(b.Context(), batch, media.ImageSize(64, 128)); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(rows*b.N)/b.Elapsed().Seconds(), "rows/s")
			})
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, threads := range []int{1, 2} {
		m := openBench(b, threads)
		latents := make([]float32, 32*64)
		for i := range latents {
			latents[i] = float32(i%17)/8 - 1
		}
		b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) {
			for b.Loop() {
				if _, err := m.Decode(b.Context(), latents, media.ImageSize(64, 128)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkEncode(b *testing.B) {
	m := openBench(b, 1)
	for b.Loop() {
		if _, err := m.Encode(b.Context(), []string{"x"}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	dir := checkpoint.Dir(b, signsSize)
	for b.Loop() {
		m, err := qwenimage.Open(dir, qwenimage.Options{Options: model.Options{Threads: 1}})
		if err != nil {
			b.Fatal(err)
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
