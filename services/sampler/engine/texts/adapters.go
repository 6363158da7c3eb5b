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

// newAdapters returns the folder in which servers find the adapters of policies; nil where its name is empty.
func newAdapters(folder string, l lm.Language) (*engine.WeightsFolder, error) {
	m, ok := l.(interface{ Modules() lora.Table })
	if folder != "" && (!ok || len(m.Modules()) == 0) {
		return nil, engine.Refuse("engine_adapters: set; the model %s takes no adapters", l.Card().Name)
	}
	if folder == "" {
		return nil, nil
	}
	return engine.NewWeightsFolder(folder, m.Modules(), nil), nil
}

// save writes an adapter to its folder and returns its name, of which version is a part and which servers know it by.
func (e *Served) save(a lora.Weighted, version string) (string, error) {
	if m := e.adapters.Modules; e.pool.Facts().Name == remotelm.SGLang { // which computes these as one
		a = a.Completed(m, ".q_proj", ".k_proj", ".v_proj").Completed(m, ".gate_proj", ".up_proj")
	}
	return e.adapters.SaveAdapter(a, version)
}

// unloadPatience bounds how long the end of a version waits for the servers.
const unloadPatience = 2 * time.Second

// With returns the network with an adapter, which the servers load beside their model.
func (e *Served) With(ctx context.Context, c engine.Change) (engine.Network, error) {
	if c.Empty() {
		return e, nil
	}
	if c.Full != nil {
		return nil, engine.Refuse("weights: given; %s", e.facts().NoWhole())
	}
	c, err := e.adapters.Fit(e, c)
	if err != nil {
		return nil, err
	}
	digest := lora.WeightsDigest(e.Digest(), c.Adapters...)
	name, err := e.save(c.Adapters[0], digest)
	if err != nil {
		return nil, err
	}
	err = e.pool.LoadAdapter(ctx, name, e.adapters.Path(name))
	if errors.Is(err, remotelm.ErrRefused) {
		err = engine.Refuse("adapter: %w", err)
	}
	if err != nil {
		return nil, errors.Join(err, e.adapters.Remove(name))
	}
	return &Served{
		language: e.language, config: e.config, adapters: e.adapters, pool: e.pool, adapter: name, digest: digest,
		changed: make(chan struct{}),
	}, nil
}

// Canary draws the likeliest answer to a fixed prompt, see engine.Canary; nil where servers keep their weights.
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
	ctx, cancel := context.WithTimeout(context.Background(), unloadPatience)
	defer cancel()
	e.pool.UnloadAdapter(ctx, e.adapter)
	return e.adapters.Remove(e.adapter)
}
