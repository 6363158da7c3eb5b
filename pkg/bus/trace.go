package bus

import (
	"context"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

type traceKey struct{}

// WithTraceparent returns a context whose publishes carry the W3C trace context. The context of a handler has the one
// of its message already.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	if traceparent == "" {
		return ctx
	}
	return context.WithValue(ctx, traceKey{}, traceparent)
}

// Traceparent returns the trace context of ctx; empty: none.
func Traceparent(ctx context.Context) string {
	s, _ := ctx.Value(traceKey{}).(string)
	return s
}

// TraceparentOf returns the trace header of a message in any spelling: clients in other languages write it in lower
// case, as the standard recommends, and Go's canonical form differs.
func TraceparentOf(h nats.Header) string {
	if v := h[schemas.HeaderTraceparent]; len(v) > 0 {
		return v[0]
	}
	for name, v := range h {
		if len(v) > 0 && strings.EqualFold(name, schemas.HeaderTraceparent) {
			return v[0]
		}
	}
	return ""
}
