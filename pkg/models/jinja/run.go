package jinja

import "slices"

// signal says how a statement ended: normally, or by break or continue.
type signal int

const (
	goOn signal = iota
	stopLoop
	nextRound
)

// run runs statements until one ends with break or continue.
func (s *state) run(body []statement) signal {
	for _, n := range body {
		s.countSteps(0)
		if sig := n(s); sig != goOn {
			return sig
		}
	}
	return goOn
}

// assign assigns v to a target.
func (s *state) assign(to target, v any) {
	switch {
	case to.several != nil:
		items := s.iterate(v)
		if len(items) != len(to.several) {
			s.fail("%d values for %d names", len(items), len(to.several))
		}
		for i, part := range to.several {
			s.assign(part, items[i])
		}
	case to.attribute != "":
		of, _ := s.frame.lookup(to.name)
		ns, ok := of.(*namespace)
		if !ok {
			s.fail("%s.%s cannot be set: %s is no namespace", to.name, to.attribute, to.name)
		}
		ns.attributes.put(to.attribute, v)
	default:
		s.frame.vars[to.name] = v
	}
}

// loop is the variable loop of a for statement.
type loop struct {
	items   []any
	at      int
	depth   int64
	node    *forNode
	frame   *frame // around it
	changed []any  // the last arguments of loop.changed; nil: none
}

// loop runs a for statement over the items of a value. depth counts recursive calls.
func (s *state) loop(n *forNode, over any, depth int64) {
	l := &loop{items: s.iterate(over), node: n, frame: s.frame, depth: depth}
	if n.test != nil {
		var kept []any
		for _, item := range l.items {
			s.scope(s.frame, func() {
				s.assign(n.target, item)
				if truth(s.eval(n.test)) {
					kept = append(kept, item)
				}
			})
		}
		s.countMemory(16 * len(kept))
		l.items = kept
	}
	none := true
	for l.at = range l.items {
		s.countSteps(0)
		var sig signal
		s.scope(l.frame, func() {
			s.frame.vars["loop"] = l
			s.assign(n.target, l.items[l.at])
			sig = s.run(n.body)
		})
		if sig == stopLoop {
			break
		}
		if sig == goOn {
			none = false
		}
	}
	if none && n.has { // as in Jinja: also if every round ended early
		s.scope(l.frame, func() { s.run(n.none) })
	}
}

// eval calls a function or a method.
func (n callNode) eval(s *state) any {
	if a, ok := n.of.(attrNode); ok {
		on := s.eval(a.of)
		args := s.args(a.name, n.args)
		s.line = n.line
		if v, ok := s.method(on, a.name, args); ok {
			return v
		}
		return s.call(s.attribute(on, a.name), args)
	}
	of := s.eval(n.of)
	args := s.args("", n.args)
	s.line = n.line
	return s.call(of, args)
}

// args evaluates the arguments of a call.
func (s *state) args(name string, a arguments) *call {
	c := &call{name: name, names: slices.Clone(a.names)}
	for _, e := range a.list {
		c.args = append(c.args, s.eval(e))
	}
	for _, e := range a.named {
		c.named = append(c.named, s.eval(e))
	}
	return c
}

// call calls a function, a macro, or a recursive loop.
func (s *state) call(of any, c *call) any {
	switch f := of.(type) {
	case *function:
		c.name = f.name
		return f.call(s, c)
	case *macro:
		return s.macro(f, c)
	case *loop:
		over := s.bindArguments(c, 1, "iterable")[0]
		if !f.node.recursive {
			s.fail("loop is called, but is not recursive")
		}
		return s.nestCall(f.frame, func() { s.loop(f.node, over, f.depth+1) })
	}
	s.mustBeDefined(of)
	s.fail("%s is not a function", typeName(of))
	return nil
}

// nestCall runs the body of a call inside parent and returns its text. It limits the depth of calls.
func (s *state) nestCall(parent *frame, body func()) string {
	if s.calls++; s.calls > MaxCalls {
		s.fail("%w: calls nest more than %d deep", ErrLimit, MaxCalls)
	}
	saved, line, text := s.frame, s.line, ""
	s.frame = parent
	text = s.capture(body)
	s.frame, s.line = saved, line
	s.calls--
	return text
}

// macro calls a macro and returns its text. Arguments without a parameter go to varargs and kwargs if the body uses
// them, else they are errors.
func (s *state) macro(m *macro, c *call) any {
	n := m.macroNode
	vars := map[string]any{}
	for i, name := range n.parameters {
		if i < len(c.args) {
			vars[name] = c.args[i]
		}
	}
	rest := &list{tuple: true}
	if len(c.args) > len(n.parameters) {
		rest.items = c.args[len(n.parameters):]
		if !n.varargs {
			s.fail("macro %s takes at most %d arguments, not %d", n.name, len(n.parameters), len(c.args))
		}
	}
	named := newDict()
	var caller any = undefined{"no caller is defined"}
	for i, name := range c.names {
		_, given := vars[name]
		switch {
		case slices.Contains(n.parameters, name) && !given:
			vars[name] = c.named[i]
		case name == "caller" && n.caller:
			caller = c.named[i]
		case !n.named:
			s.fail("macro %s takes no argument %s", n.name, name)
		default:
			named.put(name, c.named[i])
		}
	}
	return s.nestCall(m.frame, func() {
		s.scope(s.frame, func() {
			for i, name := range n.parameters {
				if v, given := vars[name]; given {
					s.frame.vars[name] = v
				} else if d := i - len(n.parameters) + len(n.defaults); d >= 0 {
					s.frame.vars[name] = s.eval(n.defaults[d])
				} else {
					s.frame.vars[name] = undefined{"the parameter " + name + " was not given"}
				}
			}
			for name, special := range map[string]struct {
				asked bool
				v     any
			}{"caller": {n.caller, caller}, "kwargs": {n.named, named}, "varargs": {n.varargs, rest}} {
				if special.asked {
					s.frame.vars[name] = special.v
				}
			}
			s.run(n.body)
		})
	})
}

// bindArguments returns the arguments of a call in the order of names; the first must of them are required. An
// argument that
// is not given is absent{}; nil is the value None.
func (s *state) bindArguments(c *call, must int, names ...string) []any {
	out := make([]any, len(names))
	for i := range out {
		out[i] = absent{}
	}
	if len(c.args) > len(names) {
		s.fail("%s takes at most %d arguments, not %d", c.name, len(names), len(c.args))
	}
	copy(out, c.args)
	for i, name := range c.names {
		at := slices.Index(names, name)
		if at < 0 || out[at] != (absent{}) {
			s.fail("%s takes no argument %s, or has it already", c.name, name)
		}
		out[at] = c.named[i]
	}
	for i := range must {
		if out[i] == (absent{}) {
			s.fail("%s needs its argument %s", c.name, names[i])
		}
	}
	return out
}

// absent is an argument that was not given.
type absent struct{}

// argument returns v, or otherwise if v was not given.
func argument(v, otherwise any) any {
	if v == (absent{}) {
		return otherwise
	}
	return v
}
