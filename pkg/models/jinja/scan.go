package jinja

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

type kind int

const (
	endOfTemplate kind = iota
	data
	variableBegin
	variableEnd
	blockBegin
	blockEnd
	name
	literal // a string, an integer or a float; its value is in value
	operator
)

// token is a piece of a template.
type token struct {
	kind  kind
	text  string
	value any
	line  int
}

// String returns the token as error messages show it.
func (t token) String() string {
	switch t.kind {
	case endOfTemplate:
		return "the end of the template"
	case literal:
		return fmt.Sprintf("%.40q", fmt.Sprint(t.value))
	case blockEnd:
		return "the end of the block"
	case variableEnd:
		return "the end of the expression"
	}
	return fmt.Sprintf("%.40q", t.text)
}

// scanner splits a template into tokens as Jinja's lexer does with trim_blocks and lstrip_blocks.
type scanner struct {
	source string
	pos    int
	line   int
	// lineStart is whether the last text ended a line; lstrip_blocks needs it.
	lineStart bool
	tokens    []token
}

var (
	newlines = strings.NewReplacer("\r\n", "\n", "\r", "\n")
	tags     = regexp.MustCompile(`\{[{%#]`)
	rawBegin = regexp.MustCompile(`^\{%[-+]?` + space + `*raw` + space + `*(?:-%\}` + space + `*|%\})`)
	rawEnd   = regexp.MustCompile(`\{%([-+]?)` + space + `*endraw` + space + `*(?:\+%\}|-%\}` + space + `*|%\}\n?)`)
)

// space matches what Python's regular expressions match with \s.
const space = `[\s\x0b\x1c-\x1f\x85\p{Z}]`

func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// scan returns the tokens of a template, the last of kind endOfTemplate.
func scan(source string) (_ []token, err error) {
	defer recoverFailure(&err)
	s := &scanner{source: strings.TrimSuffix(newlines.Replace(source), "\n"), line: 1, lineStart: true}
	if !utf8.ValidString(source) {
		s.fail("the text is not UTF-8")
	}
	for s.pos < len(s.source) {
		s.text()
	}
	return append(s.tokens, token{kind: endOfTemplate, line: s.line}), nil
}

func (s *scanner) fail(format string, args ...any) {
	panic(failure{fmt.Errorf("line %d: %w", s.line, fmt.Errorf(format, args...))})
}

func (s *scanner) add(k kind, text string, value any) {
	s.tokens = append(s.tokens, token{k, text, value, s.line})
}

// skip moves on by n bytes.
func (s *scanner) skip(n int) {
	passed := s.source[s.pos : s.pos+n]
	s.line += strings.Count(passed, "\n")
	s.pos += n
	if n > 0 {
		s.lineStart = passed[n-1] == '\n'
	}
}

func (s *scanner) rest() string { return s.source[s.pos:] }

// text reads the text up to the next tag, and the tag.
func (s *scanner) text() {
	m := tags.FindStringIndex(s.rest())
	if m == nil {
		s.data(s.rest(), 0, false)
		return
	}
	at := s.pos + m[0]
	text, tag := s.source[s.pos:at], s.source[at:]
	sign := byte(0)
	if len(tag) > 2 {
		sign = tag[2]
	}
	s.data(text, sign, tag[1] != '{')
	s.lineStart = false
	if raw := rawBegin.FindString(tag); raw != "" {
		s.skip(len(raw))
		s.raw()
		return
	}
	begin := 2
	if sign == '-' || sign == '+' {
		begin = 3
	}
	switch tag[1] {
	case '#':
		s.skip(begin)
		s.comment()
	case '%':
		s.add(blockBegin, tag[:begin], nil)
		s.skip(begin)
		s.code("%}", blockEnd)
	default:
		s.add(variableBegin, tag[:begin], nil)
		s.skip(begin)
		s.code("}}", variableEnd)
	}
}

// data adds the text before a tag. It drops the white space that the sign of the tag, or lstrip_blocks before a
// block, removes.
func (s *scanner) data(text string, sign byte, block bool) {
	kept := text
	switch {
	case sign == '-':
		kept = strings.TrimRightFunc(text, isSpace)
	case sign != '+' && block:
		line := strings.LastIndexByte(text, '\n') + 1
		if (line > 0 || s.lineStart) && strings.TrimFunc(text[line:], isSpace) == "" {
			kept = text[:line]
		}
	}
	if kept != "" {
		s.add(data, kept, nil)
	}
	s.skip(len(text))
}

// end returns the length of the end tag here, with the white space that it removes; 0: there is no end tag.
func (s *scanner) end(tag string, trims bool) int {
	rest := s.rest()
	switch {
	case strings.HasPrefix(rest, "-"+tag):
		return len(rest) - len(strings.TrimLeftFunc(rest[1+len(tag):], isSpace))
	case trims && strings.HasPrefix(rest, "+"+tag):
		return 1 + len(tag)
	case trims && strings.HasPrefix(rest, tag+"\n"):
		return len(tag) + 1
	case strings.HasPrefix(rest, tag):
		return len(tag)
	}
	return 0
}

// comment skips the rest of a comment.
func (s *scanner) comment() {
	for s.pos < len(s.source) {
		if n := s.end("#}", true); n > 0 {
			s.skip(n)
			return
		}
		_, n := utf8.DecodeRuneInString(s.rest())
		s.skip(n)
	}
	s.fail("a comment has no end")
}

// raw reads the text up to endraw as it is.
func (s *scanner) raw() {
	m := rawEnd.FindStringSubmatchIndex(s.rest())
	if m == nil {
		s.fail("raw has no endraw")
	}
	sign := byte(0)
	if m[3] > m[2] {
		sign = s.rest()[m[2]]
	}
	s.data(s.rest()[:m[0]], sign, true)
	s.skip(m[1] - m[0])
}

var (
	floats    = regexp.MustCompile(`^(?i:(?:\d+_)*\d+(?:(?:\.(?:\d+_)*\d+)?e[+\-]?(?:\d+_)*\d+|\.(?:\d+_)*\d+))`)
	integers  = regexp.MustCompile(`^(?i:0b(?:_?[01])+|0o(?:_?[0-7])+|0x(?:_?[0-9a-f])+|[1-9](?:_?\d)*|0(?:_?0)*)`)
	names     = regexp.MustCompile(`^[\pL_][\pL\pN\p{Mn}\p{Mc}_]*`)
	quoted    = regexp.MustCompile(`^(?s:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")`)
	operators = regexp.MustCompile(`^(?://|\*\*|==|!=|>=|<=|[-+/*%~\[\](){}><=.:|,;])`)
)

// maxTag bounds the tokens of a tag, and so how deep a chain of operators nests.
const maxTag = 10000

// code reads the tokens inside a tag, up to its end.
func (s *scanner) code(tag string, end kind) {
	var open []byte
	first := len(s.tokens)
	for s.pos < len(s.source) {
		if len(s.tokens)-first > maxTag {
			s.fail("%w: more than %d words in a tag", ErrLimit, maxTag)
		}
		if len(open) == 0 {
			if n := s.end(tag, end == blockEnd); n > 0 {
				s.add(end, tag, nil)
				s.skip(n)
				return
			}
		}
		rest := s.rest()
		if r, n := utf8.DecodeRuneInString(rest); isSpace(r) {
			s.skip(n)
			continue
		}
		text := ""
		if s.source[s.pos-1] != '.' {
			text = floats.FindString(rest)
		}
		if text != "" {
			v, err := strconv.ParseFloat(strings.ReplaceAll(text, "_", ""), 64)
			if err != nil && !math.IsInf(v, 0) {
				s.fail("%s: %w", text, err)
			}
			s.add(literal, text, v)
		} else if text = integers.FindString(rest); text != "" {
			v, err := strconv.ParseInt(text, 0, 64)
			if err != nil {
				s.fail("the integer %.40s: %w", text, ErrUnsupported)
			}
			s.add(literal, text, v)
		} else if text = names.FindString(rest); text != "" {
			s.add(name, text, nil)
		} else if text = quoted.FindString(rest); text != "" {
			s.add(literal, text, s.unescape(text[1:len(text)-1]))
		} else if text = operators.FindString(rest); text != "" {
			s.add(operator, text, nil)
			switch c := text[0]; c {
			case '(', '[', '{':
				open = append(open, map[byte]byte{'(': ')', '[': ']', '{': '}'}[c])
			case ')', ']', '}':
				if len(open) == 0 || open[len(open)-1] != c {
					s.fail("%q closes nothing", text)
				}
				open = open[:len(open)-1]
			}
		} else {
			r, _ := utf8.DecodeRuneInString(rest)
			s.fail("unexpected %q", r)
		}
		s.skip(len(text))
	}
	s.fail("a tag has no end; must be %s", tag)
}

var digitsOf = map[int]string{8: "01234567", 16: "0123456789abcdefABCDEF"}

// unescape returns the value of a string literal, as Jinja computes it: characters outside ASCII become escapes
// first, then Python's unicode-escape applies.
func (s *scanner) unescape(text string) string {
	if !strings.Contains(text, `\`) {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); {
		if text[i] != '\\' {
			b.WriteByte(text[i])
			i++
			continue
		}
		r, n := utf8.DecodeRuneInString(text[i+1:])
		i += 1 + n
		number := func(digits, base int) {
			end := i
			for end < len(text) && end < i+digits && strings.IndexByte(digitsOf[base], text[end]) >= 0 {
				end++
			}
			v, err := strconv.ParseUint(text[i:end], base, 32)
			if err != nil || base == 16 && end < i+digits || v > unicode.MaxRune {
				s.fail("%.20q: an escape that is not one of Python's", text[i-1-n:])
			}
			if !utf8.ValidRune(rune(v)) {
				s.fail("%.20q: half a surrogate pair: %w", text[i-1-n:], ErrUnsupported)
			}
			b.WriteRune(rune(v))
			i = end
		}
		switch {
		case r == 'x':
			number(2, 16)
		case r == 'u':
			number(4, 16)
		case r == 'U':
			number(8, 16)
		case r >= '0' && r <= '7':
			i--
			number(3, 8)
		case r == 'N':
			s.fail(`the escape \N: %w`, ErrUnsupported)
		case r == '\n':
		case r < utf8.RuneSelf && strings.ContainsRune(`\'"abfnrtv`, r):
			b.WriteByte("\\'\"\a\b\f\n\r\t\v"[strings.IndexRune(`\'"abfnrtv`, r)])
		case r < utf8.RuneSelf:
			b.WriteByte('\\')
			b.WriteRune(r)
		case r <= 0xff:
			fmt.Fprintf(&b, `\x%02x`, r)
		case r <= 0xffff:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
	}
	return b.String()
}
