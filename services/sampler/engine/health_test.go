package engine_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/services/sampler/engine"
)

// A dead server is waited for, and readiness and episodes say why. A server that comes back must serve what it did.
func TestHealth(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var down, changed atomic.Value // texts; the goroutine below reads them
		down.Store("connection refused")
		changed.Store("")
		fault := func(v *atomic.Value) error {
			if why := v.Load().(string); why != "" {
				return errors.New(why)
			}
			return nil
		}
		var ready func() error
		h := &engine.Health{}
		check := func(context.Context) error { return errors.Join(fault(&down), fault(&changed)) }
		ctx, stop := context.WithCancel(t.Context())
		var log bytes.Buffer
		go func() {
			logger := zerolog.New(&log)
			at := engine.Server{Ready: func(_ string, check func() error) { ready = check }}
			if err := h.Reach(ctx, at, check, logger); err != nil {
				t.Error(err)
			}
			h.Watch(ctx, logger)
		}()
		// is lets a minute pass, and then asks for the state of the server; "" is one that accepts requests.
		is := func(why string) {
			t.Helper()
			time.Sleep(time.Minute)
			synctest.Wait()
			err, away := ready(), h.Away()
			switch {
			case why == "" && (err != nil || away != nil):
				t.Errorf("ready: %v; away: %v; want neither", err, away)
			case why == "":
			case err == nil || !strings.Contains(err.Error(), why) || !errors.Is(away, engine.ErrAway) || !errors.Is(away, err):
				t.Errorf("ready: %v; away: %v; want %q", err, away, why)
			}
		}
		is("connection refused")
		down.Store("")
		is("")
		down.Store("out of memory")
		is("out of memory")
		down.Store("")
		changed.Store("serves another model")
		is("serves another model")
		changed.Store("")
		is("")
		stop()
		synctest.Wait()
		for message, most := range map[string]int{
			"waiting for the engine": 6, "the engine is away": 1, "the engine is back": 1,
		} {
			if n := strings.Count(log.String(), message); n < 1 || n > most {
				t.Errorf("%d lines %q; want 1 to %d:\n%s", n, message, most, &log)
			}
		}
	})
}

// What waiting does not change ends the start.
func TestHealth_Refused(t *testing.T) {
	t.Parallel()
	check := func(context.Context) error { return engine.Refuse("serves texts") }
	if err := (&engine.Health{}).Reach(t.Context(), engine.Server{}, check, zerolog.Nop()); !engine.Refused(err) {
		t.Errorf("reach: %v; want the refusal", err)
	}
}
