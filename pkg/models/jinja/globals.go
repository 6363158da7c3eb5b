package jinja

import (
	"fmt"
	"math"
	"strings"
	"time"
)

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

// Day returns the function strftime_now of a day, as a variable of Render: the text of the day in a format of strftime,
// in English. A time of the day is not known: a format that asks for one fails with ErrUnsupported.
func Day(day time.Time) any {
	return &function{StrftimeNow, func(s *state, c *call) any {
		format := s.text(s.bindArguments(c, 1, "format")[0])
		text, err := strftime(day, format)
		if err != nil {
			s.unsupported("strftime_now(%.40q): %v", format, err)
		}
		s.countMemory(len(text))
		return text
	}}
}

// StrftimeNow is the name of the function.
const StrftimeNow = "strftime_now"

// dayLayouts are the layouts of Go for conversions of strftime.
var dayLayouts = map[byte]string{
	'a': "Mon", 'A': "Monday", 'b': "Jan", 'h': "Jan", 'B': "January", 'd': "02", 'e': "_2", 'm': "01", 'y': "06",
	'Y': "2006", 'D': "01/02/06", 'x': "01/02/06", 'F': "2006-01-02",
}

// strftime formats a day as Python does in the C locale.
func strftime(day time.Time, format string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		bare := strings.HasPrefix(format[i:], "%-")
		if bare {
			i++
		}
		if i++; i == len(format) {
			return "", fmt.Errorf("it ends in %%")
		}
		text := ""
		switch c := format[i]; {
		case c == '%':
			text = "%"
		case c == 'j':
			text = fmt.Sprintf("%03d", day.YearDay())
		case c == 'u':
			text = fmt.Sprint((int(day.Weekday())+6)%7 + 1)
		case c == 'w':
			text = fmt.Sprint(int(day.Weekday()))
		case dayLayouts[c] != "":
			text = day.Format(dayLayouts[c])
		default:
			return "", fmt.Errorf("%%%c is not supported: only the day is fixed", c)
		}
		if bare {
			text = strings.TrimLeft(text, "0 ")
		}
		b.WriteString(text)
	}
	return b.String(), nil
}
