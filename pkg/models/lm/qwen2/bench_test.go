package qwen2_test

import (
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
)

// BenchmarkDecode draws tokens, sequences side by side; an operation is a step of all.
func BenchmarkDecode(b *testing.B) {
	for _, c := range []struct {
		name string
		dir  func() string
	}{
		{"sums", func() string { return sums }},
		{"wide", func() string {
			return folder(b, qwen2test.Random{
				Width: 1024, Layers: 4, Heads: 16, KVHeads: 4, Intermediate: 2816, Vocabulary: 2048,
				DType: "BF16",
			})
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			m := open(b, c.dir(), lm.Options{Options: model.Options{Threads: 1}})
			for _, rows := range []int{1, 8} {
				b.Run(fmt.Sprint(rows), func(b *testing.B) { decode(b, m, rows) })
			}
		})
	}
}

func decode(b *testing.B, m lm.Model, n int) {
	prompt, err := m.Prompt([]lm.Message{{Role: "user", Content: "347+58=?"}})
	if err != nil {
		b.Fatal(err)
	}
	rows, next := make([]lm.Row, n), make([]int32, n)
	var d decoding.Distribution
	step := -1
	for b.Loop() {
		if step++; step%64 == 0 {
			for i := range rows {
				if rows[i].Sequence != nil {
					rows[i].Sequence.Close()
				}
				rows[i] = lm.Row{Sequence: m.NewSequence(), IDs: prompt, Logits: make([]float32, m.Card().Vocabulary)}
			}
		}
		forward(b, m, rows...)
		for i := range rows {
			if err := d.Reset(rows[i].Logits, decoding.Params{Temperature: 1}); err != nil {
				b.Fatal(err)
			}
			next[i] = d.Draw(uint64(i), uint32(rows[i].Sequence.Len()))
			rows[i].IDs = next[i : i+1]
		}
	}
	b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "tokens/s")
}
