package lm

import (
	"strings"
	"unicode/utf8"
)

// Decoder turns the bytes of tokens, which may end in the middle of a character, into text.
// The zero value is ready.
type Decoder struct{ held []byte }

// Push adds the bytes of a token and returns the characters that are complete so far; the rest
// waits for the next token, or for Flush. U+FFFD replaces bytes that are not UTF-8, one for each
// longest part of a character, as in transformers.
func (d *Decoder) Push(piece string) string {
	if len(d.held) == 0 && utf8.ValidString(piece) {
		return piece
	}
	d.held = append(d.held, piece...)
	var b strings.Builder
	rest := d.held
	for len(rest) > 0 {
		r, n := utf8.DecodeRune(rest)
		if r == utf8.RuneError && n == 1 {
			if n = prefixLength(rest); n == len(rest) && n < characterLength(rest[0]) {
				break // the next token may complete it
			}
			r = utf8.RuneError
		}
		b.WriteRune(r)
		rest = rest[n:]
	}
	d.held = append(d.held[:0], rest...)
	return b.String()
}

// Flush returns U+FFFD for an incomplete character at the end, else "".
func (d *Decoder) Flush() string {
	if len(d.held) == 0 {
		return ""
	}
	d.held = d.held[:0]
	return string(utf8.RuneError)
}

// characterLength returns the length in bytes of a UTF-8 character that begins with b; 1 if none
// does.
func characterLength(b byte) int {
	switch {
	case b >= 0xC2 && b < 0xE0:
		return 2
	case b >= 0xE0 && b < 0xF0:
		return 3
	case b >= 0xF0 && b < 0xF5:
		return 4
	}
	return 1
}

// prefixLength returns how many of the first bytes of b could begin one UTF-8 character, at least
// 1: Push replaces so many by one U+FFFD. b does not begin with a complete one.
func prefixLength(b []byte) int {
	n := 1
	for n < len(b) && n < characterLength(b[0]) {
		low, high := byte(0x80), byte(0xBF)
		if n == 1 {
			switch b[0] { // no overlong forms, no surrogates, nothing beyond U+10FFFF
			case 0xE0:
				low = 0xA0
			case 0xED:
				high = 0x9F
			case 0xF0:
				low = 0x90
			case 0xF4:
				high = 0x8F
			}
		}
		if b[n] < low || b[n] > high {
			break
		}
		n++
	}
	return n
}
