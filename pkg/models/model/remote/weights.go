package remote

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// change is what a worker loads beside the checkpoint. It is kept for another worker until its model is closed.
type change struct {
	args    wire.LoadArgs
	tensors []wire.Tensor
	dir     *scratch // of the files of a whole network; nil: there are none
	// closed says that its model was closed: it is loaded no more. shared.mu guards it.
	closed bool
}

// BaseDigest returns the digest of the checkpoint, without adapters.
func (m *Model) BaseDigest() string { return m.base }

// Modules returns the projections that adapters can change.
func (m *Model) Modules() lora.Table { return m.modules }

// Tensors returns the shapes of the tensors of the trained network.
func (m *Model) Tensors() lora.Shapes { return m.tensors }

// Adapted returns a model of the checkpoint plus exactly these adapters. The worker loads them beside the others.
func (m *Model) Adapted(adapters ...lora.Weighted) (model.Model, error) {
	n, err := m.adapted(adapters...)
	if err != nil {
		return nil, err
	}
	return n, nil
}

// adapted has the worker load adapters, and returns a model with them; without any the checkpoint itself.
func (m *Model) adapted(adapters ...lora.Weighted) (*Model, error) {
	if len(adapters) == 0 {
		return m.derive(nil, m.base), nil
	}
	adapters, err := m.modules.Fit(adapters...)
	if err != nil {
		return nil, err
	}
	digest := lora.WeightsDigest(m.base, adapters...)
	c := &change{args: wire.LoadArgs{Weights: digest, Kind: wire.KindAdapter, Files: []string{}}}
	times := map[string]int{} // how often a module was named
	for _, a := range adapters {
		for _, name := range a.Adapter.Modules() {
			p, suffix := a.Adapter.Product(name), ""
			if k := times[name]; k > 0 {
				suffix = fmt.Sprintf(".%d", k)
			}
			times[name]++
			c.args.Modules = append(c.args.Modules, wire.Scaled{Name: name, Scale: p.Scale * a.Weight, Rank: p.R})
			c.tensors = append(c.tensors, floats(name+".A"+suffix, p.A, p.R, p.K),
				floats(name+".B"+suffix, p.B, p.N, p.R))
		}
	}
	return m.loaded(c, digest)
}

// floats returns values as a tensor that is sent.
func floats(name string, x []float32, shape ...int) wire.Tensor {
	return wire.Tensor{Name: name, DType: wire.F32, Shape: shape, Data: tensor.F32.AppendFloats(nil, x)}
}

// Replaced returns a model whose trained network is replaced. A worker on this machine reads it from temporary files.
func (m *Model) Replaced(weights *lora.Full, digest string) (_ model.Model, err error) {
	if err := m.tensors.Check(weights); err != nil {
		return nil, err
	}
	c := &change{args: wire.LoadArgs{
		Weights: digest, Kind: wire.KindWhole, Modules: []wire.Scaled{},
		Files: []string{},
	}}
	if c.dir, err = makeScratch(os.TempDir()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.dir.remove()
		}
	}()
	total := bytesOf(weights)
	for i := range weights.Files() {
		name := filepath.Join(c.dir.path, fmt.Sprintf("weights-%05d.safetensors", i+1))
		err := weights.CopyTo(name, i, 0o600)
		if errors.Is(err, safetensors.ErrChanged) {
			return nil, fmt.Errorf("weights: %w", err)
		}
		if err != nil {
			return nil, fmt.Errorf("weights: %d bytes for the worker do not fit into the folder for temporary files: "+
				"free space there, or name another with TMPDIR: %w", total, err)
		}
		c.args.Files = append(c.args.Files, name)
	}
	if !m.files {
		for _, name := range weights.Archive().Names() {
			info, _ := weights.Archive().Info(name)
			total += 4*info.Elements() - info.Bytes()
		}
		if total > m.limits.BodyBytes {
			return nil, fmt.Errorf("weights: %d bytes in f32; must be at most %d over TCP: join the worker by "+
				"torch=unix:/PATH", total, m.limits.BodyBytes)
		}
	}
	n, err := m.loaded(c, digest)
	if err != nil {
		return nil, err
	}
	return n, nil
}

// bytesOf returns the bytes of the files of a whole network.
func bytesOf(weights *lora.Full) (n int) {
	for _, file := range weights.Files() {
		n += len(file)
	}
	return n
}

// loaded returns a model with a change that the worker has loaded.
func (m *Model) loaded(c *change, digest string) (*Model, error) {
	m.use(c)
	if err := m.load(m.link.life, c); err != nil {
		m.drop(c)
		return nil, fmt.Errorf("weights: %w", explain(err))
	}
	return m.derive(c, digest), nil
}

// use counts a user of a change, so that the worker keeps it until drop. It returns false if its model was closed.
func (s *shared) use(c *change) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !c.closed {
		s.used[c.args.Weights]++
	}
	return !c.closed
}

// errClosed says that weights are not loaded again, as they would never be freed.
var errClosed = fmt.Errorf("%w: their model is closed", model.ErrWeights)

// reload sends a change again that the worker has lost. model.ErrWeights: it does not take it any more.
func (s *shared) reload(ctx context.Context, c *change) error {
	s.link.cfg.log(Event{Text: fmt.Sprintf("the worker has no longer the weights %.12s: they are loaded again",
		c.args.Weights)})
	err := s.load(ctx, c)
	if err == nil || ctx.Err() != nil || errors.Is(err, tensor.ErrDeviceLost) || errors.Is(err, model.ErrAway) {
		return err
	}
	return fmt.Errorf("%w: %w", model.ErrWeights, explain(err))
}

// load sends a change to the worker, once it has freed what was closed before: it may have no room for both.
func (s *shared) load(ctx context.Context, c *change) error {
	if err := s.awaitUnloads(ctx); err != nil {
		return err
	}
	args, tensors := c.args, c.tensors
	if len(args.Files) > 0 && !s.files {
		var err error
		if tensors, err = readTensors(args.Files); err != nil {
			return err
		}
		args.Files = []string{}
	}
	_, err := s.call(ctx, oneWork(nil, wire.CallLoad, args.Weights), wire.CallLoad, args, tensors, nil)
	return err
}

// readTensors reads files of weights, to send them.
func readTensors(files []string) (list []wire.Tensor, err error) {
	for _, file := range files {
		a, err := safetensors.Open(file)
		if err != nil {
			return nil, err
		}
		for _, name := range a.Names() {
			x, err := a.Floats(name)
			if err != nil {
				return nil, errors.Join(err, a.Close())
			}
			info, _ := a.Info(name)
			list = append(list, floats(name, x, info.Shape...))
		}
		if err := a.Close(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// derive returns a model that shares everything but the weights.
func (m *Model) derive(c *change, digest string) *Model {
	n := &Model{shared: m.shared, card: m.card, change: c}
	n.card.WeightsDigest = digest
	m.users.Add(1)
	return n
}

// unloadWithin is how long the end of a model waits for the worker to free weights.
const unloadWithin = 2 * time.Second

// release ends the use of a change by its model, which is closed.
func (s *shared) release(c *change) {
	if c.dir != nil {
		c.dir.remove()
	}
	s.mu.Lock()
	c.closed = true
	s.mu.Unlock()
	s.drop(c)
}

// drop ends a use of a change, and has the worker free it with the last one. It does not wait for the worker.
func (s *shared) drop(c *change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	digest := c.args.Weights
	if s.used[digest]--; s.used[digest] > 0 {
		return
	}
	delete(s.used, digest)
	before, done := s.unloads, make(chan struct{})
	s.unloads = done
	go func() {
		defer close(done)
		_, err := s.call(s.link.life, nil, wire.CallUnload, wire.UnloadArgs{Weights: digest}, nil, nil)
		gone := errors.Is(err, tensor.ErrDeviceLost) || errors.Is(err, model.ErrAway) // and the weights with it
		if err != nil && s.link.life.Err() == nil && !gone {
			s.link.cfg.log(Event{Text: "weights that are not used any more stay in the worker", Err: err})
		}
		if before != nil {
			<-before
		}
	}()
}

// awaitUnloads waits until the worker has freed what was closed so far. The error is of ctx.
func (s *shared) awaitUnloads(ctx context.Context) error {
	s.mu.Lock()
	unloads := s.unloads
	s.mu.Unlock()
	if unloads == nil {
		return nil
	}
	select {
	case <-unloads:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
