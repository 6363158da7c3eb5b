package trace_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/trace"
)

// kept is an exporter that keeps what it gets.
type kept struct {
	spans []sdk.ReadOnlySpan
	err   error
}

func (k *kept) ExportSpans(_ context.Context, spans []sdk.ReadOnlySpan) error {
	k.spans = append(k.spans, spans...)
	return k.err
}

// export exports what is stored of a run.
func export(t *testing.T, b *bus.Bus, run schemas.Run) (spans []sdk.ReadOnlySpan, traces int) {
	t.Helper()
	k := &kept{}
	err := trace.Export(t.Context(), b, k, trace.Options{
		Run: run, Exported: func(string, int) { traces++ }, Failed: func(err error) error { return err },
	})
	if err != nil {
		t.Fatal(err)
	}
	return k.spans, traces
}

// names counts spans as SERVICE: PARENT > NAME.
func names(spans []sdk.ReadOnlySpan) map[string]int {
	of := map[string]string{}
	for _, s := range spans {
		of[s.SpanContext().SpanID().String()] = s.Name()
	}
	out := map[string]int{}
	for _, s := range spans {
		service, _ := s.Resource().Set().Value("service.name")
		out[fmt.Sprintf("%s: %s > %s", service.AsString(), of[s.Parent().SpanID().String()], s.Name())]++
	}
	return out
}

// serve runs a pipeline of the model synthetic, and makes groups: each context is one's.
func serve(t *testing.T, groups ...context.Context) *bus.Bus {
	t.Helper()
	plane := bustest.New(t)
	config := pipeline.DefaultConfig()
	config.Sampler.Model = "synthetic"
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) })
	for i, ctx := range groups {
		uid := schemas.UID(fmt.Sprintf("g%d", i))
		if _, err := client.New(plane.Bus).Publish(ctx, "r", &schemas.Prompt{
			UID: uid, Prompt: "a fox", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(3)), Height: new(int64(64)), Width: new(int64(64))},
		}); err != nil {
			t.Fatal(err)
		}
		bustest.Until(t, "the group has closed", func() error {
			_, err := plane.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("r", uid))
			return err
		})
	}
	return plane.Bus
}

// A group is one trace with all stages, whose ids are the same each time; a prompt's own trace is gone on with.
func TestExport_Groups(t *testing.T) {
	const own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	b := serve(t, t.Context(), tracing.With(t.Context(), tracing.Context{Parent: own}))
	spans, traces := export(t, b, "r")
	want := map[string]int{
		"meander-advantage:  > group": 2, "meander-intake: group > intake": 2, "meander-sampler: group > sample": 4,
		"meander-sampler: sample > queue": 4, "meander-sampler: sample > encode": 4,
		"meander-sampler: sample > wait for a slot": 4, "meander-sampler: sample > denoise": 4,
		"meander-sampler: sample > decode": 4, "meander-reward: sample > wait for scoring": 4,
		"meander-reward: sample > score jpeg_compressibility": 4, "meander-advantage: group > advantage": 2,
	}
	if got := names(spans); !maps.Equal(got, want) || traces != 2 {
		t.Errorf("%d traces of %v; want %v", traces, got, want)
	}
	byTrace, ids := map[string]int{}, map[string]bool{}
	for _, s := range spans {
		byTrace[s.SpanContext().TraceID().String()]++
		ids[s.SpanContext().SpanID().String()] = true
		if s.EndTime().Before(s.StartTime()) || s.StartTime().Before(time.Now().Add(-time.Hour)) {
			t.Errorf("%s lasts from %v to %v", s.Name(), s.StartTime(), s.EndTime())
		}
		if s.Name() == "denoise" && (len(s.Events()) != 3 ||
			!slices.IsSortedFunc(s.Events(), func(a, b sdk.Event) int { return a.Time.Compare(b.Time) })) {
			t.Errorf("steps %v; want three, in order", s.Events())
		}
		if s.Name() == "group" && s.Parent().IsValid() != (s.SpanContext().TraceID().String() == own[3:35]) {
			t.Errorf("group in trace %s, parent %s", s.SpanContext().TraceID(), s.Parent().SpanID())
		}
	}
	if len(byTrace) != 2 || byTrace[own[3:35]] != len(spans)/2 || len(ids) != len(spans) {
		t.Errorf("spans by trace %v, %d ids of %d", byTrace, len(ids), len(spans))
	}
	again, _ := export(t, b, "r")
	for i, s := range again {
		if was := spans[i].SpanContext(); was.TraceID() != s.SpanContext().TraceID() ||
			was.SpanID() != s.SpanContext().SpanID() {
			t.Fatalf("%s: other ids the second time", s.Name())
		}
	}
	if none, _ := export(t, b, "other"); len(none) != 0 {
		t.Errorf("%d spans of a run that is not stored", len(none))
	}
}

// The stages of a sample are spans of it, each once, in the order in which they ran.
func TestExport_Stages(t *testing.T) {
	b := serve(t)
	stage := func(name schemas.Stage, children int64) schemas.StageSpec {
		return schemas.StageSpec{Name: name, Children: &children, ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(3)), Height: new(int64(64)), Width: new(int64(64)),
		}}
	}
	if _, err := client.New(b).Publish(t.Context(), "r", &schemas.Prompt{
		UID: "g", Prompt: "a fox", GroupSize: new(int64(4)), Stages: []schemas.StageSpec{stage("draft", 1), stage("paint", 2)},
	}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, b, 1, schemas.StreamAdvantages)
	spans, traces := export(t, b, "r")
	got := names(spans)
	for name, want := range map[string]int{
		"meander-sampler: group > sample": 4, "meander-sampler: sample > stage draft": 2, "meander-sampler: sample > stage paint": 4,
		"meander-sampler: stage draft > denoise": 2, "meander-sampler: stage paint > denoise": 4, "meander-sampler: sample > denoise": 0,
		"meander-reward: sample > score jpeg_compressibility": 4,
	} {
		if got[name] != want {
			t.Errorf("%d spans %s, want %d", got[name], name, want)
		}
	}
	ids := map[oteltrace.SpanID]bool{}
	last := map[string]sdk.ReadOnlySpan{}
	for _, s := range spans {
		ids[s.SpanContext().SpanID()] = true
		if s.Name() == "stage draft" {
			last[s.Parent().SpanID().String()] = s
		}
	}
	for _, s := range spans {
		draft := last[s.Parent().SpanID().String()]
		if s.Name() == "stage paint" && draft != nil && s.StartTime().Before(draft.EndTime()) {
			t.Errorf("paint begins %v before its draft has ended", draft.EndTime().Sub(s.StartTime()))
		}
	}
	if traces != 1 || len(ids) != len(spans) {
		t.Errorf("%d traces, %d ids of %d spans", traces, len(ids), len(spans))
	}
}

// A live export sends the groups that close while it runs, and ends with its context; a collector that fails is told.
func TestExport_Live(t *testing.T) {
	b := serve(t, t.Context())
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	exported, failed := make(chan string, 10), make(chan error, 10)
	done, k := make(chan error, 1), &kept{err: errors.New("no collector")}
	go func() {
		done <- trace.Export(ctx, b, k, trace.Options{
			Run: "*", Live: true, Exported: func(name string, _ int) { exported <- name },
			Failed: func(err error) error { failed <- err; return nil },
		})
	}()
	if err := bustest.Receive(t, "the failure", failed); !errors.Is(err, k.err) {
		t.Errorf("told of %v", err)
	}
	stop()
	if err := bustest.Receive(t, "the end", done); err != nil {
		t.Errorf("ended with %v", err)
	}
	if len(exported) != 0 {
		t.Error("what was not sent counts as sent")
	}
	err := trace.Export(t.Context(), b, k, trace.Options{
		Run: "r", Exported: func(string, int) {}, Failed: func(err error) error { return err },
	})
	if !errors.Is(err, k.err) {
		t.Errorf("a failure that ends it: %v", err)
	}
}

// A pushed policy is a trace of the push and of each sampler's answer.
func TestExport_Policies(t *testing.T) {
	plane := bustest.New(t)
	now := time.Now()
	first := &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "x", Model: "x", SchedulerConfig: []byte("{}"), Reward: []string{}, Announced: now.UnixNano(),
		LatentChannels: 1, PixelsPerToken: 8, Height: 8, Width: 8, NumInferenceSteps: 1, MaxPixels: 64,
	}
	if err := plane.SetPolicy(t.Context(), first, nil); err != nil {
		t.Fatal(err)
	}
	for instance, fault := range map[string]string{"a": "", "b": "another checkpoint"} {
		a := &schemas.Applied{
			Tenant: schemas.TenantMain,
			Lane:   "x", Instance: instance, State: schemas.AppliedApplied, LoadNS: 5e8, At: now.Add(2 * time.Second).UnixNano(),
		}
		if fault != "" {
			a.State, a.Error = schemas.AppliedRefused, fault
		}
		if _, err := plane.Publish(t.Context(), a); err != nil {
			t.Fatal(err)
		}
	}
	spans, traces := export(t, plane.Bus, "*")
	got := names(spans)
	if want := map[string]int{"meander-client:  > policy": 2, "meander-sampler: policy > apply": 2}; !maps.Equal(got,
		want) || traces != 2 {
		t.Errorf("%d traces of %v; want %v", traces, got, want)
	}
	for _, s := range spans {
		if s.Name() != "apply" {
			continue
		}
		if took := s.EndTime().Sub(s.StartTime()); took != 500*time.Millisecond ||
			(s.Status().Code == codes.Error) != (s.Status().Description != "") {
			t.Errorf("apply took %v: %+v", took, s.Status())
		}
	}
}

// A client that does not record its trace gets no spans in it; what it keeps in the state of its trace, each span has.
func TestExport_AsItsClientRecords(t *testing.T) {
	const with, without = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
	b := serve(t, tracing.With(t.Context(), tracing.Context{Parent: without, State: "vendor=b"}),
		tracing.With(t.Context(), tracing.Context{Parent: with, State: "vendor=a"}))
	spans, traces := export(t, b, "r")
	for _, s := range spans {
		if c := s.SpanContext(); c.TraceID().String() != with[3:35] || c.TraceState().String() != "vendor=a" ||
			!c.IsSampled() {
			t.Errorf("%s: %+v", s.Name(), c)
		}
	}
	if len(spans) == 0 || traces != 1 {
		t.Errorf("%d spans in %d traces", len(spans), traces)
	}
}
