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
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

// The three headers of a prompt's trace context are those of each event that follows from it, up to the batch, and of
// each request to a worker. What is longer than the standard has everybody hand through loses its last members.
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
	asked := make(chan nats.Header, 4)
	if _, err := plane.Conn().QueueSubscribe(schemas.ScoreSubject("worker"), "worker", func(m *nats.Msg) {
		reply, _ := schemas.Encode(&schemas.ScoreReply{Score: new(1.0)})
		asked <- m.Header
		_ = m.Respond(reply)
	}); err != nil {
		t.Fatal(err)
	}
	c := pipeline.DefaultConfig()
	c.Sampler.Model = "synthetic"
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, c, zerolog.Nop()) })
	for i := range 2 {
		p := &schemas.Prompt{UID: schemas.UID(fmt.Sprint("u", i)), Prompt: "red", GroupSize: new(int64(2))}
		p.Batch, p.Reward = &schemas.BatchSpec{ID: "b", Groups: 2},
			[]schemas.RewardSpec{{Name: "nats:worker", Weight: new(1.0)}}
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
	for range 4 {
		got := bustest.Receive(t, "a request to the worker", asked)
		for name, value := range want {
			if !slices.Equal(got[name], []string{value}) {
				t.Errorf("the worker got %s: %.100q; want %.100q", name, got[name], value)
			}
		}
	}
}

// A traceparent that is none is not handed on, and its client is told. What another one says of its client's choice
// to record is handed on as it is.
func TestRun_TraceContextOfOthers(t *testing.T) {
	t.Parallel()
	plane := bustest.New(t)
	c := pipeline.DefaultConfig()
	c.Sampler.Model = "synthetic"
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, c, zerolog.Nop()) })
	for i, of := range []struct{ sent, want, says string }{
		{"00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", "", "traceparent: \"00-0AF7651916"},
		{"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", ""},
	} {
		uid := schemas.UID(fmt.Sprint("u", i))
		inbox := plane.Conn().NewInbox()
		answers, err := plane.Conn().SubscribeSync(inbox)
		if err != nil {
			t.Fatal(err)
		}
		data, err := schemas.Encode(&schemas.Prompt{UID: uid, Prompt: "red", GroupSize: new(int64(1))})
		if err == nil {
			_, err = plane.PublishPrompt(t.Context(), "r", data, nats.Header{
				"traceparent": {of.sent}, "tracestate": {"vendor=a"}, schemas.HeaderReply: {inbox},
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		var receipt schemas.Receipt
		bustest.Until(t, "a receipt that decides", func() error {
			m, err := answers.NextMsg(time.Second)
			if err == nil {
				err = schemas.Decode(m.Data, &receipt)
			}
			if err == nil && !receipt.Accepted {
				err = errors.New(receipt.Waiting)
			}
			return err
		})
		told := strings.Join(receipt.Warnings, "; ")
		if strings.Contains(told, "traceparent") != (of.says != "") || !strings.Contains(told, of.says) {
			t.Errorf("%s: told %q; want %q", of.sent, told, of.says)
		}
		bustest.Until(t, "the result", func() error {
			m, err := plane.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("r", uid))
			if err != nil {
				return err
			}
			state := map[bool]string{true: "vendor=a"}[of.want != ""]
			if strings.Join(m.Header["traceparent"], "") != of.want ||
				strings.Join(m.Header["tracestate"], "") != state {
				t.Errorf("%s: the result has %v", of.sent, m.Header)
			}
			return nil
		})
	}
}
