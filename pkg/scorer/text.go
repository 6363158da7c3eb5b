package scorer

import (
	"errors"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Target is what a picture shall say: groundTruth, or the text between the first pair
// of double quotes of the prompt, straight or typographic. A prompt without one is an
// error, not an empty target.
func Target(prompt, groundTruth string) (string, error) {
	if groundTruth != "" {
		return groundTruth, nil
	}
	const quotes = "\"\u201c\u201d\u201e"
	open := strings.IndexAny(prompt, quotes)
	if open >= 0 {
		_, size := utf8.DecodeRuneInString(prompt[open:])
		rest := prompt[open+size:]
		if end := strings.IndexAny(rest, quotes); end > 0 {
			return rest[:end], nil
		}
	}
	return "", errors.New(`ground_truth: empty, and the prompt has no text in double quotes`)
}

// TextReward is the OCR reward of Flow-GRPO as verl has it, in [0, 1]: white space and
// case do not count; a recognised text that contains the target scores 1; else, with d
// the Levenshtein distance in characters, 1 - min(d, n)/n for a target of n. An empty
// target scores 1 against an empty text, else 0.
func TextReward(target, recognised string) float64 {
	t, r := plainText(target), plainText(recognised)
	switch {
	case len(t) == 0 && len(r) == 0:
		return 1
	case len(t) == 0:
		return 0
	case strings.Contains(string(r), string(t)):
		return 1
	}
	n := len(t)
	return 1 - float64(min(levenshtein(t, r), n))/float64(n)
}

// maxRecognised bounds the characters of a recognised text that are compared: a picture
// full of text costs time in their product with the target's.
const maxRecognised = 4096

func plainText(s string) []rune {
	var out []rune
	for _, r := range strings.ToLower(s) {
		if !unicode.IsSpace(r) {
			if out = append(out, r); len(out) == maxRecognised {
				break
			}
		}
	}
	return out
}

// levenshtein is the least number of insertions, deletions and substitutions.
func levenshtein(a, b []rune) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i, x := range a {
		diagonal := row[0]
		row[0] = i + 1
		for j, y := range b {
			cost := diagonal
			if x != y {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
