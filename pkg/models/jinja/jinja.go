// Package jinja renders chat templates: programs in Jinja, the template language of Python, as transformers runs
// them. It uses trim_blocks and lstrip_blocks, has the loop controls and the generation block, and gives the same
// values and texts as Python. testdata holds what transformers made of the same conversations.
//
// Parse turns the text of a template into a Template: a scanner splits it into tokens, a parser makes functions of
// them. Template.Render runs these with variables; a state holds one rendering.
//
// A template can only compute: it has no files, imports, clock and randomness, and can change no value but its own
// namespaces. Its time and memory are bounded. Whatever Jinja has and this package has not is refused by name: by
// Parse if the text shows it, else by Render. So a template is never rendered wrongly.
//
// Inside the package errors are panics of type failure, which Parse and Render recover. state.fail and
// state.unsupported raise them; countSteps and countMemory do, with ErrLimit, when a rendering takes too much time or
// memory. So functions that evaluate return no error: what they cannot do ends the rendering.
package jinja

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// Bounds of a template and of one rendering.
const (
	// MaxSource bounds the text of a template, in bytes.
	MaxSource = 1 << 20
	// MaxSteps bounds the work of a rendering. An expression is one step, a scope eight, and 256 bytes that are read
	// are one.
	MaxSteps = 4 << 20
	// MaxBytes bounds the memory of the strings and lists that a rendering makes, its output included.
	MaxBytes = 64 << 20
	// MaxCalls bounds how deep calls of macros nest, MaxNesting how deep expressions, blocks and values nest.
	MaxCalls, MaxNesting = 64, 100
)

var (
	// ErrUnsupported is wrapped by the errors for features of Jinja or Python that this package does not have.
	ErrUnsupported = errors.New("not supported in chat templates here")
	// ErrLimit is wrapped by the error of a rendering that exceeds a limit.
	ErrLimit = errors.New("the template takes too much")
)

// Raised is the error of a template that refuses its variables by calling raise_exception.
type Raised struct{ Message string }

// Error quotes a message with control characters: templates are not trusted.
func (e *Raised) Error() string {
	message := e.Message
	if strings.ContainsFunc(message, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' }) {
		message = strconv.Quote(message)
	}
	return "the template refuses: " + message
}

// Dict is a dictionary of Python, in order. If a key repeats, its last value counts.
type Dict []Pair

// Pair is an item of a Dict.
type Pair struct {
	Key   string
	Value any
}

// Template is a parsed template. It is safe for concurrent use.
type Template struct{ body []statement }

// Parse parses the text of a template, once for many renderings. Faults of syntax and features that
// Render would always refuse are errors; the latter wrap ErrUnsupported.
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

// Render runs the template with variables and returns its output. Values are nil, bool, int, int64,
// float64, string, and []any and Dict of such values. Missing variables are undefined, as in Jinja.
// An error says what the template did wrong or refused (raise_exception), wraps ErrUnsupported for
// a feature that is not built here, or ErrLimit for too much time or memory.
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

// failure is the panic that carries an error up to Parse and Render.
type failure struct{ err error }

// recoverFailure ends Parse and Render, deferred: it sets err to the error of a failure that the
// template caused; other panics, which are faults of this package, go on.
func recoverFailure(err *error) {
	switch r := recover().(type) {
	case nil:
	case failure:
		*err = r.err
	default:
		panic(r)
	}
}

// state is one rendering: the current scope, output and line, and what is left of the limits.
type state struct {
	frame        *frame
	out          *strings.Builder
	line         int
	steps, bytes int
	calls        int
}

// frame holds the names of a scope.
type frame struct {
	vars   map[string]any
	parent *frame
}

// lookup returns the value of a name in this scope or the nearest one around it.
func (f *frame) lookup(name string) (any, bool) {
	for ; f != nil; f = f.parent {
		if v, ok := f.vars[name]; ok {
			return v, true
		}
	}
	return nil, false
}

// fail ends the rendering with an error at the current line.
func (s *state) fail(format string, args ...any) {
	panic(failure{fmt.Errorf("line %d: %w", s.line, fmt.Errorf(format, args...))})
}

// unsupported ends the rendering with an ErrUnsupported.
func (s *state) unsupported(format string, args ...any) {
	s.fail("%s: %w", fmt.Sprintf(format, args...), ErrUnsupported)
}

// countSteps counts one step of work, and n bytes that are read.
func (s *state) countSteps(n int) {
	if s.steps -= 1 + n/256; s.steps < 0 {
		s.fail("%w: more than %d steps", ErrLimit, MaxSteps)
	}
}

// checkDepth limits how deep values nest.
func (s *state) checkDepth(depth int) {
	if depth > MaxNesting {
		s.fail("%w: values nest more than %d deep", ErrLimit, MaxNesting)
	}
}

// countDepth counts a step of work on a value inside others.
func (s *state) countDepth(depth int) {
	s.checkDepth(depth)
	s.countSteps(0)
}

// countMemory counts n bytes of a new value. It is called before large values are made.
func (s *state) countMemory(n int) {
	s.countSteps(n)
	if s.bytes -= n; s.bytes < 0 || n < 0 {
		s.fail("%w: values of more than %d bytes", ErrLimit, MaxBytes)
	}
}

// write adds text to the output, or to the block that is captured.
func (s *state) write(text string) {
	s.countMemory(len(text))
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

// scope runs body in a new scope inside parent.
func (s *state) scope(parent *frame, body func()) {
	s.countSteps(8 * 256)
	saved := s.frame
	s.frame = &frame{vars: map[string]any{}, parent: parent}
	body()
	s.frame = saved
}
