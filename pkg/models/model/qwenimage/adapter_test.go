package qwenimage_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

func openAdapter(t testing.TB, name string) *lora.Adapter {
	t.Helper()
	a, err := lora.Open(filepath.Join(golden, name))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func withAdapters(t testing.TB, m *qwenimage.Model, adapters ...lora.Weighted) *qwenimage.Model {
	t.Helper()
	n, err := m.Adapted(adapters...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n.(*qwenimage.Model)
}

func TestParity_Adapters(t *testing.T) {
	g, prompts := openGoldens(t, "lora.safetensors"), goldenPrompts(t)
	base := openModel(t, "full", qwenimage.Options{})
	first, second := openAdapter(t, "lora-first"), openAdapter(t, "lora-second")
	size, sigma := g.ints("size"), g.floats("sigma")
	var texts []string
	for _, i := range g.ints("prompts") {
		texts = append(texts, prompts[i])
	}
	x := rows(g.floats("x"), len(texts))
	seen := map[string]bool{}
	for _, tt := range []struct {
		name     string
		adapters []lora.Weighted
	}{
		{"base", nil},
		{"first", []lora.Weighted{{Adapter: first, Weight: 1}}},
		{"first.scaled", []lora.Weighted{{Adapter: first, Weight: 0.4}}},
		{"second", []lora.Weighted{{Adapter: second, Weight: 1}}},
		{"both", []lora.Weighted{{Adapter: first, Weight: 1}, {Adapter: second, Weight: -0.5}}},
	} {
		m := withAdapters(t, base, tt.adapters...)
		got := flat(velocities(t, m, x, sigma, encodeAll(t, m, texts...), size[0], size[1]))
		within(t, tt.name, got, g.floats(tt.name), loraTolerance)
		if digest := m.Card().WeightsDigest; seen[digest] {
			t.Errorf("%s: digest %s of another model", tt.name, digest)
		} else {
			seen[digest] = true
		}
		if tt.name == "base" && m.Card().WeightsDigest != base.Card().WeightsDigest {
			t.Error("no adapters change the digest")
		}
	}
}

func TestModel_WithAdapters_swapsAndRestores(t *testing.T) {
	m := openModel(t, "full", qwenimage.Options{})
	g := openGoldens(t, "velocity.safetensors")
	x, sigma, cond := rows(g.floats("single.x"), 1), g.floats("single.sigma"), encodeAll(t, m, "a sign")
	before := flat(velocities(t, m, x, sigma, cond, 64, 128))
	adapted := withAdapters(t, m, lora.Weighted{Adapter: openAdapter(t, "lora-first"), Weight: 1})
	changed := flat(velocities(t, adapted, x, sigma, cond, 64, 128))
	if slices.Equal(before, changed) {
		t.Error("the adapter changes nothing")
	}
	if after := flat(velocities(t, m, x, sigma, cond, 64, 128)); !slices.Equal(before, after) {
		t.Error("the base changed")
	}
	if again := flat(velocities(t, withAdapters(t, adapted), x, sigma, cond, 64, 128)); !slices.Equal(before, again) {
		t.Error("no adapters do not give the base back bit for bit")
	}
}

// Rows of several versions in one call have the bits that each has alone, in any order and on any number of threads.
func TestModel_MixesVersions(t *testing.T) {
	first, second := openAdapter(t, "lora-first"), openAdapter(t, "lora-second")
	for _, threads := range []int{1, 3} {
		m := openModel(t, "full", qwenimage.Options{Options: model.Options{Threads: threads}})
		of := []*qwenimage.Model{
			m, withAdapters(t, m, lora.Weighted{Adapter: first, Weight: 1}),
			withAdapters(t, m, lora.Weighted{Adapter: second, Weight: 1}),
			withAdapters(t, m, lora.Weighted{Adapter: first, Weight: 0.4}, lora.Weighted{Adapter: second, Weight: 1}),
		}
		b := newBench(t, m, 11)
		for _, each := range [][]int{{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2}, {3, 3, 1, 1, 1, 0, 0, 2, 2, 3, 3}} {
			batch, want := make([]model.Row, len(each)), make([][]float32, len(each))
			for i, k := range each {
				want[i] = b.run(t, of[k], i, i+1)[0]
				batch[i] = model.Row{
					X: b.x[i], Sigma: b.sigma[i], Conditioning: b.cond[i], Of: of[k], Dst: make([]float32, len(b.x[i])),
				}
			}
			if err := of[each[1]].Velocity(t.Context(), batch, media.ImageSize(b.h, b.w)); err != nil {
				t.Fatal(err)
			}
			for i, r := range batch {
				if !slices.Equal(r.Dst, want[i]) {
					t.Errorf("%d threads: row %d of model %d has other bits than alone", threads, i, each[i])
				}
				if k := (each[i] + 1) % len(of); slices.Equal(b.run(t, of[k], i, i+1)[0], want[i]) {
					t.Errorf("model %d gives the same as %d", k, each[i])
				}
			}
		}
		other := openModel(t, "full", qwenimage.Options{})
		row := model.Row{X: b.x[0], Conditioning: b.cond[0], Of: other, Dst: make([]float32, len(b.x[0]))}
		err := m.Velocity(t.Context(), []model.Row{row}, media.ImageSize(b.h, b.w))
		if err == nil || !strings.Contains(err.Error(), "of another checkpoint") {
			t.Errorf("a row of a model that was opened anew: %v", err)
		}
	}
}

func TestModel_Close_sharedThreads(t *testing.T) {
	m, err := qwenimage.Open(filepath.Join(golden, "full"), qwenimage.Options{Options: model.Options{Threads: 2}})
	if err != nil {
		t.Fatal(err)
	}
	n, err := m.Adapted()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // a second Close does nothing
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.Decode(t.Context(), make([]float32, 32*64), media.ImageSize(64, 128)); err != nil {
		t.Error(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOpenAdapter_refuses(t *testing.T) {
	floats := func(name string, shape ...int) safetensors.Tensor {
		n := 1
		for _, d := range shape {
			n *= d
		}
		x, err := safetensors.FloatTensor(name, tensor.F32, shape, make([]float32, n))
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	const q = "transformer_blocks.0.attn.to_q"
	pair := []safetensors.Tensor{floats(q+".lora_A.weight", 2, 48), floats(q+".lora_B.weight", 48, 2)}
	base := openModel(t, "full", qwenimage.Options{})
	for _, tt := range []struct {
		name    string
		tensors []safetensors.Tensor
		config  string
		want    string
	}{
		{"half a module", pair[:1], "", "lora_B is missing"},
		{"ranks differ", []safetensors.Tensor{pair[0], floats(q+".lora_B.weight", 48, 3)}, "", "do not fit"},
		{"not a LoRA", []safetensors.Tensor{floats("conv.weight", 2, 2)}, "", "no tensor of a LoRA"},
		{"empty", nil, "", "no tensors"},
		{"DoRA", pair, `{"lora_alpha": 2, "use_dora": true}`, "use_dora"},
		{"other kind", pair, `{"lora_alpha": 2, "peft_type": "LOHA"}`, "peft_type"},
		{"no alpha", pair, `{"r": 2}`, "lora_alpha"},
		{"pattern", pair, `{"lora_alpha": 2, "alpha_pattern": {"to_(?!q)": 3}}`, "alpha_pattern"},
		{"not JSON", pair, `{`, "adapter configuration"},
		{
			"unknown module",
			[]safetensors.Tensor{floats("to_q.lora_A.weight", 2, 48), floats("to_q.lora_B.weight", 48, 2)},
			"",
			"the transformer has none",
		},
		{
			"other width",
			[]safetensors.Tensor{floats(q+".lora_A.weight", 2, 32), floats(q+".lora_B.weight", 48, 2)},
			"",
			"48 x 32, here 48 x 48",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := safetensors.WriteFile(filepath.Join(dir, "adapter_model.safetensors"), tt.tensors,
				nil); err != nil {
				t.Fatal(err)
			}
			if tt.config != "" {
				if err := os.WriteFile(filepath.Join(dir, "adapter_config.json"), []byte(tt.config),
					0o600); err != nil {
					t.Fatal(err)
				}
			}
			a, err := lora.Open(dir)
			if err == nil {
				var m model.Model
				if m, err = base.Adapted(lora.Weighted{Adapter: a, Weight: 1}); err == nil {
					m.Close()
				}
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}
