package bus

import (
	"context"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// Trace is the trace context of a message by W3C: traceparent, tracestate and baggage. Each is empty where it has none.
type Trace struct{ Parent, State, Baggage string }

type traceKey struct{}

// WithTrace returns a context whose publishes carry a trace context, in place of the one that ctx has. The context of a
// handler has the one of its message already.
func WithTrace(ctx context.Context, t Trace) context.Context {
	if t == TraceIn(ctx) {
		return ctx
	}
	return context.WithValue(ctx, traceKey{}, t)
}

// TraceIn returns the trace context of ctx.
func TraceIn(ctx context.Context) Trace {
	t, _ := ctx.Value(traceKey{}).(Trace)
	return t
}

// maxTraceState and maxBaggage are the bytes that the standard has everybody hand through. Members of a list beyond
// them are left out, the last ones first: each event of a group carries what is left.
const (
	maxTraceparent = 512
	maxTraceState  = 512
	maxBaggage     = 8192
)

// TraceOf returns the trace context of a message, in any spelling of its headers: clients in other languages write them
// in lower case, as the standard recommends, and Go's canonical form differs.
func TraceOf(h nats.Header) (t Trace) {
	for name, values := range h {
		switch {
		case len(values) == 0:
		case strings.EqualFold(name, schemas.HeaderTraceparent):
			t.Parent = within(values[:1], maxTraceparent)
		case strings.EqualFold(name, schemas.HeaderTraceState):
			t.State = within(values, maxTraceState)
		case strings.EqualFold(name, schemas.HeaderBaggage):
			t.Baggage = within(values, maxBaggage)
		}
	}
	return t
}

func within(values []string, most int) string {
	list := strings.Join(values, ",")
	for len(list) > most {
		list = list[:max(0, strings.LastIndexByte(list, ','))]
	}
	return list
}

// setTrace adds the trace context of ctx to a header: what it lacks. The state belongs to its traceparent.
func setTrace(ctx context.Context, h nats.Header) {
	t, own := TraceIn(ctx), TraceOf(h)
	if t.Parent != "" && own.Parent == "" {
		h[schemas.HeaderTraceparent] = []string{t.Parent}
		if t.State != "" && own.State == "" {
			h[schemas.HeaderTraceState] = []string{t.State}
		}
	}
	if t.Baggage != "" && own.Baggage == "" {
		h[schemas.HeaderBaggage] = []string{t.Baggage}
	}
}
