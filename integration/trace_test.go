package integration_test

import (
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// The trace of the client of tracedRun, and its span.
const (
	clientTrace = "0af7651916cd43dd8448eb211c80319c"
	clientSpan  = "b7ad6b7169203331"
)

// tracedStages are the spans of the run that tracedRun makes, by the program and the stage. There are 27.
var tracedStages = []string{
	"meander-advantage advantage", "meander-advantage group", "meander-intake intake", "meander-reward score jpeg_compressibility",
	"meander-reward wait for scoring", "meander-sampler decode", "meander-sampler denoise", "meander-sampler encode",
	"meander-sampler queue", "meander-sampler sample", "meander-sampler wait for a slot",
}

// tracedRun has four programs make a group of three samples in the run r, whose prompt goes on with a client's trace.
func tracedRun(t *testing.T) (w *world, dir string) {
	t.Helper()
	w, dir = newWorld(t, bustest.TCP), t.TempDir()
	for name, args := range map[string][]string{
		"intake": nil, "sampler": {"--model", "synthetic"}, "reward": nil,
		"advantage": nil,
	} {
		p := harness.Raise(t, &harness.Process{
			Name: name, Path: program(t, "meander-"+name), Dir: dir,
			Args: append([]string{"--nats-url", w.Server.ClientURL(), "--health-addr", ""}, args...),
		})
		t.Cleanup(func() { p.Bury(t) })
	}
	if _, err := w.client.Publish(tracing.With(t.Context(), tracing.Context{Parent: "00-" + clientTrace + "-" +
		clientSpan + "-01"}), "r", slowPrompt("g", 3, 4)); err != nil {
		t.Fatal(err)
	}
	if a := w.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusComplete {
		t.Fatalf("%+v", a)
	}
	return w, dir
}

// The trace of a prompt that four programs worked on has all stages, under the names of the programs, and goes on with
// the trace of the prompt's client. It comes to a collector by OTLP.
func TestTrace_FourPrograms(t *testing.T) {
	w, dir := tracedRun(t)
	var mu sync.Mutex
	got, traces, steps := map[string]int{}, map[string]bool{}, 0
	take := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		body, err := io.ReadAll(r.Body)
		var in collector.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(body, &in)
		}
		if err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		for _, of := range in.GetResourceSpans() {
			service := ""
			for _, a := range of.GetResource().GetAttributes() {
				if a.GetKey() == "service.name" {
					service = a.GetValue().GetStringValue()
				}
			}
			for _, scope := range of.GetScopeSpans() {
				for _, s := range scope.GetSpans() {
					got[service+" "+s.GetName()]++
					traces[string(s.GetTraceId())] = true
					if s.GetName() == "denoise" {
						steps += len(s.GetEvents())
					}
				}
			}
		}
		rw.Header().Set("Content-Type", "application/x-protobuf")
	})
	otlp := httptest.NewServer(take)
	defer otlp.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp.URL)
	out := meander(t, dir, "trace", "r", "--once", "--nats", w.Server.ClientURL()).must(t, 0)
	if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, tracedStages) ||
		got["meander-sampler sample"] != 3 || steps != 12 ||
		len(traces) != 1 || !strings.Contains(out.stdout, "1 trace, 27 spans") {
		t.Errorf("spans %v, %d steps, %d traces; want %v: %s", got, steps, len(traces), tracedStages, out.stdout)
	}
	if l, err := net.Listen("tcp", "127.0.0.1:4318"); err != nil {
		t.Logf("not checked, the default address: a collector is there: %v", err)
	} else {
		local := &http.Server{Handler: take, ReadHeaderTimeout: time.Minute}
		go func() { _ = local.Serve(l) }()
		defer func() { _ = local.Close() }()
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
		meander(t, dir, "trace", "r", "--once", "--nats", w.Server.ClientURL()).must(t, 0)
		if got["meander-sampler sample"] != 6 {
			t.Errorf("%d samples, want the three a second time", got["meander-sampler sample"])
		}
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp.URL)
	}
	otlp.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "500")
	for _, c := range []struct {
		protocol, says string
		code           int
	}{{"grpc", "must be http/protobuf", 2}, {"http/protobuf", "OTEL_EXPORTER_OTLP_ENDPOINT names the collector", 1}} {
		t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", c.protocol)
		out := meander(t, dir, "trace", "r", "--once", "--nats", w.Server.ClientURL()).must(t, c.code)
		if !strings.Contains(out.stderr, c.says) {
			t.Errorf("%s: %s; want %q", c.protocol, out.stderr, c.says)
		}
	}
}
