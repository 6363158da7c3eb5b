package scorer

import (
	"errors"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Target returns the text that an image must show: groundTruth, or the text between the first pair of double quotes
// of the prompt, straight or typographic. Without either it is an error.
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

// TextReward is the OCR reward of Flow-GRPO as in verl-omni (genrm_ocr), in [0, 1]. White space and case do not
// count. A recognised text that contains the target scores 1. Otherwise the score is 1 - min(d, n)/n, with d the
// Levenshtein distance and n the length of the target, in characters. An empty target scores 1 for an empty text,
// else 0. White space and lower case are those of Python.
func TextReward(target, recognised string) float64 {
	t, r := plainText(target), plainText(recognised)
	n := len(t)
	switch {
	case n == 0 && len(r) == 0:
		return 1
	case n == 0:
		return 0
	case strings.Contains(string(r), string(t)):
		return 1
	case len(r) >= 2*n: // at least n letters too many
		return 0
	}
	return 1 - float64(min(levenshtein(t, r), n))/float64(n)
}

// readResult returns the result of a function that reads images: TextReward of the text, and whether the text is
// exactly the target.
func readResult(target, text string) Result {
	return Result{
		Value: TextReward(target, text), Detail: truncate(text),
		Exact: new(slices.Equal(plainText(target), plainText(text))),
	}
}

// plainText is Python's re.sub(r"\s+", "", s).lower(): unicode.ToLower, except for two capitals.
func plainText(s string) []rune {
	var text []rune
	for _, r := range s {
		if !unicode.IsSpace(r) && (r < 0x1c || r > 0x1f) { // the ASCII separators are white space there
			text = append(text, r)
		}
	}
	lower := make([]rune, 0, len(text))
	for i, r := range text {
		switch {
		case r == 'İ':
			lower = append(lower, 'i', '\u0307')
		case r == 'Σ' && finalSigma(text, i):
			lower = append(lower, 'ς')
		default:
			lower = append(lower, unicode.ToLower(r))
		}
	}
	return lower
}

// finalSigma reports whether the sigma at i ends a word: a cased letter is before it and none after it, with
// characters between them that case ignores (Unicode 3.13, Final_Sigma).
func finalSigma(text []rune, i int) bool {
	before, behind := i-1, i+1
	for before >= 0 && caseIgnorable(text[before]) {
		before--
	}
	for behind < len(text) && caseIgnorable(text[behind]) {
		behind++
	}
	return before >= 0 && cased(text[before]) && (behind == len(text) || !cased(text[behind]))
}

func cased(r rune) bool {
	return unicode.In(r, unicode.Lu, unicode.Ll, unicode.Lt, unicode.Other_Uppercase, unicode.Other_Lowercase)
}

func caseIgnorable(r rune) bool {
	return unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) || strings.ContainsRune(midWord, r)
}

// midWord are the characters of Word_Break MidLetter, MidNumLet and Single_Quote.
const midWord = "'.:\u00b7\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55\uff07\uff0e\uff1a"

// levenshtein returns the least number of insertions, deletions and substitutions that turn a into b.
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
