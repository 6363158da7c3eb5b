package texts

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// adapters says where the servers of one sampler find the adapters of policies. Servers know an adapter by the name of
// its folder: another sampler of the same servers may unload its own at any time.
type adapters struct {
	*engine.WeightsFolder
	modules lora.Table
}

// newAdapters returns the adapters of servers that find them in folder; nil where folder is empty.
func newAdapters(folder string, l lm.Language) *adapters {
	if f := engine.NewWeightsFolder(folder); f != nil {
		return &adapters{WeightsFolder: f, modules: engine.Modules(l)}
	}
	return nil
}

// loadZero has the servers load an adapter of zeros, with which samples of the checkpoint are drawn, and returns its
// name. vLLM computes requests without an adapter wrong on CPUs when it batches them with requests that have one: it
// takes the last of its adapters for them.
func (a *adapters) loadZero(ctx context.Context, p *remotelm.Pool) (string, error) {
	return a.load(ctx, p, a.modules.Zero(), "base")
}

// load writes an adapter to its folder, has the servers load it, and returns its name, of which version is a part.
func (a *adapters) load(ctx context.Context, p *remotelm.Pool, w lora.Weighted, version string) (string, error) {
	if p.Facts().Name == remotelm.SGLang { // which computes these as one, and refuses a part of them
		w = w.Completed(a.modules, ".q_proj", ".k_proj", ".v_proj").Completed(a.modules, ".gate_proj", ".up_proj")
	}
	name, err := a.SaveAdapter(w, version)
	if err != nil {
		return "", err
	}
	if err := p.LoadAdapter(ctx, name, a.Path(name)); err != nil {
		return "", errors.Join(err, a.Remove(name))
	}
	return name, nil
}

// unload has the servers forget an adapter, and removes its folder.
func (a *adapters) unload(p *remotelm.Pool, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), unloadPatience)
	defer cancel()
	p.UnloadAdapter(ctx, name)
	return a.Remove(name)
}

// unloadPatience bounds how long the end of a version waits for the servers.
const unloadPatience = 2 * time.Second

// With returns the network with an adapter, which the servers load beside their model: samples of both can be drawn at
// once. A *Refusal says that they take no such change.
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
	fitting, err := e.adapters.modules.Fit(c.Adapters...)
	if err != nil {
		return nil, engine.Refuse("%w", err)
	}
	digest := lora.WeightsDigest(e.Digest(), c.Adapters...)
	name, err := e.adapters.load(ctx, e.pool, fitting[0], digest)
	switch {
	case errors.Is(err, remotelm.ErrRefused):
		return nil, engine.Refuse("adapter: %w", err)
	case err != nil:
		return nil, err
	}
	return &Served{
		Health: e.Health, language: e.language, config: e.config, adapters: e.adapters, pool: e.pool,
		adapter: name, digest: digest, changed: make(chan struct{}),
	}, nil
}

// Modules lists what adapters can change; nil: the servers keep their weights.
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
		for c, err := range e.pool.Stream(ctx, remotelm.Request{
			ID: fmt.Sprintf("meander-canary-%d", time.Now().UnixNano()), Adapter: e.adapter, IDs: e.config.ProbeIDs,
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

// Close has the servers forget the network's adapter, and closes idle connections.
func (e *Served) Close() error {
	defer e.pool.Close()
	if e.adapter == "" {
		return nil
	}
	return e.adapters.unload(e.pool, e.adapter)
}
