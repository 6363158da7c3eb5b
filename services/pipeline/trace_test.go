package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

// The three headers of a prompt's trace context are those of each event that follows from it, up to the batch. What is
// longer than the standard has everybody hand through loses its last members.
func TestRun_TraceContext(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	long := strings.Repeat("k=v,", 4096) + "last=1"
	sent := nats.Header{
		"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
		"tracestate":  {"vendor=a", "other=b"}, "baggage": {long},
	}
	want := map[string]string{
		"traceparent": sent["Traceparent"][0], "tracestate": "vendor=a,other=b", "baggage": long[:8191],
	}
	var mu sync.Mutex
	seen := map[string]int{}
	if _, err := plane.Bus.Conn().Subscribe("mdr.v1.>", func(m *nats.Msg) {
		a, ok := schemas.ParseSubject(m.Subject)
		if !ok || m.Header.Get("Mdr-Type") == "" || m.Header.Get("Traceparent") != "" {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		switch a.Kind {
		case "policy", "applied", "parked":
			return
		}
		seen[a.Kind]++
		for name, value := range want {
			if got := m.Header[name]; !slices.Equal(got, []string{value}) {
				t.Errorf("%s: %s: %.100q; want %.100q", m.Subject, name, got, value)
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	c := pipeline.DefaultConfig()
	c.Sampler.Model = "synthetic"
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, c, zerolog.Nop()) })
	for i := range 2 {
		p := &schemas.Prompt{UID: schemas.UID(fmt.Sprint("u", i)), Prompt: "red", GroupSize: new(int64(2))}
		p.Batch = &schemas.BatchSpec{ID: "b", Groups: 2}
		data, err := schemas.Encode(p)
		if err == nil {
			_, err = plane.Bus.PublishPrompt(t.Context(), "r", data, sent)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	all := []string{"advantage", "batch", "group", "opening", "request", "reward", "step", "trajectory"}
	bustest.Until(t, "the batch", func() error {
		mu.Lock()
		defer mu.Unlock()
		if got := slices.Sorted(maps.Keys(seen)); !slices.Equal(got, all) {
			return errors.New("seen: " + strings.Join(got, ", "))
		}
		return nil
	})
}
