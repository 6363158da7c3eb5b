package ptxvm

import "strings"

// token is a word, a number, a string or a single mark of the PTX text.
type token struct {
	text string
	line int
}

func isWord(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '$' || c == '.' ||
		c == '%'
}

// lex splits the text. A mnemonic with its suffixes, a register and a number are one word
// each; a minus before a digit belongs to its number, :: to the mnemonic around it.
func lex(text string) []token {
	var tokens []token
	line := 1
	for i := 0; i < len(text); {
		c := text[i]
		switch {
		case c == '\n':
			line++
			i++
		case c == ' ' || c == '\t' || c == '\r':
			i++
		case strings.HasPrefix(text[i:], "//"):
			for i < len(text) && text[i] != '\n' {
				i++
			}
		case strings.HasPrefix(text[i:], "/*"):
			end := strings.Index(text[i+2:], "*/")
			if end < 0 {
				end = len(text) - i - 4
			}
			line += strings.Count(text[i:min(len(text), i+end+4)], "\n")
			i = min(len(text), i+end+4)
		case c == '"':
			end := strings.IndexByte(text[i+1:], '"')
			if end < 0 {
				end = len(text) - i - 2
			}
			tokens = append(tokens, token{text[i : i+end+2], line})
			i += end + 2
		case isWord(c) || c == '-' && i+1 < len(text) && text[i+1] >= '0' && text[i+1] <= '9':
			j := i + 1
			for j < len(text) {
				if strings.HasPrefix(text[j:], "::") {
					j++
				} else if !isWord(text[j]) {
					break
				}
				j++
			}
			tokens = append(tokens, token{text[i:j], line})
			i = j
		default:
			tokens = append(tokens, token{text[i : i+1], line})
			i++
		}
	}
	return tokens
}
