package texts

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// newWeights returns the folder in which servers find the weights of policies; nil where its name is empty.
func newWeights(folder string, l lm.Language) (*engine.WeightsFolder, error) {
	m, ok := l.(interface {
		Modules() lora.Table
		Tensors() lora.Shapes
	})
	if folder != "" && (!ok || len(m.Modules()) == 0) {
		return nil, engine.Refuse("engine_adapters: set; the model %s takes no adapters", l.Card().Name)
	}
	if folder == "" {
		return nil, nil
	}
	return engine.NewWeightsFolder(folder, m.Modules(), m.Tensors()), nil
}

// saved are weights in the folder of the servers.
type saved struct {
	adapter string // the servers' name for it, one of zeros without a policy; empty: none
	whole   string // the servers' name for whole weights; empty: those that they were started with
	folder  string // the name of the weights in the folder; empty: none
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

// With returns the network with an adapter, which the servers load beside their model, or with whole weights, which a
// server loads in place of its own for the first answer with them.
func (e *Served) With(ctx context.Context, c engine.Change) (engine.Network, error) {
	if c.Empty() {
		return e, nil
	}
	if c.Full != nil && e.adapters != nil && e.adapters.Tensors == nil {
		return nil, engine.Refuse("weights: given; %s", e.facts().NoWhole())
	}
	if _, own := e.adapters.Tensors["lm_head.weight"]; c.Full != nil && !own && e.pool.Facts().KeepsHead {
		return nil, engine.Refuse("weights: the model's head is its embedding (tie_word_embeddings), and %s on a CPU "+
			"keeps the head that it was started with; serve a checkpoint with an lm_head.weight of its own, or push "+
			"an adapter", e.facts().Name)
	}
	c, err := e.adapters.Fit(e, c)
	if err == nil {
		err = engine.Away(e.pool) // before anything large is written
	}
	if err != nil {
		return nil, err
	}
	n := &Served{
		language: e.language, config: e.config, adapters: e.adapters, pool: e.pool, changed: make(chan struct{}),
	}
	if c.Full != nil {
		n.digest, n.own.whole = c.Digest, remotelm.WeightsName(c.Digest)
		if n.own.folder, err = e.adapters.SaveFull(c.Full, c.Digest, wholeFile); err != nil {
			return nil, err
		}
		e.pool.AddWeights(n.own.whole, n.wholeFolder())
		return n, nil
	}
	n.digest = lora.WeightsDigest(e.Digest(), c.Adapters...)
	if n.own.adapter, err = e.save(c.Adapters[0], n.digest); err != nil {
		return nil, err
	}
	n.own.folder = n.own.adapter
	err = e.pool.LoadAdapter(ctx, n.own.adapter, e.adapters.Path(n.own.adapter))
	if errors.Is(err, remotelm.ErrRefused) {
		err = engine.Refuse("adapter: %w", err)
	}
	if err != nil {
		return nil, errors.Join(err, e.adapters.Remove(n.own.folder))
	}
	return n, nil
}

// wholeFile is the path of the file of whole weights in the folder of a version, without its ending.
const wholeFile = "model/model"

// wholeFolder returns the folder in which servers find the network's whole weights.
func (e *Served) wholeFolder() string {
	return filepath.Join(e.adapters.Path(e.own.folder), filepath.Dir(wholeFile))
}

// Canary draws the likeliest answer to a fixed prompt, see engine.Canary; nil where servers keep their weights.
func (e *Served) Canary(ctx context.Context) (*schemas.Canary, error) {
	if e.adapters == nil {
		return nil, nil
	}
	return engine.Canary("numbers of an answer", func() (x []float32, err error) {
		tokens := min(2*canaryTokens, e.context()-len(e.config.ProbeIDs))
		for c, err := range e.pool.Stream(ctx, remotelm.Request{
			ID: fmt.Sprintf("meander-canary-%d", time.Now().UnixNano()), Adapter: e.own.adapter, Weights: e.own.whole,
			IDs: e.config.ProbeIDs, MaxTokens: max(1, tokens), TopP: 1, Seed: engine.CanarySeed,
		}) {
			switch {
			case errors.Is(err, remotelm.ErrWeights), errors.Is(err, remotelm.ErrRefused),
				errors.Is(err, remotelm.ErrGarbage):
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

// Close has the servers forget the network's adapter, removes its weights, and closes idle connections. Whole weights
// stay in the servers until others come.
func (e *Served) Close() error {
	defer e.pool.Close()
	if e.own.whole != "" {
		e.pool.RemoveWeights(e.own.whole, e.wholeFolder())
	}
	if e.own.adapter != "" {
		ctx, cancel := context.WithTimeout(context.Background(), unloadPatience)
		defer cancel()
		e.pool.UnloadAdapter(ctx, e.own.adapter)
	}
	if e.own.folder == "" {
		return nil
	}
	return e.adapters.Remove(e.own.folder)
}
