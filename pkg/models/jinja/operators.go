package jinja

import (
	"math"
	"slices"
	"strings"
)

// compare evaluates a comparison or a test with in or not in.
func (s *state) compare(op string, a, b any) bool {
	switch op {
	case "==":
		return s.equal(a, b, 0)
	case "!=":
		return !s.equal(a, b, 0)
	case "<":
		return s.less(a, b, 0)
	case ">":
		return s.less(b, a, 0)
	case "<=", ">=":
		if op == ">=" {
			a, b = b, a
		}
		if isNumber(a) && isNumber(b) {
			order, ok := compareNumbers(a, b)
			return ok && order <= 0
		}
		return s.less(a, b, 0) || s.equal(a, b, 0)
	case "in":
		return s.contains(b, a)
	}
	return !s.contains(b, a)
}

// sign evaluates +v or -v of a number.
func (s *state) sign(v any, minus bool) any {
	s.mustBeDefined(v)
	if i, ok := integer(v); ok {
		if minus {
			return s.subtract(0, i)
		}
		return i
	}
	f, ok := v.(float64)
	if !ok {
		s.fail("a sign before %s", typeName(v))
	}
	if minus {
		return -f
	}
	return f
}

func (s *state) overflow() { s.unsupported("an integer of more than 64 bits") }

// subtract returns a - b; a result beyond 64 bits is an error.
func (s *state) subtract(a, b int64) int64 {
	if c := a - b; (c < a) == (b > 0) {
		return c
	}
	s.overflow()
	return 0
}

// multiply returns a * b; a result beyond 64 bits is an error.
func (s *state) multiply(a, b int64) int64 {
	c := a * b
	if a != 0 && (c/a != b || a == -1 && b == math.MinInt64) {
		s.overflow()
	}
	return c
}

// binary evaluates an arithmetic operator of numbers, texts or lists.
func (s *state) binary(op string, a, b any) any {
	s.mustBeDefined(a)
	if text, ok := a.(string); ok && op == "%" {
		return s.format(text, b)
	}
	s.mustBeDefined(b)
	i, isI := integer(a)
	j, isJ := integer(b)
	if isI && isJ {
		return s.integers(op, i, j)
	}
	x, isX := float(a)
	y, isY := float(b)
	if isX && isY {
		return s.floats(op, x, y)
	}
	switch op {
	case "+":
		if x, ok := a.(string); ok {
			if y, ok := b.(string); ok {
				s.countMemory(len(x) + len(y))
				return x + y
			}
		}
		if x, ok := a.(*list); ok {
			if y, ok := b.(*list); ok && x.tuple == y.tuple {
				s.countMemory(16 * (len(x.items) + len(y.items)))
				return &list{slices.Concat(x.items, y.items), x.tuple}
			}
		}
	case "*":
		if isI {
			a, b, j, isJ = b, a, i, true
		}
		if isJ {
			switch x := a.(type) {
			case string:
				s.countCopies(len(x), j)
				return strings.Repeat(x, int(max(0, j)))
			case *list:
				s.countCopies(16*len(x.items), j)
				return &list{slices.Repeat(x.items, int(max(0, j))), x.tuple}
			}
		}
	}
	s.fail("%s %s %s", typeName(a), op, typeName(b))
	return nil
}

// countCopies counts the bytes of times copies of size bytes.
func (s *state) countCopies(size int, times int64) {
	if times > 0 && size > 0 {
		s.countMemory(int(min(times, MaxBytes+1)) * min(size, MaxBytes+1))
	}
}

// integers evaluates an operator of two integers, with the division and remainder of Python. What it does not list
// is **.
func (s *state) integers(op string, a, b int64) any {
	if b == 0 && (op == "/" || op == "//" || op == "%") {
		s.fail("division by zero")
	}
	switch op {
	case "+":
		if b == math.MinInt64 {
			s.overflow()
		}
		return s.subtract(a, -b)
	case "-":
		return s.subtract(a, b)
	case "*":
		return s.multiply(a, b)
	case "/":
		if max(a, -a) > 1<<53 || max(b, -b) > 1<<53 {
			s.unsupported("a quotient of integers above 2^53")
		}
		return float64(a) / float64(b)
	case "//":
		if b == -1 {
			return s.subtract(0, a)
		}
		q := a / b
		if a%b != 0 && (a < 0) != (b < 0) {
			q--
		}
		return q
	case "%":
		r := a % b
		if r != 0 && (r < 0) != (b < 0) {
			r += b
		}
		return r
	}
	if b < 0 {
		if a == 0 {
			s.fail("division by zero")
		}
		return math.Pow(float64(a), float64(b))
	}
	out := int64(1)
	for range b {
		s.countSteps(0)
		if out = s.multiply(out, a); a == 1 || a == 0 {
			break
		}
	}
	return out
}

// floats evaluates an operator of two numbers, at least one of which is a float.
func (s *state) floats(op string, a, b float64) any {
	if b == 0 && (op == "/" || op == "//" || op == "%") {
		s.fail("division by zero")
	}
	switch op {
	case "+":
		return a + b
	case "-":
		return a - b
	case "*":
		return a * b
	case "/":
		return a / b
	}
	s.unsupported("%s of floats", op)
	return nil
}
