package view

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// token is one token of a text.
type token struct {
	ID        int32    `json:"id"`
	Text      string   `json:"text,omitempty"`
	Generated bool     `json:"generated,omitempty"`
	LogProb   *float64 `json:"log_prob,omitempty"`
	Entropy   *float64 `json:"entropy,omitempty"`
	// Top are the likeliest tokens here, where the logits of topk are stored.
	Top []choice `json:"top,omitempty"`
}

// choice is a token that could have been drawn.
type choice struct {
	ID      int32   `json:"id"`
	Text    string  `json:"text,omitempty"`
	LogProb float64 `json:"log_prob"`
}

// maxTokens is how many tokens of a text a page shows, maxTop how many that could have been drawn of each.
const maxTokens, maxTop = 4000, 8

// dropTensors returns a text without the lists that the tokens have.
func dropTensors(x *Text) *Text {
	if x != nil {
		x.IDs, x.Mask, x.LogProbs, x.ProcessedLogProbs, x.Entropies = nil, nil, nil, nil, nil
	}
	return x
}

// setTokens fills the tokens of a text, which may be in the object store.
func (r *Reader) setTokens(ctx context.Context, x *Sample, t *schemas.Trajectory) error {
	if t.Text.IDs == nil {
		return nil // it did not complete
	}
	text, err := LoadText(ctx, r.bus, t)
	if err != nil {
		return err
	}
	logProbs, of := text.LogProbs, "before temperature and filters"
	if logProbs == nil {
		logProbs, of = text.ProcessedLogProbs, "after temperature and filters"
	}
	x.LogProbsOf = of
	for i, id := range text.IDs {
		if len(x.Tokens) == maxTokens {
			x.More = len(text.IDs) - maxTokens
			break
		}
		k := token{ID: id, Generated: i < len(text.Mask) && text.Mask[i] == 1}
		if r.Piece != nil {
			k.Text = r.Piece(id)
		}
		if k.Generated && i < len(logProbs) && !math.IsNaN(float64(logProbs[i])) {
			k.LogProb = new(float64(logProbs[i]))
		}
		if k.Generated && i < len(text.Entropies) {
			k.Entropy = new(float64(text.Entropies[i]))
		}
		x.Tokens = append(x.Tokens, k)
	}
	within, done := context.WithTimeout(ctx, topTimeout)
	defer done()
	if err := r.setTop(within, x, t); err != nil && ctx.Err() == nil {
		r.Log.Warn().Err(err).Str("uid", string(t.UID)).Msg("tokens are shown without the likeliest others")
	}
	return nil
}

// topTimeout bounds how long a page waits for the likeliest tokens of a long text: it shows the others without them.
const topTimeout = 4 * time.Second

// setTop fills the likeliest tokens beside those that were drawn, if the events of the tokens have them. Events that
// are no longer stored are left out. When it fails, the tokens before have theirs.
func (r *Reader) setTop(ctx context.Context, x *Sample, t *schemas.Trajectory) error {
	if l := t.Text.Settings.Logits; l == nil || l.Form != schemas.LogitsTopK {
		return nil
	}
	for e, err := range r.client.Tokens(ctx, t) {
		if errors.Is(err, client.ErrNotFound) || err == nil && e.Position >= int64(len(x.Tokens)) {
			return nil
		}
		if err != nil {
			return err
		}
		if !e.Generated || e.Logits == nil {
			continue
		}
		top, err := client.Likeliest(e, maxTop)
		if err != nil {
			return err
		}
		for i, list := range top {
			if at := int(e.Position) + i; at < len(x.Tokens) {
				for _, c := range list {
					k := choice{ID: c.ID, LogProb: c.LogProb}
					if r.Piece != nil {
						k.Text = r.Piece(c.ID)
					}
					x.Tokens[at].Top = append(x.Tokens[at].Top, k)
				}
			}
		}
	}
	return nil
}
