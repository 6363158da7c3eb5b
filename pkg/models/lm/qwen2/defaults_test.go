package qwen2

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

func configsOf(t *testing.T, config, generation string) *configs {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"config.json": config, "generation_config.json": generation} {
		if text == "" {
			continue // no such file
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = folder.Close() }()
	c, err := readConfigs(folder)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const least = `{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "eos_token_id": 7`

// What a file leaves out is what the classes of transformers have, recorded by deploy/golden/make_defaults.py.
func TestConfig_DefaultsOfTransformers(t *testing.T) {
	data, err := os.ReadFile("testdata/defaults.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Classes struct {
			Qwen2Config      map[string]any
			GenerationConfig struct {
				Temperature float64
				TopK        int     `json:"top_k"`
				TopP        float64 `json:"top_p"`
				DoSample    bool    `json:"do_sample"`
			}
		}
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	want := golden.Classes.Qwen2Config
	rope, ok := want["rope_parameters"].(map[string]any)
	if !ok {
		t.Fatalf("rope_parameters: %v", want["rope_parameters"])
	}
	want["rope_theta"] = rope["rope_theta"]
	c := configsOf(t, least+`}`, `{"do_sample": true}`)
	data, err = json.Marshal(c.decoder)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	compared := 0
	for field, value := range got {
		if w, ok := want[field]; ok && field != "rope_parameters" {
			compared++
			if !reflect.DeepEqual(value, w) {
				t.Errorf("%s: %v, want %v", field, value, w)
			}
		}
	}
	if compared < 12 {
		t.Errorf("%d fields compared, want 12", compared)
	}
	g := golden.Classes.GenerationConfig
	if p := c.generation.params(); p != (decoding.Params{Temperature: g.Temperature, TopK: g.TopK}) || g.TopP != 1 {
		t.Errorf("tokens are drawn with %+v, want %+v", p, g)
	}
	if c = configsOf(t, least+`}`, `{}`); c.generation.params() != (decoding.Params{TopP: 1}) || g.DoSample {
		t.Errorf("tokens are drawn with %+v, want greedily", c.generation.params())
	}
}

// Heads of keys that are null are as many as there are heads.
func TestConfig_NullHeads(t *testing.T) {
	c := configsOf(t, least+`, "num_attention_heads": 16, "num_key_value_heads": null}`, `{}`)
	if c.decoder.KVHeads != 16 {
		t.Errorf("%d heads of keys, want 16", c.decoder.KVHeads)
	}
	if c = configsOf(t, least+`, "num_key_value_heads": 8}`, `{}`); c.decoder.KVHeads != 8 {
		t.Errorf("%d heads of keys, want 8", c.decoder.KVHeads)
	}
}

// What transformers writes into every file, with its own defaults, changes nothing; a file says which settings of
// drawing are not those. Without a generation_config.json those of config.json count, as in transformers.
func TestConfig_AllThatTransformersWrites(t *testing.T) {
	const of4 = `"max_length": 20, "min_length": 0, "do_sample": false, "early_stopping": false, "num_beams": 1,
		"diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "length_penalty": 1.0,
		"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": null, "num_return_sequences": 1,
		"remove_invalid_values": false, "repetition_penalty": 1.0, "decoder_start_token_id": null, "num_beam_groups": 1`
	const config = least + `, "is_encoder_decoder": false, "id2label": {"0": "LABEL_0"}, "pruned_heads": {},
		"torchscript": false, "auto_map": null, ` + of4 + `}`
	generation := `{` + of4 + `, "generation_kwargs": {}, "is_assistant": false, "num_assistant_tokens": 20,
		"assistant_confidence_threshold": 0.4, "compile_config": null, "disable_compile": false, "use_mtp": null,
		"speculation_type": null, "max_cache_len": null}`
	c := configsOf(t, config, generation)
	if len(c.notes) > 0 || c.generation.params() != (decoding.Params{TopP: 1}) {
		t.Errorf("%q, tokens are drawn with %+v; want no notes, and greedily", c.notes, c.generation.params())
	}
	c = configsOf(t, least+`, "do_sample": true, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.3}`, "")
	want := decoding.Params{Temperature: 0.5, TopK: 7}
	if len(c.notes) != 1 || !strings.HasPrefix(c.notes[0], "config.json: repetition_penalty: 1.3 ") ||
		c.generation.params() != want {
		t.Errorf("%q, tokens are drawn with %+v; want one note and %+v", c.notes, c.generation.params(), want)
	}
}
