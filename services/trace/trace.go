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
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
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

// Options say what Export exports.
type Options struct {
	// Run is the run whose groups are exported; "*": those of all runs.
	Run schemas.Run
	// Live goes on with what is stored later, until the context ends. Since leaves out what was stored before.
	Live  bool
	Since time.Time
	// Exported is called after each trace with the number of its spans. Failed is called with the error of a trace that
	// could not be exported, and decides whether to go on (nil) or to end with an error.
	Exported func(name string, spans int)
	Failed   func(err error) error
}

// Export exports a trace for each group that has closed and, for all runs, for each policy that was pushed. It ends
// with an error when a stream cannot be read, or Failed says so.
func Export(ctx context.Context, b *bus.Bus, to Exporter, o Options) error {
	var mu sync.Mutex // held for Exported and Failed
	read := bus.ReadOptions{Live: o.Live, FromTime: o.Since}
	send := func(ctx context.Context, name string, r *recorder) error {
		n := len(r.ended)
		err := r.export(ctx, to)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case ctx.Err() != nil: // it may have been sent, or not
		case err != nil:
			return o.Failed(fmt.Errorf("%s: %w", name, err))
		case n > 0: // else its client does not record the trace
			o.Exported(name, n)
		}
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		r := newRecorder()
		for m, err := range b.Read(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(o.Run, "*")},
			read) {
			if err != nil {
				return err
			}
			result := stored[schemas.Advantage]{at: m.Time, header: m.Header}
			if bus.Fits(m, &result.event) != nil {
				continue // not a result; the group's true one will replace it
			}
			closed, err := readGroup(ctx, b, result)
			if err != nil {
				return err
			}
			closed.add(r)
			if err := send(ctx, fmt.Sprintf("group %s of %s", result.event.UID, result.event.Run), r); err != nil {
				return err
			}
		}
		return nil
	})
	if o.Run == "*" {
		g.Go(func() error { return exportPolicies(ctx, b, read, send) })
	}
	return g.Wait()
}

// exportPolicies exports a trace for each answer of a sampler to a policy: the push, and the answer. The spans of a
// push have the same ids each time.
func exportPolicies(
	ctx context.Context, b *bus.Bus, read bus.ReadOptions,
	send func(ctx context.Context, name string, r *recorder) error,
) error {
	r, history := newRecorder(), map[schemas.Lineage][]*schemas.Policy{}
	for m, err := range b.Read(ctx, schemas.StreamApplied, []string{schemas.AppliedSubject("*", "*", "*")}, read) {
		if err != nil {
			return err
		}
		var a schemas.Applied
		if bus.Fits(m, &a) != nil {
			continue
		}
		answered := func(p *schemas.Policy) bool { return p.PolicyVersion == a.PolicyVersion }
		if !slices.ContainsFunc(history[a.Lineage()], answered) {
			if history[a.Lineage()], err = b.PolicyHistory(ctx, a.Lineage()); err != nil {
				return err
			}
		}
		for _, p := range history[a.Lineage()] {
			if answered(p) {
				addPolicy(r, p, &a)
			}
		}
		name := fmt.Sprintf("version %d of lane %s on %s", a.PolicyVersion, a.Lineage(), a.Instance)
		if err := send(ctx, name, r); err != nil {
			return err
		}
	}
	return nil
}

// addPolicy records the push of a policy and how a sampler answered it.
func addPolicy(r *recorder, p *schemas.Policy, a *schemas.Applied) {
	lane, version := p.Lineage().String(), fmt.Sprint(p.PolicyVersion)
	of := []attribute.KeyValue{
		attribute.String("meander.lane", lane), attribute.Int64("meander.policy_version", p.PolicyVersion),
		attribute.String("meander.weights_digest", p.WeightsDigest), attribute.String("meander.pushed_by", p.By),
	}
	pushed := moment(p.Announced)
	ctx := r.add(root(tracing.Context{}, "policy", lane, version), span{
		name: "policy", service: "client", begin: pushed, end: pushed,
		attributes: of,
	}, lane, version)
	r.add(ctx, span{
		name: "apply", service: "sampler", instance: a.Instance, begin: moment(a.At - a.LoadNS), end: moment(a.At),
		attributes: []attribute.KeyValue{attribute.String("meander.state", a.State)}, fault: a.Error,
	}, a.Instance)
}
