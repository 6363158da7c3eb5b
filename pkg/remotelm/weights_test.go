package remotelm_test

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
)

// newWhole returns a server that takes whole weights.
func newWhole(t *testing.T, mode string) *remotelmtest.Server {
	s := remotelmtest.New(t, mode)
	s.DevMode = true
	return s
}

// dialWhole returns a pool of servers whose whole weights change; loads is told which folder one loads.
func dialWhole(t *testing.T, most int, loads func(folder string), hooks remotehttp.Hooks, s ...*remotelmtest.Server,
) *remotelm.Pool {
	t.Helper()
	at := s[0].Engine()
	for _, other := range s[1:] {
		at += "," + other.URL
	}
	p, err := remotelm.Dial(t.Context(), remotelm.Config{
		Server: at, Vocabulary: 320, ProbeIDs: []int32{1, 2}, Pause: time.Millisecond, Concurrency: most, Whole: true,
		Loading: func(_, folder string) { loads(folder) }, Hooks: hooks,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	if !p.Facts().Whole {
		t.Fatalf("%+v; must take whole weights", p.Facts())
	}
	return p
}

func ignore(string) {}

// weightsFolder returns a folder with a file of weights.
func weightsFolder(t *testing.T, of string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), []byte(of), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// drew checks that an answer is the recorded one, all of it drawn with weights of a name.
func drew(t *testing.T, got told, name string) {
	t.Helper()
	if got.err != nil || !slices.Equal(got.ids, recordedIDs) {
		t.Fatalf("drew %+v; want %v", got, recordedIDs)
	}
	for _, w := range got.weights {
		if strings.HasPrefix(w.Version, "meander-") != (name != "") || name != "" && w.Version != name {
			t.Errorf("tokens %d to %d with %q; want %q", w.Begin, w.End, w.Version, name)
		}
	}
	if name != "" && len(got.weights) == 0 {
		t.Error("no weights are named")
	}
}

// A server loads whole weights once, for the first request with them, and says so of each answer. One that was started
// again has old ones: the answer is not taken, and the next one is drawn with the weights again.
func TestPool_WholeWeights(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{remotelmtest.LogProbs, remotelmtest.Logits, remotelmtest.SGLang} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newWhole(t, mode)
			p := dialWhole(t, 4, ignore, remotehttp.Hooks{}, s)
			first, second := remotelm.WeightsName("1111"), remotelm.WeightsName("2222")
			p.AddWeights(first, weightsFolder(t, "one"))
			p.AddWeights(second, weightsFolder(t, "two"))
			for i, of := range []string{"", first, first, second, "", second} {
				drew(t, drawWith(t.Context(), p, of), of)
				if _, loads := s.Version(); loads != []int{0, 1, 1, 2, 3, 4}[i] {
					t.Errorf("request %d: %d loads", i, loads)
				}
			}
			for _, change := range []func(){s.Restart, func() { s.SetVersion(first) }} {
				change()
				if got := drawWith(t.Context(), p, second); !errors.Is(got.err, remotelm.ErrChanged) {
					t.Errorf("drew %+v with others; want ErrChanged", got)
				}
				if err := p.Check(t.Context()); err != nil {
					t.Error(err)
				}
				drew(t, drawWith(t.Context(), p, second), second)
			}
			p.RemoveWeights(first, "another folder")
			drew(t, drawWith(t.Context(), p, first), first)
		})
	}
}

// No weights change under a request: the one for others waits for it, and requests that come later for the request.
func TestPool_WeightsWait(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{remotelmtest.LogProbs, remotelmtest.SGLang} {
		s := newWhole(t, mode)
		var running atomic.Bool
		p := dialWhole(t, 4, func(string) {
			if running.Load() {
				t.Error("weights change under a request")
			}
		}, remotehttp.Hooks{}, s)
		name := remotelm.WeightsName("33")
		p.AddWeights(name, weightsFolder(t, "three"))
		begun, goOn := make(chan struct{}), make(chan struct{})
		s.Then(func(w http.ResponseWriter, body map[string]any) {
			running.Store(true)
			close(begun)
			<-goOn
			running.Store(false)
			remotelmtest.Whole(s.Stream())(w, body)
		}, remotelmtest.Whole(s.Stream()))
		old, next := make(chan told, 1), make(chan told, 4)
		go func() { old <- draw(t.Context(), p) }()
		<-begun
		for range cap(next) {
			go func() { next <- drawWith(t.Context(), p, name) }()
		}
		if len(next) > 0 {
			t.Errorf("drew %+v beside a request for other weights", <-next)
		}
		close(goOn)
		drew(t, <-old, "")
		for range cap(next) {
			drew(t, <-next, name)
		}
		if _, loads := s.Version(); loads != 1 {
			t.Errorf("%d loads; want one for all", loads)
		}
	}
}

// Weights that a server cannot load are refused in its words, and the ones before go on; vLLM ends, and goes on when it
// was started again. Another server may load them.
func TestPool_WeightsRefused(t *testing.T) {
	t.Parallel()
	for mode, says := range map[string]string{
		remotelmtest.LogProbs: "Worker failed with error", remotelmtest.SGLang: "Cannot find any model weights",
	} {
		s := newWhole(t, mode)
		p := dialWhole(t, 4, ignore, remotehttp.Hooks{}, s)
		good, bad := remotelm.WeightsName("4"), remotelm.WeightsName("5")
		p.AddWeights(good, weightsFolder(t, "four"))
		p.AddWeights(bad, t.TempDir())
		drew(t, drawWith(t.Context(), p, good), good)
		for _, unknown := range []string{bad, remotelm.WeightsName("6")} {
			got := drawWith(t.Context(), p, unknown)
			if !errors.Is(got.err, remotelm.ErrWeights) || unknown == bad && !strings.Contains(got.err.Error(), says) {
				t.Errorf("%s: %v; want what the server says, %q", mode, got.err, says)
			}
			if unknown == bad && mode != remotelmtest.SGLang {
				if got := drawWith(t.Context(), p, good); !errors.Is(got.err, remotelm.ErrAway) {
					t.Errorf("%+v of a server that ended", got)
				}
				s.Restart()
				if err := p.Check(t.Context()); err != nil {
					t.Error(err)
				}
			}
			drew(t, drawWith(t.Context(), p, good), good)
			drew(t, draw(t.Context(), p), "")
		}
	}
}

// A server that says it has loaded weights and has other numbers than the first with them gets no requests; nor does
// one with pushed weights by a sampler that changes none.
func TestPool_WeightsStale(t *testing.T) {
	t.Parallel()
	a, b, out := newWhole(t, remotelmtest.LogProbs), newWhole(t, remotelmtest.LogProbs), make(chan error, 1)
	b.Stale = true
	p := dialWhole(t, 1, ignore, remotehttp.Hooks{Changed: func(_ string, err error) {
		select {
		case out <- err:
		default:
		}
	}}, a, b)
	name := remotelm.WeightsName("7")
	p.AddWeights(name, weightsFolder(t, "seven"))
	drew(t, drawWith(t.Context(), p, name), name)
	begun, end := make(chan struct{}), make(chan struct{})
	a.Then(func(w http.ResponseWriter, body map[string]any) {
		close(begun)
		<-end
		remotelmtest.Whole(a.Stream())(w, body)
	}, remotelmtest.Whole(a.Stream()))
	both := make(chan told, 2)
	go func() { both <- drawWith(t.Context(), p, name) }()
	<-begun
	go func() { both <- drawWith(t.Context(), p, name) }()
	if err := <-out; err == nil || !strings.Contains(err.Error(), "other weights") {
		t.Errorf("the second server is out by %v", err)
	}
	close(end)
	drew(t, <-both, name)
	drew(t, <-both, name)
	if len(b.Asked()) > 0 {
		t.Errorf("the second server drew %d answers", len(b.Asked()))
	}
	a.SetVersion(name)
	_, err := remotelm.Dial(t.Context(), remotelm.Config{
		Server: a.Engine(), Vocabulary: 320, ProbeIDs: []int32{1, 2},
	})
	if !errors.Is(err, remotelm.ErrRefused) || !strings.Contains(err.Error(), name) {
		t.Errorf("a server with pushed weights: %v; must be refused", err)
	}
}
