package tokenizer_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// variants are tokenizer folders with changed settings, and what transformers makes of them (testdata/variants.py).
type variants struct {
	Transformers string   `json:"transformers"`
	Texts        []string `json:"texts"`
	Variants     []struct {
		Name    string              `json:"name"`
		Changes [][]json.RawMessage `json:"changes"`
		IDs     [][2][]int32        `json:"ids"`
	} `json:"variants"`
}

const variantBase = "../../../deploy/models/sums"

// Whatever is changed in a tokenizer's files, the ids are those of transformers, or the folder is refused by the name
// of the setting. With MEANDER_PYTHON it asks transformers again.
func TestLoad_VariantsOfTransformers(t *testing.T) {
	t.Parallel()
	record, err := os.ReadFile("testdata/variants.json")
	if err != nil {
		t.Fatal(err)
	}
	if python := os.Getenv("MEANDER_PYTHON"); python != "" &&
		exec.CommandContext(t.Context(), python, "-c", "import transformers").Run() == nil {
		if record, err = exec.CommandContext(t.Context(), python, "testdata/variants.py",
			variantBase).Output(); err != nil {
			t.Fatal(err)
		}
	}
	var all variants
	if err := json.Unmarshal(record, &all); err != nil {
		t.Fatal(err)
	}
	refused := map[string]string{
		"split_special_tokens": "split_special_tokens", "add_prefix_space": "add_prefix_space",
		"add_bos_token": "add_bos_token", "add_eos_token": "add_eos_token", "truncation_side": "truncation_side",
		"another class": "tokenizer_class", "Llama class": "tokenizer_class", "post-processor": "post_processor",
		"added_tokens.json with a gap": "without a gap", "decoder with a gap": "without a gap",
		"decoder with another id": "has id 307, elsewhere 263", "extra token is new": "<tool>",
		"model's own token is new": "<tool>", "decoder lacks one": "without a gap",
		"both kinds of extra tokens": "additional_special_tokens", "normalizer NFKC": "normalizer",
		"normalizer NFKC, its class": "normalizer", "normalizer of two": "normalizer.normalizers",
		"no normalizer": "normalizer", "prefix space in the file": "pre_tokenizer[1]",
		"special_tokens_map.json alone":    "special_tokens_map.json: token \"user\"",
		"extra in special_tokens_map.json": "special_tokens_map.json: additional_special_tokens",
		"ignore_merges":                    "model.ignore_merges", "model.unk_token": "model.unk_token",
	}
	for _, v := range all.Variants {
		t.Run(v.Name, func(t *testing.T) {
			t.Parallel()
			tok, err := tokenizer.Load(changedFolder(t, v.Changes))
			name, setting := refused[v.Name], strings.Split(v.Name, ",")[0]
			if setting == "lstrip" || setting == "rstrip" || setting == "single_word" {
				name = setting
			}
			if name != "" || err != nil {
				if err == nil || name == "" || !strings.Contains(err.Error(), name) {
					t.Errorf("%v; want an error with %q", err, name)
				}
				return
			}
			for i, want := range v.IDs {
				for _, want := range want {
					if got, err := tok.Encode(all.Texts[i]); err != nil || !slices.Equal(got, want) {
						t.Errorf("%q: %v, %v; transformers %s has %v", all.Texts[i], got, err, all.Transformers, want)
					}
				}
			}
		})
	}
}

// changedFolder returns the tokenizer of variantBase with changes [file, path, value].
func changedFolder(t *testing.T, changes [][]json.RawMessage) string {
	t.Helper()
	files := map[string]any{}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := os.ReadFile(filepath.Join(variantBase, name))
		if err != nil {
			t.Fatal(err)
		}
		var whole any
		if err := json.Unmarshal(data, &whole); err != nil {
			t.Fatal(err)
		}
		files[name] = whole
	}
	for _, c := range changes {
		var file string
		var path []any
		if err := json.Unmarshal(c[0], &file); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(c[1], &path); err != nil {
			t.Fatal(err)
		}
		if len(path) == 0 {
			delete(files, file)
			continue
		}
		var value any
		if len(c) > 2 {
			if err := json.Unmarshal(c[2], &value); err != nil {
				t.Fatal(err)
			}
		}
		if files[file] == nil {
			files[file] = map[string]any{}
		}
		files[file] = set(files[file], path, value, len(c) > 2)
	}
	dir := t.TempDir()
	for name, whole := range files {
		data, err := json.Marshal(whole)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// set returns node with a value at a path below it, or without what is there.
func set(node any, path []any, value any, there bool) any {
	switch {
	case len(path) == 0:
		return value
	case len(path) == 1 && !there:
		delete(node.(map[string]any), path[0].(string))
		return node
	}
	switch n := node.(type) {
	case []any:
		i := int(path[0].(float64))
		if i == len(n) {
			n = append(n, nil)
		}
		n[i] = set(n[i], path[1:], value, there)
		return n
	case map[string]any:
		n[path[0].(string)] = set(n[path[0].(string)], path[1:], value, there)
		return n
	}
	return value
}
