package tokenizer

import (
	"iter"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"golang.org/x/text/unicode/rangetable"
)

// qwen2Pattern is the pattern that splitWord follows, as tokenizer.json spells it.
const qwen2Pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// splitWord returns the length in bytes of the first match of qwen2Pattern in s, which
// must not be empty. The pattern matches at every place: alternatives in order are a
// contraction; letters with one leading character that is neither digit nor line end;
// one digit; punctuation with one leading space and the line ends after it; white space
// up to its last line end; white space without its last character, which then leads the
// next word; white space.
func splitWord(s string) int {
	c, size := utf8.DecodeRuneInString(s)
	if n := contraction(s); n > 0 {
		return n
	}
	class := classify(c)
	next, nextSize := utf8.DecodeRuneInString(s[size:])
	nextClass := classNone
	if nextSize > 0 {
		nextClass = classify(next)
	}
	switch {
	case class == classLetter:
		return span(s, size, classLetter)
	case class != classNumber && c != '\r' && c != '\n' && nextClass == classLetter:
		return span(s, size+nextSize, classLetter)
	case class == classNumber:
		return size
	case class == classOther:
		return lineEnds(s, span(s, size, classOther))
	case c == ' ' && nextClass == classOther:
		return lineEnds(s, span(s, size+nextSize, classOther))
	}

	// White space: one pass finds its end, its last line end and its last character.
	end, last, afterLine := 0, 0, 0
	for end < len(s) {
		c, n := utf8.DecodeRuneInString(s[end:])
		if classify(c) != classSpace {
			break
		}
		last = end
		end += n
		if c == '\r' || c == '\n' {
			afterLine = end
		}
	}
	switch {
	case afterLine > 0:
		return afterLine
	case end == len(s) || last == 0:
		return end
	}
	return last
}

// span returns where the run of characters of a class ends that includes s[:i].
func span(s string, i int, class charClass) int {
	for i < len(s) {
		c, n := utf8.DecodeRuneInString(s[i:])
		if classify(c) != class {
			break
		}
		i += n
	}
	return i
}

// lineEnds returns where the run of line ends from s[i] ends.
func lineEnds(s string, i int) int {
	for i < len(s) && (s[i] == '\r' || s[i] == '\n') {
		i++
	}
	return i
}

// contraction returns the length of an English contraction at the start of s, or 0. The
// long s folds to s.
func contraction(s string) int {
	if len(s) < 2 || s[0] != '\'' {
		return 0
	}
	switch s[1] | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if len(s) > 2 && s[2]|0x20 == 'e' {
			return 3
		}
	case 'l':
		if len(s) > 2 && s[2]|0x20 == 'l' {
			return 3
		}
	}
	if len(s) > 2 && s[1:3] == "\u017f" {
		return 3
	}
	return 0
}

// charClass is a class of characters that the pattern distinguishes.
type charClass int

const (
	classNone charClass = iota
	classLetter
	classNumber
	classSpace
	classOther
)

// classify returns the class of a character, by Unicode 16 as in the reference.
func classify(c rune) charClass {
	switch {
	case c < utf8.RuneSelf:
		return asciiClass[c]
	case unicode.IsLetter(c) || unicode.Is(lettersAfter15, c):
		return classLetter
	case unicode.IsNumber(c) || unicode.Is(numbersAfter15, c):
		return classNumber
	case unicode.IsSpace(c):
		return classSpace
	}
	return classOther
}

// asciiClass is classify for ASCII.
var asciiClass = func() (table [utf8.RuneSelf]charClass) {
	for c := range rune(utf8.RuneSelf) {
		switch {
		case 'a' <= c|0x20 && c|0x20 <= 'z':
			table[c] = classLetter
		case '0' <= c && c <= '9':
			table[c] = classNumber
		case c == ' ' || '\t' <= c && c <= '\r':
			table[c] = classSpace
		default:
			table[c] = classOther
		}
	}
	return table
}()

// The reference has the tables of Unicode 16, package unicode of Go 1.26 those of 15: these
// are the new letters and numbers. A golden test of all characters fails when this changes.
var (
	lettersAfter15 = &unicode.RangeTable{
		R16: []unicode.Range16{
			{Lo: 0x1c89, Hi: 0x1c8a, Stride: 1},
			{Lo: 0xa7cb, Hi: 0xa7cd, Stride: 1},
			{Lo: 0xa7da, Hi: 0xa7dc, Stride: 1},
		},
		R32: []unicode.Range32{
			{Lo: 0x105c0, Hi: 0x105f3, Stride: 1},
			{Lo: 0x10d4a, Hi: 0x10d65, Stride: 1},
			{Lo: 0x10d6f, Hi: 0x10d85, Stride: 1},
			{Lo: 0x10ec2, Hi: 0x10ec4, Stride: 1},
			{Lo: 0x11380, Hi: 0x11389, Stride: 1},
			{Lo: 0x1138b, Hi: 0x1138e, Stride: 3},
			{Lo: 0x11390, Hi: 0x113b5, Stride: 1},
			{Lo: 0x113b7, Hi: 0x113b7, Stride: 1},
			{Lo: 0x113d1, Hi: 0x113d3, Stride: 2},
			{Lo: 0x11bc0, Hi: 0x11be0, Stride: 1},
			{Lo: 0x13460, Hi: 0x143fa, Stride: 1},
			{Lo: 0x16100, Hi: 0x1611d, Stride: 1},
			{Lo: 0x16d40, Hi: 0x16d6c, Stride: 1},
			{Lo: 0x18cff, Hi: 0x18cff, Stride: 1},
			{Lo: 0x1e5d0, Hi: 0x1e5ed, Stride: 1},
			{Lo: 0x1e5f0, Hi: 0x1e5f0, Stride: 1},
			{Lo: 0x2ebf0, Hi: 0x2ee5d, Stride: 1},
		},
	}
	numbersAfter15 = &unicode.RangeTable{
		R32: []unicode.Range32{
			{Lo: 0x10d40, Hi: 0x10d49, Stride: 1},
			{Lo: 0x116d0, Hi: 0x116e3, Stride: 1},
			{Lo: 0x11bf0, Hi: 0x11bf9, Stride: 1},
			{Lo: 0x16130, Hi: 0x16139, Stride: 1},
			{Lo: 0x16d70, Hi: 0x16d79, Stride: 1},
			{Lo: 0x1ccf0, Hi: 0x1ccf9, Stride: 1},
			{Lo: 0x1e5f1, Hi: 0x1e5fa, Stride: 1},
		},
	}
)

// Vocabulary files spell bytes as printable characters, an alphabet that came with
// GPT-2: bytes that are printable in Latin-1 stand for themselves, the others take the
// characters from U+0100 in order.
var byteToChar, charToByte = func() (to [256]rune, from map[rune]byte) {
	from = make(map[rune]byte, 256)
	next := rune(256)
	for b := range 256 {
		c := rune(b)
		if !('!' <= c && c <= '~' || '¡' <= c && c <= '¬' || '®' <= c && c <= 'ÿ') {
			c = next
			next++
		}
		to[b], from[c] = c, byte(b)
	}
	return to, from
}()

// toByteLevel spells bytes in the alphabet.
func toByteLevel(s string) string {
	var b strings.Builder
	for i := range len(s) {
		b.WriteRune(byteToChar[s[i]])
	}
	return b.String()
}

// fromByteLevel returns the bytes that s spells, and whether all of s is in the alphabet.
func fromByteLevel(s string) (string, bool) {
	b := make([]byte, 0, utf8.RuneCountInString(s))
	for _, c := range s {
		v, ok := charToByte[c]
		if !ok {
			return "", false
		}
		b = append(b, v)
	}
	return string(b), true
}

// byKey yields the entries of a map in the order of its keys, so that equal files give equal errors.
func byKey[V any](m map[string]V) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

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
