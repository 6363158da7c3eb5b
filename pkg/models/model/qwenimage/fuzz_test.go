package qwenimage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor/reference"
)

// FuzzConfigs reads hostile configurations and holds checkpoints against them: errors, in
// memory bounded by the files, never a panic.
func FuzzConfigs(f *testing.F) {
	dir := checkpoint.Dir(f, checkpoint.Config{})
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
	names := []string{"text_encoder/config.json", "transformer/config.json", "vae/config.json", nn.DefaultsFile}
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
			l := nn.NewLoader(archives[0], reference.Device{})
			loadTextEncoder(l, c.text)
			_ = l.Finish()
		}
		if c.transformer != nil {
			l := nn.NewLoader(archives[1], reference.Device{})
			loadMMDiT(l, c.transformer)
			_ = l.Finish()
		}
		if c.vae != nil {
			l := nn.NewLoader(archives[2], reference.Device{})
			loadAutoencoder(l, c.vae)
			_ = l.Finish()
		}
		if err == nil {
			var o Options
			_ = o.setDefaults(&c.defaults)
		}
	})
}
