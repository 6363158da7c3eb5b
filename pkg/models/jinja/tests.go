package jinja

import (
	"maps"
	"slices"
	"strings"
)

// test applies the test of that name to v.
func (s *state) test(name string, v any, c *call) bool {
	f, known := tests[name]
	if !known {
		s.unsupported("the test %q", name)
	}
	s.countSteps(0)
	return s.use(f, v, c).(bool)
}

// tests are all tests of Jinja by name: filters that give a bool.
var tests map[string]filter

// init fills tests: some of them call others, so the map cannot be a literal.
func init() {
	tests = map[string]filter{
		"defined":   plain(func(_ *state, v any) any { _, ok := v.(undefined); return !ok }),
		"undefined": plain(func(_ *state, v any) any { _, ok := v.(undefined); return ok }),
		"none":      plain(func(_ *state, v any) any { return v == nil }),
		"boolean":   plain(func(_ *state, v any) any { _, ok := v.(bool); return ok }),
		"true":      plain(func(_ *state, v any) any { return v == true }),
		"false":     plain(func(_ *state, v any) any { return v == false }),
		"integer":   plain(func(_ *state, v any) any { _, ok := v.(int64); return ok }),
		"float":     plain(func(_ *state, v any) any { _, ok := v.(float64); return ok }),
		"number":    plain(func(_ *state, v any) any { return isNumber(v) }),
		"string":    plain(func(_ *state, v any) any { return typeName(v) == "str" || typeName(v) == "Markup" }),
		"mapping":   plain(func(_ *state, v any) any { _, ok := v.(*dict); return ok }),
		"sequence": plain(func(s *state, v any) any {
			_, ok := s.length(v)
			return ok && !slices.Contains([]string{"dict_keys", "dict_values", "dict_items"}, typeName(v))
		}),
		"iterable": plain(func(_ *state, v any) any {
			switch v.(type) {
			case undefined, string, markup, *list, *dict, *view, span, *generator, *loop:
				return true
			}
			return false
		}),
		"callable": plain(func(_ *state, v any) any {
			switch v.(type) {
			case *function, *macro, *loop, undefined: // as Python sees it
				return true
			}
			return false
		}),
	}
	compareTests()
}

// compareTests adds the tests that compare with another value, and those of numbers and of the case of texts.
func compareTests() {
	with := func(name string, f func(s *state, v, other any) any) filter {
		apply := func(s *state, v any, a []any) any { return f(s, v, a[0]) }
		return filter{needs: 1, names: []string{name}, apply: apply}
	}
	withCase := func(change func(*state, string) string) filter {
		return plain(func(s *state, v any) any {
			text := s.text(v)
			return change(s, text) == text && strings.IndexFunc(text, cased) >= 0
		})
	}
	whole := func(s *state, v any) int64 {
		s.mustBeDefined(v)
		i, ok := integer(v)
		if !ok {
			s.unsupported("a remainder of %s", typeName(v))
		}
		return i
	}
	maps.Copy(tests, map[string]filter{
		"sameas": with("other", func(s *state, v, other any) any {
			if v == nil || other == nil {
				return v == nil && other == nil
			}
			_, isBool := v.(bool)
			_, otherBool := other.(bool)
			if isBool || otherBool {
				return v == other
			}
			s.unsupported("sameas but of none, true and false")
			return false
		}),
		"odd":  plain(func(s *state, v any) any { return whole(s, v)%2 != 0 }),
		"even": plain(func(s *state, v any) any { return whole(s, v)%2 == 0 }),
		"divisibleby": with("num", func(s *state, v, num any) any {
			by := whole(s, num)
			if by == 0 {
				s.fail("division by zero")
			}
			return whole(s, v)%by == 0
		}),
		"upper": withCase((*state).upper), "lower": withCase((*state).lower),
		"in": with("seq", func(s *state, v, seq any) any { return s.contains(seq, v) }),
	})
	for op, names := range map[string][]string{
		"==": {"eq", "equalto", "=="}, "!=": {"ne", "!="}, "<": {"lt", "lessthan", "<"},
		">": {"gt", "greaterthan", ">"}, "<=": {"le", "<="}, ">=": {"ge", ">="},
	} {
		for _, name := range names {
			tests[name] = with("other", func(s *state, v, other any) any { return s.compare(op, v, other) })
		}
	}
}
