package tokenizer

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"golang.org/x/text/unicode/rangetable"
)

// nfc brings s to normalization form C as the reference does. The reference has the tables of
// Unicode 9: it treats later combining marks as ordinary characters, and no mark moves or
// composes across them. So the text between such marks is normalized piece by piece.
func nfc(s string) string {
	at := nextAfter9(s)
	if at < 0 {
		return norm.NFC.String(s)
	}
	var b strings.Builder
	for at >= 0 {
		_, n := utf8.DecodeRuneInString(s[at:])
		b.WriteString(norm.NFC.String(s[:at]))
		b.WriteString(s[at : at+n])
		s = s[at+n:]
		at = nextAfter9(s)
	}
	b.WriteString(norm.NFC.String(s))
	return b.String()
}

// nextAfter9 returns the position of the first character in s that has a combining class and is not in Unicode 9, or
// of U+11930, the second half of a later composition; -1: there is none. A golden test of all characters fails when the
// tables of either side change.
func nextAfter9(s string) int {
	return strings.IndexFunc(s, func(c rune) bool {
		return c >= 0x7fd && !unicode.Is(unicode9, c) &&
			(c == 0x11930 || norm.NFC.PropertiesString(string(c)).CCC() > 0)
	})
}

var unicode9 = rangetable.Assigned("9.0.0")
