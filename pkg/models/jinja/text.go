package jinja

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// text returns Python's str() of a value.
func (s *state) text(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case markup:
		return string(v)
	case undefined:
		return ""
	}
	var b strings.Builder
	s.represent(&b, v, 0)
	return b.String()
}

// represent writes Python's repr().
func (s *state) represent(b *strings.Builder, v any, depth int) {
	s.checkDepth(depth)
	before := b.Len()
	all := func(open string, items []any, end string) {
		b.WriteString(open)
		for i, item := range items {
			if i > 0 {
				b.WriteString(", ")
			}
			s.represent(b, item, depth+1)
		}
		b.WriteString(end)
	}
	switch v := v.(type) {
	case nil:
		b.WriteString("None")
	case bool:
		b.WriteString(map[bool]string{true: "True", false: "False"}[v])
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case float64:
		b.WriteString(floatText(v))
	case string:
		represent(b, v)
	case undefined:
		b.WriteString("Undefined")
	case *list:
		switch {
		case !v.tuple:
			all("[", v.items, "]")
		case len(v.items) == 1:
			all("(", v.items, ",)")
		default:
			all("(", v.items, ")")
		}
	case *dict:
		b.WriteByte('{')
		for i := range v.keys {
			if i > 0 {
				b.WriteString(", ")
			}
			s.represent(b, v.keys[i], depth+1)
			b.WriteString(": ")
			s.represent(b, v.values[i], depth+1)
		}
		b.WriteByte('}')
	case *view:
		all(v.name+"([", v.items, "])")
	case span:
		if v.step == 1 {
			fmt.Fprintf(b, "range(%d, %d)", v.begin, v.end)
		} else {
			fmt.Fprintf(b, "range(%d, %d, %d)", v.begin, v.end, v.step)
		}
	default:
		s.unsupported("a %s as a text", typeName(v))
	}
	s.countMemory(b.Len() - before)
}

// represent writes repr() of a string.
func represent(b *strings.Builder, v string) {
	quote := byte('\'')
	if strings.Contains(v, "'") && !strings.Contains(v, `"`) {
		quote = '"'
	}
	b.WriteByte(quote)
	for _, r := range v {
		switch {
		case r == rune(quote) || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < ' ' || r > '~' && r <= 0xff && !unicode.IsPrint(r):
			fmt.Fprintf(b, `\x%02x`, r)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		case r <= 0xffff:
			fmt.Fprintf(b, `\u%04x`, r)
		default:
			fmt.Fprintf(b, `\U%08x`, r)
		}
	}
	b.WriteByte(quote)
}

// floatText returns repr() of a float.
func floatText(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 0):
		return map[bool]string{true: "inf", false: "-inf"}[f > 0]
	}
	text := strconv.FormatFloat(f, 'e', -1, 64)
	_, exponent, _ := strings.Cut(text, "e")
	if e, _ := strconv.Atoi(exponent); e < -4 || e >= 16 {
		return text
	}
	text = strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

// jsonForm is the format of json: non-ASCII characters escaped, keys sorted, the indent of a level (nil: all on one
// line), and the separators of items and after keys.
type jsonForm struct {
	ascii, sorted bool
	indent        *string
	item, key     string
}

// json writes a value as Python's json.dumps does.
func (s *state) json(b *strings.Builder, v any, f jsonForm, depth int) {
	s.checkDepth(depth)
	before := b.Len()
	line := func(depth int) {
		if f.indent != nil {
			b.WriteByte('\n')
			for range depth {
				b.WriteString(*f.indent)
			}
		}
	}
	switch v := v.(type) {
	case nil:
		b.WriteString("null")
	case bool:
		b.WriteString(strconv.FormatBool(v))
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case float64:
		b.WriteString(jsonFloat(v))
	case string:
		jsonString(b, v, f.ascii)
	case markup:
		jsonString(b, string(v), f.ascii)
	case *list:
		b.WriteByte('[')
		for i, item := range v.items {
			if i > 0 {
				b.WriteString(f.item)
			}
			line(depth + 1)
			s.json(b, item, f, depth+1)
		}
		if len(v.items) > 0 {
			line(depth)
		}
		b.WriteByte(']')
	case *dict:
		order := make([]int, len(v.keys))
		for i := range order {
			order[i] = i
		}
		if f.sorted {
			slices.SortStableFunc(order, func(i, j int) int {
				if s.less(v.keys[i], v.keys[j], 0) {
					return -1
				}
				return int(boolToInt(s.less(v.keys[j], v.keys[i], 0)))
			})
		}
		b.WriteByte('{')
		for n, i := range order {
			if n > 0 {
				b.WriteString(f.item)
			}
			line(depth + 1)
			switch k := v.keys[i].(type) {
			case string:
				jsonString(b, k, f.ascii)
			case float64:
				jsonString(b, jsonFloat(k), f.ascii)
			case nil:
				b.WriteString(`"null"`)
			default:
				fmt.Fprintf(b, `"%v"`, k)
			}
			b.WriteString(f.key)
			s.json(b, v.values[i], f, depth+1)
		}
		if len(v.keys) > 0 {
			line(depth)
		}
		b.WriteByte('}')
	default:
		s.fail("a %s cannot be written as JSON", typeName(v))
	}
	s.countMemory(b.Len() - before)
}

// jsonFloat returns a float as json.dumps writes it, with NaN and Infinity.
func jsonFloat(f float64) string {
	switch text := floatText(f); text {
	case "nan":
		return "NaN"
	case "inf":
		return "Infinity"
	case "-inf":
		return "-Infinity"
	default:
		return text
	}
}

// jsonString writes a string as json.dumps does.
func jsonString(b *strings.Builder, v string, ascii bool) {
	b.WriteByte('"')
	for _, r := range v {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < ' ' && strings.ContainsRune("\b\f\n\r\t", r):
			b.WriteByte('\\')
			b.WriteByte("bfnrt"[strings.IndexRune("\b\f\n\r\t", r)])
		case r < ' ' || ascii && r > '~' && r <= 0xffff:
			fmt.Fprintf(b, `\u%04x`, r)
		case ascii && r > 0xffff:
			r -= 0x10000
			fmt.Fprintf(b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
}
