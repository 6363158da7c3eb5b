package tokenizer

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

// FuzzTokenizerFiles parses hostile tokenizer files: an error, or a tokenizer that encodes
// and decodes.
func FuzzTokenizerFiles(f *testing.F) {
	dir := filepath.Join(checkpoint.Dir(f, checkpoint.Config{}), "tokenizer")
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
