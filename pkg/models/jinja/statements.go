package jinja

import "slices"

// statement parses a statement from its tag on.
func (p *parser) statement() statement {
	line := p.now().line
	switch tag := p.name(); tag {
	case "for":
		return p.loop(line)
	case "if":
		return p.branches(line)
	case "set":
		to := p.target(true)
		if p.skip(operator, "=") {
			n := setNode{to, p.tuple(true), line}
			p.blockEnd()
			return n
		}
		filter := p.filters(nil)
		return setBlockNode{to, filter, p.block("endset"), line}
	case "macro":
		m := &macroNode{name: p.name(), line: line}
		p.macro(m, true, "endmacro")
		return m
	case "call":
		m := &macroNode{name: "caller", line: line}
		signature := p.is(operator, "(")
		var parameters macroNode
		if signature {
			p.signature(&parameters)
		}
		call, ok := p.expression().(callNode)
		if !ok {
			p.fail("call: must be followed by a call")
		}
		m.parameters, m.defaults = parameters.parameters, parameters.defaults
		p.macro(m, false, "endcall")
		return callBlockNode{m, call}
	case "filter":
		filter := p.filter(nil)
		filter = p.filters(filter)
		return filterBlockNode{filter, p.block("endfilter")}
	case "with":
		var n withNode
		for p.now().kind != blockEnd {
			if len(n.names) > 0 {
				p.expect(operator, ",")
			}
			n.names = append(n.names, p.name())
			p.expect(operator, "=")
			n.values = append(n.values, p.expression())
		}
		n.body = p.block("endwith")
		return n
	case "generation": // marks an assistant's text; what it sets is its own
		return withNode{body: p.blockOutsideLoops("endgeneration")}
	case "break", "continue":
		if p.loops == 0 {
			p.fail("%s: there is no loop", tag)
		}
		p.blockEnd()
		if tag == "break" {
			return breakNode{}
		}
		return continueNode{}
	case "include", "import", "from", "extends", "block", "autoescape", "do", "trans", "debug":
		p.pos--
		p.fail("the tag %q: %w", tag, ErrUnsupported)
	default:
		p.pos--
		p.fail("the tag %q is not one of Jinja's", tag)
	}
	return nil
}

// loop parses a for statement.
func (p *parser) loop(line int) statement {
	n := forNode{target: p.target(false), line: line}
	p.expect(name, "in")
	n.of = p.tuple(false, "recursive")
	if p.skip(name, "if") {
		n.test = p.expression()
	}
	n.recursive = p.skip(name, "recursive")
	p.blockEnd()
	p.loops++
	n.body = p.statements("else", "endfor")
	p.loops--
	if n.has = p.next().text == "else"; n.has {
		n.none = p.block("endfor")
	} else {
		p.blockEnd()
	}
	return n
}

// branches parses an if statement with its elif and else.
func (p *parser) branches(line int) statement {
	n := ifNode{line: line}
	for {
		n.tests = append(n.tests, p.tuple(false))
		p.blockEnd()
		n.bodies = append(n.bodies, p.statements("elif", "else", "endif"))
		switch p.next().text {
		case "elif":
			continue
		case "else":
			n.bodies = append(n.bodies, p.block("endif"))
		default:
			p.blockEnd()
		}
		return n
	}
}

// macro parses the body of a macro, and its signature first if signature is true. It finds out which of caller,
// kwargs and varargs the body uses.
func (p *parser) macro(m *macroNode, signature bool, end string) {
	outside := p.read
	p.read = map[string]bool{}
	if signature {
		p.signature(m)
	}
	m.body = p.blockOutsideLoops(end)
	asks := func(name string) bool { return p.read[name] && !slices.Contains(m.parameters, name) }
	m.caller, m.named, m.varargs = asks("caller"), asks("kwargs"), asks("varargs")
	for name := range p.read {
		if name != "caller" && name != "kwargs" && name != "varargs" {
			outside[name] = true
		}
	}
	p.read = outside
}

// signature parses the parameters of a macro in parentheses.
func (p *parser) signature(m *macroNode) {
	p.expect(operator, "(")
	for !p.is(operator, ")") {
		if len(m.parameters) > 0 {
			p.expect(operator, ",")
		}
		m.parameters = append(m.parameters, p.name())
		if p.skip(operator, "=") {
			m.defaults = append(m.defaults, p.expression())
		} else if len(m.defaults) > 0 {
			p.fail("a parameter without a default follows one with a default")
		}
	}
	p.expect(operator, ")")
}

// target parses the left side of an assignment; namespaces allows attributes.
func (p *parser) target(namespaces bool) target {
	one := func() (t target) {
		if p.skip(operator, "(") {
			p.nest(func() { t = p.target(namespaces) })
			p.expect(operator, ")")
			return t
		}
		t.name = p.name()
		if slices.Contains([]string{"true", "false", "none", "True", "False", "None"}, t.name) {
			p.fail("%s cannot be set", t.name)
		}
		if namespaces && p.skip(operator, ".") {
			t.attribute = p.name()
		}
		return t
	}
	first := one()
	if !p.is(operator, ",") {
		return first
	}
	all := target{several: []target{first}}
	for p.skip(operator, ",") {
		if p.is(name, "in") || p.is(operator, "=", ")") || p.now().kind == blockEnd {
			break
		}
		all.several = append(all.several, one())
	}
	return all
}
