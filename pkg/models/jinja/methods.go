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

// methods are all names that can be called on a value; the parser refuses others.
var methods = func() map[string]bool {
	all := map[string]bool{"cycle": true, "changed": true}
	for _, names := range [][]string{
		strings.Fields("get items keys values copy count index"),
		strings.Fields(`strip lstrip rstrip split rsplit splitlines startswith endswith replace lower upper title capitalize
			find rfind join format removeprefix removesuffix isdigit isalpha isalnum isspace islower isupper partition
			rpartition zfill`),
	} {
		for _, name := range names {
			all[name] = true
		}
	}
	return all
}()

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
		return s.dictMethod(v, name, c), true
	case *list:
		return s.listMethod(v, name, c), true
	case string:
		return s.stringMethod(v, name, c), true
	}
	s.unsupported("%s.%s()", typeName(of), name)
	return nil, true
}

// dictMethod calls a method of a dict. Methods that change it, and unknown ones, fail the
// rendering.
func (s *state) dictMethod(d *dict, name string, c *call) any {
	s.countSteps(16 * len(d.keys))
	switch name {
	case "get":
		a := s.bindArguments(c, 1, "key", "default")
		if _, ok := key(a[0]); !ok {
			s.fail("%s as a key of a dict", typeName(a[0]))
		}
		if v, ok := d.get(a[0]); ok {
			return v
		}
		return argument(a[1], nil)
	case "items":
		s.bindArguments(c, 0)
		s.countMemory(64 * len(d.keys))
		return &view{"dict_items", d.pairs()}
	case "keys":
		s.bindArguments(c, 0)
		return &view{"dict_keys", d.keys}
	case "values":
		s.bindArguments(c, 0)
		return &view{"dict_values", d.values}
	case "copy":
		s.bindArguments(c, 0)
		return d // nothing changes it
	}
	s.fail("dict.%s(): a template cannot change a dict", name)
	return nil
}

// listMethod calls a method of a list or a tuple. Methods that change it, and unknown ones, fail
// the rendering.
func (s *state) listMethod(l *list, name string, c *call) any {
	switch name {
	case "copy":
		s.bindArguments(c, 0)
		return l
	case "count", "index":
		v, n := s.bindArguments(c, 1, "value")[0], int64(0)
		for i, item := range l.items {
			if s.equal(item, v, 0) {
				if n++; name == "index" {
					return int64(i)
				}
			}
		}
		if name == "index" {
			s.fail("the value is not in the list")
		}
		return n
	}
	s.fail("list.%s(): a template cannot change a list", name)
	return nil
}

// stringsOf returns the arguments of a call as strings; a value of another type fails the rendering
// with the method's name.
func (s *state) stringsOf(c *call, values ...any) []string {
	out := make([]string, len(values))
	for i, v := range values {
		s.mustBeDefined(v)
		text, ok := v.(string)
		if !ok {
			s.fail("%s of %s; must be str", c.name, typeName(v))
		}
		out[i] = text
	}
	return out
}

// stringMethod calls a method of a string, with the results of Python. Arguments that Python would
// refuse fail the rendering.
func (s *state) stringMethod(v, name string, c *call) any {
	s.countMemory(len(v))
	switch name {
	case "strip", "lstrip", "rstrip":
		return s.strip(v, argument(s.bindArguments(c, 0, "chars")[0], nil), name != "rstrip", name != "lstrip")
	case "split", "rsplit":
		a := s.bindArguments(c, 0, "sep", "maxsplit")
		return s.split(v, argument(a[0], nil), argument(a[1], int64(-1)), name == "rsplit")
	case "splitlines":
		s.bindArguments(c, 0)
		return stringList(s, s.lines(v))
	case "startswith", "endswith":
		of := s.bindArguments(c, 1, "prefix")[0]
		any := []any{of}
		if l, ok := of.(*list); ok && l.tuple {
			any = l.items
		}
		for _, part := range s.stringsOf(c, any...) {
			if name == "startswith" && strings.HasPrefix(v, part) || name == "endswith" && strings.HasSuffix(v, part) {
				return true
			}
		}
		return false
	case "replace":
		a := s.bindArguments(c, 2, "old", "new", "count")
		n, ok := integer(argument(a[2], int64(-1)))
		if !ok {
			s.fail("replace: count must be an integer")
		}
		t := s.stringsOf(c, a[0], a[1])
		return s.replace(v, t[0], t[1], n)
	case "lower":
		s.bindArguments(c, 0)
		return s.lower(v)
	case "upper":
		s.bindArguments(c, 0)
		return s.upper(v)
	case "title":
		s.bindArguments(c, 0)
		return s.title(v)
	case "capitalize":
		s.bindArguments(c, 0)
		return s.capitalize(v)
	case "join":
		items := s.iterate(s.bindArguments(c, 1, "iterable")[0])
		parts := s.stringsOf(c, items...)
		for _, part := range parts {
			s.countMemory(len(part) + len(v))
		}
		return strings.Join(parts, v)
	case "format":
		return s.formatBraces(v, c)
	case "removeprefix":
		return strings.TrimPrefix(v, s.stringsOf(c, s.bindArguments(c, 1, "prefix")[0])[0])
	case "removesuffix":
		return strings.TrimSuffix(v, s.stringsOf(c, s.bindArguments(c, 1, "suffix")[0])[0])
	case "zfill":
		n, ok := integer(s.bindArguments(c, 1, "width")[0])
		if !ok {
			s.fail("zfill: width must be an integer")
		}
		return s.pad(v, n, true, false)
	}
	if strings.HasPrefix(name, "is") {
		return s.testCharacters(v, name, c)
	}
	return s.search(v, name, c)
}

// ascii refuses numbers outside ASCII: Python may classify them in another way than Go. It returns true otherwise.
func (s *state) ascii(r rune) bool {
	if r >= utf8.RuneSelf && unicode.IsNumber(r) {
		s.unsupported("the number %q", r)
	}
	return true
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

// testCharacters calls a method such as isdigit, which tests the characters of a string.
func (s *state) testCharacters(v, name string, c *call) any {
	all := func(holds func(rune) bool) bool {
		s.bindArguments(c, 0)
		return v != "" && strings.IndexFunc(v, func(r rune) bool { return !holds(r) }) < 0
	}
	switch name {
	case "isdigit":
		return all(func(r rune) bool { return s.ascii(r) && r >= '0' && r <= '9' })
	case "isalpha":
		return all(unicode.IsLetter)
	case "isalnum":
		return all(func(r rune) bool { return unicode.IsLetter(r) || s.ascii(r) && r >= '0' && r <= '9' })
	case "isspace":
		return all(isSpace)
	case "islower":
		return tests["lower"](s, v, c)
	case "isupper":
		return tests["upper"](s, v, c)
	}
	s.unsupported("str.%s()", name)
	return nil
}

// search calls a method that looks for a part of a string.
func (s *state) search(v, name string, c *call) any {
	switch name {
	case "find", "rfind", "index":
		part := s.stringsOf(c, s.bindArguments(c, 1, "sub")[0])[0]
		at := strings.Index(v, part)
		if name == "rfind" {
			at = strings.LastIndex(v, part)
		}
		if at >= 0 {
			at = utf8.RuneCountInString(v[:at])
		} else if name == "index" {
			s.fail("index: the text is not there")
		}
		return int64(at)
	case "count":
		part := s.stringsOf(c, s.bindArguments(c, 1, "sub")[0])[0]
		return int64(strings.Count(v, part))
	case "partition", "rpartition":
		part := s.stringsOf(c, s.bindArguments(c, 1, "sep")[0])[0]
		if part == "" {
			s.fail("%s by an empty text", name)
		}
		at := strings.Index(v, part)
		if name == "rpartition" {
			at = strings.LastIndex(v, part)
		}
		switch {
		case at >= 0:
			return &list{[]any{v[:at], part, v[at+len(part):]}, true}
		case name == "partition":
			return &list{[]any{v, "", ""}, true}
		}
		return &list{[]any{"", "", v}, true}
	}
	s.unsupported("str.%s()", name)
	return nil
}
