package jinja

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

var ofIntegers = strings.Fields(`as_integer_ratio bit_count bit_length conjugate denominator from_bytes imag is_integer
	numerator real to_bytes`)

// attributes are the names of methods, by the type that has them. As in Python they take precedence over items of a
// dict.
var attributes = map[string][]string{
	"str": strings.Fields(`capitalize casefold center count encode endswith expandtabs find format format_map index isalnum
		isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust
		lower lstrip maketrans partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip
		split splitlines startswith strip swapcase title translate upper zfill`),
	"list":  strings.Fields(`append clear copy count extend index insert pop remove reverse sort`),
	"tuple": strings.Fields(`count index`),
	"dict":  strings.Fields(`clear copy fromkeys get items keys pop popitem setdefault update values`),
	"int":   ofIntegers,
	"bool":  ofIntegers,
	"float": strings.Fields(`as_integer_ratio conjugate from_number fromhex hex imag is_integer real`),
	"range": strings.Fields(`count index start step stop`),
}

// dictMethods, listMethods and stringMethods are those that are called, as filters of their value.
var (
	dictMethods = map[string]filter{
		"get": {needs: 1, names: []string{"key", "default"}, apply: func(s *state, v any, a []any) any {
			if _, ok := key(a[0]); !ok {
				s.fail("%s as a key of a dict", typeName(a[0]))
			}
			if v, ok := v.(*dict).get(a[0]); ok {
				return v
			}
			return argument(a[1], nil)
		}},
		"items": plain(func(s *state, v any) any {
			s.countMemory(64 * len(v.(*dict).keys))
			return &view{"dict_items", v.(*dict).pairs()}
		}),
		"keys":   plain(func(_ *state, v any) any { return &view{"dict_keys", v.(*dict).keys} }),
		"values": plain(func(_ *state, v any) any { return &view{"dict_values", v.(*dict).values} }),
		"copy":   plain(func(_ *state, v any) any { return v }), // nothing changes it
	}
	listMethods = map[string]filter{
		"copy": plain(func(_ *state, v any) any { return v }),
		"count": {needs: 1, names: []string{"value"}, apply: func(s *state, v any, a []any) any {
			n := int64(0)
			for _, item := range v.(*list).items {
				n += boolToInt(s.equal(item, a[0], 0))
			}
			return n
		}},
		"index": {needs: 1, names: []string{"value"}, apply: func(s *state, v any, a []any) any {
			at := slices.IndexFunc(v.(*list).items, func(item any) bool { return s.equal(item, a[0], 0) })
			if at < 0 {
				s.fail("the value is not in the list")
			}
			return int64(at)
		}},
	}
	stringMethods = map[string]filter{
		"strip": stripping(true, true), "lstrip": stripping(true, false), "rstrip": stripping(false, true),
		"split": splitting(false), "rsplit": splitting(true),
		"splitlines": plain(func(s *state, v any) any { return stringList(s, s.lines(v.(string))) }),
		"startswith": atEnd("startswith", strings.HasPrefix), "endswith": atEnd("endswith", strings.HasSuffix),
		"replace": {needs: 2, names: []string{"old", "new", "count"}, apply: func(s *state, v any, a []any) any {
			n, ok := integer(argument(a[2], int64(-1)))
			if !ok {
				s.fail("replace: count must be an integer")
			}
			t := s.stringsOf("replace", a[0], a[1])
			return s.replace(v.(string), t[0], t[1], n)
		}},
		"lower": changing((*state).lower), "upper": changing((*state).upper), "title": changing((*state).title),
		"capitalize": changing((*state).capitalize),
		"join": {needs: 1, names: []string{"iterable"}, apply: func(s *state, v any, a []any) any {
			parts := s.stringsOf("join", s.iterate(a[0])...)
			for _, part := range parts {
				s.countMemory(len(part) + len(v.(string)))
			}
			return strings.Join(parts, v.(string))
		}},
		"format": {call: func(s *state, v any, c *call) any { return s.formatBraces(v.(string), c) }},
		"removeprefix": ofPart("removeprefix", "prefix", func(_ *state, v, part string) any {
			return strings.TrimPrefix(v, part)
		}),
		"removesuffix": ofPart("removesuffix", "suffix", func(_ *state, v, part string) any {
			return strings.TrimSuffix(v, part)
		}),
		"zfill": {needs: 1, names: []string{"width"}, apply: func(s *state, v any, a []any) any {
			n, ok := integer(a[0])
			if !ok {
				s.fail("zfill: width must be an integer")
			}
			return s.pad(v.(string), n, true, false)
		}},
		"isdigit": ofAll((*state).asciiDigit),
		"isalpha": ofAll(func(_ *state, r rune) bool { return unicode.IsLetter(r) }),
		"isalnum": ofAll(func(s *state, r rune) bool { return unicode.IsLetter(r) || s.asciiDigit(r) }),
		"isspace": ofAll(func(_ *state, r rune) bool { return isSpace(r) }),
		"islower": {call: func(s *state, v any, c *call) any { return s.use(tests["lower"], v, c) }},
		"isupper": {call: func(s *state, v any, c *call) any { return s.use(tests["upper"], v, c) }},
		"find": ofPart("find", "sub", func(_ *state, v, part string) any {
			return place(v, strings.Index(v, part))
		}),
		"rfind": ofPart("rfind", "sub", func(_ *state, v, part string) any {
			return place(v, strings.LastIndex(v, part))
		}),
		"index": ofPart("index", "sub", func(s *state, v, part string) any {
			at := strings.Index(v, part)
			if at < 0 {
				s.fail("index: the text is not there")
			}
			return place(v, at)
		}),
		"count": ofPart("count", "sub", func(_ *state, v, part string) any { return int64(strings.Count(v, part)) }),
		"partition": ofPart("partition", "sep", func(s *state, v, part string) any {
			return s.partition("partition", v, part, strings.Index(v, part), &list{[]any{v, "", ""}, true})
		}),
		"rpartition": ofPart("rpartition", "sep", func(s *state, v, part string) any {
			return s.partition("rpartition", v, part, strings.LastIndex(v, part), &list{[]any{"", "", v}, true})
		}),
	}
)

// methods are all names that can be called on a value; the parser refuses others.
var methods = func() map[string]bool {
	all := map[string]bool{"cycle": true, "changed": true}
	for _, of := range []map[string]filter{dictMethods, listMethods, stringMethods} {
		for name := range of {
			all[name] = true
		}
	}
	return all
}()

func stripping(left, right bool) filter {
	return filter{names: []string{"chars"}, apply: func(s *state, v any, a []any) any {
		return s.strip(v.(string), argument(a[0], nil), left, right)
	}}
}

func splitting(fromRight bool) filter {
	return filter{names: []string{"sep", "maxsplit"}, apply: func(s *state, v any, a []any) any {
		return s.split(v.(string), argument(a[0], nil), argument(a[1], int64(-1)), fromRight)
	}}
}

// atEnd returns a method that looks for a text, or for each of a tuple, at an end.
func atEnd(name string, is func(v, part string) bool) filter {
	return filter{needs: 1, names: []string{"prefix"}, apply: func(s *state, v any, a []any) any {
		parts := a
		if l, ok := a[0].(*list); ok && l.tuple {
			parts = l.items
		}
		return slices.ContainsFunc(s.stringsOf(name, parts...), func(part string) bool { return is(v.(string), part) })
	}}
}

// ofPart returns a method with one argument, a text.
func ofPart(name, of string, apply func(s *state, v, part string) any) filter {
	return filter{needs: 1, names: []string{of}, apply: func(s *state, v any, a []any) any {
		return apply(s, v.(string), s.stringsOf(name, a[0])[0])
	}}
}

// ofAll returns a method that tests the characters of a string.
func ofAll(holds func(*state, rune) bool) filter {
	return plain(func(s *state, v any) any {
		return v != "" && strings.IndexFunc(v.(string), func(r rune) bool { return !holds(s, r) }) < 0
	})
}

// place returns a place in a text in characters; -1 stays.
func place(v string, at int) any {
	if at >= 0 {
		at = utf8.RuneCountInString(v[:at])
	}
	return int64(at)
}

// partition returns what is before and after a part of a text, with it; without one there, otherwise.
func (s *state) partition(name, v, part string, at int, otherwise *list) any {
	switch {
	case part == "":
		s.fail("%s by an empty text", name)
	case at < 0:
		return otherwise
	}
	return &list{[]any{v[:at], part, v[at+len(part):]}, true}
}

// method calls the method of a value that a template names, such as text.strip(); false: it has
// none of that name, and the caller looks for an attribute. Arguments that Python would refuse fail
// the rendering.
func (s *state) method(of any, name string, c *call) (any, bool) {
	switch v := of.(type) {
	case undefined, markup:
		s.mustBeDefined(v)
	case *loop:
		switch name {
		case "cycle":
			s.bindArguments(&call{name: name, names: c.names, named: c.named}, 0)
			if len(c.args) == 0 {
				s.fail("loop.cycle of nothing")
			}
			return c.args[v.at%len(c.args)], true
		case "changed":
			if v.changed != nil && s.equal(&list{items: v.changed}, &list{items: c.args}, 0) {
				return false, true
			}
			v.changed = append([]any{}, c.args...)
			return true, true
		}
		return nil, false
	case *namespace:
		return nil, false
	}
	if !slices.Contains(attributes[typeName(of)], name) {
		return nil, false
	}
	switch v := of.(type) {
	case *dict:
		s.countSteps(16 * len(v.keys))
		return s.callMethod(dictMethods, "dict", of, c), true
	case *list:
		return s.callMethod(listMethods, "list", of, c), true
	case string:
		s.countMemory(len(v))
		if f, known := stringMethods[name]; known {
			return s.use(f, of, c), true
		}
	}
	s.unsupported("%s.%s()", typeName(of), name)
	return nil, true
}

// callMethod calls a method of a dict or a list. Methods that change it, and unknown ones, fail the rendering.
func (s *state) callMethod(of map[string]filter, kind string, v any, c *call) any {
	f, known := of[c.name]
	if !known {
		s.fail("%s.%s(): a template cannot change a %s", kind, c.name, kind)
	}
	return s.use(f, v, c)
}

// stringsOf returns the arguments of a call as strings; a value of another type fails the rendering
// with the method's name.
func (s *state) stringsOf(method string, values ...any) []string {
	out := make([]string, len(values))
	for i, v := range values {
		s.mustBeDefined(v)
		text, ok := v.(string)
		if !ok {
			s.fail("%s of %s; must be str", method, typeName(v))
		}
		out[i] = text
	}
	return out
}

// asciiDigit refuses numbers outside ASCII: Python may classify them in another way than Go.
func (s *state) asciiDigit(r rune) bool {
	if r >= utf8.RuneSelf && unicode.IsNumber(r) {
		s.unsupported("the number %q", r)
	}
	return r >= '0' && r <= '9'
}

// stringList makes a list of texts.
func stringList(s *state, texts []string) *list {
	l := &list{items: make([]any, len(texts))}
	s.countMemory(16 * len(texts))
	for i, t := range texts {
		l.items[i] = t
	}
	return l
}
