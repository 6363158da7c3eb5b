package jinja

import (
	"maps"
	"slices"
	"strings"
)

// test applies the test of that name to v.
func (s *state) test(name string, v any, c *call) bool {
	f := tests[name]
	if f == nil {
		s.unsupported("the test %q", name)
	}
	s.countSteps(0)
	return f(s, v, c)
}

// plainTest returns a test that has no arguments.
func plainTest(f func(s *state, v any) bool) func(*state, any, *call) bool {
	return func(s *state, v any, c *call) bool {
		s.bindArguments(c, 0)
		return f(s, v)
	}
}

// tests are all tests of Jinja by name.
var tests map[string]func(s *state, v any, c *call) bool

// init fills tests: some of them call others, so the map cannot be a literal.
func init() {
	tests = map[string]func(s *state, v any, c *call) bool{
		"defined":   plainTest(func(_ *state, v any) bool { _, ok := v.(undefined); return !ok }),
		"undefined": plainTest(func(_ *state, v any) bool { _, ok := v.(undefined); return ok }),
		"none":      plainTest(func(_ *state, v any) bool { return v == nil }),
		"boolean":   plainTest(func(_ *state, v any) bool { _, ok := v.(bool); return ok }),
		"true":      plainTest(func(_ *state, v any) bool { return v == true }),
		"false":     plainTest(func(_ *state, v any) bool { return v == false }),
		"integer":   plainTest(func(_ *state, v any) bool { _, ok := v.(int64); return ok }),
		"float":     plainTest(func(_ *state, v any) bool { _, ok := v.(float64); return ok }),
		"number":    plainTest(func(_ *state, v any) bool { return isNumber(v) }),
		"string":    plainTest(func(_ *state, v any) bool { return typeName(v) == "str" || typeName(v) == "Markup" }),
		"mapping":   plainTest(func(_ *state, v any) bool { _, ok := v.(*dict); return ok }),
		"sequence": plainTest(func(s *state, v any) bool {
			_, ok := s.length(v)
			return ok && !slices.Contains([]string{"dict_keys", "dict_values", "dict_items"}, typeName(v))
		}),
		"iterable": plainTest(func(_ *state, v any) bool {
			switch v.(type) {
			case undefined, string, markup, *list, *dict, *view, span, *generator, *loop:
				return true
			}
			return false
		}),
		"callable": plainTest(func(_ *state, v any) bool {
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
	with := func(f func(s *state, v, other any) bool) func(*state, any, *call) bool {
		return func(s *state, v any, c *call) bool { return f(s, v, s.bindArguments(c, 1, "other")[0]) }
	}
	compare := func(op string) func(*state, any, *call) bool {
		return with(func(s *state, v, other any) bool { return s.compare(op, v, other) })
	}
	withCase := func(change func(*state, string) string) func(*state, any, *call) bool {
		return plainTest(func(s *state, v any) bool {
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
	maps.Copy(tests, map[string]func(s *state, v any, c *call) bool{
		"sameas": with(func(s *state, v, other any) bool {
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
		"odd":  plainTest(func(s *state, v any) bool { return whole(s, v)%2 != 0 }),
		"even": plainTest(func(s *state, v any) bool { return whole(s, v)%2 == 0 }),
		"divisibleby": func(s *state, v any, c *call) bool {
			by := whole(s, s.bindArguments(c, 1, "num")[0])
			if by == 0 {
				s.fail("division by zero")
			}
			return whole(s, v)%by == 0
		},
		"upper": withCase((*state).upper), "lower": withCase((*state).lower),
		"in": func(s *state, v any, c *call) bool { return s.contains(s.bindArguments(c, 1, "seq")[0], v) },
	})
	for op, names := range map[string][]string{
		"==": {"eq", "equalto", "=="}, "!=": {"ne", "!="}, "<": {"lt", "lessthan", "<"},
		">": {"gt", "greaterthan", ">"}, "<=": {"le", "<="}, ">=": {"ge", ">="},
	} {
		for _, name := range names {
			tests[name] = compare(op)
		}
	}
}
