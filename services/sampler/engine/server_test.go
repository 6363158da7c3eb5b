package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// only is the name of the one server of a test.
type only string

func (o only) String() string { return string(o) }

// poolOf returns the pool of one server, which is looked at by a function.
func poolOf(at engine.Server, log zerolog.Logger, look func() error) *pool.Pool[only] {
	return pool.New(remotehttp.Pooled(pool.Config[only]{
		Members: []only{"vllm at X"}, Most: 1,
		Probe: func(context.Context, only) error { return look() },
		Join:  func(context.Context, only) error { return nil },
	}, at.Hooks(log)))
}

// A dead server is waited for, and readiness and episodes say why. A server that comes back must serve what it did.
func TestServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Value // a text; the goroutine below reads it
		down.Store("connection refused")
		var ready func() error
		var log bytes.Buffer
		at := engine.Server{Ready: func(_ string, check func() error) { ready = check }}
		p := poolOf(at, zerolog.New(&log), func() error {
			if why := down.Load().(string); why != "" {
				return errors.New(why)
			}
			return nil
		})
		ctx, stop := context.WithCancel(t.Context())
		go func() {
			if err := at.Reach(ctx, p); err != nil {
				t.Error(err)
			}
			defer p.Watch(ctx)()
			<-ctx.Done()
		}()
		for _, why := range []string{"connection refused", "", "out of memory", "", "serves another model", ""} {
			down.Store(why)
			time.Sleep(time.Minute)
			synctest.Wait()
			err, away := ready(), engine.Away(p)
			switch {
			case why == "" && (err != nil || away != nil):
				t.Errorf("ready: %v; away: %v; want neither", err, away)
			case why == "":
			case err == nil || !strings.Contains(err.Error(), why) || !errors.Is(away, engine.ErrAway) ||
				!strings.Contains(away.Error(), why):
				t.Errorf("ready: %v; away: %v; want %q", err, away, why)
			}
		}
		stop()
		synctest.Wait()
		for message, counts := range map[string][2]int{
			"waiting for the engine": {1, 6}, "the engine is away": {2, 2}, "the engine is back": {2, 2},
		} {
			if n := strings.Count(log.String(), `"message":"`+message); n < counts[0] || n > counts[1] {
				t.Errorf("%d lines %q; want %d to %d:\n%s", n, message, counts[0], counts[1], &log)
			}
		}
	})
}

// What waiting does not change ends the start.
func TestServer_Refused(t *testing.T) {
	t.Parallel()
	at := engine.Server{}
	p := poolOf(at, zerolog.Nop(), func() error { return fmt.Errorf("%w: serves texts", pool.ErrRefused) })
	if err := at.Reach(t.Context(), p); !engine.Refused(err) {
		t.Errorf("reach: %v; want the refusal", err)
	}
}
