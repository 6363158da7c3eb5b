package remotelm_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
)

// A server that is paused is waited for, whatever the form in which it says so, and is no overload; meanwhile the pool
// says why it cannot be used.
func TestPool_Paused(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{remotelmtest.LogProbs, remotelmtest.Completions} {
		for _, inStream := range []bool{false, true} {
			s, out := remotelmtest.New(t, mode), make(chan error, 1)
			p, err := remotelm.Dial(t.Context(), remotelm.Config{
				Server: s.Engine(), Vocabulary: 320, ProbeIDs: []int32{1, 2}, Patience: time.Hour, Concurrency: 64,
				Pause: time.Millisecond,
				Hooks: remotehttp.Hooks{
					Changed: func(_ string, err error) {
						select {
						case out <- err:
						default:
						}
					},
					Overloaded: func(_ string, most int, err error) { t.Errorf("%d at once, by %v", most, err) },
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			s.Pause(true, inStream)
			drew := make(chan told, 4)
			for range cap(drew) {
				go func() { drew <- draw(t.Context(), p) }()
			}
			if err := <-out; !strings.Contains(err.Error(), "paused") {
				t.Errorf("%s: out by %v", mode, err)
			}
			if err := p.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "paused") || p.Used() != 0 {
				t.Errorf("%s: %v, %d servers are used", mode, err, p.Used())
			}
			if len(drew) > 0 {
				t.Errorf("%s: drew %+v of a paused server", mode, <-drew)
			}
			s.Pause(false, false)
			for range cap(drew) {
				if got := <-drew; got.err != nil || !slices.Equal(got.ids, recordedIDs) || got.resumed != 0 {
					t.Errorf("%s: drew %+v, %v", mode, got, got.err)
				}
			}
			for _, asked := range s.Asked() {
				if params, ok := asked["sampling_params"].(map[string]any); ok {
					asked = params
				}
				if asked["seed"] != 3.0 {
					t.Errorf("%s: seed %v; want that of the request", mode, asked["seed"])
				}
			}
		}
	}
}

// A pause that is longer than the patience has the request put back; the end of its context ends the wait.
func TestPool_PausedForLong(t *testing.T) {
	t.Parallel()
	s := remotelmtest.New(t, remotelmtest.LogProbs)
	p := dial(t, s, time.Second)
	s.Pause(true, false)
	if got := draw(t.Context(), p); !errors.Is(got.err, remotelm.ErrAway) ||
		!strings.Contains(got.err.Error(), "paused") {
		t.Errorf("%v; want ErrAway", got.err)
	}
	p = dial(t, remotelmtest.New(t, remotelmtest.LogProbs), time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := draw(ctx, p); !errors.Is(got.err, context.Canceled) {
		t.Errorf("%v", got.err)
	}
}
