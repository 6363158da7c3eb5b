package boot

import (
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Safe returns a text that changes nothing on a terminal but the cells it is printed in: control characters, those that
// turn the direction of text, those that are not seen, and bytes that are no text are written as in JSON, \u009b. Line
// breaks stay. Whatever strangers wrote goes through it on its way to a terminal.
func Safe(text string) string { return safe(text, func(string) int { return 0 }) }

// SafeOutput is Safe for what a program lays out itself: tabs stay, and so do its colours, where it has any.
func SafeOutput(text string, colours bool) string {
	return safe(text, func(rest string) int {
		if strings.HasPrefix(rest, "\t") {
			return 1
		} else if !colours {
			return 0
		}
		return colourBegins(rest)
	})
}

// safe is Safe, but for what stays: keep returns how many bytes of it a text begins with.
func safe(text string, keep func(string) int) string {
	unsafe := func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }
	if utf8.ValidString(text) && !strings.ContainsFunc(text, unsafe) {
		return text
	}
	var s strings.Builder
	for len(text) > 0 {
		if n := keep(text); n > 0 {
			s.WriteString(text[:n])
			text = text[n:]
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && n == 1:
			escape(&s, rune(text[0]))
		case !unsafe(r):
			s.WriteRune(r)
		case r == '\t':
			s.WriteString(`\t`)
		case r == '\r':
			s.WriteString(`\r`)
		case r >= 0x10000:
			high, low := utf16.EncodeRune(r)
			escape(&s, high)
			escape(&s, low)
		default:
			escape(&s, r)
		}
		text = text[n:]
	}
	return s.String()
}

// escape writes a character of 16 bits as JSON has it.
func escape(s *strings.Builder, r rune) {
	const digits = "0123456789abcdef"
	s.WriteString(`\u`)
	for shift := 12; shift >= 0; shift -= 4 {
		s.WriteByte(digits[r>>shift&15])
	}
}

// colourBegins returns the length of the SGR sequence that a text begins with; 0: it begins with none.
func colourBegins(text string) int {
	if !strings.HasPrefix(text, "\x1b[") {
		return 0
	}
	if end := strings.IndexFunc(text[2:], func(r rune) bool { return r != ';' && (r < '0' || r > '9') }); end >= 0 &&
		text[2+end] == 'm' {
		return 2 + end + 1
	}
	return 0
}
