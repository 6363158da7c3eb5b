// Package tokenizertest makes the smallest tokenizer, for folders of random weights.
package tokenizertest

import "fmt"

// Vocabulary returns the 256 bytes in the alphabet of byte-level files, without merges, and
// the special tokens, whose ids follow.
func Vocabulary() (vocab map[string]int, special map[string]any) {
	vocab, special = map[string]int{}, map[string]any{}
	next := rune(256)
	for b := range 256 {
		c := rune(b)
		if !('!' <= c && c <= '~' || '¡' <= c && c <= '¬' || '®' <= c && c <= 'ÿ') {
			c = next
			next++
		}
		vocab[string(c)] = b
	}
	for i, token := range []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"} {
		special[fmt.Sprint(256+i)] = map[string]any{
			"content": token, "lstrip": false, "rstrip": false, "single_word": false, "normalized": false,
			"special": true,
		}
	}
	return vocab, special
}
