package jinja

import (
	"math"
	"slices"
	"strings"
)

// filter is a filter of Jinja. apply gets the value, and the arguments in the order of names, of which the first needs
// are required (bindArguments); filters of any arguments have call in its place.
type filter struct {
	needs int
	names []string
	apply func(s *state, v any, a []any) any
	call  func(s *state, v any, c *call) any
}

// plain returns a filter without arguments.
func plain(apply func(s *state, v any) any) filter {
	return filter{apply: func(s *state, v any, _ []any) any { return apply(s, v) }}
}

// changing returns a filter without arguments that changes a text.
func changing(change func(s *state, text string) string) filter {
	return plain(func(s *state, v any) any { return change(s, s.string(v)) })
}

// filters are all filters by name: those of Jinja, with the tojson of transformers.
var filters = map[string]filter{
	"abs": plain(func(s *state, v any) any {
		if f, ok := v.(float64); ok {
			return math.Abs(f)
		}
		if i, ok := integer(v); ok && i < 0 {
			return s.subtract(0, i)
		}
		return s.sign(v, false)
	}),
	"batch":      {needs: 1, names: []string{"linecount", "fill_with"}, apply: filterBatch},
	"capitalize": changing((*state).capitalize),
	"count":      plain(filterLength),
	"d":          {names: []string{"default_value", "boolean"}, apply: filterDefault},
	"default":    {names: []string{"default_value", "boolean"}, apply: filterDefault},
	"dictsort":   {names: []string{"case_sensitive", "by", "reverse"}, apply: filterDictSort},
	"e":          plain(filterEscape),
	"escape":     plain(filterEscape),
	"first": plain(func(s *state, v any) any {
		if g, ok := v.(*generator); ok && len(g.items) > 0 {
			first := g.items[0]
			g.items = g.items[1:]
			return first
		}
		if items := s.iterate(v); len(items) > 0 {
			return items[0]
		}
		return undefined{"the first item of none"}
	}),
	"float": {names: []string{"default"}, apply: func(s *state, v any, a []any) any {
		s.mustBeDefined(v)
		if f, ok := s.parseFloat(v); ok {
			return f
		}
		return argument(a[0], 0.0)
	}},
	"format": {call: func(s *state, v any, c *call) any {
		if len(c.names) > 0 {
			s.unsupported("format with names")
		}
		return s.format(s.string(v), &list{c.args, true})
	}},
	"indent": {names: []string{"width", "first", "blank"}, apply: filterIndent},
	"int":    {names: []string{"default", "base"}, apply: filterInt},
	"items": plain(func(s *state, v any) any {
		if _, ok := v.(undefined); ok {
			return &generator{}
		}
		pairs := s.mapping("items", v).pairs()
		s.countMemory(64 * len(pairs))
		return &generator{pairs}
	}),
	"join": {names: []string{"d", "attribute"}, apply: filterJoin},
	"last": plain(func(s *state, v any) any {
		if _, ok := v.(*generator); ok {
			s.fail("the last item of a generator; put list before it")
		}
		s.mustBeDefined(v)
		if items := s.iterate(v); len(items) > 0 {
			return items[len(items)-1]
		}
		return undefined{"the last item of none"}
	}),
	"length": plain(filterLength),
	"list": plain(func(s *state, v any) any {
		items := slices.Clone(s.iterate(v))
		s.countMemory(16 * len(items))
		return &list{items: items}
	}),
	"lower": changing((*state).lower),
	"max": {names: []string{"case_sensitive", "attribute"}, apply: func(s *state, v any, a []any) any {
		return s.filterExtremum(v, a, true)
	}},
	"min": {names: []string{"case_sensitive", "attribute"}, apply: func(s *state, v any, a []any) any {
		return s.filterExtremum(v, a, false)
	}},
	"reject":     {call: func(s *state, v any, c *call) any { return s.filterSelect(v, c, false, false) }},
	"rejectattr": {call: func(s *state, v any, c *call) any { return s.filterSelect(v, c, true, false) }},
	"replace": {needs: 2, names: []string{"old", "new", "count"}, apply: func(s *state, v any, a []any) any {
		n, ok := integer(argument(a[2], int64(-1)))
		if a[2] == nil {
			n, ok = -1, true
		}
		if !ok {
			s.fail("replace: count must be an integer")
		}
		return s.replace(s.string(v), s.string(a[0]), s.string(a[1]), n)
	}},
	"reverse": plain(func(s *state, v any) any {
		if text, ok := v.(string); ok {
			s.countMemory(len(text))
			runes := []rune(text)
			slices.Reverse(runes)
			return string(runes)
		}
		s.mustBeDefined(v)
		items := slices.Clone(s.iterate(v))
		s.countMemory(16 * len(items))
		slices.Reverse(items)
		if _, ok := v.(*generator); ok {
			return &list{items: items}
		}
		return &generator{items}
	}),
	"round":      {names: []string{"precision", "method"}, apply: filterRound},
	"safe":       plain(func(s *state, v any) any { return markup(s.text(v)) }),
	"select":     {call: func(s *state, v any, c *call) any { return s.filterSelect(v, c, false, true) }},
	"selectattr": {call: func(s *state, v any, c *call) any { return s.filterSelect(v, c, true, true) }},
	"sort":       {names: []string{"reverse", "case_sensitive", "attribute"}, apply: filterSort},
	"string": plain(func(s *state, v any) any {
		if m, ok := v.(markup); ok {
			return m
		}
		return s.text(v)
	}),
	"sum": {names: []string{"attribute", "start"}, apply: func(s *state, v any, a []any) any {
		attribute, total := s.attributeOf(argument(a[0], nil), nil), argument(a[1], int64(0))
		for _, item := range s.iterate(v) {
			total = s.binary("+", total, attribute(item))
		}
		return total
	}},
	"title":  changing((*state).titleFilter),
	"tojson": {names: []string{"ensure_ascii", "indent", "separators", "sort_keys"}, apply: filterJSON},
	"trim": {names: []string{"chars"}, apply: func(s *state, v any, a []any) any {
		return s.strip(s.string(v), argument(a[0], nil), true, true)
	}},
	"unique": {names: []string{"case_sensitive", "attribute"}, apply: filterUnique},
	"upper":  changing((*state).upper),
}

func init() { filters["map"] = filter{call: filterMap} } // it applies others

// filterBatch is the filter batch: it yields lists of linecount items; fill_with fills the last one.
func filterBatch(s *state, v any, a []any) any {
	n, ok := integer(a[0])
	if !ok || n < 1 {
		s.fail("batch: linecount must be a positive integer")
	}
	fill := argument(a[1], nil)
	var out []any
	for line := range slices.Chunk(s.iterate(v), int(min(n, MaxBytes))) {
		line = slices.Clone(line)
		if missing := n - int64(len(line)); fill != nil && missing > 0 {
			s.countCopies(16, missing)
			line = append(line, slices.Repeat([]any{fill}, int(missing))...)
		}
		out = append(out, &list{items: line})
	}
	s.countMemory(32 * len(out))
	return &generator{out}
}

// filterDictSort is the filter dictsort: the items of a dict as pairs, in the order of their keys or values.
func filterDictSort(s *state, v any, a []any) any {
	by := argument(a[1], "key")
	if by != "key" && by != "value" {
		s.fail("dictsort: by must be key or value")
	}
	d := s.mapping("dictsort", v)
	pairs := d.pairs()
	s.countMemory(64 * len(pairs))
	s.sort(pairs, func(p any) any {
		return s.sortKey(p.(*list).items[boolToInt(by == "value")], truth(argument(a[0], false)))
	}, truth(argument(a[2], false)))
	return &list{items: pairs}
}

// filterInt is the filter int: v as an integer, or default where it is none. Integers beyond 64 bits are unsupported.
func filterInt(s *state, v any, a []any) any {
	if argument(a[1], int64(10)) != int64(10) {
		s.unsupported("int of another base than 10")
	}
	s.mustBeDefined(v)
	if text, ok := v.(string); ok {
		if i, ok := s.parseInt(text); ok {
			return i
		}
	}
	if i, ok := integer(v); ok {
		return i
	}
	if f, ok := s.parseFloat(v); ok && f == f && !math.IsInf(f, 0) {
		if math.Abs(f) >= 1<<63 {
			s.overflow()
		}
		return int64(f)
	}
	return argument(a[0], int64(0))
}

// filterJoin is the filter join: the texts of the items, or of an attribute of each, with d between them.
func filterJoin(s *state, v any, a []any) any {
	between := s.string(argument(a[0], ""))
	attribute := s.attributeOf(argument(a[1], nil), nil)
	var b strings.Builder
	for i, item := range s.iterate(v) {
		text := s.string(attribute(item))
		if i > 0 {
			text = between + text
		}
		s.countMemory(len(text))
		b.WriteString(text)
	}
	return b.String()
}

// filterSort is the filter sort: the items in the order of an attribute. Several attributes are unsupported.
func filterSort(s *state, v any, a []any) any {
	if text, ok := argument(a[2], nil).(string); ok && strings.Contains(text, ",") {
		s.unsupported("sort by several attributes")
	}
	attribute, exact := s.attributeOf(argument(a[2], nil), nil), truth(argument(a[1], false))
	items := slices.Clone(s.iterate(v))
	s.countMemory(16 * len(items))
	// a list, as in Jinja
	by := func(item any) any { return &list{items: []any{s.sortKey(attribute(item), exact)}} }
	s.sort(items, by, truth(argument(a[0], false)))
	return &list{items: items}
}

// filterUnique is the filter unique: the first item of each attribute. What cannot be a key of a dict is unsupported.
func filterUnique(s *state, v any, a []any) any {
	attribute, exact := s.attributeOf(argument(a[1], nil), nil), truth(argument(a[0], false))
	seen := newDict()
	var out []any
	for _, item := range s.iterate(v) {
		k := s.sortKey(attribute(item), exact)
		if _, there := seen.get(k); there {
			continue
		}
		if !seen.put(k, true) {
			s.unsupported("unique of %s", typeName(k))
		}
		s.countMemory(64)
		out = append(out, item)
	}
	return &generator{out}
}
