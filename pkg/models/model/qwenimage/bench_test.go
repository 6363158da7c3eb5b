package qwenimage_test

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
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

// attentionAdapter is a LoRA of rank 4 of the projections of attention, of one value.
func attentionAdapter(b *testing.B, m *qwenimage.Model, value float32) *lora.Adapter {
	b.Helper()
	const rank = 4
	var file bytes.Buffer
	var factors []safetensors.Tensor
	modules := m.Modules()
	for _, name := range slices.Sorted(maps.Keys(modules)) {
		if !strings.Contains(name, ".attn.") {
			continue
		}
		for half, shape := range map[string][]int{"A": {rank, modules[name][1]}, "B": {modules[name][0], rank}} {
			x := slices.Repeat([]float32{value}, shape[0]*shape[1])
			f, err := safetensors.FloatTensor(name+".lora_"+half+".weight", tensor.F32, shape, x)
			if err != nil {
				b.Fatal(err)
			}
			factors = append(factors, f)
		}
	}
	if err := safetensors.Write(&file, factors, nil); err != nil {
		b.Fatal(err)
	}
	a, err := lora.Parse("bench", file.Bytes(), nil)
	if err != nil {
		b.Fatal(err)
	}
	return a
}

// The same rows of two versions, in one call and in a call for each.
func BenchmarkVelocity_Mixed(b *testing.B) {
	m := openBench(b, 2)
	of := []model.Model{m, m}
	for i := range of {
		adapted, err := m.Adapted(lora.Weighted{Adapter: attentionAdapter(b, m, float32(i+1)/100), Weight: 1})
		if err != nil {
			b.Fatal(err)
		}
		defer adapted.Close()
		of[i] = adapted
	}
	for _, rows := range []int{2, 8} {
		batch := make([]model.Row, rows)
		for i := range batch {
			x, embeds := make([]float32, 32*64), make([]float32, 20*128)
			for j := range x {
				x[j] = float32(j%17)/8 - 1
			}
			batch[i] = model.Row{
				X: x, Sigma: 0.5, Conditioning: conditioning([]int{20, 128}, embeds), Dst: make([]float32, len(x)),
				Of: of[2*i/rows],
			}
		}
		var spent [2]time.Duration
		b.Run(fmt.Sprintf("rows=%d", rows), func(b *testing.B) {
			for b.Loop() {
				for way, parts := range [][][]model.Row{{batch}, {batch[:rows/2], batch[rows/2:]}} {
					began := time.Now()
					for _, part := range parts {
						if err := part[0].Of.Velocity(b.Context(), part, media.ImageSize(64, 128)); err != nil {
							b.Fatal(err)
						}
					}
					spent[way] += time.Since(began)
				}
			}
			b.ReportMetric(spent[0].Seconds()/spent[1].Seconds(), "mixed/apart")
		})
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
