package sampler

import (
	"context"
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/decoding"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/schemas"
)

// Network is an open model of images, of text, or of text that a server makes, one of the three: what weights, policies and
// engines need of any.
type Network struct {
	Images model.Model
	Text   lm.Model
	Served *Served
}

// Name is the model's.
func (n Network) Name() string {
	if n.Served != nil {
		return n.Served.language.Card().Name
	}
	if n.Text != nil {
		return n.Text.Card().Name
	}
	return n.Images.Card().Name
}

// Backend names what computes.
func (n Network) Backend() string {
	if n.Served != nil {
		return n.Served.Backend()
	}
	if n.Text != nil {
		return n.Text.Card().Backend
	}
	return n.Images.Card().Backend
}

// WeightsDigest names the weights.
func (n Network) WeightsDigest() string {
	if n.Served != nil {
		return n.Served.weightsDigest()
	}
	if n.Text != nil {
		return n.Text.Card().WeightsDigest
	}
	return n.Images.Card().WeightsDigest
}

// Policy is what a sampler of the model announces, in the lane of the model's name.
func (n Network) Policy() *schemas.Policy {
	if n.Served != nil {
		return n.Served.policy()
	}
	if n.Text != nil {
		return TextPolicyOf(n.Text.Card())
	}
	return PolicyOf(n.Images.Card())
}

// Close closes the model.
func (n Network) Close() error {
	if n.Served != nil {
		n.Served.server.Close()
		return nil
	}
	if n.Text != nil {
		return n.Text.Close()
	}
	return n.Images.Close()
}

// TextPolicyOf is PolicyOf for a language model.
func TextPolicyOf(c lm.Card) *schemas.Policy {
	return &schemas.Policy{
		Lane: schemas.Lane(c.Name), Model: c.Name, Family: c.Family, WeightsDigest: c.WeightsDigest, Reward: c.Reward,
		Text: &schemas.TextPolicy{
			Vocabulary: int64(c.Vocabulary), MaxTokens: int64(c.MaxPositions), MaxNewTokens: int64(c.MaxNewTokens),
			Temperature: temperatureOf(c.Decoding), TopK: int64(c.Decoding.TopK), TopP: shareOf(c.Decoding.TopP), MinP: c.Decoding.MinP,
		},
	}
}

func temperatureOf(p decoding.Params) float64 {
	if p.Greedy() {
		return 0
	}
	return p.Temperature
}

// shareOf is top_p, which is 1 where it leaves nothing out.
func shareOf(p float64) float64 {
	if p <= 0 || p > 1 {
		return 1
	}
	return p
}

// adaptable is a model of type M that adapters can be added to.
type adaptable[M any] interface {
	BaseDigest() string
	Modules() lora.Table
	Adapted(adapters ...lora.Weighted) (M, error)
}

// base names the checkpoint; modules are what adapters can change, false where that is nothing.
func (n Network) base() (digest string, modules lora.Table, ok bool) {
	switch m := n.either().(type) {
	case model.Adaptable:
		return m.BaseDigest(), m.Modules(), true
	case lm.Adaptable:
		return m.BaseDigest(), m.Modules(), true
	}
	return n.WeightsDigest(), nil, false
}

// BaseDigest names the checkpoint: the weights without adapters.
func (n Network) BaseDigest() string {
	digest, _, _ := n.base()
	return digest
}

func (n Network) either() any {
	if n.Served != nil {
		return n.Served
	}
	if n.Text != nil {
		return n.Text
	}
	return n.Images
}

// with is a model that is changed; the model itself where there is nothing to change.
func (c change) with(n Network) (_ Network, err error) {
	if n.Served != nil && (c.full != nil || len(c.adapters) > 0) {
		return n, refuse("adapter: given, or weights; %s has those that it was started with", n.Backend())
	}
	if n.Served != nil {
		return n, nil
	}
	images, whole := n.Images.(model.Adaptable)
	switch {
	case c.full != nil && !whole:
		return n, refuse("weights: the model %s takes none", n.Name())
	case c.full != nil:
		if err = images.Tensors().Check(c.full); err == nil {
			n.Images, err = images.Replaced(c.full, c.digest)
		}
		return n, refused(err)
	case n.Text != nil:
		n.Text, err = adapted(n.Text, n, c.adapters)
	default:
		n.Images, err = adapted(n.Images, n, c.adapters)
	}
	return n, err
}

// adapted is the checkpoint of a model plus adapters; the model itself where there is nothing to change.
func adapted[M any](m M, n Network, adapters []lora.Weighted) (M, error) {
	a, ok := any(m).(adaptable[M])
	switch {
	case !ok && len(adapters) > 0:
		return m, refuse("adapter: the model %s takes none", n.Name())
	case !ok, n.WeightsDigest() == lora.WeightsDigest(a.BaseDigest(), adapters...):
		return m, nil
	}
	changed, err := a.Adapted(adapters...)
	return changed, refused(err)
}

// engine makes samples; workers call it at once. With share, samples of one prompt share what the model made of it.
func (n Network) engine(workers int, share bool) Engine {
	if n.Served != nil {
		return n.Served
	}
	if n.Text != nil {
		return newTokenEngine(n.Text, share)
	}
	return newFlowEngine(n.Images, workers)
}

// canary is what weights make of a fixed input.
func (n Network) canary(ctx context.Context) (*schemas.Canary, error) {
	if n.Served != nil {
		return nil, nil // nobody here has its weights
	}
	what, x := "velocity", []float32(nil)
	err := guarded(func() (err error) {
		if n.Text != nil {
			what = "vector of logits"
			x, err = canaryLogits(ctx, n.Text)
		} else {
			x, err = canaryVelocity(ctx, n.Images)
		}
		return err
	})
	if bus.Code(err) == schemas.CodePanic {
		return nil, refuse("canary: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("canary: %w", err)
	}
	sum := 0.0
	for _, e := range x {
		sum += float64(float64(e) * float64(e))
	}
	if sum-sum != 0 {
		return nil, refuse("canary: the %s at a fixed input is not finite", what)
	}
	return &schemas.Canary{Digest: digestOf(x), Norm: math.Sqrt(sum)}, nil
}

// The fixed input of canaries: the negative prompt, which every model takes, drawn noise, a sigma, and an image of
// a few tokens; of language models a few tokens.
const (
	canarySeed   = 7
	canarySigma  = 0.75
	canarySide   = 4 // tokens
	canaryTokens = 4
)

func canaryVelocity(ctx context.Context, m model.Model) ([]float32, error) {
	card := m.Card()
	side := canarySide * card.PixelsPerToken
	tokens, err := card.Tokens(side, side)
	if err != nil {
		return nil, err
	}
	conds, err := m.Encode(ctx, []string{card.NegativePrompt})
	if err != nil {
		return nil, err
	}
	x, v := make([]float32, tokens*card.LatentChannels), make([]float32, tokens*card.LatentChannels)
	flow.InitialNoise(x, canarySeed)
	return v, m.Velocity(ctx, [][]float32{v}, [][]float32{x}, []float32{canarySigma}, conds, side, side)
}

func canaryLogits(ctx context.Context, m lm.Model) ([]float32, error) {
	card := m.Card()
	ids := make([]int32, min(canaryTokens, card.MaxPositions))
	for i := range ids {
		ids[i] = int32((i + canarySeed) % card.Vocabulary)
	}
	s := m.NewSequence()
	defer s.Close()
	z := make([]float32, card.Vocabulary)
	if err := m.Forward(ctx, []lm.Row{{Sequence: s, IDs: ids, Logits: z}}); err != nil {
		return nil, err
	}
	return z, nil
}
