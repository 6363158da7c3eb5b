package tokenizer_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"
	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// Goldens in testdata/golden come from deploy/golden/make_golden.py; versions and seed
// are in its meta.json. They lie with the checkpoints that they were made with.
const golden = "../model/qwenimage/testdata/golden"

func loadTokenizer(t testing.TB, name string) *tokenizer.Tokenizer {
	t.Helper()
	tok, err := tokenizer.Load(filepath.Join(golden, name, "tokenizer"))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// gunzip yields the lines of a compressed golden.
func gunzip(t testing.TB, name string, f func(line []byte)) {
	t.Helper()
	file, err := os.Open(filepath.Join(golden, name))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	z, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	s := bufio.NewScanner(z)
	s.Buffer(nil, 1<<22)
	for s.Scan() {
		f(s.Bytes())
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
}

func TestTokenizer_Encode_equalsReference(t *testing.T) {
	full, half := loadTokenizer(t, "full"), loadTokenizer(t, "half")
	lines, wrong := 0, 0
	gunzip(t, "corpus.jsonl.gz", func(line []byte) {
		var c struct {
			text string
			want [2][]int32
		}
		if err := json.Unmarshal(line, &[]any{&c.text, &c.want[0], &c.want[1]}); err != nil {
			t.Fatal(err)
		}
		lines++
		for i, tok := range []*tokenizer.Tokenizer{full, half} {
			got, err := tok.Encode(c.text)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, c.want[i]) {
				if wrong++; wrong < 10 {
					t.Errorf("tokenizer %d: Encode(%+q)\n got %v\nwant %v", i, c.text, got, c.want[i])
				}
			}
		}
	})
	if wrong > 0 {
		t.Errorf("%d of %d texts differ", wrong, 2*lines)
	}
	if lines < 1000 {
		t.Errorf("corpus of %d texts: want at least 1000", lines)
	}
}

func TestTokenizer_Decode_roundTrips(t *testing.T) {
	tok := loadTokenizer(t, "full")
	rapid.Check(t, func(t *rapid.T) {
		pieces := rapid.SliceOf(rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
			"<|im_end|>", " ", "\n", "'s", "e\u0301", "the", "  ", "\r\n", "가", "12",
		}))).Draw(t, "pieces")
		// Normalization stops at special tokens, so compare what is between them.
		text := norm.NFC.String(strings.Join(pieces, ""))
		ids, err := tok.Encode(text)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tok.Decode(ids)
		if err != nil {
			t.Fatal(err)
		}
		if got != text {
			t.Errorf("Decode(Encode(%+q)) = %+q", text, got)
		}
		for _, id := range ids {
			if int(id) >= tok.Size() {
				t.Errorf("id %d of %d", id, tok.Size())
			}
		}
	})
}

func TestTokenizer_Encode_refusesInvalidUTF8(t *testing.T) {
	if ids, err := loadTokenizer(t, "full").Encode("a\xffb"); err == nil {
		t.Errorf("Encode = %v: want an error", ids)
	}
}

func TestTokenizer_Encode_longWord(t *testing.T) {
	tok := loadTokenizer(t, "full")
	text := strings.Repeat("signthe", 1<<16)
	ids, err := tok.Encode(text)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := tok.Decode(ids); err != nil || got != text {
		t.Errorf("round trip of a word of %d bytes: %v", len(text), err)
	}
}

func TestLoadTokenizer_refuses(t *testing.T) {
	dir := filepath.Join(golden, "half", "tokenizer")
	files := map[string]string{}
	for _, name := range []string{"vocab.json", "merges.txt", "tokenizer_config.json"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = string(b)
	}
	combined, err := os.ReadFile(filepath.Join(golden, "full", "tokenizer", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, file, old, new string
		want                 string // in the error
	}{
		{"no files", "vocab.json", "", "", "neither tokenizer.json"},
		{"vocabulary not JSON", "vocab.json", "{", "", "vocab.json"},
		{"id too large", "vocab.json", `"!": 0`, `"!": 99999999`, "id 99999999"},
		{"negative id", "vocab.json", `"!": 0`, `"!": -1`, "id -1"},
		{"same id twice", "vocab.json", `"!": 0`, `"!": 1`, "same id 1"},
		{"byte missing", "vocab.json", `"!": 0`, `"!!!!": 0`, "lacks byte 0x21"},
		{"not byte level", "vocab.json", `"!": 0`, `"\u4e00": 0`, "byte-level alphabet"},
		{"merge of three", "merges.txt", "\n", "\na b c\n", "line 2"},
		{"merge of one", "merges.txt", "\n", "\nab\n", "line 2"},
		{"merge unknown", "merges.txt", "\n", "\n! !\n", "not in the vocabulary"},
		{"stripping token", "tokenizer_config.json", `"rstrip": false`, `"rstrip": true`, "rstrip"},
		{"prefix space", "tokenizer_config.json", `"add_prefix_space": null`, `"add_prefix_space": true`, "add_prefix_space"},
		{"special without id", "tokenizer_config.json", `"unk_token": "<|endoftext|>"`, `"unk_token": "<unk>"`, "<unk>"},
		{"other model", "tokenizer.json", `"BPE"`, `"Unigram"`, "model.type"},
		{"other normalizer", "tokenizer.json", `"NFC"`, `"NFKC"`, "normalizer"},
		{"other pattern", "tokenizer.json", `'ll|'d)`, `'ll)`, "pre_tokenizer[0].pattern"},
		{"other order", "tokenizer.json", `"ByteLevel"`, `"Whitespace"`, "pre_tokenizer[1]"},
		{"dropout", "tokenizer.json", `"dropout": null`, `"dropout": 0.1`, "model.dropout"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			all := map[string]string{"tokenizer.json": string(combined)}
			if tt.file != "tokenizer.json" {
				all = files
			}
			for name, text := range all {
				if name == tt.file {
					if tt.old == "" {
						continue
					}
					changed := strings.Replace(text, tt.old, tt.new, 1)
					if changed == text {
						t.Fatalf("%q not in %s", tt.old, name)
					}
					text = changed
				}
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if _, ok := all[tt.file]; !ok {
				if err := os.WriteFile(filepath.Join(dir, tt.file), []byte(tt.new), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := tokenizer.Load(dir)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func FuzzTokenizer(f *testing.F) {
	tok := loadTokenizer(f, "half")
	for _, s := range []string{"", "a sign", "it's\n\n 12 \u4f60<|im_end|>", "e\u0301\u0323", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ids, err := tok.Encode(s)
		if err != nil {
			return
		}
		if _, err := tok.Decode(ids); err != nil {
			t.Error(err)
		}
	})
}
