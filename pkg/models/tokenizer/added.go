package tokenizer

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// addedSpec is an added token as the files write it. Without normalized it is normalized unless it is special.
type addedSpec struct {
	ID         *int64 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized *bool  `json:"normalized"`
	Special    bool   `json:"special"`
}

// sideConfig holds the fields of tokenizer_config.json that change the result of Encode.
type sideConfig struct {
	Class          string               `json:"tokenizer_class"`
	Decoder        map[string]addedSpec `json:"added_tokens_decoder"`
	AddPrefixSpace bool                 `json:"add_prefix_space"`
	AddBOS         bool                 `json:"add_bos_token"`
	AddEOS         bool                 `json:"add_eos_token"`
	SplitSpecial   bool                 `json:"split_special_tokens"`
	TruncationSide string               `json:"truncation_side"`
	named          specialNames
}

// specialNames are the fields of tokenizer_config.json and special_tokens_map.json that name special tokens: those
// whose name ends in _token, and two that hold several, of which transformers reads one.
type specialNames map[string]json.RawMessage

// specialLists are the fields that hold several special tokens, by their newer and their older name.
var specialLists = []string{"extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"}

// configUnused are the keys of tokenizer_config.json that change no id of a text.
var configUnused = strictjson.Unused{
	"added_tokens_decoder.*.__type": "of the format",
	"chat_template":                 "the family reads it, or has a template of its own",
	"response_template":             "answers are not taken apart",
	"response_schema":               "as response_template",
	"chat_control_tokens":           "transformers reads it where a caller asks to sanitize",
	"clean_up_tokenization_spaces":  "transformers ignores it for byte-level BPE",
	"errors":                        "bytes that are not UTF-8 become U+FFFD, here and in transformers",
	"model_max_length":              "the model's own limit counts",
	"max_len":                       "an older name of model_max_length",
	"max_length":                    "of a truncation, which each call sets anew",
	"stride":                        "as max_length",
	"truncation_strategy":           "as max_length",
	"padding_side":                  "rows are not padded",
	"pad_to_multiple_of":            "as padding_side",
	"pad_token_type_id":             "as padding_side",
	"model_input_names":             "of the arrays that transformers returns",
	"return_token_type_ids":         "as model_input_names",
	"processor_class":               "of a processor for images",
	"backend":                       "a library of transformers",
	"is_local":                      "where the files were",
	"local_files_only":              "as is_local",
	"name_or_path":                  "as is_local",
	"tokenizer_file":                "as is_local",
	"vocab_file":                    "as is_local",
	"merges_file":                   "as is_local",
	"special_tokens_map_file":       "as is_local",
	"files_loaded":                  "as is_local",
	"use_fast":                      "a choice of transformers 4 between two equal implementations",
	"from_slow":                     "as use_fast",
	"is_fast":                       "as use_fast",
	"trust_remote_code":             "no code of the folder is run",
	"verbose":                       "of warnings",
	"legacy":                        "of tokenizers of Llama and T5",
	"use_default_system_prompt":     "of tokenizers of Llama",
}

// parseConfig reads tokenizer_config.json; b is nil if there is no file. What would give other ids than the class
// Qwen2Tokenizer of transformers is an error.
func parseConfig(b []byte) (*sideConfig, error) {
	c := &sideConfig{named: specialNames{}}
	if b == nil {
		return c, nil
	}
	var err error
	if c.named, err = parseNames(b, configUnused, c); err != nil {
		return nil, err
	}
	var faults []error
	for _, s := range []struct {
		field string
		on    bool
	}{
		{"add_prefix_space", c.AddPrefixSpace},
		{"add_bos_token", c.AddBOS},
		{"add_eos_token", c.AddEOS},
		{"split_special_tokens", c.SplitSpecial},
	} {
		if s.on {
			faults = append(faults, fmt.Errorf("%s: true is not supported; must be false", s.field))
		}
	}
	switch strings.TrimSuffix(c.Class, "Fast") {
	case "", "Qwen2Tokenizer", "PreTrainedTokenizer", "TokenizersBackend": // transformers makes the first of all
	default:
		faults = append(faults, fmt.Errorf("tokenizer_class: %q; must be Qwen2Tokenizer", c.Class))
	}
	if c.TruncationSide != "" && c.TruncationSide != "right" {
		faults = append(faults, fmt.Errorf("truncation_side: %q; must be right", c.TruncationSide))
	}
	if len(c.Decoder) > maxAddedTokens {
		faults = append(faults, fmt.Errorf("added_tokens_decoder: more than %d tokens", maxAddedTokens))
	}
	return c, errors.Join(faults...)
}

// parseNames decodes a file into its struct, and returns the special tokens that it names.
func parseNames(b []byte, unused strictjson.Unused, into any) (specialNames, error) {
	all := map[string]json.RawMessage{}
	if err := strictjson.Unmarshal(b, nil, &all); err != nil {
		return nil, err
	}
	unused, names := unused.With(nil), specialNames{}
	for key, raw := range all {
		settings := key == "add_bos_token" || key == "add_eos_token"
		if slices.Contains(specialLists, key) || strings.HasSuffix(key, "_token") && !settings {
			names[key], unused[key] = raw, "it is read here"
		}
	}
	return names, strictjson.Unmarshal(b, unused, into)
}

// tokens returns the special tokens, each once, as the class of transformers takes them.
func (n specialNames) tokens() (contents []string, err error) {
	extra, older := n[specialLists[0]], n[specialLists[1]]
	if len(extra) > 0 && len(older) > 0 {
		a, errA := tokensIn(specialLists[0], extra)
		b, errB := tokensIn(specialLists[1], older)
		if slices.Sort(a); errors.Join(errA, errB) == nil && len(a) > 0 && len(b) > 0 {
			if slices.Sort(b); !slices.Equal(a, b) {
				return nil, fmt.Errorf("%s: other tokens than in %s, which transformers reads alone; must be the same",
					specialLists[1], specialLists[0])
			}
		}
	}
	for key, raw := range byKey(n) {
		list, err := tokensIn(key, raw)
		if err != nil {
			return nil, err
		}
		contents = append(contents, list...)
	}
	for _, key := range []string{"eos_token", "unk_token", "pad_token"} {
		if _, there := n[key]; !there {
			contents = append(contents, "<|endoftext|>") // the default of the class
		}
	}
	return contents, nil
}

// same returns an error if special_tokens_map.json would change the special tokens, which are those of
// tokenizer_config.json: it is not among the files that a digest is of.
func (n specialNames) same(file []byte, specials []string) error {
	names, err := parseNames(file, nil, &struct{}{})
	if err != nil {
		return err
	}
	both := maps.Clone(n)
	maps.Copy(both, names)
	with, err := both.tokens()
	if err != nil {
		return err
	}
	for _, content := range with {
		if !slices.Contains(specials, content) {
			return fmt.Errorf("token %.40q is not special in %s; name it there, too", content, configFile)
		}
	}
	for _, content := range specials {
		if !slices.Contains(with, content) {
			return fmt.Errorf("lacks token %.40q of %s; add it", content, configFile)
		}
	}
	return nil
}

// tokensIn returns the tokens of a field that holds a token, or a list or a map of them, each a string or an object
// with its content; null has none.
func tokensIn(key string, raw json.RawMessage) (contents []string, err error) {
	var name *string
	if json.Unmarshal(raw, &name) == nil {
		if name != nil {
			contents = []string{*name}
		}
		return contents, nil
	}
	several := map[string]json.RawMessage{}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) == nil {
		for i, item := range list {
			several[fmt.Sprintf("%03d", i)] = item
		}
	} else if err := json.Unmarshal(raw, &several); err != nil {
		return nil, fmt.Errorf("%s: %.40s; must be a token: a text, or an object with its content", key, raw)
	}
	if _, one := several["content"]; one && list == nil {
		var token addedSpec
		err := strictjson.Unmarshal(raw, strictjson.Unused{"__type": "of the format"}, &token)
		if err == nil {
			err = token.stripped()
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		return []string{token.Content}, nil
	}
	for _, item := range byKey(several) {
		more, err := tokensIn(key, item)
		if err != nil {
			return nil, err
		}
		contents = append(contents, more...)
	}
	return contents, nil
}

// stripped returns an error for a token that is matched in a way that is not supported.
func (a *addedSpec) stripped() error {
	if a.SingleWord || a.LStrip || a.RStrip {
		return fmt.Errorf("added token %.40q: single_word, lstrip and rstrip are not supported", a.Content)
	}
	return nil
}

// addedTokens returns the added tokens with the ids that transformers gives them. Where tokenizer_config.json has an
// added_tokens_decoder, that counts alone; else added_tokens.json and the list of tokenizer.json (combined) do. A
// special token without an id in any file is an error: the reference would choose one.
func (f *tokenizerFiles) addedTokens(vocab map[string]int64, combined []addedSpec) ([]addedSpec, error) {
	config, err := parseConfig(f.config)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", configFile, err)
	}
	specials, err := config.named.tokens()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", configFile, err)
	}
	if config.Decoder == nil && f.special != nil {
		if err := config.named.same(f.special, specials); err != nil {
			return nil, fmt.Errorf("%s: %w", specialFile, err)
		}
	}
	l := &addedList{vocab: vocab, at: map[string]int{}, last: -1}
	if config.Decoder != nil {
		err = l.addDecoder(config.Decoder)
	} else {
		err = l.addFiles(f.added, combined, specials)
	}
	if err != nil {
		return nil, err
	}
	for _, content := range specials {
		if _, there := l.at[content]; !there && content != "" {
			id, ok := vocab[content]
			if !ok {
				return nil, fmt.Errorf("%s: special token %.40q has no id", configFile, content)
			}
			if err := l.add(configFile, addedSpec{Content: content, ID: &id}); err != nil {
				return nil, err
			}
		}
		if content != "" {
			token := &l.tokens[l.at[content]]
			token.Special, token.Normalized = true, new(bool)
		}
	}
	return l.tokens, nil
}

// addedList collects added tokens. Each gets the id of the vocabulary, or the next one behind all others.
type addedList struct {
	vocab  map[string]int64
	tokens []addedSpec
	at     map[string]int // where in tokens, by content
	last   int64          // the largest id
}

// addDecoder adds the tokens of an added_tokens_decoder, in the order of their ids.
func (l *addedList) addDecoder(decoder map[string]addedSpec) error {
	tokens := make([]addedSpec, 0, len(decoder))
	for key, a := range byKey(decoder) {
		id, err := strconv.ParseInt(key, 10, 32)
		if err != nil {
			return fmt.Errorf("%s: added_tokens_decoder: id %.20q: %w", configFile, key, errors.Unwrap(err))
		}
		if a.ID != nil {
			return fmt.Errorf("%s: added_tokens_decoder: token %.40q: id: its key is the id", configFile, a.Content)
		}
		a.ID = &id
		tokens = append(tokens, a)
	}
	return l.addSorted(configFile, tokens)
}

// addFiles adds the tokens of added_tokens.json and tokenizer.json, in the order of their ids.
func (l *addedList) addFiles(legacy []byte, combined []addedSpec, specials []string) error {
	file, ids := combinedName, map[string]int64{}
	if legacy != nil {
		file = addedFile
		if err := strictjson.Unmarshal(legacy, nil, &ids); err != nil {
			return fmt.Errorf("%s: %w", addedFile, err)
		}
	}
	for _, a := range combined {
		if id, there := ids[a.Content]; there && a.ID != nil && id != *a.ID {
			return fmt.Errorf("%s: token %.40q has id %d, elsewhere %d", addedFile, a.Content, id, *a.ID)
		}
		delete(ids, a.Content)
	}
	tokens := slices.Clone(combined)
	for content, id := range byKey(ids) {
		tokens = append(tokens, addedSpec{Content: content, ID: &id, Special: slices.Contains(specials, content)})
	}
	return l.addSorted(file, tokens)
}

// addSorted adds tokens in the order of their ids.
func (l *addedList) addSorted(file string, tokens []addedSpec) error {
	for i := range tokens {
		if a := &tokens[i]; a.ID == nil || *a.ID < 0 || *a.ID >= 2*MaxVocabulary {
			return fmt.Errorf("%s: added token %.40q: no id, or not in [0, %d)", file, a.Content, 2*MaxVocabulary)
		}
	}
	slices.SortStableFunc(tokens, func(a, b addedSpec) int { return cmp.Compare(*a.ID, *b.ID) })
	for _, a := range tokens {
		if err := l.add(file, a); err != nil {
			return err
		}
	}
	return nil
}

// add adds a token of a file. It is an error if transformers would give it another id than the file.
func (l *addedList) add(file string, a addedSpec) error {
	id, known := l.vocab[a.Content]
	if i, there := l.at[a.Content]; there {
		id, known = *l.tokens[i].ID, true
	}
	switch {
	case known && id != *a.ID:
		return fmt.Errorf("%s: token %.40q has id %d, elsewhere %d", file, a.Content, *a.ID, id)
	case !known:
		if next := max(int64(len(l.vocab)), l.last+1); next != *a.ID {
			return fmt.Errorf("%s: token %.40q has id %d; transformers would give it %d: ids of added tokens follow "+
				"the vocabulary without a gap", file, a.Content, *a.ID, next)
		}
	}
	if a.Normalized == nil {
		normalized := !a.Special
		a.Normalized = &normalized
	}
	if _, there := l.at[a.Content]; there {
		return fmt.Errorf("%s: token %.40q stands there twice", file, a.Content)
	}
	l.at[a.Content] = len(l.tokens)
	l.tokens = append(l.tokens, a)
	l.last = max(l.last, *a.ID)
	return nil
}
