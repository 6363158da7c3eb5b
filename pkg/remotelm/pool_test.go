package remotelm_test

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
)

// said is what a pool said of its servers, by their addresses.
type said struct {
	mu sync.Mutex
	of map[string]error
}

func (s *said) changed(server string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = map[string]error{}
	}
	s.of[server] = err
}

// dialBoth returns a pool of two servers, of which one can be used at least.
func dialBoth(t *testing.T, a, b *remotelmtest.Server, told *said) *remotelm.Pool {
	t.Helper()
	p, err := remotelm.Dial(t.Context(), remotelm.Config{
		Server: a.Engine() + "," + b.URL, Vocabulary: 320, ProbeIDs: []int32{1, 2}, Pause: time.Millisecond,
		Hooks: remotehttp.Hooks{Changed: told.changed},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// An answer that breaks off at one server is gone on with by the other; one that is gone is not asked again.
func TestPool_GoesOnElsewhere(t *testing.T) {
	t.Parallel()
	a, b, told := remotelmtest.New(t, remotelmtest.LogProbs), remotelmtest.New(t, remotelmtest.LogProbs), &said{}
	p := dialBoth(t, a, b, told)
	a.Then(remotelmtest.Cut(a.Stream(), 2))
	b.Then(remotelmtest.Whole(remotelmtest.Tail(b.Stream(), 2)), remotelmtest.Whole(b.Stream()))
	got := draw(t.Context(), p)
	if got.err != nil || !slices.Equal(got.ids, recordedIDs) || got.resumed != 1 || len(b.Asked()) != 1 {
		t.Fatalf("drew %+v; want %v, resumed once, by the other server", got, recordedIDs)
	}
	a.CloseClientConnections()
	a.Close()
	for range 3 {
		if got := draw(t.Context(), p); got.err != nil || !slices.Equal(got.ids, recordedIDs) {
			t.Fatalf("drew %+v", got)
		}
	}
	if why := told.of["vllm at "+a.URL]; len(b.Asked()) != 4 || why == nil {
		t.Errorf("the other server was asked %d times, want 4; said %v", len(b.Asked()), told.of)
	}
	b.Down(true)
	if err := p.Check(t.Context()); err == nil || errors.Is(err, remotelm.ErrRefused) {
		t.Errorf("both away: %v", err)
	}
	if got := draw(t.Context(), p); !errors.Is(got.err, remotelm.ErrAway) {
		t.Errorf("both away: %v; want ErrAway", got.err)
	}
}

// A server that gives other numbers for the same prompt, or of another kind, is not used, also while the others are
// away. Nor is one that comes back so.
func TestPool_Refuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		a, b func(s *remotelmtest.Server)
		says string
	}{
		"other weights": {b: func(s *remotelmtest.Server) {
			s.Row = func(z []float64) { slices.Reverse(z) }
		}, says: "it has other weights"},
		"bf16": {b: func(s *remotelmtest.Server) {
			s.Row = func(z []float64) {
				for i := range z {
					z[i] = float64(int(16*z[i])) / 16
				}
			}
		}, says: "raw numbers in bf16"},
		"another mode": {b: func(s *remotelmtest.Server) { s.Mode = remotelmtest.Logits }, says: "logits numbers"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b, told := remotelmtest.New(t, remotelmtest.LogProbs), remotelmtest.New(t, remotelmtest.LogProbs),
				&said{}
			c.b(b)
			p := dialBoth(t, a, b, told)
			for range 3 {
				if got := draw(t.Context(), p); got.err != nil {
					t.Fatal(got.err)
				}
			}
			if why := told.of["vllm at "+b.URL]; len(b.Asked()) != 0 || why == nil ||
				!strings.Contains(why.Error(), c.says) {
				t.Errorf("asked %d times, said %v; want none, %q", len(b.Asked()), why, c.says)
			}
			a.Down(true)
			_ = p.Check(t.Context())
			if got := draw(t.Context(), p); !errors.Is(got.err, remotelm.ErrAway) || len(b.Asked()) != 0 {
				t.Errorf("the first is away: %v, the other was asked %d times; want ErrAway, none", got.err,
					len(b.Asked()))
			}
			a.Down(false)
			c.b(a)
			if err := p.Check(t.Context()); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("the first comes back changed: %v; want %q", err, c.says)
			}
		})
	}
}

// The only server may come back with other weights: its owner may have changed them.
func TestPool_NewWeightsOfTheOnlyOne(t *testing.T) {
	t.Parallel()
	s := remotelmtest.New(t, remotelmtest.LogProbs)
	p, err := remotelm.Dial(t.Context(), remotelm.Config{
		Server: s.Engine(), Vocabulary: 320, ProbeIDs: []int32{1, 2}, Pause: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	s.Down(true)
	_ = p.Check(t.Context())
	s.Down(false)
	s.Row = func(z []float64) { slices.Reverse(z) }
	if err := p.Check(t.Context()); err != nil || draw(t.Context(), p).err != nil {
		t.Errorf("it comes back with other weights: %v", err)
	}
}

// A server that lets us in no more is left for another one; of a single one that is the end of the answer.
func TestPool_ShutOut(t *testing.T) {
	t.Parallel()
	a, b, told := remotelmtest.New(t, remotelmtest.LogProbs), remotelmtest.New(t, remotelmtest.LogProbs), &said{}
	p := dialBoth(t, a, b, told)
	a.Then(remotelmtest.Fail(http.StatusForbidden, "no key"))
	b.Then(remotelmtest.Whole(b.Stream()), remotelmtest.Fail(http.StatusForbidden, "no key"))
	if got := draw(t.Context(), p); got.err != nil || !slices.Equal(got.ids, recordedIDs) {
		t.Errorf("drew %+v; want the answer of the other server", got)
	}
	if why := told.of["vllm at "+a.URL]; why == nil || !strings.Contains(why.Error(), "no key") {
		t.Errorf("said %v", told.of)
	}
	if got := draw(t.Context(), p); !errors.Is(got.err, remotelm.ErrRefused) {
		t.Errorf("no server lets us in: %v; want ErrRefused", got.err)
	}
}

// All servers load an adapter, also one that was started again; one that has lost it is not used until it has it.
func TestPool_Adapters(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{remotelmtest.LogProbs, remotelmtest.SGLang} {
		t.Run(mode, func(t *testing.T) { testAdapters(t, mode) })
	}
}

func testAdapters(t *testing.T, mode string) {
	folder := t.TempDir()
	for _, name := range []string{"adapter_config.json", "adapter_model.safetensors"} {
		if err := os.WriteFile(filepath.Join(folder, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a, b, told := remotelmtest.New(t, mode), remotelmtest.New(t, mode), &said{}
	p := dialBoth(t, a, b, told)
	if err := p.LoadAdapter(t.Context(), "meander-x", folder); err != nil {
		t.Fatal(err)
	}
	with := func() error {
		r := remotelm.Request{ID: "r", Adapter: "meander-x", IDs: []int32{305}, MaxTokens: 8, Temperature: 1, TopP: 1}
		for _, err := range p.Stream(t.Context(), r) {
			if err != nil {
				return err
			}
		}
		return nil
	}
	loaded := func(s *remotelmtest.Server) bool {
		return maps.Equal(s.Adapters(), map[string]string{"meander-x": folder})
	}
	if !loaded(a) || !loaded(b) {
		t.Fatalf("%v, %v", a.Adapters(), b.Adapters())
	}
	a.Restart()
	if err := with(); err != nil || len(b.Asked()) != 1 || loaded(a) {
		t.Errorf("%v, asked %d times; want the other server", err, len(b.Asked()))
	}
	b.Restart()
	if err := with(); !errors.Is(err, remotelm.ErrAway) {
		t.Errorf("both have lost it: %v; want ErrAway", err)
	}
	if err := p.Check(t.Context()); err != nil || !loaded(a) || !loaded(b) || with() != nil {
		t.Errorf("%v; have %v, %v", err, a.Adapters(), b.Adapters())
	}
	p.UnloadAdapter(t.Context(), "meander-x")
	if len(a.Adapters())+len(b.Adapters()) != 0 {
		t.Errorf("unloaded: %v, %v", a.Adapters(), b.Adapters())
	}
	b.NoAdapters = true
	if err := p.LoadAdapter(t.Context(), "meander-y", folder); !errors.Is(err, remotelm.ErrRefused) ||
		len(a.Adapters()) != 0 {
		t.Errorf("one takes none: %v, the other has %v", err, a.Adapters())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.LoadAdapter(ctx, "meander-z", folder); err == nil {
		t.Error("loaded without being asked")
	}
}
