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
	switch n := e.(type) {
	case constNode:
		return n.value
	case nameNode:
		s.line = n.line
		if v, ok := s.frame.lookup(n.name); ok {
			return v
		}
		return undefined{n.name + " is undefined"}
	case listNode:
		return s.list(n)
	case dictNode:
		return s.dict(n)
	case condNode:
		switch {
		case truth(s.eval(n.test)):
			return s.eval(n.then)
		case n.otherwise != nil:
			return s.eval(n.otherwise)
		}
		return undefined{"an if without an else gave no value"}
	case andNode:
		if v := s.eval(n.left); !truth(v) {
			return v
		}
		return s.eval(n.right)
	case orNode:
		if v := s.eval(n.left); truth(v) {
			return v
		}
		return s.eval(n.right)
	case notNode:
		return !truth(s.eval(n.of))
	case signNode:
		return s.sign(s.eval(n.of), n.minus)
	case compareNode:
		return s.compareChain(n)
	case concatNode:
		return s.concat(n)
	case binaryNode:
		left, right := s.eval(n.left), s.eval(n.right)
		s.line = n.line
		return s.binary(n.op, left, right)
	case attrNode:
		of := s.eval(n.of)
		s.line = n.line
		return s.attribute(of, n.name)
	case itemNode:
		of := s.eval(n.of)
		if slice, ok := n.index.(sliceNode); ok {
			return s.slice(of, slice)
		}
		index := s.eval(n.index)
		s.line = n.line
		return s.item(of, index)
	case callNode:
		return s.callNode(n)
	case filterNode:
		return s.filter(n, s.eval(n.of))
	case testNode:
		v := s.eval(n.of)
		s.line = n.line
		return s.test(n.name, v, s.args(n.name, n.args)) != n.minus
	}
	s.fail("an expression of Go type %T", e)
	return nil
}

// list evaluates a list or a tuple.
func (s *state) list(n listNode) *list {
	l := &list{make([]any, len(n.items)), n.tuple}
	s.countMemory(16 * len(n.items))
	for i, item := range n.items {
		l.items[i] = s.eval(item)
	}
	return l
}

// dict evaluates the literal of a dict. A key that Python could not hash fails the rendering.
func (s *state) dict(n dictNode) *dict {
	d := newDict()
	s.countMemory(64 * len(n.keys))
	for i := range n.keys {
		k := s.eval(n.keys[i])
		if !d.put(k, s.eval(n.values[i])) {
			s.unsupported("%s as a key of a dict", typeName(k))
		}
	}
	return d
}

// compareChain evaluates a comparison such as a < b < c.
func (s *state) compareChain(n compareNode) bool {
	left := s.eval(n.first)
	for i, op := range n.ops {
		right := s.eval(n.rest[i])
		if !s.compare(op, left, right) {
			return false
		}
		left = right
	}
	return true
}

// concat evaluates a ~ b: the values as one text.
func (s *state) concat(n concatNode) string {
	var b strings.Builder
	for _, item := range n.items {
		text := s.string(s.eval(item))
		s.countMemory(len(text))
		b.WriteString(text)
	}
	return b.String()
}

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
func (s *state) slice(of any, n sliceNode) any {
	var bounds [3]*int64
	for i, e := range []expression{n.begin, n.end, n.step} {
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
