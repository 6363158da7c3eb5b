package images

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/remoteimage"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// textProjections are the projections of a text that the servers compute as one. They leave out an adapter of some of
// them, with status 200.
var textProjections = []string{".add_q_proj", ".add_k_proj", ".add_v_proj"}

// newServedWeights returns the weights of servers that find them in folder; nil where folder is empty. The transformer
// of the model's folder is opened for the shapes of its tensors.
func newServedWeights(folder, dir string) (*engine.WeightsFolder, error) {
	if folder == "" {
		return nil, nil
	}
	base, err := lora.OpenFull(dir)
	if err != nil {
		return nil, fmt.Errorf("engine_adapters: set; the shapes of the weights are read from the model's folder: %w",
			err)
	}
	return engine.NewWeightsFolder(folder, base.Table(), base.Shapes()), base.Close()
}

// With returns the network with other weights. A server loads them when it makes the first image with them; images of
// both networks can be asked for at once. A *Refusal says that they do not fit the model.
func (s *Served) With(_ context.Context, c engine.Change) (engine.Network, error) {
	if c.Empty() {
		return s, nil
	}
	c, err := s.weights.Fit(s, c)
	if err != nil {
		return nil, err
	}
	if err := engine.Away(s.pool); err != nil { // before anything large is written
		return nil, err
	}
	n := *s
	var w remoteimage.Weights
	if c.Full != nil {
		n.digest = c.Digest
		n.changed, err = s.weights.SaveFull(c.Full, n.digest, "transformer/diffusion_pytorch_model")
		w.Full = s.weights.Path(n.changed)
	} else {
		n.digest = lora.WeightsDigest(s.Digest(), c.Adapters...)
		n.changed, err = s.weights.SaveAdapter(c.Adapters[0].Completed(s.weights.Modules, textProjections...), n.digest)
		w.Adapter = s.weights.Path(n.changed)
	}
	if err != nil {
		return nil, err
	}
	s.pool.AddWeights(n.changed, w)
	return &n, nil
}

// Canary makes the image of the probe and returns the digest of its latents; nil where the servers keep their weights.
// A *Refusal says that no server makes it with these weights.
func (s *Served) Canary(ctx context.Context) (*schemas.Canary, error) {
	if s.weights == nil {
		return nil, nil
	}
	return engine.Canary("latents of an image", func() ([]float32, error) {
		q := *s.probe
		q.Weights = s.changed
		a, err := s.pool.Generate(ctx, &q)
		switch {
		case errors.Is(err, remotehttp.ErrRefused), errors.Is(err, remoteimage.ErrNotFinite):
			return nil, engine.Refuse("%w", err)
		case err != nil:
			return nil, err
		}
		return a.Latents[probeSteps], nil
	})
}

// setBackPatience bounds how long the end of a sampler waits for its servers.
const setBackPatience = 2 * time.Second

// Close removes the network's weights. That of the checkpoint takes the adapters of the servers away, and closes the
// connections.
func (s *Served) Close() error {
	if s.changed == "" {
		if s.weights != nil {
			ctx, cancel := context.WithTimeout(context.Background(), setBackPatience)
			defer cancel()
			s.pool.SetBack(ctx)
		}
		s.pool.Close()
		return nil
	}
	s.pool.RemoveWeights(s.changed)
	return s.weights.Remove(s.changed)
}
