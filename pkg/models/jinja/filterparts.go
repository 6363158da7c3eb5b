package jinja

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// string is soft_str of Jinja: the text of a value that is not markup.
func (s *state) string(v any) string {
	if m, ok := v.(markup); ok {
		s.mustBeDefined(m)
	}
	return s.text(v)
}

// mapping returns v as a dict; another type is an error that names the filter.
func (s *state) mapping(name string, v any) *dict {
	d, ok := v.(*dict)
	if !ok {
		s.mustBeDefined(v)
		s.fail("%s of %s; must be of a dict", name, typeName(v))
	}
	return d
}

// filter applies the filter of a node to v.
func (s *state) filter(n filterNode, v any) any {
	c := s.args(n.name, n.args)
	s.line = n.line
	return s.apply(v, c)
}

// filtered applies the chain of filters of a block to its text, the innermost first.
func (s *state) filtered(n filterNode, text any) any {
	if inner, ok := n.of.(filterNode); ok {
		text = s.filtered(inner, text)
	}
	return s.filter(n, text)
}

// apply applies the filter named c.name to v.
func (s *state) apply(v any, c *call) any {
	f, known := filters[c.name]
	if !known {
		s.unsupported("the filter %q", c.name)
	}
	s.countSteps(0)
	return s.use(f, v, c)
}

// use applies a filter or a method to v.
func (s *state) use(f filter, v any, c *call) any {
	if f.call != nil {
		return f.call(s, v, c)
	}
	return f.apply(s, v, s.bindArguments(c, f.needs, f.names...))
}

func filterDefault(_ *state, v any, a []any) any {
	if _, ok := v.(undefined); ok || truth(argument(a[1], false)) && !truth(v) {
		return argument(a[0], "")
	}
	return v
}

var escapes = strings.NewReplacer("&", "&amp;", ">", "&gt;", "<", "&lt;", "'", "&#39;", `"`, "&#34;")

// filterEscape is the filter escape: it returns v as text in which the characters of HTML are
// replaced. Text that is escaped already stays.
func filterEscape(s *state, v any) any {
	if m, ok := v.(markup); ok {
		return m
	}
	text := escapes.Replace(s.text(v))
	s.countMemory(len(text))
	return markup(text)
}

func filterLength(s *state, v any) any {
	n, ok := s.length(v)
	if !ok {
		s.fail("%s has no length", typeName(v))
	}
	return int64(n)
}

// filterIndent is the filter indent: it indents the lines after the first by width spaces, or by a text.
func filterIndent(s *state, v any, a []any) any {
	s.mustBeDefined(v)
	text, ok := v.(string)
	if !ok {
		s.fail("indent of %s", typeName(v))
	}
	by := ""
	switch width := argument(a[0], int64(4)).(type) {
	case string:
		by = width
	case int64:
		s.countCopies(1, width)
		by = strings.Repeat(" ", int(max(0, width)))
	default:
		s.fail("indent by %s", typeName(width))
	}
	var b strings.Builder
	if truth(argument(a[1], false)) {
		b.WriteString(by)
	}
	for i, line := range s.lines(text + "\n") {
		if i > 0 {
			b.WriteByte('\n')
			if line != "" || truth(argument(a[2], false)) {
				s.countMemory(len(by))
				b.WriteString(by)
			}
		}
		s.countMemory(len(line))
		b.WriteString(line)
	}
	return b.String()
}

// filterMap is the filter map: it applies a filter to each item of v, or reads an attribute of
// each. Arguments of another form fail the rendering.
func filterMap(s *state, v any, c *call) any {
	var each func(any) any
	if len(c.args) == 0 && slices.Contains(c.names, "attribute") {
		a := s.bindArguments(&call{c.name, nil, c.names, c.named}, 0, "attribute", "default")
		each = s.attributeOf(a[0], argument(a[1], nil))
	} else {
		if len(c.args) == 0 {
			s.fail("map needs a filter or an attribute")
		}
		name, ok := c.args[0].(string)
		if !ok {
			s.fail("map by %s; must be the name of a filter", typeName(c.args[0]))
		}
		each = func(item any) any { return s.apply(item, &call{name, c.args[1:], c.names, c.named}) }
	}
	var out []any
	if truth(v) {
		for _, item := range s.iterate(v) {
			s.countMemory(16)
			out = append(out, each(item))
		}
	}
	return &generator{out}
}

// filterRound is the filter round, with the rounding of Python. What Python rounds in a way that is
// not built here is unsupported; another method than common, ceil or floor fails the rendering.
func filterRound(s *state, v any, a []any) any {
	s.mustBeDefined(v)
	precision, whole := integer(argument(a[0], int64(0)))
	f, ok := float(v)
	if !ok || !whole || precision < 0 || precision > 15 {
		s.unsupported("round of %s", typeName(v))
	}
	if i, isInt := integer(v); isInt {
		if argument(a[1], "common") == "common" {
			return i // Python's round leaves integers as they are
		}
		s.unsupported("round of int with a method")
	}
	scale := math.Pow(10, float64(precision))
	switch argument(a[1], "common") {
	case "common":
		if math.IsInf(f, 0) || f != f {
			return f
		}
		// The nearest decimal, as Python's round gives it; of two the even one.
		out, _ := strconv.ParseFloat(strconv.FormatFloat(f, 'f', int(precision), 64), 64)
		return out
	case "ceil":
		return math.Ceil(f*scale) / scale
	case "floor":
		return math.Floor(f*scale) / scale
	}
	s.fail("round: method must be common, ceil or floor")
	return nil
}

// filterJSON is the filter tojson of transformers: json.dumps without HTML escapes. Options that
// json.dumps would refuse fail the rendering.
func filterJSON(s *state, v any, a []any) any {
	f := jsonForm{ascii: truth(argument(a[0], false)), sorted: truth(argument(a[3], false)), item: ", ", key: ": "}
	switch by := argument(a[1], nil).(type) {
	case nil:
	case string:
		f.indent = &by
	default:
		n, ok := integer(by)
		if !ok || n > 1000 {
			s.fail("tojson: indent must be an integer below 1000, or a string")
		}
		spaces := strings.Repeat(" ", int(max(0, n)))
		f.indent = &spaces
	}
	if f.indent != nil {
		f.item = ","
	}
	if separators := argument(a[2], nil); separators != nil {
		items := s.iterate(separators)
		if len(items) != 2 {
			s.fail("tojson: separators must be two strings")
		}
		f.item, f.key = s.string(items[0]), s.string(items[1])
	}
	var b strings.Builder
	s.json(&b, v, f, 0)
	return b.String()
}

// attributeOf returns a function that reads an attribute path such as a.b.0 of an item; a nil path returns the item
// itself. otherwise, unless nil, replaces an undefined value.
func (s *state) attributeOf(path, otherwise any) func(any) any {
	var parts []any
	switch path := path.(type) {
	case nil:
	case string:
		for part := range strings.SplitSeq(path, ".") {
			if i, err := strconv.ParseInt(part, 10, 32); err == nil && i >= 0 {
				parts = append(parts, i)
			} else {
				parts = append(parts, part)
			}
		}
	default:
		parts = []any{path}
	}
	return func(item any) any {
		for _, part := range parts {
			item = s.item(item, part)
			if _, ok := item.(undefined); ok && otherwise != nil {
				item = otherwise
			}
		}
		return item
	}
}

// sortKey returns the key by which Jinja sorts a value: texts in lower case unless exact.
func (s *state) sortKey(v any, exact bool) any {
	if text, ok := v.(string); ok && !exact {
		return s.lower(text)
	}
	return v
}

// sort sorts items in place by the keys that by returns, for the filters sort and dictsort; it is
// stable. Keys that Python cannot compare fail the rendering.
func (s *state) sort(items []any, by func(any) any, reverse bool) {
	keys := make(map[int]any, len(items))
	order := make([]int, len(items))
	for i, item := range items {
		keys[i], order[i] = by(item), i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		if reverse {
			i, j = j, i
		}
		if s.less(keys[i], keys[j], 0) {
			return -1
		}
		return int(boolToInt(s.less(keys[j], keys[i], 0)))
	})
	sorted := make([]any, len(items))
	for i, at := range order {
		sorted[i] = items[at]
	}
	copy(items, sorted)
}

// filterExtremum is the filters max (most) and min: it returns the first of the largest or smallest
// items of v, undefined for none. Items that Python cannot compare fail the rendering.
func (s *state) filterExtremum(v any, a []any, most bool) any {
	attribute, exact := s.attributeOf(argument(a[1], nil), nil), truth(argument(a[0], false))
	var best any = undefined{"the largest or smallest item of none"}
	for i, item := range s.iterate(v) {
		k := s.sortKey(attribute(item), exact)
		if i == 0 {
			best = item
			continue
		}
		least := s.sortKey(attribute(best), exact)
		if most {
			k, least = least, k
		}
		if s.less(k, least, 0) {
			best = item
		}
	}
	return best
}

// filterSelect is the filters select, reject (wanted is false), selectattr and rejectattr
// (attribute): it keeps the items of v for which a test holds, or does not. Arguments of another
// form fail the rendering.
func (s *state) filterSelect(v any, c *call, attribute, wanted bool) any {
	if !truth(v) {
		return &generator{}
	}
	args, read := c.args, func(item any) any { return item }
	if attribute {
		if len(args) == 0 {
			s.fail("%s needs an attribute", c.name)
		}
		read, args = s.attributeOf(args[0], nil), args[1:]
	}
	holds := truth
	if len(args) > 0 {
		name, ok := args[0].(string)
		if !ok {
			s.fail("%s by %s; must be the name of a test", c.name, typeName(args[0]))
		}
		holds = func(item any) bool { return s.test(name, item, &call{name, args[1:], c.names, c.named}) }
	}
	var out []any
	for _, item := range s.iterate(v) {
		if holds(read(item)) == wanted {
			s.countMemory(16)
			out = append(out, item)
		}
	}
	return &generator{out}
}

// numeral prepares a text for parsing as a number: lower case, without white space around it.
func (s *state) numeral(text string) string {
	foreign := func(r rune) bool { return r == '_' || r >= utf8.RuneSelf && unicode.IsDigit(r) }
	if strings.IndexFunc(text, foreign) >= 0 {
		s.unsupported("%.40q as a number", text)
	}
	s.countSteps(len(text))
	return strings.ToLower(strings.TrimFunc(text, isSpace))
}

func (s *state) parseInt(text string) (int64, bool) {
	t := s.numeral(text)
	i, err := strconv.ParseInt(t, 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		s.overflow()
	}
	return i, err == nil
}

// parseFloat returns v as a float, as Python's float() reads it; false if it is no number.
// Hexadecimal numbers are none.
func (s *state) parseFloat(v any) (float64, bool) {
	text, ok := v.(string)
	if !ok {
		return float(v)
	}
	t := s.numeral(text)
	if strings.ContainsAny(t, "xp") { // hexadecimal is Go's alone
		return 0, false
	}
	f, err := strconv.ParseFloat(t, 64)
	return f, err == nil || math.IsInf(f, 0)
}
