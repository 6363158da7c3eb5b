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
			value := p.tuple(true)
			p.blockEnd()
			return func(s *state) signal {
				s.line = line
				s.assign(to, s.eval(value))
				return goOn
			}
		}
		return p.setBlock(to, line)
	case "macro":
		m := &macroNode{name: p.name()}
		p.macro(m, true, "endmacro")
		return func(s *state) signal {
			s.frame.vars[m.name] = &macro{m, s.frame}
			return goOn
		}
	case "call":
		return p.callBlock()
	case "filter":
		filter := p.filters(p.filter(nil)).(filterNode)
		body := p.block("endfilter")
		return func(s *state) signal {
			s.scope(s.frame, func() {
				text := s.capture(func() { s.run(body) })
				s.write(s.text(s.filtered(filter, text)))
			})
			return goOn
		}
	case "with":
		var names []string
		var values []expression
		for p.now().kind != blockEnd {
			if len(names) > 0 {
				p.expect(operator, ",")
			}
			names = append(names, p.name())
			p.expect(operator, "=")
			values = append(values, p.expression())
		}
		return with(names, values, p.block("endwith"))
	case "generation": // marks an assistant's text; what it sets is its own
		return with(nil, nil, p.blockOutsideLoops("endgeneration"))
	case "break", "continue":
		if p.loops == 0 {
			p.fail("%s: there is no loop", tag)
		}
		p.blockEnd()
		if tag == "break" {
			return func(*state) signal { return stopLoop }
		}
		return func(*state) signal { return nextRound }
	case "include", "import", "from", "extends", "block", "autoescape", "do", "trans", "debug":
		p.pos--
		p.fail("the tag %q: %w", tag, ErrUnsupported)
	default:
		p.pos--
		p.fail("the tag %q is not one of Jinja's", tag)
	}
	return nil
}

// callBlock parses a call statement: its body is the macro caller of the macro that it calls.
func (p *parser) callBlock() statement {
	m := &macroNode{name: "caller"}
	if p.is(operator, "(") {
		p.signature(m)
	}
	call, ok := p.expression().(callNode)
	if !ok {
		p.fail("call: must be followed by a call")
	}
	p.macro(m, false, "endcall")
	return func(s *state) signal {
		args := s.args("", call.args)
		args.names = append(args.names, "caller")
		args.named = append(args.named, &macro{m, s.frame})
		s.line = call.line
		s.write(s.text(s.call(s.eval(call.of), args)))
		return goOn
	}
}

// setBlock parses the rest of a set statement that has a body: its text, through filters, is the value.
func (p *parser) setBlock(to target, line int) statement {
	filter := p.filters(nil)
	body := p.block("endset")
	return func(s *state) signal {
		s.line = line
		var v any
		s.scope(s.frame, func() {
			v = s.capture(func() { s.run(body) })
			if filter != nil {
				v = s.filtered(filter.(filterNode), v)
			}
		})
		s.assign(to, v)
		return goOn
	}
}

// with returns a statement that runs body in a scope with names of its own.
func with(names []string, values []expression, body []statement) statement {
	return func(s *state) (sig signal) {
		given := make([]any, len(values))
		for i, v := range values {
			given[i] = s.eval(v)
		}
		s.scope(s.frame, func() {
			for i, name := range names {
				s.frame.vars[name] = given[i]
			}
			sig = s.run(body)
		})
		return sig
	}
}

// loop parses a for statement.
func (p *parser) loop(line int) statement {
	n := &forNode{target: p.target(false)}
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
	return func(s *state) signal {
		s.line = line
		s.loop(n, s.eval(n.of), 0)
		return goOn
	}
}

// branches parses an if statement with its elif and else.
func (p *parser) branches(line int) statement {
	var tests []expression
	var bodies [][]statement // one more where there is an else
	for {
		tests = append(tests, p.tuple(false))
		p.blockEnd()
		bodies = append(bodies, p.statements("elif", "else", "endif"))
		switch p.next().text {
		case "elif":
			continue
		case "else":
			bodies = append(bodies, p.block("endif"))
		default:
			p.blockEnd()
		}
		return func(s *state) signal {
			s.line = line
			for i, test := range tests {
				if truth(s.eval(test)) {
					return s.run(bodies[i])
				}
			}
			if len(bodies) > len(tests) {
				return s.run(bodies[len(tests)])
			}
			return goOn
		}
	}
}

// forNode, macroNode and target are what loops, macros and assignments keep.
type (
	forNode struct {
		target         target
		of, test       expression
		body, none     []statement
		recursive, has bool // has: there is an else
	}
	macroNode struct {
		name                   string
		parameters             []string
		defaults               []expression // of the last parameters
		body                   []statement
		caller, named, varargs bool // whether the body uses caller, kwargs, varargs
	}
	// target is the left side of an assignment: a name, an attribute of a namespace, or several targets.
	target struct {
		name, attribute string
		several         []target
	}
)

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
