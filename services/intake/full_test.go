package intake

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// While samplers find no room for steps, prompts are held, with the fix; they go on when there is
// some, and are refused when there was none for as long as a prompt is held.
func TestFull_Prompts(t *testing.T) {
	p := &plane{bustest.New(t)}
	if err := p.SetPolicy(t.Context(), qwen(), nil); err != nil {
		t.Fatal(err)
	}
	var waiting atomic.Bool
	waiting.Store(true)
	changed := make(chan struct{}, 1)
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return b.Announce(ctx, func() *schemas.Presence {
			e := &schemas.Presence{Service: schemas.ServiceSampler, Instance: "sampler-1", Lane: qwen().Lane}
			if waiting.Load() {
				e.Room = &schemas.Room{Waiting: 3, Need: 1 << 20, Since: time.Now().Add(-time.Hour).UnixNano()}
			}
			return e
		}, changed)
	})
	bustest.Until(t, "the sampler", func() error {
		_, err := p.Last(t.Context(), schemas.StreamPresenceBucket, schemas.PresenceSubject("sampler-1"))
		return err
	})
	cfg := DefaultConfig()
	cfg.Hold, cfg.DrainTimeout = 6*time.Second, 100*time.Millisecond
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, cfg, b, zerolog.Nop()) })
	first := p.publish(t, "r1", &schemas.Prompt{Prompt: "a fox", UID: "u1"})
	const fix = "meander streams limit --max-steps-bytes"
	if r := receipt(t, first); !strings.Contains(r.Waiting, "MDR_STEPS is full: 3 samples wait") ||
		!strings.Contains(r.Waiting, fix) {
		t.Fatalf("held with %+v", r)
	}
	if r := receipt(t, first); r.Accepted || r.Code != schemas.CodeExhausted || !strings.Contains(r.Error, fix) {
		t.Fatalf("refused with %+v", r)
	}
	second := p.publish(t, "r1", &schemas.Prompt{Prompt: "a fox", UID: "u2"})
	if r := receipt(t, second); r.Waiting == "" {
		t.Fatalf("held with %+v", r)
	}
	waiting.Store(false)
	changed <- struct{}{}
	if r := receipt(t, second); !r.Accepted {
		t.Fatalf("with room again: %+v", r)
	}
}
