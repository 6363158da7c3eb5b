package tokenizer

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
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

// nextAfter9 returns the position of the first character of marksAfter9 in s, or -1.
func nextAfter9(s string) int {
	return strings.IndexFunc(s, func(c rune) bool { return c >= 0x7fd && unicode.Is(marksAfter9, c) })
}

// marksAfter9 holds the characters that have a combining class in Unicode 15 and none in
// Unicode 9, and U+11930, the second half of a later composition. A golden test of all
// characters fails when the tables of either side change.
var marksAfter9 = &unicode.RangeTable{
	R16: []unicode.Range16{
		{Lo: 0x07fd, Hi: 0x07fd, Stride: 1},
		{Lo: 0x0898, Hi: 0x089f, Stride: 1},
		{Lo: 0x08ca, Hi: 0x08d3, Stride: 1},
		{Lo: 0x09fe, Hi: 0x09fe, Stride: 1},
		{Lo: 0x0c3c, Hi: 0x0c3c, Stride: 1},
		{Lo: 0x0d3b, Hi: 0x0d3c, Stride: 1},
		{Lo: 0x0eba, Hi: 0x0eba, Stride: 1},
		{Lo: 0x1715, Hi: 0x1715, Stride: 1},
		{Lo: 0x1abf, Hi: 0x1ace, Stride: 1},
		{Lo: 0x1df6, Hi: 0x1dfa, Stride: 1},
		{Lo: 0xa82c, Hi: 0xa82c, Stride: 1},
	},
	R32: []unicode.Range32{
		{Lo: 0x10d24, Hi: 0x10d27, Stride: 1},
		{Lo: 0x10eab, Hi: 0x10eac, Stride: 1},
		{Lo: 0x10efd, Hi: 0x10eff, Stride: 1},
		{Lo: 0x10f46, Hi: 0x10f50, Stride: 1},
		{Lo: 0x10f82, Hi: 0x10f85, Stride: 1},
		{Lo: 0x11070, Hi: 0x11070, Stride: 1},
		{Lo: 0x1133b, Hi: 0x1133b, Stride: 1},
		{Lo: 0x1145e, Hi: 0x1145e, Stride: 1},
		{Lo: 0x11839, Hi: 0x1183a, Stride: 1},
		{Lo: 0x11930, Hi: 0x11930, Stride: 1},
		{Lo: 0x1193d, Hi: 0x1193e, Stride: 1},
		{Lo: 0x11943, Hi: 0x11943, Stride: 1},
		{Lo: 0x119e0, Hi: 0x119e0, Stride: 1},
		{Lo: 0x11a34, Hi: 0x11a34, Stride: 1},
		{Lo: 0x11a47, Hi: 0x11a47, Stride: 1},
		{Lo: 0x11a99, Hi: 0x11a99, Stride: 1},
		{Lo: 0x11d42, Hi: 0x11d42, Stride: 1},
		{Lo: 0x11d44, Hi: 0x11d45, Stride: 1},
		{Lo: 0x11d97, Hi: 0x11d97, Stride: 1},
		{Lo: 0x11f41, Hi: 0x11f42, Stride: 1},
		{Lo: 0x16ff0, Hi: 0x16ff1, Stride: 1},
		{Lo: 0x1e08f, Hi: 0x1e08f, Stride: 1},
		{Lo: 0x1e130, Hi: 0x1e136, Stride: 1},
		{Lo: 0x1e2ae, Hi: 0x1e2ae, Stride: 1},
		{Lo: 0x1e2ec, Hi: 0x1e2ef, Stride: 1},
		{Lo: 0x1e4ec, Hi: 0x1e4ef, Stride: 1},
	},
}
