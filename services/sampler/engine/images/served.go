package images

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/remoteimage"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Served is an image model whose samples servers make, from the text to the pixels; of its folder the configuration is
// read. It is Network and Engine. Its noise is that of torch's generator, and its samples say so.
type Served struct {
	card    model.Card
	pool    *remoteimage.Pool
	probe   *remoteimage.Request // the request that each server must be able to make before it is used
	weights *engine.WeightsFolder
	changed string // the name of the network's own weights; empty: those of the checkpoint
	digest  string
}

var (
	_ engine.Network = (*Served)(nil)
	_ engine.Engine  = (*Served)(nil)
)

// The probe that each server must make before it is used: a small sample with noise at every step.
const (
	probePrompt           = `a blue sign that says "4071"`
	probeSeed, probeSteps = 5, 4
	probeWidth, probeSide = 64, 32
	probeNoise            = 0.7
	sameFP32, sameRounded = 1e-3, 5e-2 // relative distance of the probe's end states of two servers of the same weights
)

// ServedModel is a model that servers have: its card, the class of its pipeline in diffusers, and its folder here.
type ServedModel struct {
	Card   model.Card
	Class  string
	Folder string
}

// Dial waits until a server that makes the images of a model can be reached. An error is the end of ctx, a refusal of
// all servers, or says that the model's images cannot be made so.
func Dial(ctx context.Context, at engine.Server, of ServedModel, log zerolog.Logger) (engine.Network, error) {
	card := of.Card
	if len(card.Conditioning) != 1 || card.MaxFrames > 1 || card.Guidance != 0 || card.Prompts > 1 {
		return nil,
			fmt.Errorf("model %s of the family %s; must be one of images of one text, without a guidance input",
				card.Name, card.Family)
	}
	s := &Served{card: card, digest: schemas.ServedBy(remoteimage.SGLangDiffusion)}
	var err error
	if s.weights, err = newServedWeights(at.EngineAdapters, of.Folder); err != nil {
		return nil, engine.Refuse("%w", err)
	}
	if s.probe, err = s.newProbe(); err != nil {
		return nil, err
	}
	s.pool, err = remoteimage.NewPool(remoteimage.Config{
		Server: at.Engine, Key: at.EngineKey, Patience: at.EnginePatience, Pipeline: of.Class, Probe: *s.probe,
		Same:    sameWeights,
		Changes: s.weights != nil, Hooks: at.Hooks(log),
		Spoiled: func(err error) { log.Warn().Err(err).Msg("an image is made again") },
	})
	if err != nil {
		return nil, err
	}
	if err = at.Reach(ctx, s.pool); err != nil {
		s.pool.Close()
	}
	return s, err
}

// newProbe returns the request that each server must be able to make before it is used.
func (s *Served) newProbe() (*remoteimage.Request, error) {
	r := &schemas.Request{Sampling: schemas.Sampling{
		Prompt: probePrompt, TrueCFGScale: 1, Height: probeSide, Width: probeWidth, SampleSeed: probeSeed,
		NoiseLevel:  probeNoise,
		LogProbKind: schemas.LogProbDensity,
	}}
	tokens, err := s.card.Tokens(sampling.SizeOf(&r.Sampling))
	if err != nil {
		return nil, fmt.Errorf("a small sample to try a server with: %w", err)
	}
	schedule, err := sampling.Schedule(PolicyOf(s.card))
	if err == nil {
		r.Sigmas, err = schedule.Sigmas(probeSteps, tokens)
	}
	for i := range probeSteps + 1 {
		r.ReturnStepIndices = append(r.ReturnStepIndices, int64(i))
	}
	r.Transitions = slices.Repeat([]string{schemas.TransitionSDE}, probeSteps)
	q := s.ask(r, tokens)
	q.Conditioning = false
	return q, err
}

// sameWeights refuses the answers of two servers to the probe that are not of the same weights.
func sameWeights(a, b *remoteimage.Answer, precision string) error {
	most := sameRounded
	if precision == schemas.PrecisionFP32 {
		most = sameFP32
	}
	x, y := a.Latents[probeSteps], b.Latents[probeSteps]
	var square, off float64
	for i, v := range x {
		d := float64(v) - float64(y[i])
		square, off = square+float64(v)*float64(v), off+d*d
	}
	if d := math.Sqrt(off / square); !(d <= most) {
		return fmt.Errorf("its latents are %.2g away from those of the first server, of which %g passes; "+
			"all servers must have the weights of the first", d, most)
	}
	return nil
}

// Name is the model's.
func (s *Served) Name() string { return s.card.Name }

// Backend returns the server's name and release, and its precision.
func (s *Served) Backend() string { return s.facts().String() + "/" + s.pool.Facts().Precision }

// facts returns what the first server says of itself, as events have it.
func (s *Served) facts() *schemas.Engine {
	f := s.pool.Facts()
	return &schemas.Engine{Name: remoteimage.SGLangDiffusion, Version: f.Version, Precision: f.Precision}
}

// Digest names the weights: those of the checkpoint by the server, as their real digest is not known here.
func (s *Served) Digest() string { return s.digest }

// Policy returns the policy that a sampler of the servers announces.
func (s *Served) Policy() *schemas.Policy {
	p := PolicyOf(s.card)
	p.WeightsDigest, p.BaseDigest, p.Engine = s.Digest(), s.Digest(), s.facts()
	return p
}

// Engine is the pool of servers itself.
func (s *Served) Engine(engine.Options) engine.Engine { return s }

// Abilities are those of servers, which lack the ones of a model that is computed here.
func (s *Served) Abilities() engine.Abilities {
	a := engine.Abilities{Servers: s.pool, Fault: CheckSchedule(s.card), Describe: describe(s.card)}
	if w := s.weights; w != nil {
		a.Modules, a.Tensors = w.Modules, w.Tensors
	}
	return a
}

// ServerDraws returns what a server drew for a sample: x_T and the noise of its stochastic steps, both [S, C], for
// verify. Both are nil where that is not known: in a network of fewer bits than float32 x_T is drawn in another way.
func ServerDraws(by *schemas.Engine, of *schemas.Sampling, shape []int64) (x []float32, noise map[int][]float32) {
	if by.Name != remoteimage.SGLangDiffusion || by.Precision != schemas.PrecisionFP32 {
		return nil, nil
	}
	q := remoteimage.Request{
		Seed: of.SampleSeed, Height: int(of.Height), Width: int(of.Width), Tokens: int(shape[0]),
		Channels: int(shape[1]),
	}
	for _, i := range of.StochasticSteps() {
		q.SDESteps = append(q.SDESteps, int(i))
	}
	return q.Draws()
}

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
