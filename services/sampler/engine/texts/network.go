// Package texts makes samples of language models. Either the sampler draws the tokens (Network, tokens.go), or a
// server does (Served, served.go and servedengine.go). An episode is one sample while it is made (engine.Episode).
//
// A transcript is a sample's text so far: prompt and answers as one sequence of tokens, in turns that are given (the
// prompt, a reply) or generated (an answer). In a conversation an interaction, a worker outside of the sampler, replies
// to each answer (turns.go); an episode that waits for the reply is resting. Prefixes are prompts whose part of the
// model's cache the episodes of a group share (prefixes.go). When the cache is full, freeCache frees what can be
// computed again: prefixes and the caches of resting episodes.
package texts

import (
	"context"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Network is an open language model whose tokens are drawn here.
type Network struct{ Model lm.Model }

var _ engine.Network = (*Network)(nil)

// PolicyOf returns the policy that a sampler of a language model announces, in the lane of the model's name.
func PolicyOf(c lm.Card) *schemas.Policy {
	return &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   schemas.Lane(c.Name), Model: c.Name, Source: c.Source, Family: c.Family, WeightsDigest: c.WeightsDigest,
		Reward: c.Reward,
		Text: &schemas.TextPolicy{
			Vocabulary: int64(c.Vocabulary), MaxTokens: int64(c.MaxPositions), MaxNewTokens: int64(c.MaxNewTokens),
			Temperature: c.Temperature, TopK: int64(c.TopK), TopP: shareOf(c.TopP),
			MinP: c.MinP, Dated: c.Dated,
		},
	}
}

// shareOf returns top_p; 1 where it leaves nothing out.
func shareOf(p float64) float64 {
	if p <= 0 || p > 1 {
		return 1
	}
	return p
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

// Engine returns an engine that draws tokens.
func (n *Network) Engine(o engine.Options) engine.Engine {
	return newTokenEngine(n.Model, o.SharePrefixes)
}

// With returns the network with adapters, or with other weights, for a policy. A *Refusal says that the model accepts
// no such change.
func (n *Network) With(_ context.Context, c engine.Change) (engine.Network, error) {
	m, same, err := engine.Changed(n.Model, n, c)
	if err != nil || same {
		return n, err
	}
	return &Network{m}, nil
}

// Abilities are those of a model that is computed here.
func (n *Network) Abilities() engine.Abilities {
	a := engine.Abilities{Notes: n.Model.Card().Notes}
	a.Modules, a.Tensors = engine.Can(n.Model)
	return a
}

// canaryTokens is how many tokens the fixed input of canaries has.
const canaryTokens = 4

// Canary evaluates the logits after a few fixed tokens, see engine.Canary.
func (n *Network) Canary(ctx context.Context) (*schemas.Canary, error) {
	return engine.Canary("vector of logits", func() ([]float32, error) {
		card := n.Model.Card()
		ids := make([]int32, min(canaryTokens, card.MaxPositions))
		for i := range ids {
			ids[i] = int32((i + engine.CanarySeed) % card.Vocabulary)
		}
		s := n.Model.NewSequence()
		defer s.Close()
		z := make([]float32, card.Vocabulary)
		return z, n.Model.Forward(ctx, []lm.Row{{Sequence: s, IDs: ids, Logits: z}})
	})
}

// Close closes the model.
func (n *Network) Close() error { return n.Model.Close() }
