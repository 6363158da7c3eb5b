// Package tracing hands the trace context of a prompt through: the headers of W3C (Trace Context, Baggage) that each
// event, and each request to a worker, has from it.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// Context is the trace context of a message: traceparent, tracestate and baggage. Each is empty where it has none.
type Context struct{ Parent, State, Baggage string }

type key struct{}

// With returns a context whose publishes and requests carry a trace context, in place of the one that ctx has. The
// context of a handler has the one of its message already.
func With(ctx context.Context, t Context) context.Context {
	if t == In(ctx) {
		return ctx
	}
	return context.WithValue(ctx, key{}, t)
}

// In returns the trace context of ctx.
func In(ctx context.Context) Context {
	t, _ := ctx.Value(key{}).(Context)
	return t
}

// The bytes, and the members of a state, that the standard has everybody hand through. Members of a list beyond them
// are left out, the last ones first: each event of a group carries what is left.
const (
	maxParent  = 512
	maxState   = 512
	maxMembers = 32
	maxBaggage = 8192
)

var (
	// parentForm is version, trace, parent and flags. Versions above 00 may have more behind them.
	parentForm = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?$`)
	noTrace    = regexp.MustCompile(`^(ff|..-0{32}|..-.{32}-0{16}|00-.{52}.)`)
	// Key and value of a state have 256 bytes at most. Counted in the form, that would take longer than some programs.
	stateForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_\-*/@]*=[ -+\--<>-~]*[!-+\--<>-~]$`)
)

func isState(member string) bool {
	key, value, _ := strings.Cut(member, "=")
	return len(key) <= 256 && len(value) <= 256 && stateForm.MatchString(member)
}

// Of returns the trace context of a message, in any spelling of its headers: clients in other languages write them in
// lower case, as the standard recommends, and Go's canonical form differs. What breaks the standard is left out, which
// the error says: a parent that is none, with its state, or the state alone. The flags are handed through as they are.
func Of(headers map[string][]string) (t Context, err error) {
	var state []string
	for name, values := range headers {
		switch {
		case len(values) == 0:
		case strings.EqualFold(name, schemas.HeaderTraceparent):
			t.Parent = strings.Join(values, ",")
		case strings.EqualFold(name, schemas.HeaderTraceState):
			state = strings.FieldsFunc(strings.Join(values, ","), func(r rune) bool { return r == ',' })
		case strings.EqualFold(name, schemas.HeaderBaggage):
			t.Baggage = within(values, maxBaggage)
		}
	}
	switch {
	case t.Parent == "" && state == nil:
		return t, nil
	case t.Parent == "":
		return t, errors.New("tracestate: belongs to no traceparent; it is not handed on")
	case len(t.Parent) > maxParent || !parentForm.MatchString(t.Parent) || noTrace.MatchString(t.Parent):
		err = fmt.Errorf("traceparent: %.60q; must be 00-TRACE-PARENT-FLAGS, of 32, 16 and 2 hexadecimal digits in "+
			"lower case, TRACE and PARENT not 0; it is not handed on, nor its tracestate", t.Parent)
		t.Parent = ""
		return t, err
	}
	for i, member := range state {
		if state[i] = strings.Trim(member, " \t"); state[i] != "" && !isState(state[i]) {
			return t, fmt.Errorf("tracestate: %.60q; must be KEY=VALUE; it is not handed on", state[i])
		}
	}
	state = slices.DeleteFunc(state, func(member string) bool { return member == "" })
	t.State = within(state[:min(len(state), maxMembers)], maxState)
	return t, nil
}

func within(values []string, most int) string {
	list := strings.Join(values, ",")
	for len(list) > most {
		list = list[:max(0, strings.LastIndexByte(list, ','))]
	}
	return list
}

// Add gives a header what it lacks of the trace context of ctx. The state belongs to its parent.
func Add(ctx context.Context, headers map[string][]string) {
	t := In(ctx)
	if t == (Context{}) {
		return
	}
	own, _ := Of(headers)
	if t.Parent != "" && own.Parent == "" {
		headers[schemas.HeaderTraceparent] = []string{t.Parent}
		if t.State != "" {
			headers[schemas.HeaderTraceState] = []string{t.State}
		}
	}
	if t.Baggage != "" && own.Baggage == "" {
		headers[schemas.HeaderBaggage] = []string{t.Baggage}
	}
}

// Header returns the headers of a request that has nothing but the trace context of ctx; nil: it has none.
func Header(ctx context.Context) map[string][]string {
	if In(ctx) == (Context{}) {
		return nil
	}
	headers := map[string][]string{}
	Add(ctx, headers)
	return headers
}
