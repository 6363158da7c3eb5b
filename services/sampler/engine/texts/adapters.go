package texts

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// adapters are those of policies that a server has loaded for one sampler, each from a folder of its own in folder.
// The server knows an adapter by the name of its folder. The names are this sampler's alone: another sampler of the
// same server may unload its own at any time.
type adapters struct {
	folder  string
	owner   string
	modules lora.Table

	mu     sync.Mutex
	loaded map[string]bool // by name
}

// newAdapters returns the adapters of a server that finds them in folder; nil where folder is empty.
func newAdapters(folder string, l lm.Language) *adapters {
	if folder == "" {
		return nil
	}
	if full, err := filepath.Abs(folder); err == nil { // the server has another working folder
		folder = full
	}
	owner := strings.ToLower(rand.Text()[:8])
	return &adapters{folder: folder, owner: owner, modules: engine.Modules(l), loaded: map[string]bool{}}
}

// path returns the folder of an adapter.
func (a *adapters) path(name string) string { return filepath.Join(a.folder, name) }

// loadZero returns the server, asked for its model with an adapter of zeros. vLLM computes requests without an adapter
// wrong on CPUs when it batches them with requests that have one: it takes the last of its adapters for them.
func (a *adapters) loadZero(ctx context.Context, s *remotelm.Server) (*remotelm.Server, string, error) {
	if a == nil {
		return s, "", nil
	}
	name, err := a.load(ctx, s, a.modules.Zero(), "base")
	return s.WithAdapter(name), name, err
}

// load writes an adapter to its folder, has the server load it, and returns its name, of which version is a part.
func (a *adapters) load(ctx context.Context, s *remotelm.Server, w lora.Weighted, version string) (string, error) {
	name := fmt.Sprintf("meander-%.12s-%s", version, a.owner)
	if err := w.Save(a.path(name)); err != nil {
		return "", err
	}
	if err := s.LoadAdapter(ctx, name, a.path(name)); err != nil {
		return "", errors.Join(err, os.RemoveAll(a.path(name)))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.loaded[name] = true
	return name, nil
}

// loadAgain has a server that is back load all adapters that it had.
func (a *adapters) loadAgain(ctx context.Context, s *remotelm.Server) error {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	names := slices.Collect(maps.Keys(a.loaded))
	a.mu.Unlock()
	for _, name := range names {
		if err := s.LoadAdapter(ctx, name, a.path(name)); err != nil {
			return err
		}
	}
	return nil
}

// unload has the server forget an adapter, and removes its folder. A server that is away has forgotten it.
func (a *adapters) unload(s *remotelm.Server, name string) error {
	a.mu.Lock()
	delete(a.loaded, name)
	a.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), unloadPatience)
	defer cancel()
	_ = s.UnloadAdapter(ctx, name)
	return os.RemoveAll(a.path(name))
}

// unloadPatience bounds how long the end of a version waits for the server.
const unloadPatience = 2 * time.Second

// With returns the network with an adapter, which the server loads beside its model: samples of both can be drawn at
// once. A *Refusal says that the server takes no such change.
func (e *Served) With(ctx context.Context, c engine.Change) (engine.Network, error) {
	switch {
	case c.Empty():
		return e, nil
	case c.Full != nil:
		return nil, engine.Refuse("weights: given; %s takes adapters only", e.Backend())
	case e.adapters == nil:
		return engine.Unchanged(e, c)
	case len(c.Adapters) > 1:
		return nil, engine.Refuse("adapter: %d; %s takes one", len(c.Adapters), e.Backend())
	}
	if err := e.adapters.modules.Check(c.Adapters...); err != nil {
		return nil, engine.Refuse("%w", err)
	}
	digest := lora.WeightsDigest(e.Digest(), c.Adapters...)
	name, err := e.adapters.load(ctx, e.server, c.Adapters[0], digest)
	switch {
	case errors.Is(err, remotelm.ErrRefused):
		return nil, engine.Refuse("adapter: %w", err)
	case err != nil:
		return nil, err
	}
	return &Served{
		Health: e.Health, language: e.language, config: e.config, load: e.load, adapters: e.adapters,
		server: e.server.WithAdapter(name), adapter: name, digest: digest, changed: make(chan struct{}),
	}, nil
}

// Modules lists what adapters can change; nil: the server keeps its weights.
func (e *Served) Modules() lora.Table {
	if e.adapters == nil {
		return nil
	}
	return e.adapters.modules
}

// Tensors is nil: servers take no full weights.
func (e *Served) Tensors() lora.Shapes { return nil }

// Canary draws the likeliest answer to a fixed prompt and returns the digest of its numbers; nil where the server keeps
// its weights. A *Refusal says that the server gives no numbers with these weights.
func (e *Served) Canary(ctx context.Context) (*schemas.Canary, error) {
	if e.adapters == nil {
		return nil, nil
	}
	return engine.Canary("numbers of an answer", func() (x []float32, err error) {
		tokens := min(2*canaryTokens, e.context()-len(e.config.ProbeIDs))
		for c, err := range e.server.Stream(ctx, remotelm.Request{
			ID: fmt.Sprintf("meander-canary-%d", time.Now().UnixNano()), IDs: e.config.ProbeIDs,
			MaxTokens: max(1, tokens), TopP: 1, Seed: engine.CanarySeed,
		}) {
			switch {
			case errors.Is(err, remotelm.ErrRefused), errors.Is(err, remotelm.ErrGarbage):
				return nil, engine.Refuse("%w", err)
			case err != nil:
				return nil, err
			}
			for _, t := range c.Tokens {
				x = append(x, float32(t.ID), t.Value, t.Top)
				x = append(x, t.Logits...)
			}
		}
		return x, nil
	})
}

// checkAdapter returns err, the error of a request with the network's adapter. Where it says that the server has lost
// the adapter, it has the server load it again, and the sample may be tried again.
func (e *Served) checkAdapter(ctx context.Context, err error) error {
	if e.adapter == "" || !remotelm.AdapterLost(err) {
		return err
	}
	if again := e.adapters.loadAgain(ctx, e.server); again != nil {
		return fmt.Errorf("%w: %w", engine.ErrAway, again)
	}
	return fmt.Errorf("%w: it had lost the adapter, which is loaded again", engine.ErrAway)
}

// Close has the server forget the network's adapter, and closes idle connections.
func (e *Served) Close() error {
	defer e.server.Close()
	if e.adapter == "" {
		return nil
	}
	return e.adapters.unload(e.server, e.adapter)
}
