// Package images makes samples of image models. A Network is an open model; its engine makes flow-matching rollouts
// (flow.go) and, for requests of scheduled sampling, rolled ones (rolled.go). pkg/flow and pkg/scheduled have the
// mathematics, pkg/models/model the networks. Encode, Rolling, StartFrom and Velocities are shared with verify, so
// that both compute the same.
//
// An attempt at a sample calls Start, and Finish and Close at the end; in between the scheduler calls Step and Take.
// Errors marked terminal fail the sample; any other lets its request come again.
package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Network is an open model of images.
type Network struct{ Model model.Model }

var _ engine.Network = (*Network)(nil)

// PolicyOf returns the policy that a sampler of a model announces, in the lane of its name. What is the default is left
// out, so that a card that names it makes the same lane as one that does not.
func PolicyOf(c model.Card) *schemas.Policy {
	p := &schemas.Policy{
		Tenant: schemas.TenantMain,
		Grid:   unless(c.Grid, model.GridLinspace), Mu: unless(c.Mu, model.MuLinear), MuConstant: c.ConstantMu,
		Lane: schemas.Lane(c.Name), Model: c.Name, Source: c.Source, Family: c.Family, WeightsDigest: c.WeightsDigest,
		SchedulerConfig: c.SchedulerConfig,
		LatentChannels:  int64(c.LatentChannels), PixelsPerToken: int64(c.PixelsPerToken),
		Height: int64(c.Height), Width: int64(c.Width), NumInferenceSteps: int64(c.NumInferenceSteps),
		TrueCFGScale: c.TrueCFGScale, NegativePrompt: c.NegativePrompt, MaxPixels: int64(c.MaxPixels), Reward: c.Reward,
		Guidance: c.Guidance, Prompts: severalTexts(c.Prompts), BoundaryRatio: c.BoundaryRatio,
		ConditioningBytes: c.ConditioningBytes, ConditioningTokenBytes: c.ConditioningTokenBytes,
		LatentsDType: string(c.LatentsDType),
	}
	if c.MaxFrames > 1 {
		p.Frames, p.MaxFrames, p.FramesPerToken, p.FPS = int64(c.Frames), int64(c.MaxFrames), int64(c.FramesPerToken),
			c.FPS
	}
	if c.Pipeline != nil {
		p.Pipeline, _ = json.Marshal(c.Pipeline) // its defaults are scalars
	}
	return p
}

// severalTexts returns how many texts a prompt may have; 0 if it is one.
func severalTexts(n int) int64 {
	if n < 2 {
		return 0
	}
	return int64(n)
}

// unless returns a text; "" if it is the default.
func unless(text, def string) string {
	if text == def {
		return ""
	}
	return text
}

// Name is the model's.
func (n *Network) Name() string { return n.Model.Card().Name }

// Backend is the model's.
func (n *Network) Backend() string { return n.Model.Card().Backend }

// Digest is that of the model's weights.
func (n *Network) Digest() string { return n.Model.Card().WeightsDigest }

// Policy returns PolicyOf the model, with the digest of its checkpoint.
func (n *Network) Policy() *schemas.Policy {
	p := PolicyOf(n.Model.Card())
	p.BaseDigest = engine.Base(n.Model, p.WeightsDigest)
	return p
}

// Engine returns an engine for flow-matching rollouts and those of scheduled sampling: the request says which.
func (n *Network) Engine(o engine.Options) engine.Engine { return newFlowEngine(n.Model, o) }

// With returns the network with adapters, or with another transformer.
func (n *Network) With(_ context.Context, c engine.Change) (engine.Network, error) {
	m, same, err := engine.Changed(n.Model, n, c)
	if err != nil || same {
		return n, err
	}
	return &Network{m}, nil
}

// Abilities are those of a model that is computed here, or by a worker.
func (n *Network) Abilities() engine.Abilities {
	a := engine.Abilities{
		Fault: CheckSchedule(n.Model.Card()), Describe: describe(n.Model.Card()), StateShape: n.stateShape,
		Encoder: n.Model,
	}
	a.Modules, a.Tensors = engine.Can(n.Model)
	if m, ok := n.Model.(interface{ Away() error }); ok {
		a.Away = m.Away
	}
	return a
}

// describe returns a function that adds to a trajectory the rule of guidance of a model.
func describe(c model.Card) func(*schemas.Trajectory) {
	return func(t *schemas.Trajectory) { t.CFGRule = c.CFGRule }
}

// The fixed input of canaries: the negative prompt, which every model takes, a sigma, and an image of a few tokens.
const (
	canarySigma = 0.75
	canarySide  = 4 // tokens
)

// Canary evaluates the velocity at noise of a fixed seed, see engine.Canary: of a pipeline at the small size that it
// was tested at, or at the default size where it has other states there than its card says.
func (n *Network) Canary(ctx context.Context) (*schemas.Canary, error) {
	return engine.Canary("velocity", func() ([]float32, error) {
		card := n.Model.Card()
		if card.Pipeline == nil {
			side := canarySide * card.PixelsPerToken
			return n.canaryAt(ctx, card, media.ImageSize(side, side))
		}
		if _, err := card.Tokens(card.Pipeline.Admitted); err == nil {
			v, err := n.canaryAt(ctx, card, card.Pipeline.Admitted)
			if !errors.Is(err, model.ErrLatents) {
				return v, err
			}
		}
		v, err := n.canaryAt(ctx, card, card.Size)
		if err != nil {
			err = fmt.Errorf("at the default size, %v, of which meander.json may have another: %w", card.Size, err)
		}
		return v, err
	})
}

// canaryAt evaluates the velocity at noise at a size. ErrLatents: the model has other states there than its card says.
func (n *Network) canaryAt(ctx context.Context, card model.Card, size media.Size) ([]float32, error) {
	tokens, err := card.Tokens(size)
	if err != nil {
		return nil, err
	}
	cond, err := n.probe(ctx, card, size)
	if err != nil {
		return nil, err
	}
	x, v := make([]float32, tokens*card.LatentChannels), make([]float32, tokens*card.LatentChannels)
	flow.InitialNoise(x, engine.CanarySeed)
	row := model.Row{X: x, Sigma: canarySigma, Conditioning: cond, Guidance: float32(card.Guidance), Dst: v}
	return v, n.Model.Velocity(ctx, []model.Row{row}, size)
}

// probe encodes the negative prompt; for a pipeline also a grey image of a size for each file and something for each
// argument that it needs.
func (n *Network) probe(ctx context.Context, card model.Card, size media.Size) (*model.Conditioning, error) {
	if card.Pipeline == nil {
		conds, err := n.Model.Encode(ctx, []string{card.NegativePrompt})
		if err != nil {
			return nil, err
		}
		return conds[0], nil
	}
	r := &model.Recipe{
		Texts: model.Texts{card.NegativePrompt}, Size: size, Arguments: map[string]any{},
	}
	if card.Pipeline.Guidance != "" {
		r.Guidance = card.TrueCFGScale
	}
	for _, in := range card.Pipeline.Conditions {
		if in.Required {
			r.Probe(in)
		}
	}
	return model.EncodeRecipe(ctx, n.Model, r)
}

// Close closes the model.
func (n *Network) Close() error { return n.Model.Close() }

// stateShape is [S, C]; nil of scheduled sampling, whose rollouts are short and need the steps before a state.
func (n *Network) stateShape(r *schemas.Request) ([]int64, error) {
	if r.ScheduledSampling != nil {
		return nil, nil
	}
	card := n.Model.Card()
	tokens, err := card.Tokens(sampling.SizeOf(&r.Sampling))
	return []int64{int64(tokens), int64(card.LatentChannels)}, err
}

// CheckSchedule refuses a model by whose schedule neither a rollout nor scheduled sampling can be made.
func CheckSchedule(c model.Card) error {
	if c.Pipeline != nil && c.Pipeline.RandomAccess == "" && c.Grid != model.GridDiffusion {
		return nil // its grid is not known yet
	}
	noise, err := scheduled.ParseNoise(c.SchedulerConfig)
	if err == nil && noise.Prediction != string(scheduled.Flow) && c.Grid != model.GridDiffusion {
		return nil // such a model serves scheduled sampling only
	}
	_, fault := sampling.Schedule(PolicyOf(c))
	if fault == nil {
		return nil
	}
	return errors.Join(fault, err)
}

// ScheduleDiffers says in a line how the schedule that samples are made by differs from that which the library of a
// worker makes of the same files, as a new release of it may; empty: not by a bit, or there is no other.
func ScheduleDiffers(c model.Card) string {
	schedule, err := sampling.Schedule(PolicyOf(c))
	if err != nil {
		return "" // CheckSchedule says it
	}
	tokens, err := c.Tokens(c.Size)
	if err != nil {
		return ""
	}
	for _, told := range c.Told {
		if told.Why != "" {
			return "the worker's diffusers makes no schedule of scheduler_config.json: " + told.Why
		}
		ours, err := schedule.Sigmas(told.Steps, tokens)
		if err != nil {
			continue // a number of steps that it does not have
		}
		if len(ours) != len(told.Sigmas) {
			return fmt.Sprintf("of %d steps the worker's diffusers makes %d sigmas, meander %d", told.Steps,
				len(told.Sigmas), len(ours))
		}
		for i, sigma := range ours {
			theirs := float32(told.Sigmas[i])
			if !SameSigma(sigma, theirs, c.Grid == model.GridUniFlow && i == 0) {
				return fmt.Sprintf("sigma %d of %d steps is %v to the worker's diffusers (%s), %v to meander: compare "+
					"both with 'meander parity'", i, told.Steps, theirs, c.Backend, sigma)
			}
		}
	}
	return ""
}

// SameSigma reports whether a sigma of ours is that of diffusers. UniPC takes 1 - 1e-6 for a first sigma of 1, whose
// logarithm it needs.
func SameSigma(ours, theirs float32, firstOfUniPC bool) bool {
	return ours == theirs || firstOfUniPC && ours == 1 && theirs == 1-1e-6
}
