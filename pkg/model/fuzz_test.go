package model

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/meander-rl/meander/pkg/model/modeltest"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor/reference"
)

// FuzzTokenizerFiles parses hostile tokenizer files: an error, or a tokenizer that encodes
// and decodes.
func FuzzTokenizerFiles(f *testing.F) {
	dir := filepath.Join(modeltest.Dir(f, modeltest.Config{}), "tokenizer")
	vocab, err := os.ReadFile(filepath.Join(dir, "vocab.json"))
	if err != nil {
		f.Fatal(err)
	}
	config, err := os.ReadFile(filepath.Join(dir, "tokenizer_config.json"))
	if err != nil {
		f.Fatal(err)
	}
	combined := []byte(`{"added_tokens": [{"id": 256, "content": "<|im_end|>"}], "normalizer": {"type": "NFC"}, "model": {"type": "BPE",
		"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b", ["a", "b"]]}}`)
	f.Add([]byte(nil), vocab, []byte("#version: 0.2\n"), config, []byte(nil))
	f.Add([]byte(nil), vocab, []byte("a b\n"), config, []byte(`{"<|x|>": 300}`))
	f.Add(combined, []byte(nil), []byte(nil), []byte(`{"eos_token": {"content": "ab"}}`), []byte(nil))
	f.Fuzz(func(t *testing.T, combined, vocab, merges, config, added []byte) {
		files := tokenizerFiles{vocab: vocab, merges: merges}
		if len(combined) > 0 {
			files.combined = combined
		}
		if len(config) > 0 {
			files.config = config
		}
		if len(added) > 0 {
			files.added = added
		}
		tok, err := files.parse()
		if err != nil {
			return
		}
		ids, err := tok.Encode("a red sign, 12\n<|im_end|>")
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range ids {
			if id < 0 || int(id) >= tok.Size() {
				t.Errorf("id %d of %d", id, tok.Size())
			}
		}
		if _, err := tok.Decode(ids); err != nil {
			t.Error(err)
		}
	})
}

// FuzzConfigs reads hostile configurations and holds checkpoints against them: errors, in
// memory bounded by the files, never a panic.
func FuzzConfigs(f *testing.F) {
	dir := modeltest.Dir(f, modeltest.Config{})
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = folder.Close() })
	var archives [3]*safetensors.Archive
	for i, part := range []string{"text_encoder", "transformer", "vae"} {
		if archives[i], err = folder.Archive(part); err != nil {
			f.Fatal(err)
		}
		f.Cleanup(func() { _ = archives[i].Close() })
	}
	names := []string{"text_encoder/config.json", "transformer/config.json", "vae/config.json", defaultsFile}
	var seed [4]string
	for i, name := range names {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			f.Fatal(err)
		}
		seed[i] = string(b)
	}
	f.Add(seed[0], seed[1], seed[2], seed[3])
	f.Add(`{"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 131072, "num_attention_heads": 1}}`,
		`{"num_layers": 1e9}`, `{"base_dim": 4096, "dim_mult": [64, 64]}`, `{"height": 1e18}`)
	f.Fuzz(func(t *testing.T, text, transformer, vae, defaults string) {
		for i, b := range []string{text, transformer, vae, defaults} {
			if err := os.WriteFile(filepath.Join(dir, names[i]), []byte(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		c, err := readConfigs(folder)
		if c == nil {
			t.Fatal(err) // the index is intact
		}
		if c.text != nil {
			l := newLoader(archives[0], reference.Device{})
			loadTextEncoder(l, c.text)
			_ = l.finish()
		}
		if c.transformer != nil {
			l := newLoader(archives[1], reference.Device{})
			loadMMDiT(l, c.transformer)
			_ = l.finish()
		}
		if c.vae != nil {
			l := newLoader(archives[2], reference.Device{})
			loadAutoencoder(l, c.vae)
			_ = l.finish()
		}
		if err == nil {
			var o QwenImageOptions
			_ = o.complete(&c.defaults)
		}
	})
}
