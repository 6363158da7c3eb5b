package lm_test

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/models/lm"
)

// decoded are bytes and what CPython 3.13 makes of them: bytes.decode("utf-8", errors="replace").
var decoded = []struct{ bytes, text string }{
	{"plain", "plain"},
	{"", ""},
	{"\xc3\xa9", "é"},
	{"\xe2\x82\xac uro", "€ uro"},
	{"\xf0\x9f\x98\x80", "😀"},
	{"\xff", "\ufffd"},
	{"\xc3", "\ufffd"},
	{"\xe2\x82", "\ufffd"},
	{"\xe2\x82x", "\ufffdx"},
	{"\xf0\x9f\x98", "\ufffd"},
	{"a\xf0\x9fb", "a\ufffdb"},
	{"\xc0\x80", "\ufffd\ufffd"},
	{"\xe0\x80\x80", "\ufffd\ufffd\ufffd"},
	{"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
	{"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"},
	{"\xf5\x80", "\ufffd\ufffd"},
	{"\x80\x80", "\ufffd\ufffd"},
	{"\xc3\xc3\xa9", "\ufffdé"},
	{"\xf0\x9f\xe2\x82\xac", "\ufffd€"},
}

// The text does not depend on where tokens cut the bytes.
func TestDecoder(t *testing.T) {
	for _, tt := range decoded {
		rapid.Check(t, func(t *rapid.T) {
			var d lm.Decoder
			var text strings.Builder
			for rest := tt.bytes; rest != ""; {
				n := rapid.IntRange(1, len(rest)).Draw(t, "piece")
				text.WriteString(d.Push(rest[:n]))
				rest = rest[n:]
			}
			text.WriteString(d.Flush())
			if text.String() != tt.text || d.Flush() != "" {
				t.Fatalf("%+q is %+q, want %+q", tt.bytes, text.String(), tt.text)
			}
		})
	}
}

// A complete character is not kept back.
func TestDecoder_Streams(t *testing.T) {
	var d lm.Decoder
	for i, tt := range []struct{ piece, text string }{
		{"a\xe2", "a"}, {"\x82", ""}, {"\xacb", "€b"}, {"\xf0", ""}, {"c", "\ufffdc"},
	} {
		if got := d.Push(tt.piece); got != tt.text {
			t.Errorf("piece %d gives %+q, want %+q", i, got, tt.text)
		}
	}
}

// alphabet is a language of one byte per id; other ids have no text.
type alphabet struct{ lm.Language }

func (alphabet) Piece(id int32) string {
	if id < 0 || id > 255 {
		return ""
	}
	return string([]byte{byte(id)})
}

func TestText(t *testing.T) {
	if got := lm.Text(alphabet{}, []int32{'h', 1000, 0xc3, 0xa9, 0xe2, 0x82}); got != "hé\ufffd" {
		t.Errorf("%+q", got)
	}
}

func TestCheckMessages(t *testing.T) {
	good := []lm.Message{{Role: "system"}, {Role: "user", Content: "2+2=?"}, {Role: "assistant", Content: "4"}}
	if err := lm.CheckMessages(good); err != nil {
		t.Error(err)
	}
	for want, messages := range map[string][]lm.Message{
		"no messages": nil,
		`message 1: role: "tool"; must be system, user or assistant`: {{Role: "user"}, {Role: "tool"}},
	} {
		if err := lm.CheckMessages(messages); !errors.Is(err, lm.ErrPrompt) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want an ErrPrompt with %q", err, want)
		}
	}
}
