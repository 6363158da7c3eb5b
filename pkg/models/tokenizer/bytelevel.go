package tokenizer

import (
	"iter"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"
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
