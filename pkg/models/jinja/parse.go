package jinja

import (
	"fmt"
	"slices"
	"strings"
)

// expression gives a value; statement runs, and says how it ended. The parser makes them of tokens.
type (
	expression interface{ eval(s *state) any }
	computed   func(s *state) any
	statement  func(s *state) signal
	attrNode   struct {
		of   expression
		name string
		line int
	}
	callNode struct {
		of   expression
		args arguments
		line int
	}
	filterNode struct {
		of   expression // nil: the text of a block
		name string
		args arguments
		line int
	}
	arguments struct {
		list  []expression
		names []string
		named []expression
	}
)

// parser parses tokens. Errors are panics of type failure.
type parser struct {
	tokens []token
	pos    int
	depth  int
	loops  int // how many loops are around the statement: break and continue need one
	// read are the names that expressions read: macro checks which special names its body uses.
	read map[string]bool
}

// parse returns the statements of a template.
func parse(tokens []token) (_ []statement, err error) {
	defer recoverFailure(&err)
	p := &parser{tokens: tokens, read: map[string]bool{}}
	body := p.statements()
	return body, nil
}

func (p *parser) now() token { return p.tokens[p.pos] }

func (p *parser) fail(format string, args ...any) {
	panic(failure{fmt.Errorf("line %d: %w", p.now().line, fmt.Errorf(format, args...))})
}

func (p *parser) next() token {
	t := p.now()
	if t.kind != endOfTemplate {
		p.pos++
	}
	return t
}

// is reports whether the next token is of a kind and has one of the texts.
func (p *parser) is(k kind, texts ...string) bool {
	t := p.now()
	return t.kind == k && slices.Contains(texts, t.text)
}

// skip consumes the next token if it has that kind and text, and reports whether it did.
func (p *parser) skip(k kind, text string) bool {
	if p.is(k, text) {
		p.pos++
		return true
	}
	return false
}

// expect consumes a token of that kind and text; another one is an error.
func (p *parser) expect(k kind, text string) {
	if !p.skip(k, text) {
		p.fail("unexpected %v; must be %q", p.now(), text)
	}
}

func (p *parser) name() string {
	if p.now().kind != name {
		p.fail("unexpected %v; must be a name", p.now())
	}
	return p.next().text
}

func (p *parser) blockEnd() {
	if p.now().kind != blockEnd {
		p.fail("unexpected %v; must be the end of the block", p.now())
	}
	p.pos++
}

// nest runs f one level deeper and limits the depth.
func (p *parser) nest(f func()) {
	if p.depth++; p.depth > MaxNesting {
		p.fail("%w: it nests more than %d deep", ErrLimit, MaxNesting)
	}
	f()
	p.depth--
}

// statements parses statements up to a block that begins with one of the names in until, and leaves that name as
// the next token. Without names it parses up to the end.
func (p *parser) statements(until ...string) (body []statement) {
	p.nest(func() {
		for {
			switch t := p.next(); t.kind {
			case data:
				body = append(body, func(s *state) signal {
					s.write(t.text)
					return goOn
				})
			case variableBegin:
				of := p.tuple(true)
				body = append(body, func(s *state) signal {
					s.line = t.line
					s.write(s.text(s.eval(of)))
					return goOn
				})
				if p.next().kind != variableEnd {
					p.pos--
					p.fail("unexpected %v; must be the end of the expression", p.now())
				}
			case blockBegin:
				if p.is(name, until...) {
					return
				}
				body = append(body, p.statement())
			default:
				if len(until) > 0 {
					p.fail("unexpected %v; must be %q", t, until[len(until)-1])
				}
				return
			}
		}
	})
	return body
}

// block parses the body of a statement and its end tag.
func (p *parser) block(end string) []statement {
	p.blockEnd()
	body := p.statements(end)
	p.next()
	p.blockEnd()
	return body
}

// blockOutsideLoops is block for a body in which break and continue do not see the loops around it.
func (p *parser) blockOutsideLoops(end string) []statement {
	loops := p.loops
	p.loops = 0
	body := p.block(end)
	p.loops = loops
	return body
}

// tuple parses one expression, or several with commas as a tuple, up to a name in ends. Without conditions it
// leaves a following if to the statement, as in "for x in y if z".
func (p *parser) tuple(conditions bool, ends ...string) expression {
	var items []expression
	for several := false; ; several = true {
		if p.now().kind == variableEnd || p.now().kind == blockEnd || p.is(operator, ")") || p.is(name, ends...) {
			if !several && !p.is(operator, ")") {
				p.fail("unexpected %v; must be an expression", p.now())
			}
			return listOf(items, true)
		}
		var item expression
		if conditions {
			item = p.expression()
		} else {
			item = p.or()
		}
		if !p.is(operator, ",") && !several {
			return item
		}
		items = append(items, item)
		if !p.skip(operator, ",") {
			return listOf(items, true)
		}
	}
}

// listOf returns a list of items, or a tuple.
func listOf(items []expression, tuple bool) expression {
	return computed(func(s *state) any {
		l := &list{make([]any, len(items)), tuple}
		s.countMemory(16 * len(items))
		for i, item := range items {
			l.items[i] = s.eval(item)
		}
		return l
	})
}

// expression parses an expression, with conditions "a if b else c".
func (p *parser) expression() (e expression) {
	p.nest(func() {
		e = p.or()
		for p.skip(name, "if") {
			then, test, otherwise := e, p.or(), expression(nil)
			if p.skip(name, "else") {
				otherwise = p.expression()
			}
			e = computed(func(s *state) any {
				switch {
				case truth(s.eval(test)):
					return s.eval(then)
				case otherwise != nil:
					return s.eval(otherwise)
				}
				return undefined{"an if without an else gave no value"}
			})
		}
	})
	return e
}

func (p *parser) or() expression {
	e := p.and()
	for p.skip(name, "or") {
		e = either(e, p.and(), true)
	}
	return e
}

func (p *parser) and() expression {
	e := p.not()
	for p.skip(name, "and") {
		e = either(e, p.not(), false)
	}
	return e
}

// either returns the left value if its truth is enough, else the right one: or, and.
func either(left, right expression, enough bool) expression {
	return computed(func(s *state) any {
		if v := s.eval(left); truth(v) == enough {
			return v
		}
		return s.eval(right)
	})
}

func (p *parser) not() expression {
	if !p.skip(name, "not") {
		return p.compare()
	}
	var of expression
	p.nest(func() { of = p.not() })
	return computed(func(s *state) any { return !truth(s.eval(of)) })
}

// compare parses a chain of comparisons.
func (p *parser) compare() expression {
	first := p.sum()
	var ops []string
	var rest []expression
	for {
		op := p.now().text
		switch {
		case p.is(operator, "==", "!=", "<", "<=", ">", ">="), p.is(name, "in"):
			p.pos++
		case p.is(name, "not") && p.tokens[p.pos+1].kind == name && p.tokens[p.pos+1].text == "in":
			p.pos += 2
			op = "not in"
		case len(ops) == 0:
			return first
		default:
			return computed(func(s *state) any {
				left := s.eval(first)
				for i, op := range ops {
					right := s.eval(rest[i])
					if !s.compare(op, left, right) {
						return false
					}
					left = right
				}
				return true
			})
		}
		ops, rest = append(ops, op), append(rest, p.sum())
	}
}

// binary parses operators of one precedence, from left to right.
func (p *parser) binary(operand func() expression, ops ...string) expression {
	e := operand()
	for p.is(operator, ops...) {
		t := p.next()
		left, right := e, operand()
		e = computed(func(s *state) any {
			a, b := s.eval(left), s.eval(right)
			s.line = t.line
			return s.binary(t.text, a, b)
		})
	}
	return e
}

func (p *parser) sum() expression { return p.binary(p.concat, "+", "-") }

// concat parses an expression of operands that ~ joins to text; one operand alone is itself. A
// fault of syntax ends the parse.
func (p *parser) concat() expression {
	items := []expression{p.product()}
	for p.skip(operator, "~") {
		items = append(items, p.product())
	}
	if len(items) == 1 {
		return items[0]
	}
	return computed(func(s *state) any {
		var b strings.Builder
		for _, item := range items {
			text := s.string(s.eval(item))
			s.countMemory(len(text))
			b.WriteString(text)
		}
		return b.String()
	})
}

func (p *parser) product() expression { return p.binary(p.power, "*", "/", "//", "%") }

func (p *parser) power() expression {
	return p.binary(func() expression { return p.unary(true) }, "**")
}

// unary parses signs, a primary, and what follows it; with filters also filters, tests and calls of their results.
func (p *parser) unary(filters bool) (e expression) {
	if p.is(operator, "-", "+") {
		p.nest(func() {
			minus, of := p.next().text == "-", p.unary(false)
			e = computed(func(s *state) any { return s.sign(s.eval(of), minus) })
		})
	} else {
		e = p.primary()
	}
	e = p.postfix(e)
	for filters {
		line := p.now().line
		switch {
		case p.is(operator, "|"):
			e = p.filters(e)
		case p.is(name, "is"):
			e = p.test(e)
		case p.is(operator, "("):
			e = callNode{e, p.arguments(), line}
		default:
			return e
		}
	}
	return e
}

// primary parses a name, a literal, or an expression in brackets.
func (p *parser) primary() expression {
	switch t := p.next(); {
	case t.kind == name:
		switch t.text {
		case "true", "True":
			return constant(true)
		case "false", "False":
			return constant(false)
		case "none", "None":
			return constant(nil)
		case "lipsum", "cycler", "joiner":
			p.fail("%s: %w", t.text, ErrUnsupported)
		}
		p.read[t.text] = true
		return computed(func(s *state) any {
			s.line = t.line
			if v, ok := s.frame.lookup(t.text); ok {
				return v
			}
			return undefined{t.text + " is undefined"}
		})
	case t.kind == literal:
		if text, ok := t.value.(string); ok {
			for p.now().kind == literal {
				more, ok := p.now().value.(string)
				if !ok {
					break
				}
				p.pos++
				text += more
			}
			return constant(text)
		}
		return constant(t.value)
	case t.kind == operator && t.text == "(":
		var e expression
		p.nest(func() { e = p.tuple(true) })
		p.expect(operator, ")")
		return e
	case t.kind == operator && t.text == "[":
		var items []expression
		for !p.is(operator, "]") {
			items = append(items, p.expression())
			if !p.skip(operator, ",") {
				break
			}
		}
		p.expect(operator, "]")
		return listOf(items, false)
	case t.kind == operator && t.text == "{":
		return p.dict()
	}
	p.pos--
	p.fail("unexpected %v; must be an expression", p.now())
	return nil
}

func constant(v any) expression { return computed(func(*state) any { return v }) }

// dict parses the rest of a dict. A key that Python could not hash fails the rendering.
func (p *parser) dict() expression {
	var keys, values []expression
	for !p.is(operator, "}") {
		keys = append(keys, p.expression())
		p.expect(operator, ":")
		values = append(values, p.expression())
		if !p.skip(operator, ",") {
			break
		}
	}
	p.expect(operator, "}")
	return computed(func(s *state) any {
		d := newDict()
		s.countMemory(64 * len(keys))
		for i := range keys {
			k := s.eval(keys[i])
			if !d.put(k, s.eval(values[i])) {
				s.unsupported("%s as a key of a dict", typeName(k))
			}
		}
		return d
	})
}

// postfix parses what follows a primary: attributes, items and calls.
func (p *parser) postfix(e expression) expression {
	for {
		line := p.now().line
		switch {
		case p.skip(operator, "."):
			switch t := p.next(); {
			case t.kind == name:
				e = attrNode{e, t.text, line}
			case t.kind == literal:
				if _, ok := t.value.(int64); ok {
					e = itemOf(e, constant(t.value), line)
					break
				}
				fallthrough
			default:
				p.pos--
				p.fail("unexpected %v; must be a name or a number", p.now())
			}
		case p.skip(operator, "["):
			e = p.subscript(e, line)
			if p.is(operator, ",") {
				p.fail("several indices: %w", ErrUnsupported)
			}
			p.expect(operator, "]")
		case p.is(operator, "("):
			call := callNode{e, p.arguments(), line}
			if a, ok := e.(attrNode); ok && !methods[a.name] {
				p.fail("the method %s(): %w", a.name, ErrUnsupported)
			}
			e = call
		default:
			return e
		}
	}
}

// itemOf returns an item of a value.
func itemOf(of, index expression, line int) expression {
	return computed(func(s *state) any {
		v, at := s.eval(of), s.eval(index)
		s.line = line
		return s.item(v, at)
	})
}

// subscript parses what is inside [ ] behind a value: an index or a slice, of which each part may be absent.
func (p *parser) subscript(of expression, line int) expression {
	var parts [3]expression
	for i := range parts {
		if !p.is(operator, ":", "]", ",") {
			parts[i] = p.expression()
		}
		if !p.skip(operator, ":") {
			if i == 0 {
				if parts[0] == nil {
					p.fail("an empty index: %w", ErrUnsupported)
				}
				return itemOf(of, parts[0], line)
			}
			break
		}
	}
	return computed(func(s *state) any { return s.slice(s.eval(of), parts) })
}

// arguments parses the arguments of a call in parentheses.
func (p *parser) arguments() (a arguments) {
	p.expect(operator, "(")
	for !p.is(operator, ")") {
		switch {
		case p.is(operator, "*", "**"):
			p.fail("arguments of a list or a dict, %s: %w", p.now().text, ErrUnsupported)
		case p.now().kind == name && p.tokens[p.pos+1].kind == operator && p.tokens[p.pos+1].text == "=":
			a.names = append(a.names, p.next().text)
			p.pos++
			a.named = append(a.named, p.expression())
		case len(a.names) > 0:
			p.fail("an argument without a name follows one with a name")
		default:
			a.list = append(a.list, p.expression())
		}
		if !p.skip(operator, ",") {
			break
		}
	}
	p.expect(operator, ")")
	return a
}

func (p *parser) filters(e expression) expression {
	for p.skip(operator, "|") {
		e = p.filter(e)
	}
	return e
}

// filter parses one filter; of is the expression that it applies to, nil in a block.
func (p *parser) filter(of expression) expression {
	n := filterNode{of: of, line: p.now().line, name: p.dotted()}
	if _, known := filters[n.name]; !known {
		p.fail("the filter %q: %w", n.name, ErrUnsupported)
	}
	if p.is(operator, "(") {
		n.args = p.arguments()
	}
	return n
}

// test parses "is" and a test of an expression.
func (p *parser) test(of expression) expression {
	p.next()
	line, minus, called := p.now().line, p.skip(name, "not"), p.dotted()
	if _, known := tests[called]; !known {
		p.fail("the test %q: %w", called, ErrUnsupported)
	}
	var args arguments
	switch t := p.now(); {
	case p.is(operator, "("):
		args = p.arguments()
	case p.is(name, "is"):
		p.fail("a test of a test; must be in parentheses")
	case t.kind == literal, p.is(operator, "[", "{"), t.kind == name && !p.is(name, "else", "or", "and"):
		args.list = []expression{p.postfix(p.primary())}
	}
	return computed(func(s *state) any {
		v := s.eval(of)
		s.line = line
		return s.test(called, v, s.args(called, args)) != minus
	})
}

// dotted parses a name, or several with dots between them.
func (p *parser) dotted() string {
	text := p.name()
	for p.skip(operator, ".") {
		text += "." + p.name()
	}
	return text
}
