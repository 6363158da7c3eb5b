package qwen2

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"slices"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/strictjson"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// idList is a field that holds an id, a list of them, or null.
type idList []int32

// UnmarshalJSON reads a field that transformers writes as one id, as a list of them or as null,
// which leaves it as it is. Anything else is an error.
func (l *idList) UnmarshalJSON(b []byte) error {
	var one *int32
	if json.Unmarshal(b, &one) == nil {
		if one != nil {
			*l = idList{*one}
		}
		return nil
	}
	return json.Unmarshal(b, (*[]int32)(l))
}

// generationConfig holds the supported fields of generation_config.json.
type generationConfig struct {
	EOS          idList   `json:"eos_token_id"`
	Sample       bool     `json:"do_sample"`
	Temperature  *float64 `json:"temperature"`
	TopK         *int     `json:"top_k"`
	TopP         float64  `json:"top_p"`
	MinP         float64  `json:"min_p"`
	MaxNewTokens int      `json:"max_new_tokens"`
}

// generationUnused are the keys of generation_config.json that change no token.
var generationUnused = strictjson.Unused{
	"transformers_version":    "who wrote the file",
	"_from_model_config":      "who wrote the file",
	"chat_format":             "no class of transformers reads it",
	"trust_remote_code":       "no code of the folder is run",
	"bos_token_id":            "no prompt is empty",
	"pad_token_id":            "rows are not padded",
	"use_cache":               "a cache changes no result",
	"cache_implementation":    "a cache changes no result",
	"cache_config":            "a cache changes no result",
	"low_memory":              "of memory, not results",
	"output_attentions":       "what transformers returns",
	"output_hidden_states":    "what transformers returns",
	"output_scores":           "what transformers returns",
	"output_logits":           "what transformers returns",
	"return_dict_in_generate": "what transformers returns",
	"num_return_sequences":    "the group of a prompt says how many",
	"early_stopping":          "of beams, which num_beams says",
	"length_penalty":          "of beams, which num_beams says",
	"diversity_penalty":       "of beams, which num_beams says",
	"max_cache_len":           "a cache changes no result",
	"return_legacy_cache":     "a cache changes no result",
	"prefill_chunk_size":      "of memory, not results",
	"compile_config":          "of speed, not results",
	"disable_compile":         "of speed, not results",
	"decoder_start_token_id":  "of encoders and decoders",

	"continuous_batching_config":     "of speed, not results",
	"is_assistant":                   "of drafts by another model, which none gives",
	"num_assistant_tokens":           "as is_assistant",
	"num_assistant_tokens_schedule":  "as is_assistant",
	"assistant_confidence_threshold": "as is_assistant",
	"assistant_early_exit":           "as is_assistant",
	"assistant_lookbehind":           "as is_assistant",
	"target_lookbehind":              "as is_assistant",
	"max_matching_ngram_size":        "of prompt_lookup_num_tokens",
}

// unsupported has the fields of generation_config.json that change which tokens transformers draws and that are not
// supported, each with the value that changes nothing; nil: null alone.
var unsupported = map[string]any{
	"bad_words_ids": nil, "begin_suppress_tokens": nil, "encoder_no_repeat_ngram_size": 0.0,
	"encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "generation_kwargs": map[string]any{}, "use_mtp": false,
	"eta_cutoff": 0.0, "exponential_decay_length_penalty": nil, "forced_bos_token_id": nil, "forced_eos_token_id": nil,
	"guidance_scale": 1.0, "min_length": 0.0, "min_new_tokens": 0.0, "no_repeat_ngram_size": 0.0, "num_beams": 1.0,
	"penalty_alpha": 0.0, "repetition_penalty": 1.0, "sequence_bias": nil, "suppress_tokens": nil, "typical_p": 1.0,
	"dola_layers": nil, "force_words_ids": nil, "constraints": nil, "forced_decoder_ids": nil, "max_length": 20.0,
	"max_time": nil, "num_beam_groups": 1.0, "prompt_lookup_num_tokens": nil, "remove_invalid_values": false,
	"renormalize_logits": false, "stop_strings": nil, "top_h": nil, "token_healing": false, "watermarking_config": nil,
}

// ignoredFields returns a note for each field of a generation_config.json that changes how transformers draws tokens
// and is ignored here, by name.
func ignoredFields(file string, fields map[string]any) (notes []string) {
	for _, name := range slices.Sorted(maps.Keys(unsupported)) {
		if v := fields[name]; v != nil && !reflect.DeepEqual(v, unsupported[name]) {
			text, _ := json.Marshal(v) // it was read from JSON
			notes = append(notes, fmt.Sprintf("%s: %s: %s is not supported and is ignored", file, name, text))
		}
	}
	return notes
}

// defaultTopK is the top_k of transformers if a generation_config.json has none. defaultMaxNewTokens is our own:
// transformers ends a sequence, prompt included, after 20 tokens.
const (
	defaultTopK         = 50
	defaultMaxNewTokens = 128
)

// params returns how tokens are drawn if a prompt does not say: as transformers reads
// generation_config.json, greedily without do_sample.
func (g *generationConfig) params() decoding.Params {
	p := decoding.Params{TopP: g.TopP, MinP: g.MinP, Temperature: 1, TopK: defaultTopK}
	if g.Temperature != nil {
		p.Temperature = *g.Temperature
	}
	if g.TopK != nil {
		p.TopK = *g.TopK
	}
	if !g.Sample {
		return decoding.Params{TopP: 1}
	}
	return p
}

// configs holds the configurations of a folder.
type configs struct {
	decoder    *nn.DecoderConfig
	generation generationConfig
	notes      []string
	reward     []string
}

// readConfigs reads and checks the configurations of a folder. Every setting that changes results and is not
// supported is an error, or a note if it only concerns how tokens are drawn.
func readConfigs(folder *safetensors.Folder) (*configs, error) {
	// The defaults of Qwen2Config of transformers, for files that leave fields out.
	c := &configs{decoder: &nn.DecoderConfig{
		Vocabulary: 151936, Width: 4096, Intermediate: 22016, Layers: 32, Heads: 32, KVHeads: 32, MaxPositions: 32768,
		Epsilon: 1e-6, Theta: 10000, Activation: "silu",
	}}
	var top struct {
		Architectures []string `json:"architectures"`
		Type          string   `json:"model_type"`
		EOS           idList   `json:"eos_token_id"`
		Quant         any      `json:"quantization_config"`
	}
	if err := nn.ReadJSON(folder, lm.ConfigFile, nn.DecoderUnused, c.decoder, &top); err != nil {
		return nil, err
	}
	var f nn.Faults
	f.Check(slices.Contains(top.Architectures, class), "architectures: %q; must have %s", top.Architectures, class)
	f.Check(top.Type == "qwen2", "model_type: %q; must be qwen2", top.Type)
	f.Check(top.Quant == nil, "quantization_config: not supported")
	c.decoder.Check(&f, 1)
	if err := f.Of(lm.ConfigFile); err != nil {
		return nil, err
	}
	file := "generation_config.json"
	fields, unused := map[string]any{}, generationUnused.With(nil)
	for name := range unsupported {
		unused[name] = "ignoredFields says so"
	}
	switch err := errors.Join(nn.ReadJSON(folder, file, unused, &c.generation),
		nn.ReadOptionalJSON(folder, file, nn.Elsewhere, &fields)); {
	case errors.Is(err, fs.ErrNotExist): // transformers takes what config.json has of it
		file, c.generation = lm.ConfigFile, generationConfig{Sample: true, TopK: new(int)}
		if err := nn.ReadJSON(folder, file, nn.Elsewhere, &c.generation, &fields); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	}
	if c.generation.EOS == nil {
		c.generation.EOS = top.EOS
	}
	c.notes = ignoredFields(file, fields)
	for _, id := range c.generation.EOS {
		f.Check(id >= 0 && int(id) < c.decoder.Vocabulary, "eos_token_id: %d; must be below vocab_size = %d", id,
			c.decoder.Vocabulary)
	}
	f.Check(len(c.generation.EOS) > 0, "eos_token_id: none; must be there, or in %s", lm.ConfigFile)
	f.Check(c.generation.MaxNewTokens >= 0, "max_new_tokens: %d; must be at least 0", c.generation.MaxNewTokens)
	f.Check(c.generation.params().Validate() == nil, "%w", c.generation.params().Validate())
	if err := f.Of(file); err != nil {
		return nil, err
	}
	var defaults struct {
		Reward []string `json:"reward"`
	}
	err := nn.ReadOptionalJSON(folder, nn.DefaultsFile, nil, &defaults)
	c.reward = defaults.Reward
	return c, err
}

// card returns the card that describes the model to others, without the fields that need the
// weights: digest and backend. positions is the longest sequence, cacheTokens the tokens that the
// cache holds.
func (c *configs) card(dir string, positions, cacheTokens int) lm.Card {
	newTokens := c.generation.MaxNewTokens
	if newTokens == 0 {
		newTokens = defaultMaxNewTokens
	}
	return lm.Card{
		Name: model.NameOf(dir), Source: hub.Source(dir), Family: familyName, Vocabulary: c.decoder.Vocabulary,
		MaxPositions: positions, EOS: c.generation.EOS, Params: c.generation.params(), MaxNewTokens: newTokens,
		Reward: c.reward, Notes: c.notes, CacheTokens: cacheTokens,
	}
}

// fitTokenizer checks that every token has an embedding.
func (c *configs) fitTokenizer(t *tokenizer.Tokenizer) error {
	if t.Size() > c.decoder.Vocabulary {
		return fmt.Errorf("tokenizer: %d tokens; must be at most vocab_size, %d", t.Size(), c.decoder.Vocabulary)
	}
	return nil
}

// newDigest returns a digest of all files, except the weights, that change ids or logits.
func newDigest(folder *safetensors.Folder) (*safetensors.Digest, error) {
	d := safetensors.NewDigest()
	return d, d.Files(folder, tokenizer.MaxFile, lm.ConfigFile, "chat_template.jinja",
		"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json")
}
