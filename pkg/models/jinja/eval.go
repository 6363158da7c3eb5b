package jinja

import (
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// eval returns the value of an expression.
func (s *state) eval(e expression) any {
	s.countSteps(0)
	return e.eval(s)
}

func (of computed) eval(s *state) any { return of(s) }

func (n attrNode) eval(s *state) any {
	of := s.eval(n.of)
	s.line = n.line
	return s.attribute(of, n.name)
}

func (n filterNode) eval(s *state) any { return s.filter(n, s.eval(n.of)) }

// attribute evaluates x.name: an attribute of the object, else its item of that name, else undefined.
func (s *state) attribute(of any, name string) any {
	if strings.HasPrefix(name, "_") {
		s.fail("%s.%s: attributes that begin with _ cannot be read", typeName(of), name)
	}
	switch v := of.(type) {
	case undefined:
		s.mustBeDefined(v)
	case *namespace:
		if got, ok := v.attributes.get(name); ok {
			return got
		}
		return undefined{"the namespace has no attribute " + name}
	case *loop:
		return s.loopAttribute(v, name)
	case *macro:
		s.unsupported("the attribute %s of a macro", name)
	}
	if slices.Contains(attributes[typeName(of)], name) {
		s.unsupported("the method %s of %s, but to call it", name, typeName(of))
	}
	if d, ok := of.(*dict); ok {
		if got, ok := d.get(name); ok {
			return got
		}
	}
	return undefined{typeName(of) + " has no attribute " + name}
}

// item evaluates x[index]: an item of the object, else its attribute of that name, else undefined.
func (s *state) item(of, index any) any {
	s.mustBeDefined(of)
	if d, ok := of.(*dict); ok {
		if got, ok := d.get(index); ok {
			return got
		}
	} else if i, ok := integer(index); ok {
		if text, ok := of.(string); ok {
			s.countSteps(len(text))
			of = &list{items: s.iterate(text)}
		}
		switch v := of.(type) {
		case *list:
			if i < 0 {
				i += int64(len(v.items))
			}
			if i >= 0 && i < int64(len(v.items)) {
				return v.items[i]
			}
		case span:
			if i < 0 {
				i += v.len()
			}
			if i >= 0 && i < v.len() {
				return v.begin + i*v.step
			}
		}
	}
	if name, ok := index.(string); ok {
		return s.attribute(of, name)
	}
	return undefined{typeName(of) + " has no element " + s.text(index)}
}

// slice evaluates x[begin:end:step] of a string or a list. Bounds that are no integers, and other
// values, fail the rendering; a slice of a range is unsupported.
func (s *state) slice(of any, parts [3]expression) any {
	var bounds [3]*int64
	for i, e := range parts {
		if e == nil {
			continue
		}
		v := s.eval(e)
		if v == nil {
			continue
		}
		s.mustBeDefined(v)
		at, ok := integer(v)
		if !ok {
			s.fail("a slice from, to or by %s", typeName(v))
		}
		bounds[i] = &at
	}
	s.mustBeDefined(of)
	switch v := of.(type) {
	case string:
		s.countMemory(len(v))
		if !slices.ContainsFunc([]byte(v), func(b byte) bool { return b >= utf8.RuneSelf }) && bounds[2] == nil {
			begin, end, _ := s.bounds(bounds, len(v))
			return v[begin:max(begin, end)]
		}
		return string(sliceOf(s, []rune(v), bounds))
	case *list:
		s.countMemory(16 * len(v.items))
		return &list{sliceOf(s, v.items, bounds), v.tuple}
	case span:
		s.unsupported("a slice of a range")
	}
	s.fail("a slice of %s", typeName(of))
	return nil
}

// bounds returns the bounds of a slice of n items, clipped as in Python; nil is a bound that is not
// given. A step of 0 fails the rendering.
func (s *state) bounds(of [3]*int64, n int) (begin, end, step int) {
	step = 1
	if of[2] != nil {
		step = int(min(max(*of[2], -math.MaxInt32), math.MaxInt32))
	}
	if step == 0 {
		s.fail("a slice by 0")
	}
	low, high := 0, n
	if step < 0 {
		low, high = -1, n-1
	}
	clip := func(at *int64, otherwise int) int {
		if at == nil {
			return otherwise
		}
		i := *at
		if i < 0 {
			i += int64(n)
		}
		return int(min(max(i, int64(low)), int64(high)))
	}
	if step > 0 {
		return clip(of[0], low), clip(of[1], high), step
	}
	return clip(of[0], high), clip(of[1], low), step
}

// sliceOf returns the items of a slice.
func sliceOf[T any](s *state, of []T, by [3]*int64) []T {
	begin, end, step := s.bounds(by, len(of))
	var out []T
	for i := begin; step > 0 && i < end || step < 0 && i > end; i += step {
		out = append(out, of[i])
	}
	return out
}

// loopAttribute returns an attribute of the variable loop, such as loop.index.
func (s *state) loopAttribute(l *loop, name string) any {
	n, at := int64(len(l.items)), int64(l.at)
	switch name {
	case "index":
		return at + 1
	case "index0":
		return at
	case "revindex":
		return n - at
	case "revindex0":
		return n - at - 1
	case "first":
		return at == 0
	case "last":
		return at == n-1
	case "length":
		return n
	case "depth":
		return l.depth + 1
	case "depth0":
		return l.depth
	case "previtem":
		if at > 0 {
			return l.items[at-1]
		}
		return undefined{"there is no previous item"}
	case "nextitem":
		if at < n-1 {
			return l.items[at+1]
		}
		return undefined{"there is no next item"}
	case "cycle", "changed":
		s.unsupported("loop.%s, but to call it", name)
	}
	return undefined{"loop has no attribute " + name}
}
