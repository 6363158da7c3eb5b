// Package trace turns what is stored of a group into a trace of OpenTelemetry, from the prompt to the advantages. It
// reads the streams, so it needs nothing of the services, works for runs of the past, and costs a sampler nothing.
//
//	group                     from the prompt to the result; its parent is the prompt's traceparent, if it has one
//	  intake                  until the requests were stored
//	  sample                  one for each sample, from its request to its reward
//	    stage NAME            one for each stage, if it has several; what several share is in the first of them
//	    queue                 until a sampler took it
//	    encode, wait for a slot, denoise or generate (an event for each step), decode
//	    score                 one for each reward function, and "wait for scoring" before
//	  advantage               from the last reward to the result
//	policy                    a push; one "apply" for each sampler that took it over or refused it
//
// Ids follow from names, so that a trace that is exported twice has the same ones: the trace of a group without a
// traceparent is the SHA-256 of its run, its uid and the time of its prompt, a span's id that of its names. Times are
// those in the events, and those at which the server stored them.
package trace

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/meander-rl/meander/pkg/tracing"
)

// Exporter sends finished spans, as the exporters of OpenTelemetry do.
type Exporter interface {
	ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error
}

// recorder makes the spans of one trace after the other. Each service has a provider, which says whose a span is.
type recorder struct {
	providers map[string]*sdk.TracerProvider
	ended     []sdk.ReadOnlySpan
}

// newRecorder returns a recorder whose services are called meander-NAME.
func newRecorder() *recorder { return &recorder{providers: map[string]*sdk.TracerProvider{}} }

// OnStart implements sdk.SpanProcessor.
func (r *recorder) OnStart(context.Context, sdk.ReadWriteSpan) {}

// OnEnd implements sdk.SpanProcessor: it keeps the span.
func (r *recorder) OnEnd(s sdk.ReadOnlySpan) { r.ended = append(r.ended, s) }

// Shutdown implements sdk.SpanProcessor.
func (r *recorder) Shutdown(context.Context) error { return nil }

// ForceFlush implements sdk.SpanProcessor.
func (r *recorder) ForceFlush(context.Context) error { return nil }

// unlimited keeps the events of all steps, which are bounded by what a sample may have.
var unlimited = sdk.SpanLimits{
	AttributeValueLengthLimit: -1, AttributeCountLimit: -1, EventCountLimit: -1, LinkCountLimit: -1,
	AttributePerEventCountLimit: -1, AttributePerLinkCountLimit: -1,
}

// tracer returns the tracer of a service; instance is the process, empty: not known.
func (r *recorder) tracer(service, instance string) trace.Tracer {
	key := service + " " + instance
	p := r.providers[key]
	if p == nil {
		of := []attribute.KeyValue{attribute.String("service.name", "meander-"+service)}
		if instance != "" {
			of = append(of, attribute.String("service.instance.id", instance))
		}
		p = sdk.NewTracerProvider(sdk.WithSpanProcessor(r), sdk.WithIDGenerator(ids{}),
			sdk.WithResource(resource.NewSchemaless(of...)), sdk.WithRawSpanLimits(unlimited))
		r.providers[key] = p
	}
	return p.Tracer("github.com/meander-rl/meander/services/trace")
}

// span is what is known of a span that has ended. Its names, below those of its parent, give its id.
type span struct {
	name              string
	service, instance string
	begin, end        time.Time
	attributes        []attribute.KeyValue
	events            []event
	fault             string // why it failed; empty: it did not
}

// event is a moment in a span.
type event struct {
	name       string
	at         time.Time
	attributes []attribute.KeyValue
}

// add records a span below that of ctx, and returns the context of spans below it. names make its id, with those above
// it. A span that ends before it begins, as clocks of two machines have it, has no length.
func (r *recorder) add(ctx context.Context, s span, names ...string) context.Context {
	id, _ := ctx.Value(idsKey{}).(nextIDs)
	id.path += "/" + strings.Join(append([]string{s.name}, names...), "/")
	ctx = context.WithValue(ctx, idsKey{}, id)
	options := []trace.SpanStartOption{trace.WithTimestamp(s.begin), trace.WithAttributes(s.attributes...)}
	under, made := r.tracer(s.service, s.instance).Start(ctx, s.name, options...)
	for _, e := range s.events {
		made.AddEvent(e.name, trace.WithTimestamp(e.at), trace.WithAttributes(e.attributes...))
	}
	if s.fault != "" {
		made.SetStatus(codes.Error, s.fault)
	}
	end := s.end
	if end.Before(s.begin) {
		end = s.begin
	}
	made.End(trace.WithTimestamp(end))
	return under
}

// root returns the context of a trace whose id follows from names. The trace context of a client, if it has one, gives
// the trace, its parent and its state instead, and whether it is recorded: without the flag there are no spans.
func root(client tracing.Context, names ...string) context.Context {
	key := strings.Join(names, "/")
	ctx := context.WithValue(context.Background(), idsKey{}, nextIDs{trace: key, path: key})
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{
		"traceparent": client.Parent, "tracestate": client.State,
	})
}

type idsKey struct{}

// nextIDs are the names of which the ids of the next span are made.
type nextIDs struct{ trace, path string }

// ids makes ids of names in a context.
type ids struct{}

// NewIDs implements sdk.IDGenerator, for a span without a parent.
func (g ids) NewIDs(ctx context.Context) (id trace.TraceID, span trace.SpanID) {
	of, _ := ctx.Value(idsKey{}).(nextIDs)
	sum := sha256.Sum256([]byte(of.trace))
	copy(id[:], sum[:])
	return id, g.NewSpanID(ctx, id)
}

// NewSpanID implements sdk.IDGenerator.
func (ids) NewSpanID(ctx context.Context, _ trace.TraceID) (id trace.SpanID) {
	of, _ := ctx.Value(idsKey{}).(nextIDs)
	sum := sha256.Sum256([]byte(of.path))
	copy(id[:], sum[:])
	return id
}

// export sends the spans, and forgets them.
func (r *recorder) export(ctx context.Context, to Exporter) error {
	spans := r.ended
	r.ended = nil
	if len(spans) == 0 {
		return nil
	}
	if err := to.ExportSpans(ctx, spans); err != nil {
		return fmt.Errorf("export %d spans: %w", len(spans), err)
	}
	return nil
}

// moment returns the time of Unix nanoseconds.
func moment(ns int64) time.Time { return time.Unix(0, ns) }
