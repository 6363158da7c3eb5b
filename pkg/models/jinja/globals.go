package jinja

import "math"

// maxRange is the most items of a range, as in Jinja's sandbox.
const maxRange = 100000

// globals are the functions that a template can call.
var globals = map[string]*function{
	"range": {"range", func(s *state, c *call) any {
		a := s.bindArguments(c, 1, "start", "stop", "step")
		var n [3]int64
		for i, v := range a {
			if v == (absent{}) {
				continue
			}
			s.mustBeDefined(v)
			var ok bool
			if n[i], ok = integer(v); !ok {
				s.fail("range of %s", typeName(v))
			}
			if n[i] > math.MaxInt32 || n[i] < math.MinInt32 {
				s.fail("%w: a range to %d", ErrLimit, n[i])
			}
		}
		r := span{n[0], n[1], n[2]}
		if a[1] == (absent{}) {
			r.begin, r.end = 0, n[0]
		}
		if a[2] == (absent{}) {
			r.step = 1
		}
		if r.step == 0 {
			s.fail("range by 0")
		}
		if r.len() > maxRange {
			s.fail("%w: a range of %d; must be at most %d", ErrLimit, r.len(), maxRange)
		}
		return r
	}},
	"dict": {"dict", func(s *state, c *call) any {
		d := newDict()
		for _, of := range c.args {
			more, ok := of.(*dict)
			if !ok || len(c.args) > 1 {
				s.unsupported("dict of %s", typeName(of))
			}
			s.countMemory(64 * len(more.keys))
			for i := range more.keys {
				d.put(more.keys[i], more.values[i])
			}
		}
		for i, name := range c.names {
			d.put(name, c.named[i])
		}
		return d
	}},
	"namespace": {"namespace", func(s *state, c *call) any {
		d := newDict()
		for _, of := range c.args {
			more, ok := of.(*dict)
			if !ok {
				s.unsupported("namespace of %s", typeName(of))
			}
			for i := range more.keys {
				d.put(more.keys[i], more.values[i])
			}
		}
		for i, name := range c.names {
			d.put(name, c.named[i])
		}
		return &namespace{d}
	}},
	"raise_exception": {"raise_exception", func(s *state, c *call) any {
		panic(failure{&Raised{s.text(s.bindArguments(c, 1, "message")[0])}})
	}},
	"strftime_now": {"strftime_now", func(s *state, _ *call) any {
		s.unsupported("strftime_now: no day is given, and a text with today's date is another one tomorrow")
		return nil
	}},
}
