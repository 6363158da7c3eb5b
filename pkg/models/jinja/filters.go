package jinja

import (
	"maps"
	"math"
	"slices"
	"strings"
)

// filter applies a filter with its arguments.
type filter func(s *state, v any, c *call) any

// filters are all filters by name: those of Jinja, with the tojson of transformers.
var filters = map[string]filter{}

func init() { // some of them apply others
	for _, more := range []map[string]filter{textFilters(), numberFilters(), listFilters(), chooseFilters()} {
		maps.Copy(filters, more)
	}
}

// textFilters returns the filters of texts by name, each a function of the value and the call's
// arguments. The package's table of filters is made of it when the program starts.
func textFilters() map[string]filter {
	return map[string]filter{
		"capitalize": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			return s.capitalize(s.string(v))
		},
		"escape": filterEscape, "e": filterEscape,
		"format": func(s *state, v any, c *call) any {
			if len(c.names) > 0 {
				s.unsupported("format with names")
			}
			return s.format(s.string(v), &list{c.args, true})
		},
		"indent": filterIndent,
		"lower": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			return s.lower(s.string(v))
		},
		"replace": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 2, "old", "new", "count")
			n, ok := integer(argument(a[2], int64(-1)))
			if a[2] == nil {
				n, ok = -1, true
			}
			if !ok {
				s.fail("replace: count must be an integer")
			}
			return s.replace(s.string(v), s.string(a[0]), s.string(a[1]), n)
		},
		"safe": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			return markup(s.text(v))
		},
		"string": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			if m, ok := v.(markup); ok {
				return m
			}
			return s.text(v)
		},
		"title": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			return s.titleFilter(s.string(v))
		},
		"tojson": filterJSON,
		"trim": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "chars")
			return s.strip(s.string(v), argument(a[0], nil), true, true)
		},
		"upper": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			return s.upper(s.string(v))
		},
	}
}

// numberFilters returns the filters of numbers by name. The package's table of filters is made of
// it when the program starts.
func numberFilters() map[string]filter {
	return map[string]filter{
		"abs": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			if f, ok := v.(float64); ok {
				return math.Abs(f)
			}
			if i, ok := integer(v); ok && i < 0 {
				return s.subtract(0, i)
			}
			return s.sign(v, false)
		},
		"float": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "default")
			s.mustBeDefined(v)
			if f, ok := s.parseFloat(v); ok {
				return f
			}
			return argument(a[0], 0.0)
		},
		"int": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "default", "base")
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
		},
		"max":   func(s *state, v any, c *call) any { return s.filterExtremum(v, c, true) },
		"min":   func(s *state, v any, c *call) any { return s.filterExtremum(v, c, false) },
		"round": filterRound,
		"sum": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "attribute", "start")
			attribute, total := s.attributeOf(argument(a[0], nil), nil), argument(a[1], int64(0))
			for _, item := range s.iterate(v) {
				total = s.binary("+", total, attribute(item))
			}
			return total
		},
	}
}

// listFilters returns the filters of lists by name. The package's table of filters is made of it
// when the program starts.
func listFilters() map[string]filter {
	return map[string]filter{
		"batch": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 1, "linecount", "fill_with")
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
		},
		"first": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			if g, ok := v.(*generator); ok && len(g.items) > 0 {
				first := g.items[0]
				g.items = g.items[1:]
				return first
			}
			if items := s.iterate(v); len(items) > 0 {
				return items[0]
			}
			return undefined{"the first item of none"}
		},
		"join": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "d", "attribute")
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
		},
		"last": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			if _, ok := v.(*generator); ok {
				s.fail("the last item of a generator; put list before it")
			}
			s.mustBeDefined(v)
			if items := s.iterate(v); len(items) > 0 {
				return items[len(items)-1]
			}
			return undefined{"the last item of none"}
		},
		"reverse": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
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
		},
	}
}

// chooseFilters returns the filters that choose, order and list items, by name. The package's table
// of filters is made of it when the program starts.
func chooseFilters() map[string]filter {
	return map[string]filter{
		"dictsort": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "case_sensitive", "by", "reverse")
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
		},
		"default": filterDefault, "d": filterDefault,
		"items": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			if _, ok := v.(undefined); ok {
				return &generator{}
			}
			pairs := s.mapping("items", v).pairs()
			s.countMemory(64 * len(pairs))
			return &generator{pairs}
		},
		"length": filterLength, "count": filterLength,
		"list": func(s *state, v any, c *call) any {
			s.bindArguments(c, 0)
			items := slices.Clone(s.iterate(v))
			s.countMemory(16 * len(items))
			return &list{items: items}
		},
		"map": filterMap,
		"reject": func(s *state, v any, c *call) any {
			return s.filterSelect(v, c, false, false)
		},
		"rejectattr": func(s *state, v any, c *call) any {
			return s.filterSelect(v, c, true, false)
		},
		"select": func(s *state, v any, c *call) any {
			return s.filterSelect(v, c, false, true)
		},
		"selectattr": func(s *state, v any, c *call) any {
			return s.filterSelect(v, c, true, true)
		},
		"sort": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "reverse", "case_sensitive", "attribute")
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
		},
		"unique": func(s *state, v any, c *call) any {
			a := s.bindArguments(c, 0, "case_sensitive", "attribute")
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
		},
	}
}
