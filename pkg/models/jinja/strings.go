package jinja

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// strip removes the given characters from the ends; nil stands for white space.
func (s *state) strip(v string, chars any, left, right bool) string {
	s.countMemory(len(v))
	drop := isSpace
	if chars != nil {
		s.mustBeDefined(chars)
		set, ok := chars.(string)
		if !ok {
			s.fail("strip of %s; must be str", typeName(chars))
		}
		if s.countSteps(len(set)); len(set) > 256 {
			s.fail("%w: strip of %d characters", ErrLimit, len(set))
		}
		drop = func(r rune) bool { return strings.ContainsRune(set, r) }
	}
	if left {
		v = strings.TrimLeftFunc(v, drop)
	}
	if right {
		v = strings.TrimRightFunc(v, drop)
	}
	return v
}

// split is str.split and str.rsplit (fromRight).
func (s *state) split(v string, by, most any, fromRight bool) any {
	n, ok := integer(most)
	if !ok {
		s.fail("split: maxsplit must be an integer")
	}
	if by == nil {
		if n >= 0 {
			s.unsupported("split at white space, a number of times")
		}
		return stringList(s, strings.FieldsFunc(v, isSpace))
	}
	s.mustBeDefined(by)
	sep, ok := by.(string)
	if !ok || sep == "" {
		s.fail("split by %s; must be a text that is not empty", typeName(by))
	}
	s.countMemory(16 * (1 + strings.Count(v, sep)))
	if n < 0 || n > int64(len(v)) {
		n = int64(len(v))
	}
	if !fromRight {
		return stringList(s, strings.SplitN(v, sep, int(n)+1))
	}
	var parts []string
	for ; n > 0; n-- {
		at := strings.LastIndex(v, sep)
		if at < 0 {
			break
		}
		s.countSteps(len(v) - at)
		parts = append(parts, v[at+len(sep):])
		v = v[:at]
	}
	parts = append(parts, v)
	slices.Reverse(parts)
	return stringList(s, parts)
}

// lines is str.splitlines.
func (s *state) lines(v string) []string {
	s.countMemory(len(v))
	var out []string
	for v != "" {
		at := strings.IndexFunc(v, func(r rune) bool {
			return r >= '\n' && r <= '\r' || r >= 0x1c && r <= 0x1e || r == 0x85 || r == 0x2028 || r == 0x2029
		})
		if at < 0 {
			s.countMemory(16)
			return append(out, v)
		}
		s.countMemory(16)
		out = append(out, v[:at])
		r, n := utf8.DecodeRuneInString(v[at:])
		if r == '\r' && strings.HasPrefix(v[at+1:], "\n") {
			n = 2
		}
		v = v[at+n:]
	}
	return out
}

// replace is str.replace; a negative count replaces all.
func (s *state) replace(v, old, with string, count int64) string {
	n := int64(strings.Count(v, old))
	if count >= 0 {
		n = min(n, count)
	}
	s.countMemory(len(v))
	if grow := int64(len(with) - len(old)); grow > 0 {
		s.countCopies(int(grow), n)
	}
	return strings.Replace(v, old, with, int(n))
}

func cased(r rune) bool { return unicode.IsUpper(r) || unicode.IsLower(r) || unicode.IsTitle(r) }

// checkCase refuses characters whose case Python changes in another way than Go, mostly to several characters. It
// returns v.
func (s *state) checkCase(v string) string {
	s.countMemory(len(v))
	for _, r := range v {
		if r < utf8.RuneSelf || !unicode.IsLetter(r) && !unicode.IsMark(r) {
			continue
		}
		switch {
		case strings.ContainsRune("ßŉǰİΣΐΰև\u0345", r), r >= 0x1c4 && r <= 0x1cc, r >= 0x1f1 && r <= 0x1f3,
			r >= 0x10a0 && r <= 0x10ff, r >= 0x13a0 && r <= 0x13ff, r >= 0x1c80 && r <= 0x1cbf, r >= 0x1e96 &&
				r <= 0x1e9e,
			r >= 0x1f50 && r <= 0x1fff, r >= 0xa640 && r <= 0xa7ff, r >= 0xab30 && r <= 0xabbf, r >= 0xfb00 &&
				r <= 0xfb17,
			r >= 0x10000:
			if cased(r) || unicode.ToUpper(r) != r || unicode.ToLower(r) != r {
				s.unsupported("the case of %q", r)
			}
		}
	}
	return v
}

func (s *state) upper(v string) string { return strings.ToUpper(s.checkCase(v)) }

func (s *state) lower(v string) string { return strings.ToLower(s.checkCase(v)) }

func (s *state) capitalize(v string) string {
	_, n := utf8.DecodeRuneInString(v)
	return s.upper(v[:n]) + s.lower(v[n:])
}

// title is str.title(): a letter after a letter becomes lower case, others upper case.
func (s *state) title(v string) string {
	inside := false
	return strings.Map(func(r rune) rune {
		was := inside
		inside = cased(r)
		switch {
		case !inside:
			return r
		case was:
			return unicode.ToLower(r)
		}
		return unicode.ToUpper(r)
	}, s.checkCase(v))
}

// titleFilter is the filter title: the first letter of a word becomes upper case, others lower case.
func (s *state) titleFilter(v string) string {
	begins := true
	return strings.Map(func(r rune) rune {
		was := begins
		begins = isSpace(r) || strings.ContainsRune("-({[<", r)
		if was {
			return unicode.ToUpper(r)
		}
		return unicode.ToLower(r)
	}, s.checkCase(v))
}

// pad fills a text to a width: with zeros after the sign, or with spaces.
func (s *state) pad(v string, width int64, zeros, left bool) string {
	missing := width - int64(utf8.RuneCountInString(v))
	if missing <= 0 {
		return v
	}
	s.countCopies(1, missing)
	switch {
	case left:
		return v + strings.Repeat(" ", int(missing))
	case zeros && v != "" && (v[0] == '-' || v[0] == '+'):
		return v[:1] + strings.Repeat("0", int(missing)) + v[1:]
	case zeros:
		return strings.Repeat("0", int(missing)) + v
	}
	return strings.Repeat(" ", int(missing)) + v
}

// format evaluates text % values.
func (s *state) format(text string, values any) any {
	args := []any{values}
	if l, ok := values.(*list); ok && l.tuple {
		args = l.items
	} else if _, ok := values.(*dict); ok {
		s.unsupported("%% with a dict")
	}
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(text, "%")
		b.WriteString(before)
		if s.countMemory(len(before)); !found {
			break
		}
		flagsEnd, end, width, precision := parseConversion(rest)
		if end == len(rest) {
			s.fail("%%: the format ends early")
		}
		verb := rest[end]
		text = rest[end+1:]
		if verb == '%' {
			b.WriteByte('%')
			continue
		}
		if len(args) == 0 {
			s.fail("%%: too few values")
		}
		v := args[0]
		args = args[1:]
		piece := ""
		switch verb {
		case 's':
			if piece = s.string(v); precision >= 0 {
				s.unsupported("%%.%ds", precision)
			}
		case 'd', 'i':
			f, ok := float(v)
			if i, whole := integer(v); whole {
				piece = strconv.FormatInt(i, 10)
			} else if ok && math.Abs(f) < 1<<53 {
				piece = strconv.FormatInt(int64(f), 10)
			} else {
				s.fail("%%%c of %s", verb, typeName(v))
			}
			if precision >= 0 {
				s.unsupported("%%.%d%c", precision, verb)
			}
		case 'f':
			f, ok := float(v)
			if !ok {
				s.fail("%%f of %s", typeName(v))
			}
			if precision < 0 {
				precision = 6
			}
			if math.IsInf(f, 0) || f != f || precision > 100 {
				s.unsupported("%%.%df of %v", precision, f)
			}
			piece = strconv.FormatFloat(f, 'f', int(precision), 64)
		default:
			s.unsupported("%%%c", verb)
		}
		minus := strings.Contains(rest[:flagsEnd], "-")
		piece = s.pad(piece, width, !minus && verb != 's' && strings.Contains(rest[:flagsEnd], "0"), minus)
		s.countMemory(len(piece))
		b.WriteString(piece)
	}
	if l, ok := values.(*list); len(args) > 0 && (!ok || l.tuple) { // Python allows it for a list
		s.fail("%%: too many values")
	}
	return b.String()
}

// parseConversion reads a printf-style conversion, such as %-5.2f, up to its letter. text begins after the %. The flags
// are text[:flagsEnd], the letter is text[end]; end is len(text) if there is no letter. width is 0 and precision -1 if
// absent.
func parseConversion(text string) (flagsEnd, end int, width, precision int64) {
	flagsEnd = len(text) - len(strings.TrimLeft(text, "-0"))
	number := func(from int) int64 {
		for end = from; end < len(text) && text[end] >= '0' && text[end] <= '9'; {
			end++
		}
		n, _ := strconv.ParseInt("0"+text[from:end], 10, 32) // too many digits: the largest number
		return n
	}
	width, precision = number(flagsEnd), -1
	if end < len(text) && text[end] == '.' {
		precision = number(end + 1)
	}
	return flagsEnd, end, width, precision
}

// formatBraces is str.format with {}, {0} and {name}.
func (s *state) formatBraces(text string, c *call) any {
	var b strings.Builder
	auto, counted := 0, false
	for text != "" {
		at := strings.IndexAny(text, "{}")
		if at < 0 {
			b.WriteString(text)
			break
		}
		b.WriteString(text[:at])
		if strings.HasPrefix(text[at+1:], text[at:at+1]) {
			b.WriteByte(text[at])
			text = text[at+2:]
			continue
		}
		end := strings.IndexByte(text, '}')
		if text[at] == '}' || end < 0 {
			s.fail("format: a brace alone")
		}
		field := text[at+1 : end]
		text = text[end+1:]
		i, err := strconv.Atoi(field)
		switch {
		case strings.ContainsAny(field, ".[!:{"):
			s.unsupported("format of {%.40s}", field)
		case field == "":
			i, err = auto, nil
			auto++
		case err == nil:
			counted = true
		}
		if auto > 0 && counted {
			s.fail("format: {} and {0} together")
		}
		v := any(nil)
		if err == nil {
			if i >= len(c.args) || i < 0 {
				s.fail("format: %s", fmt.Sprintf("no value %d", i))
			}
			v = c.args[i]
		} else {
			at := slices.Index(c.names, field)
			if at < 0 {
				s.fail("format: no value %s", field)
			}
			v = c.named[at]
		}
		piece := s.string(v)
		s.countMemory(len(piece))
		b.WriteString(piece)
	}
	return b.String()
}
