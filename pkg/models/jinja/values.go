package jinja

import (
	"math"
	"math/big"
	"slices"
	"strings"
	"unicode/utf8"
)

// Values of a template are nil, bool, int64, float64, string, and these types.
type (
	// undefined is a missing name, attribute or item. why says which, for errors.
	undefined struct{ why string }
	// markup is a string that was marked as safe. It can only be printed.
	markup string
	list   struct {
		items []any
		tuple bool
	}
	dict struct {
		keys, values []any
		at           map[any]int
	}
	// view is the keys, values or items of a dict.
	view struct {
		name  string
		items []any
	}
	span struct{ begin, end, step int64 } // a range
	// generator yields its items once: iterating empties it.
	generator struct{ items []any }
	namespace struct{ attributes *dict }
	function  struct {
		name string
		call func(s *state, a *call) any
	}
	macro struct {
		*macroNode
		frame *frame
	}
)

// call holds the arguments of a call of a function, filter, test or method: args by position, named by names.
type call struct {
	name  string
	args  []any
	names []string
	named []any
}

// value converts a variable of Render.
func (s *state) value(v any, depth int) any {
	s.countDepth(depth)
	switch v := v.(type) {
	case nil, bool, int64, float64, *function:
		return v
	case string:
		if !utf8.ValidString(v) {
			s.fail("%.40q is not UTF-8", v)
		}
		return v
	case int:
		return int64(v)
	case []any:
		l := &list{items: make([]any, len(v))}
		for i := range v {
			l.items[i] = s.value(v[i], depth+1)
		}
		return l
	case Dict:
		d := newDict()
		for _, p := range v {
			d.put(p.Key, s.value(p.Value, depth+1))
		}
		return d
	}
	s.fail("a variable of Go type %T", v)
	return nil
}

func newDict() *dict { return &dict{at: map[any]int{}} }

// key returns the map key of a dict key: keys that are equal in Python have the same one. false: v cannot be a key.
func key(v any) (any, bool) {
	switch v := v.(type) {
	case nil, int64, string:
		return v, true
	case bool:
		return boolToInt(v), true
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
			return int64(v), true
		}
		return v, v == v
	}
	return nil, false
}

// put sets the value of a key; false: k cannot be a key.
func (d *dict) put(k, v any) bool {
	at, ok := key(k)
	if !ok {
		return false
	}
	if i, there := d.at[at]; there {
		d.values[i] = v
		return true
	}
	d.at[at] = len(d.keys)
	d.keys, d.values = append(d.keys, k), append(d.values, v)
	return true
}

// get returns the value of a key, and whether there is one.
func (d *dict) get(k any) (any, bool) {
	if at, ok := key(k); ok {
		if i, there := d.at[at]; there {
			return d.values[i], true
		}
	}
	return nil, false
}

// pairs returns the items as tuples of key and value.
func (d *dict) pairs() []any {
	out := make([]any, len(d.keys))
	for i := range d.keys {
		out[i] = &list{[]any{d.keys[i], d.values[i]}, true}
	}
	return out
}

// len returns how many numbers the range has, as Python's len(range(...)); 0 if the step leads away
// from the end.
func (r span) len() int64 {
	switch {
	case r.step > 0 && r.begin < r.end:
		return (r.end-r.begin-1)/r.step + 1
	case r.step < 0 && r.begin > r.end:
		return (r.begin-r.end-1)/-r.step + 1
	}
	return 0
}

func (r span) items() []any {
	out := make([]any, r.len())
	for i := range out {
		out[i] = r.begin + int64(i)*r.step
	}
	return out
}

// typeName returns the name of the type in Python.
func typeName(v any) string {
	switch v := v.(type) {
	case nil:
		return "NoneType"
	case bool:
		return "bool"
	case int64:
		return "int"
	case float64:
		return "float"
	case string:
		return "str"
	case markup:
		return "Markup"
	case *list:
		if v.tuple {
			return "tuple"
		}
		return "list"
	case *dict:
		return "dict"
	case *view:
		return v.name
	case span:
		return "range"
	case *generator:
		return "generator"
	case *namespace:
		return "Namespace"
	case *macro:
		return "Macro"
	case *function:
		return "function"
	case *loop:
		return "LoopContext"
	}
	return "Undefined"
}

// mustBeDefined fails on an undefined value, as Python does when one is used, and on markup.
func (s *state) mustBeDefined(values ...any) {
	for _, v := range values {
		switch v := v.(type) {
		case undefined:
			s.fail("%s", v.why)
		case markup:
			s.unsupported("a text that the filter safe or escape was applied to, but to print it")
		}
	}
}

// truth is Python's bool().
func truth(v any) bool {
	switch v := v.(type) {
	case nil, undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case markup:
		return v != ""
	case *list:
		return len(v.items) > 0
	case *dict:
		return len(v.keys) > 0
	case *view:
		return len(v.items) > 0
	case span:
		return v.len() > 0
	}
	return true
}

// iterate returns the items of a value, as a for loop sees them. It empties a generator.
func (s *state) iterate(v any) []any {
	items, ok := s.items(v)
	if !ok {
		s.fail("%s is not iterable", typeName(v))
	}
	return items
}

// items is iterate; false: v is not iterable.
func (s *state) items(v any) ([]any, bool) {
	switch v := v.(type) {
	case undefined:
		return nil, true
	case *list:
		return v.items, true
	case *dict:
		return v.keys, true
	case *view:
		return v.items, true
	case span:
		s.countMemory(16 * int(v.len()))
		return v.items(), true
	case *generator:
		items := v.items
		v.items = nil
		return items, true
	case string:
		s.countMemory(16 * len(v))
		var out []any
		for _, r := range v {
			out = append(out, string(r))
		}
		return out, true
	case markup:
		s.mustBeDefined(v)
	case *loop:
		s.unsupported("loop as a list")
	}
	return nil, false
}

// length is Python's len(); false: it has none.
func (s *state) length(v any) (int, bool) {
	switch v := v.(type) {
	case undefined:
		return 0, true
	case string:
		s.countSteps(len(v))
		return utf8.RuneCountInString(v), true
	case markup:
		return utf8.RuneCountInString(string(v)), true
	case *list:
		return len(v.items), true
	case *dict:
		return len(v.keys), true
	case *view:
		return len(v.items), true
	case span:
		return int(v.len()), true
	case *loop:
		return len(v.items), true
	}
	return 0, false
}

// boolToInt returns 1 for true, else 0.
func boolToInt(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// integer returns a value as an int of Python; a bool is one, too.
func integer(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case bool:
		return boolToInt(v), true
	}
	return 0, false
}

// float returns a number of Python as a float; false: v is not a number.
func float(v any) (float64, bool) {
	if f, ok := v.(float64); ok {
		return f, true
	}
	i, ok := integer(v)
	return float64(i), ok
}

// compareNumbers compares two numbers exactly, also an int with a float. ok is false for NaN and for other types.
func compareNumbers(a, b any) (order int, ok bool) {
	i, whole := integer(a)
	j, too := integer(b)
	if whole && too {
		switch {
		case i < j:
			return -1, true
		case i > j:
			return 1, true
		}
		return 0, true
	}
	x, isX := float(a)
	y, isY := float(b)
	if !isX || !isY || x != x || y != y {
		return 0, false
	}
	exact := func(v any, f float64) *big.Float {
		if n, ok := integer(v); ok {
			return new(big.Float).SetInt64(n)
		}
		return big.NewFloat(f)
	}
	return exact(a, x).Cmp(exact(b, y)), true
}

func isNumber(v any) bool {
	_, ok := float(v)
	return ok
}

// equal reports a == b.
func (s *state) equal(a, b any, depth int) bool {
	s.countDepth(depth)
	if isNumber(a) && isNumber(b) {
		order, ok := compareNumbers(a, b)
		return ok && order == 0
	}
	switch a := a.(type) {
	case nil:
		return b == nil
	case string:
		s.countSteps(len(a))
		if m, ok := b.(markup); ok {
			return a == string(m)
		}
		other, ok := b.(string)
		return ok && a == other
	case markup:
		return s.equal(string(a), b, depth)
	case undefined:
		_, ok := b.(undefined)
		return ok
	case *list:
		other, ok := b.(*list)
		same := func(x, y any) bool { return s.equal(x, y, depth+1) }
		return ok && a.tuple == other.tuple && slices.EqualFunc(a.items, other.items, same)
	case *dict:
		other, ok := b.(*dict)
		if !ok || len(a.keys) != len(other.keys) {
			return false
		}
		for i, k := range a.keys {
			v, there := other.get(k)
			if !there || !s.equal(a.values[i], v, depth+1) {
				return false
			}
		}
		return true
	case span:
		other, ok := b.(span)
		if !ok {
			return false
		}
		n := a.len()
		return n == other.len() && (n == 0 || a.begin == other.begin && (n == 1 || a.step == other.step))
	case *view:
		if other, ok := b.(*view); ok && other != a {
			s.unsupported("%s == %s", a.name, other.name)
		}
	case bool, int64, float64:
		return false
	}
	return a == b
}

// less reports a < b; types without an order are an error.
func (s *state) less(a, b any, depth int) bool {
	s.countDepth(depth)
	s.mustBeDefined(a, b)
	if isNumber(a) && isNumber(b) {
		order, ok := compareNumbers(a, b)
		return ok && order < 0
	}
	if x, ok := a.(string); ok {
		if y, ok := b.(string); ok {
			s.countSteps(len(x))
			return x < y // bytes of UTF-8 have the order of code points
		}
	}
	if x, ok := a.(*list); ok {
		if y, ok := b.(*list); ok && x.tuple == y.tuple {
			for i := range min(len(x.items), len(y.items)) {
				if !s.equal(x.items[i], y.items[i], depth+1) {
					return s.less(x.items[i], y.items[i], depth+1)
				}
			}
			return len(x.items) < len(y.items)
		}
	}
	s.fail("%s and %s have no order", typeName(a), typeName(b))
	return false
}

// contains reports whether item is in container.
func (s *state) contains(container, item any) bool {
	switch c := container.(type) {
	case string:
		s.countSteps(len(c))
		part, ok := item.(string)
		if !ok {
			s.fail("%s in str; must be str", typeName(item))
		}
		return strings.Contains(c, part)
	case *dict:
		if _, ok := key(item); !ok {
			s.fail("%s as a key of a dict", typeName(item))
		}
		_, ok := c.get(item)
		return ok
	}
	return slices.ContainsFunc(s.iterate(container), func(x any) bool { return s.equal(x, item, 0) })
}
