package boot_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/meander-rl/meander/services/internal/boot"
)

// hostile is what a terminal would obey, turn or not show: C0, C1, bidi, zero width, tags, and bytes that are no text.
const hostile = "a\x00\a\b\x1b[2J\x1b]0;x\x07\u009b31m\u0085\u202e\u2066\u200b\u2060\ufeff\U000e0041\x7f\x9b"

func TestSafe(t *testing.T) {
	t.Parallel()
	for _, text := range []string{boot.Safe(hostile), boot.SafeOutput(hostile, false)} {
		if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) ||
			!strings.HasPrefix(text, "a\\u0000\\u0007") {
			t.Errorf("%q", text)
		}
	}
	if got := boot.SafeOutput("\x1b[31mred\x1b[0m\x1b[2J\n", true); got != "\x1b[31mred\x1b[0m\\u001b[2J\n" {
		t.Errorf("%q", got)
	}
	const plain = "ein Gruß, 你好, 🦊\n"
	if got := boot.Safe(plain); got != plain {
		t.Errorf("%q", got)
	}
	// In JSON the text is the same afterwards.
	data, err := json.Marshal("\u009b\u202e\U000e0041")
	if err != nil {
		t.Fatal(err)
	}
	var back string
	if err := json.Unmarshal([]byte(boot.Safe(string(data))), &back); err != nil || back != "\u009b\u202e\U000e0041" {
		t.Errorf("%q, %v", back, err)
	}
}

// A log for people says what strangers wrote, and a terminal obeys none of it.
func TestLogger_Hostile(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := boot.Log{Level: "info", Format: "console"}.Logger(&out, "x", "y")
	log.Warn().Str("uid", hostile).Str(hostile, "x").Err(errors.New(hostile)).Msg(hostile)
	if strings.ContainsFunc(out.String(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
		t.Errorf("%q", out.String())
	}
}
