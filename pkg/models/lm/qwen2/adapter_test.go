package qwen2_test

import (
	"bytes"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// adapter is a LoRA of rank r of the modules of a table, in PEFT's form, with alpha 2r.
func adapter(t *testing.T, seed uint64, r int, of lora.Table) *lora.Adapter {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	var tensors []safetensors.Tensor
	for _, module := range slices.Sorted(maps.Keys(of)) {
		for _, half := range []struct {
			name string
			n, k int
		}{{"lora_A", r, of[module][1]}, {"lora_B", of[module][0], r}} {
			x := make([]float32, half.n*half.k)
			for i := range x {
				x[i] = float32(0.1 * rng.NormFloat64())
			}
			m, err := safetensors.FloatTensor("base_model.model."+module+"."+half.name+".weight", tensor.F32,
				[]int{half.n, half.k}, x)
			if err != nil {
				t.Fatal(err)
			}
			tensors = append(tensors, m)
		}
	}
	var b bytes.Buffer
	if err := safetensors.Write(&b, tensors, nil); err != nil {
		t.Fatal(err)
	}
	a, err := lora.Parse("test", b.Bytes(), []byte(`{"peft_type": "LORA", "r": 3, "lora_alpha": 6}`))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func withAdapters(t *testing.T, m lm.Model, adapters ...lora.Weighted) lm.Model {
	t.Helper()
	n, err := m.(lora.Adaptable[lm.Model]).Adapted(adapters...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// merged is the folder whose projections have the adapters in them already, computed here: W + sum of weight
// * alpha/r * B A.
func merged(t *testing.T, dir string, adapters ...lora.Weighted) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	archive, err := safetensors.Open(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	var tensors []safetensors.Tensor
	for _, name := range archive.Names() {
		w, err := archive.Floats(name)
		if err != nil {
			t.Fatal(err)
		}
		info, _ := archive.Info(name)
		for _, with := range adapters {
			p := with.Adapter.Product(strings.TrimSuffix(name, ".weight"))
			if p == nil {
				continue
			}
			n, k := info.Shape[0], info.Shape[1]
			r := len(p.A) / k
			for i := range n {
				for j := range k {
					sum := 0.0
					for l := range r {
						sum += float64(p.B[i*r+l]) * float64(p.A[l*k+j])
					}
					w[i*k+j] += float32(with.Weight * 2 * sum)
				}
			}
		}
		m, err := safetensors.FloatTensor(name, tensor.F32, info.Shape, w)
		if err != nil {
			t.Fatal(err)
		}
		tensors = append(tensors, m)
	}
	if err := safetensors.WriteFile(filepath.Join(to, "model.safetensors"), tensors, nil); err != nil {
		t.Fatal(err)
	}
	return to
}

// A model with adapters is the one whose weights have them merged, of every projection that there is, of
// weights in float32 and in bf16; the model that it was made from stays as it is, sequences that have begun
// too.
func TestAdapted(t *testing.T) {
	t.Parallel()
	for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
		dir := folder(t, qwen2test.Random{Width: 48, Heads: 3, KVHeads: 1, DType: dtype, Seed: 5})
		m := open(t, dir, lm.Options{})
		table := m.Modules()
		if len(table) != 2*7 {
			t.Fatalf("%d modules: %v; want seven of each of two layers", len(table), table)
		}
		first, second := adapter(t, 1, 3, table), adapter(t, 2, 3,
			lora.Table{"model.layers.1.self_attn.v_proj": table["model.layers.1.self_attn.v_proj"]})
		ids := randomIDs(rand.New(rand.NewPCG(1, 2)), 20)
		before := logits(t, m, ids)
		begun := m.NewSequence()
		defer begun.Close()
		forward(t, m, lm.Row{Sequence: begun, IDs: ids[:10]})
		seen := map[string]bool{m.Card().WeightsDigest: true}
		for name, with := range map[string][]lora.Weighted{
			"one": {{Adapter: first, Weight: 1}}, "less of it": {{Adapter: first, Weight: 0.4}}, "one module": {{
				Adapter: second, Weight: 1,
			}},
			"two": {{Adapter: first, Weight: 1}, {Adapter: second, Weight: -0.5}},
		} {
			n := withAdapters(t, m, with...)
			folder := merged(t, dir, with...)
			got, want := logits(t, n, ids), logits(t, open(t, folder, lm.Options{}), ids)
			if difference := relative(got, want); difference > 1e-6 {
				t.Errorf("%s, %s: %g from the weights with the adapters in them", dtype, name, difference)
			}
			if difference := relative(before, want); difference < 1e-3 {
				t.Errorf("%s, %s: %g from the checkpoint; the test would not see a lost adapter", dtype, name,
					difference)
			}
			if digest := n.Card().WeightsDigest; seen[digest] || digest != lora.WeightsDigest(m.BaseDigest(), with...) {
				t.Errorf("%s, %s: digest %s", dtype, name, digest)
			}
			seen[n.Card().WeightsDigest] = true
			whole := replaced(t, n.(lora.Adaptable[lm.Model]), folder)
			if !slices.Equal(logits(t, whole, ids), want) || whole.Card().WeightsDigest != "whole" {
				t.Errorf("%s, %s: the weights in place of the checkpoint's are not those of the folder", dtype, name)
			}
			if back := withAdapters(t, whole.(*qwen2.Model)); !slices.Equal(logits(t, back, ids), before) {
				t.Errorf("%s, %s: without them it is not the checkpoint again", dtype, name)
			}
			if again := withAdapters(t, n); again.Card().WeightsDigest != m.Card().WeightsDigest ||
				!slices.Equal(logits(t, again, ids), before) {
				t.Errorf("%s, %s: without adapters it is not the checkpoint again", dtype, name)
			}
		}
		after := make([]float32, len(before))
		forward(t, m, lm.Row{Sequence: begun, IDs: ids[10:], Logits: after})
		if !slices.Equal(before, after) || !slices.Equal(before, logits(t, m, ids)) {
			t.Errorf("%s: the checkpoint has changed", dtype)
		}
	}
}

// replaced is the model with the weights of a folder in place of its own.
func replaced(t *testing.T, m lora.Adaptable[lm.Model], dir string) lm.Model {
	t.Helper()
	full, err := lora.OpenFull(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Tensors().Check(full); err != nil {
		t.Fatal(err)
	}
	n, err := m.Replaced(full, "whole")
	if err = errors.Join(err, full.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// relative is the L2 norm of the difference by that of want.
func relative(got, want []float32) float64 {
	var difference, norm float64
	for i, w := range want {
		d := float64(got[i]) - float64(w)
		difference, norm = difference+d*d, norm+float64(w)*float64(w)
	}
	return math.Sqrt(difference / norm)
}

// Models share what no adapter changes, and whichever is closed first, the others work; what does not fit is named.
func TestAdapted_ClosedAndRefused(t *testing.T) {
	t.Parallel()
	dir := folder(t, qwen2test.Random{Seed: 5})
	m, err := qwen2.Open(dir, lm.Options{Options: model.Options{Threads: 2}})
	if err != nil {
		t.Fatal(err)
	}
	table := m.Modules()
	n := withAdapters(t, m, lora.Weighted{Adapter: adapter(t, 1, 3, table), Weight: 1})
	for name, c := range map[string]struct {
		table lora.Table
		want  string
	}{
		"module": {lora.Table{"lm_head": {259, 32}}, "lm_head"},
		"shape":  {lora.Table{"model.layers.0.mlp.down_proj": {32, 32}}, "model.layers.0.mlp.down_proj"},
	} {
		if _, err := m.Adapted(lora.Weighted{Adapter: adapter(t, 1, 3, c.table), Weight: 1}); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", name, err, c.want)
		}
	}
	ids := []int32{1, 2, 3}
	want := logits(t, n, ids)
	for range 2 { // a second Close does nothing
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := logits(t, n, ids); !slices.Equal(got, want) {
		t.Error("other logits once the model it was made from is closed")
	}
	if len(want) != 259 || slices.Max(want) == slices.Min(want) {
		t.Errorf("logits %v", want)
	}
}
