package jinja

import (
	"fmt"
	"slices"
)

// parser makes a tree of tokens. Errors are panics of type failure.
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
				body = append(body, dataNode{t.text})
			case variableBegin:
				body = append(body, outputNode{p.tuple(true), t.line})
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
			return listNode{items, true}
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
			return listNode{items, true}
		}
	}
}

// expression parses an expression, with conditions "a if b else c".
func (p *parser) expression() (e expression) {
	p.nest(func() {
		e = p.or()
		for p.skip(name, "if") {
			c := condNode{then: e, test: p.or()}
			if p.skip(name, "else") {
				c.otherwise = p.expression()
			}
			e = c
		}
	})
	return e
}

func (p *parser) or() expression {
	e := p.and()
	for p.skip(name, "or") {
		e = orNode{e, p.and()}
	}
	return e
}

func (p *parser) and() expression {
	e := p.not()
	for p.skip(name, "and") {
		e = andNode{e, p.not()}
	}
	return e
}

func (p *parser) not() (e expression) {
	if !p.skip(name, "not") {
		return p.compare()
	}
	p.nest(func() { e = notNode{p.not()} })
	return e
}

// compare parses a chain of comparisons.
func (p *parser) compare() expression {
	n := compareNode{first: p.sum()}
	for {
		op := p.now().text
		switch {
		case p.is(operator, "==", "!=", "<", "<=", ">", ">="), p.is(name, "in"):
			p.pos++
		case p.is(name, "not") && p.tokens[p.pos+1].kind == name && p.tokens[p.pos+1].text == "in":
			p.pos += 2
			op = "not in"
		case len(n.ops) == 0:
			return n.first
		default:
			return n
		}
		n.ops, n.rest = append(n.ops, op), append(n.rest, p.sum())
	}
}

// binary parses operators of one precedence, from left to right.
func (p *parser) binary(operand func() expression, ops ...string) expression {
	e := operand()
	for p.is(operator, ops...) {
		t := p.next()
		e = binaryNode{t.text, e, operand(), t.line}
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
	return concatNode{items}
}

func (p *parser) product() expression { return p.binary(p.power, "*", "/", "//", "%") }

func (p *parser) power() expression {
	return p.binary(func() expression { return p.unary(true) }, "**")
}

// unary parses signs, a primary, and what follows it; with filters also filters, tests and calls of their results.
func (p *parser) unary(filters bool) (e expression) {
	if p.is(operator, "-", "+") {
		p.nest(func() { e = signNode{minus: p.next().text == "-", of: p.unary(false)} })
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
			return constNode{true}
		case "false", "False":
			return constNode{false}
		case "none", "None":
			return constNode{nil}
		case "lipsum", "cycler", "joiner":
			p.fail("%s: %w", t.text, ErrUnsupported)
		}
		p.read[t.text] = true
		return nameNode{t.text, t.line}
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
			return constNode{text}
		}
		return constNode{t.value}
	case t.kind == operator && t.text == "(":
		var e expression
		p.nest(func() { e = p.tuple(true) })
		p.expect(operator, ")")
		return e
	case t.kind == operator && t.text == "[":
		var n listNode
		for !p.is(operator, "]") {
			n.items = append(n.items, p.expression())
			if !p.skip(operator, ",") {
				break
			}
		}
		p.expect(operator, "]")
		return n
	case t.kind == operator && t.text == "{":
		var n dictNode
		for !p.is(operator, "}") {
			n.keys = append(n.keys, p.expression())
			p.expect(operator, ":")
			n.values = append(n.values, p.expression())
			if !p.skip(operator, ",") {
				break
			}
		}
		p.expect(operator, "}")
		return n
	}
	p.pos--
	p.fail("unexpected %v; must be an expression", p.now())
	return nil
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
					e = itemNode{e, constNode{t.value}, line}
					break
				}
				fallthrough
			default:
				p.pos--
				p.fail("unexpected %v; must be a name or a number", p.now())
			}
		case p.skip(operator, "["):
			e = itemNode{e, p.subscript(), line}
			if p.is(operator, ",") {
				p.fail("several indices: %w", ErrUnsupported)
			}
			p.expect(operator, "]")
		case p.is(operator, "("):
			e = callNode{e, p.arguments(), line}
			if a, ok := e.(callNode).of.(attrNode); ok && !methods[a.name] {
				p.fail("the method %s(): %w", a.name, ErrUnsupported)
			}
		default:
			return e
		}
	}
}

// subscript parses what is inside [ ]: an index or a slice.
func (p *parser) subscript() expression {
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
				return parts[0]
			}
			break
		}
	}
	return sliceNode{parts[0], parts[1], parts[2]}
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
	n := filterNode{of: of, line: p.now().line, name: p.name()}
	for p.skip(operator, ".") {
		n.name += "." + p.name()
	}
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
	n := testNode{of: of, line: p.now().line, minus: p.skip(name, "not")}
	n.name = p.name()
	for p.skip(operator, ".") {
		n.name += "." + p.name()
	}
	if tests[n.name] == nil {
		p.fail("the test %q: %w", n.name, ErrUnsupported)
	}
	switch t := p.now(); {
	case p.is(operator, "("):
		n.args = p.arguments()
	case p.is(name, "is"):
		p.fail("a test of a test; must be in parentheses")
	case t.kind == literal, p.is(operator, "[", "{"), t.kind == name && !p.is(name, "else", "or", "and"):
		n.args.list = []expression{p.postfix(p.primary())}
	}
	return n
}
