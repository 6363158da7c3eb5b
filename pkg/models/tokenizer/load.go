package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// Bounds of tokenizer files. The published Qwen2 vocabulary has 151,643 entries and
// 151,387 merges in files of 1.7 to 7 MB.
const (
	// MaxFile bounds a file of a tokenizer, in bytes.
	MaxFile = 64 << 20
	// MaxVocabulary bounds the entries of a vocabulary.
	MaxVocabulary  = 1 << 20
	maxAddedTokens = 4096
	maxTokenBytes  = 4096
)

// The files of a tokenizer beside tokenizer.json, or vocab.json and merges.txt.
const (
	combinedName = "tokenizer.json"
	configFile   = "tokenizer_config.json"
	addedFile    = "added_tokens.json"
	specialFile  = "special_tokens_map.json"
)

// Load reads a tokenizer folder: tokenizer.json, or vocab.json with merges.txt, and the files beside them. A setting
// that is not supported exactly, and a key that is not known, are errors that name file and field.
func Load(dir string) (*Tokenizer, error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, fmt.Errorf("open tokenizer: %w", err)
	}
	t, err := Read(folder, ".")
	return t, errors.Join(err, folder.Close())
}

// Read reads the tokenizer in the folder dir inside folder: from tokenizer.json, or from vocab.json
// and merges.txt, with their configurations. Families call it when they open a model. Files that
// are missing or do not fit together, and settings that would give other ids than the reference
// implementations, are errors.
func Read(folder *safetensors.Folder, dir string) (*Tokenizer, error) {
	var f tokenizerFiles
	for _, part := range []struct {
		name string
		data *[]byte
	}{
		{combinedName, &f.combined},
		{"vocab.json", &f.vocab},
		{"merges.txt", &f.merges},
		{configFile, &f.config},
		{addedFile, &f.added},
		{specialFile, &f.special},
	} {
		data, err := folder.Read(path.Join(dir, part.name), MaxFile)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		*part.data = data
	}
	t, err := f.parse()
	if err != nil {
		return nil, fmt.Errorf("tokenizer %s: %w", dir, err)
	}
	return t, nil
}

// tokenizerFiles holds the contents of the files of a tokenizer, nil for a missing one.
type tokenizerFiles struct{ combined, vocab, merges, config, added, special []byte }

// parse builds the tokenizer from its files. tokenizer.json, if there, replaces vocab.json and merges.txt.
func (f *tokenizerFiles) parse() (*Tokenizer, error) {
	vocab := map[string]int64{}
	var merges [][2]string
	var added []addedSpec
	switch {
	case f.combined != nil:
		file, err := parseCombined(f.combined)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", combinedName, err)
		}
		vocab, merges, added = file.Model.Vocab, file.Model.Merges, file.AddedTokens
	case f.vocab != nil && f.merges != nil:
		if err := strictjson.Unmarshal(f.vocab, nil, &vocab); err != nil {
			return nil, fmt.Errorf("vocab.json: %w", err)
		}
		var err error
		if merges, err = parseMerges(f.merges); err != nil {
			return nil, fmt.Errorf("merges.txt: %w", err)
		}
	default:
		return nil, errors.New("neither tokenizer.json nor vocab.json with merges.txt")
	}
	added, err := f.addedTokens(vocab, added)
	if err != nil {
		return nil, err
	}
	return newTokenizer(vocab, merges, added)
}

// combinedFile holds the fields of tokenizer.json that change the result of Encode.
type combinedFile struct {
	AddedTokens []addedSpec `json:"added_tokens"`
	Normalizer  *struct {
		Type string `json:"type"`
	} `json:"normalizer"`
	PreTokenizer *struct {
		Type          string `json:"type"`
		Pretokenizers []struct {
			Type    string `json:"type"`
			Pattern struct {
				Regex string `json:"Regex"`
			} `json:"pattern"`
			Behavior       string `json:"behavior"`
			Invert         bool   `json:"invert"`
			AddPrefixSpace bool   `json:"add_prefix_space"`
			UseRegex       bool   `json:"use_regex"`
		} `json:"pretokenizers"`
	} `json:"pre_tokenizer"`
	PostProcessor *struct {
		Type    string         `json:"type"`
		Single  []outputPart   `json:"single"`
		Pair    []outputPart   `json:"pair"`
		Special map[string]any `json:"special_tokens"`
	} `json:"post_processor"`
	Model struct {
		Type         string           `json:"type"`
		Dropout      *float64         `json:"dropout"`
		UnkToken     *string          `json:"unk_token"`
		Prefix       *string          `json:"continuing_subword_prefix"`
		Suffix       *string          `json:"end_of_word_suffix"`
		ByteFallback bool             `json:"byte_fallback"`
		IgnoreMerges bool             `json:"ignore_merges"`
		Vocab        map[string]int64 `json:"vocab"`
		Merges       mergeList        `json:"merges"`
	} `json:"model"`
}

// outputPart is what a TemplateProcessing writes: the text, or a token that it adds.
type outputPart struct {
	Sequence *struct {
		ID   string `json:"id"`
		Type int    `json:"type_id"`
	} `json:"Sequence"`
	Special json.RawMessage `json:"SpecialToken"`
}

// combinedUnused are the keys of tokenizer.json that change no id.
var combinedUnused = strictjson.Unused{
	"version":    "of the format",
	"truncation": "transformers sets it anew for each call",
	"padding":    "transformers sets it anew for each call",
	"decoder":    "text is made of the bytes of tokens, as transformers makes it for the class",
	"pre_tokenizer.pretokenizers.trim_offsets": "places in the text are not asked for",
	"post_processor.add_prefix_space":          "as trim_offsets",
	"post_processor.trim_offsets":              "as trim_offsets",
	"post_processor.use_regex":                 "as trim_offsets",
	"model.fuse_unk":                           "bytes have no unknown token",
}

// mergeList is a list of merges, each "left right" or ["left", "right"].
type mergeList [][2]string

// UnmarshalJSON reads both forms of a merge.
func (l *mergeList) UnmarshalJSON(b []byte) error {
	var items []json.RawMessage
	if err := json.Unmarshal(b, &items); err != nil {
		return err
	}
	*l = make(mergeList, len(items))
	for i, item := range items {
		var line string
		if json.Unmarshal(item, &line) == nil {
			left, right, ok := strings.Cut(line, " ")
			if !ok {
				return fmt.Errorf("merge %d: %.40q; must be two tokens", i, line)
			}
			(*l)[i] = [2]string{left, right}
			continue
		}
		var two []string
		if err := json.Unmarshal(item, &two); err != nil || len(two) != 2 {
			return fmt.Errorf("merge %d: %.40q; must be two tokens", i, item)
		}
		(*l)[i] = [2]string(two)
	}
	return nil
}

// parseCombined reads tokenizer.json. Another model, normalizer or pre_tokenizer than those of Qwen2 is an error.
func parseCombined(b []byte) (*combinedFile, error) {
	var f combinedFile
	if err := strictjson.Unmarshal(b, combinedUnused, &f); err != nil {
		return nil, err
	}
	var faults []error
	want := func(ok bool, field, format string, args ...any) {
		if !ok {
			faults = append(faults, fmt.Errorf("%s: "+format, append([]any{field}, args...)...))
		}
	}
	empty := func(s *string) bool { return s == nil || *s == "" }
	m := &f.Model
	want(m.Type == "BPE", "model.type", "%q; must be \"BPE\"", m.Type)
	want(m.Dropout == nil || *m.Dropout == 0, "model.dropout", "not supported")
	want(m.UnkToken == nil, "model.unk_token", "not supported")
	want(empty(m.Prefix), "model.continuing_subword_prefix", "not supported")
	want(empty(m.Suffix), "model.end_of_word_suffix", "not supported")
	want(!m.ByteFallback, "model.byte_fallback", "not supported")
	want(!m.IgnoreMerges, "model.ignore_merges", "not supported")
	want(f.Normalizer != nil && f.Normalizer.Type == "NFC", "normalizer", "must be NFC")
	if p := f.PreTokenizer; p == nil || p.Type != "Sequence" || len(p.Pretokenizers) != 2 {
		want(false, "pre_tokenizer", "must be the sequence Split, ByteLevel")
	} else {
		split, level := p.Pretokenizers[0], p.Pretokenizers[1]
		want(split.Type == "Split" && split.Behavior == "Isolated" && !split.Invert, "pre_tokenizer[0]",
			"must be an isolated Split")
		want(split.Pattern.Regex == qwen2Pattern, "pre_tokenizer[0].pattern", "%.80q; must be the Qwen2 pattern",
			split.Pattern.Regex)
		want(level.Type == "ByteLevel" && !level.UseRegex && !level.AddPrefixSpace, "pre_tokenizer[1]",
			"must be ByteLevel without add_prefix_space and use_regex")
	}
	if p := f.PostProcessor; p != nil {
		adds := len(p.Special) > 0 || len(p.Single) != 1 || p.Single[0].Sequence == nil
		want(p.Type == "ByteLevel" || p.Type == "TemplateProcessing" && !adds,
			"post_processor", "must add no tokens: ByteLevel, or a TemplateProcessing of the text alone")
	}
	return &f, errors.Join(faults...)
}

// parseMerges reads merges.txt: one merge a line after an optional #version line.
func parseMerges(b []byte) ([][2]string, error) {
	var merges [][2]string
	for i, line := range bytes.Split(b, []byte("\n")) {
		line = bytes.TrimRight(line, "\r")
		if len(line) == 0 || i == 0 && bytes.HasPrefix(line, []byte("#version")) {
			continue
		}
		left, right, ok := strings.Cut(string(line), " ")
		if !ok || left == "" || right == "" || strings.Contains(right, " ") {
			return nil, fmt.Errorf("line %d: %.40q; must be two tokens", i+1, line)
		}
		if len(merges) == MaxVocabulary {
			return nil, fmt.Errorf("more than %d merges", MaxVocabulary)
		}
		merges = append(merges, [2]string{left, right})
	}
	return merges, nil
}

// newTokenizer checks the parts and builds the tables.
func newTokenizer(vocab map[string]int64, merges [][2]string, added []addedSpec) (*Tokenizer, error) {
	if len(vocab) > MaxVocabulary || len(merges) > MaxVocabulary || len(added) > maxAddedTokens {
		return nil, fmt.Errorf("%d tokens, %d merges, %d added tokens; must be at most %d, %d and %d",
			len(vocab), len(merges), len(added), MaxVocabulary, MaxVocabulary, maxAddedTokens)
	}
	t := &Tokenizer{merges: make(map[pair]merge, len(merges)), added: map[int32]string{}, special: map[int32]bool{}}
	special := make(map[string]bool, len(added))
	for _, a := range added {
		switch {
		case a.Content == "" || len(a.Content) > maxTokenBytes:
			return nil, fmt.Errorf("added token %.40q; must be 1 to %d bytes", a.Content, maxTokenBytes)
		case a.stripped() != nil:
			return nil, a.stripped()
		}
		id := int32(*a.ID)
		if other, ok := t.added[id]; ok && other != a.Content {
			return nil, fmt.Errorf("added tokens %.40q and %.40q have the same id %d", other, a.Content, id)
		}
		t.added[id] = a.Content
		t.special[id] = a.Special
		special[a.Content] = true
		if a.Normalized != nil && *a.Normalized {
			t.normed = append(t.normed, addedToken{nfc(a.Content), id})
		} else {
			t.raw = append(t.raw, addedToken{a.Content, id})
		}
	}
	for _, list := range [][]addedToken{t.raw, t.normed} {
		slices.SortFunc(list, func(a, b addedToken) int {
			return cmp.Or(cmp.Compare(len(b.content), len(a.content)), strings.Compare(a.content, b.content))
		})
	}

	size := 0
	for token, id := range vocab {
		if id < 0 || id >= MaxVocabulary {
			return nil, fmt.Errorf("token %.40q: id %d not in [0, %d)", token, id, MaxVocabulary)
		}
		size = max(size, int(id)+1)
	}
	t.tokens = make([]string, size)
	for token, id := range vocab {
		text, ok := fromByteLevel(token)
		if !ok {
			if special[token] { // spelled as it is, not in the byte alphabet
				continue
			}
			return nil, fmt.Errorf("token %.40q: not in the byte-level alphabet", token)
		}
		if len(text) == 0 || len(text) > maxTokenBytes {
			return nil, fmt.Errorf("token %.40q; must be 1 to %d bytes", token, maxTokenBytes)
		}
		if t.tokens[id] != "" {
			return nil, fmt.Errorf("tokens %.40q and %.40q have the same id %d", token, toByteLevel(t.tokens[id]), id)
		}
		t.tokens[id] = text
	}
	for b := range 256 {
		id, ok := vocab[toByteLevel(string([]byte{byte(b)}))]
		if !ok {
			return nil, fmt.Errorf("the vocabulary lacks byte 0x%02x", b)
		}
		t.bytes[b] = int32(id)
	}
	for rank, m := range merges {
		left, okLeft := vocab[m[0]]
		right, okRight := vocab[m[1]]
		id, ok := vocab[m[0]+m[1]]
		if !okLeft || !okRight || !ok {
			return nil, fmt.Errorf("merge %d: %.40q, %.40q or both joined is not in the vocabulary", rank, m[0], m[1])
		}
		t.merges[pair{int32(left), int32(right)}] = merge{rank: int32(rank), id: int32(id)}
	}
	return t, nil
}
