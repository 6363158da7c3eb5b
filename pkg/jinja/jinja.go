// Package jinja renders chat templates: programs in Jinja, the language of Python's library of that name, as
// transformers runs them. It reads them with trim_blocks and lstrip_blocks, has the loop controls and the
// generation block, and gives values and texts as Python does. testdata holds what transformers made of the same
// conversations.
//
// A template can do nothing but compute: there are no files, no imports, no clock and no randomness, and no value
// can be changed but a namespace of its own. Its time and memory are bounded. What the package does not have is
// refused by name, in Parse where the text shows it, else in Render: a template never renders as something else.
package jinja

import (
	"errors"
	"fmt"
	"strings"
)

// Bounds of a template and of one rendering.
const (
	// MaxSource bounds the text of a template, in bytes.
	MaxSource = 1 << 20
	// MaxSteps bounds the work of a rendering: expressions evaluated, scopes, which are eight, and bytes looked at,
	// 256 a step.
	MaxSteps = 4 << 20
	// MaxBytes bounds the strings and lists that a rendering makes, its output included.
	MaxBytes = 64 << 20
	// MaxCalls bounds how deep macros call one another, and MaxNesting how deep expressions, blocks and values nest.
	MaxCalls, MaxNesting = 64, 100
)

var (
	// ErrUnsupported is wrapped by the errors of what Jinja or Python has, and this package has not.
	ErrUnsupported = errors.New("not supported in chat templates here")
	// ErrLimit is wrapped by the errors of a rendering that takes more than it may.
	ErrLimit = errors.New("the template takes too much")
)

// Raised is the error of a template that refuses what it was given, by raise_exception.
type Raised struct{ Message string }

func (e *Raised) Error() string { return "the template refuses: " + e.Message }

// Dict is a dictionary of Python, with its order. A key that is there twice has its last value.
type Dict []Pair

// Pair is an item of a Dict.
type Pair struct {
	Key   string
	Value any
}

// Template is a template that was parsed. It is safe for concurrent use.
type Template struct{ body []statement }

// Parse reads a template, and refuses what Render would have to refuse whatever it is given.
func Parse(source string) (*Template, error) {
	if len(source) > MaxSource {
		return nil, fmt.Errorf("%d bytes; must be at most %d", len(source), MaxSource)
	}
	tokens, err := scan(source)
	if err != nil {
		return nil, err
	}
	body, err := parse(tokens)
	if err != nil {
		return nil, err
	}
	return &Template{body}, nil
}

// Render runs the template with variables: nil, bool, int, int64, float64, string, []any and Dict, of these again.
// Those that are not there are undefined.
func (t *Template) Render(variables map[string]any) (text string, err error) {
	s := &state{frame: &frame{vars: map[string]any{}}, steps: MaxSteps, bytes: MaxBytes}
	defer recoverFailure(&err)
	for name, v := range variables {
		s.frame.vars[name] = s.value(v, 0)
	}
	for name, f := range globals {
		if _, given := variables[name]; !given {
			s.frame.vars[name] = f
		}
	}
	s.frame = &frame{vars: map[string]any{}, parent: s.frame}
	var out strings.Builder
	s.out = &out
	s.run(t.body)
	return out.String(), nil
}

// failure carries an error from where it happens to Parse and Render.
type failure struct{ err error }

func recoverFailure(err *error) {
	switch r := recover().(type) {
	case nil:
	case failure:
		*err = r.err
	default:
		panic(r)
	}
}

// state is one rendering.
type state struct {
	frame        *frame
	out          *strings.Builder
	line         int
	steps, bytes int
	calls        int
}

// frame is the names of a scope.
type frame struct {
	vars   map[string]any
	parent *frame
}

func (f *frame) lookup(name string) (any, bool) {
	for ; f != nil; f = f.parent {
		if v, ok := f.vars[name]; ok {
			return v, true
		}
	}
	return nil, false
}

func (s *state) fail(format string, args ...any) {
	panic(failure{fmt.Errorf("line %d: %w", s.line, fmt.Errorf(format, args...))})
}

func (s *state) unsupported(format string, args ...any) {
	s.fail("%s: %w", fmt.Sprintf(format, args...), ErrUnsupported)
}

// step counts work: one, and n bytes that are looked at.
func (s *state) step(n int) {
	if s.steps -= 1 + n/256; s.steps < 0 {
		s.fail("%w: more than %d steps", ErrLimit, MaxSteps)
	}
}

// made counts n bytes of a new value.
func (s *state) made(n int) {
	s.step(n)
	if s.bytes -= n; s.bytes < 0 || n < 0 {
		s.fail("%w: values of more than %d bytes", ErrLimit, MaxBytes)
	}
}

// write adds to the output, or to what a block captures.
func (s *state) write(text string) {
	s.made(len(text))
	s.out.WriteString(text)
}

// capture runs body and returns what it writes.
func (s *state) capture(body func()) string {
	out := s.out
	var b strings.Builder
	s.out = &b
	body()
	s.out = out
	return b.String()
}

// scope runs body with names of its own.
func (s *state) scope(parent *frame, body func()) {
	s.step(8 * 256)
	saved := s.frame
	s.frame = &frame{vars: map[string]any{}, parent: parent}
	body()
	s.frame = saved
}
