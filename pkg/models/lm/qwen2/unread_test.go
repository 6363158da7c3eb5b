package qwen2_test

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/modeltest"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// A key that nothing knows, in any file of a folder, is refused by name, by whatever opens the folder.
func TestOpen_RefusesUnknownKeys(t *testing.T) {
	t.Parallel()
	modeltest.Unread(t, sums, map[string]string{
		"tokenizer.json:.decoder":                      "text is made of the bytes of tokens",
		"tokenizer.json:.model.vocab$":                 "its keys are tokens; ids that do not fit are refused",
		"tokenizer_config.json:.added_tokens_decoder$": "its keys are ids; one that is none is refused",
	}, func(dir string) error {
		_, err := qwen2.Family().Language(dir)
		info, inspectErr := qwen2.Family().Inspect(dir)
		if inspectErr != nil {
			return inspectErr
		}
		if err == nil || len(info.Problems) == 0 {
			return nil
		}
		return errors.New(strings.Join(info.Problems, "; "))
	})
}

// changedTensors returns a copy of sums whose tensors change has changed.
func changedTensors(t *testing.T, change func([]safetensors.Tensor) []safetensors.Tensor) string {
	t.Helper()
	a, err := safetensors.Open(filepath.Join(sums, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close() }()
	var tensors []safetensors.Tensor
	for _, name := range a.Names() {
		info, _ := a.Info(name)
		data, err := a.Bytes(name)
		if err != nil {
			t.Fatal(err)
		}
		tensors = append(tensors, safetensors.Tensor{
			Name: name, DType: info.DType, Shape: info.Shape, Data: slices.Clone(data),
		})
	}
	dir := t.TempDir()
	files, err := filepath.Glob(filepath.Join(sums, "*.js*"))
	chat, err2 := filepath.Glob(filepath.Join(sums, "*.jinja"))
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, chat...) {
		data, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(file)), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), change(tensors), nil); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A tensor that no part of the network takes is refused by name.
func TestOpen_RefusesUnknownTensors(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"strange":                                      "strange",
		"model.layers.4.mlp.up_proj.weight":            "model.layers.4.mlp.up_proj.weight",
		"model.layers.0.self_attn.o_proj.bias":         "model.layers.0.self_attn.o_proj.bias",
		"model.layers.0.self_attn.q_norm.weight":       "model.layers.0.self_attn.q_norm.weight",
		"lm_head.bias":                                 "lm_head.bias",
		"model.rotary_emb.inv_freq":                    "",
		"model.layers.1.self_attn.rotary_emb.inv_freq": "",
	} {
		dir := changedTensors(t, func(all []safetensors.Tensor) []safetensors.Tensor {
			extra, err := safetensors.FloatTensor(name, tensor.F32, []int{2}, []float32{1, 2})
			if err != nil {
				t.Fatal(err)
			}
			return append(all, extra)
		})
		m, err := qwen2.Open(dir, lm.Options{Options: model.Options{Threads: 1}})
		if err == nil {
			_ = m.Close()
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v; want %q", name, err, want)
		}
	}
}

// A head in the files of a tied configuration is used, as transformers does: equal to the embedding it changes nothing.
func TestOpen_HeadOfATiedConfiguration(t *testing.T) {
	t.Parallel()
	logits := func(change func([]safetensors.Tensor) []safetensors.Tensor) []float32 {
		m, err := qwen2.Open(changedTensors(t, change), lm.Options{Options: model.Options{Threads: 1}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = m.Close() }()
		s := m.NewSequence()
		defer s.Close()
		out := make([]float32, m.Card().Vocabulary)
		forward(t, m, lm.Row{Sequence: s, IDs: []int32{16, 10, 16, 28}, Logits: out})
		return out
	}
	head := func(all []safetensors.Tensor) safetensors.Tensor {
		for _, x := range all {
			if x.Name == "model.embed_tokens.weight" {
				x.Name, x.Data = "lm_head.weight", slices.Clone(x.Data)
				return x
			}
		}
		t.Fatal("no embedding")
		return safetensors.Tensor{}
	}
	tied := logits(func(all []safetensors.Tensor) []safetensors.Tensor { return all })
	same := logits(func(all []safetensors.Tensor) []safetensors.Tensor { return append(all, head(all)) })
	other := logits(func(all []safetensors.Tensor) []safetensors.Tensor {
		h := head(all)
		for i := 1; i < len(h.Data); i += 2 {
			h.Data[i] ^= 0x80 // the sign of each bf16
		}
		return append(all, h)
	})
	if !slices.Equal(tied, same) {
		t.Error("an equal head changes logits")
	}
	for i := range other {
		if math.Abs(float64(other[i]+tied[i])) > 1e-4 {
			t.Fatalf("logit %d with the head of the other sign: %v, want %v", i, other[i], -tied[i])
		}
	}
}
