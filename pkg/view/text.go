package view

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Text is a sample that is a text.
type Text struct {
	// Answer is what the model said in its last turn, FinishReason why that turn ended.
	Answer       string `json:"answer"`
	FinishReason string `json:"finish_reason,omitempty"`
	// PromptTokens counts the given tokens, Tokens the generated ones.
	PromptTokens int64             `json:"prompt_tokens"`
	Tokens       int64             `json:"tokens"`
	Messages     []schemas.Message `json:"messages"`
	Turns        []schemas.Turn    `json:"turns"`
	// Conversation says how a conversation with an interaction ended, or why it failed.
	Conversation string `json:"conversation,omitempty"`
	// SaidBy is the interaction that said it; absent: a model did.
	SaidBy string `json:"said_by,omitempty"`
	// IDs are the whole sequence; Mask is 1 for generated tokens. LogProbs are before temperature and filters,
	// ProcessedLogProbs after them, as the tokens were drawn; both are 0 for given tokens. All are absent while they
	// are in the object store: see Load.
	IDs               []int32   `json:"ids,omitempty"`
	Mask              []int32   `json:"mask,omitempty"`
	LogProbs          Numbers   `json:"log_probs,omitempty"`
	ProcessedLogProbs Numbers   `json:"processed_log_probs,omitempty"`
	Entropies         []float32 `json:"entropies,omitempty"`
	// Drawn says which server drew the tokens; absent: the sampler did. Values that the server does not give are
	// absent.
	Drawn *schemas.Drawn `json:"drawn,omitempty"`
	// The sampling settings of the text.
	Temperature float64 `json:"temperature"`
	TopK        int64   `json:"top_k"`
	TopP        float64 `json:"top_p"`
	MinP        float64 `json:"min_p"`
	Vocabulary  int64   `json:"vocabulary"`
	// Versions of the weights.
	WeightsDigest    string `json:"weights_digest"`
	PolicyVersionMin int64  `json:"policy_version_min"`
	PolicyVersionMax int64  `json:"policy_version_max"`
}

// MarshalJSON writes messages, turns and drawn with the names of the contract, for --json.
func (x *Text) MarshalJSON() ([]byte, error) {
	type rest Text
	out := struct {
		*rest
		Messages any `json:"messages"`
		Turns    any `json:"turns"`
		Drawn    any `json:"drawn,omitempty"`
	}{(*rest)(x), schemas.JSON(x.Messages), schemas.JSON(x.Turns), schemas.JSON(x.Drawn)}
	return json.Marshal(out)
}

// TextOf returns the text of a trajectory, with those tensors that the trajectory carries itself.
func TextOf(t *schemas.Trajectory) *Text {
	s := t.Text.Settings
	x := &Text{
		Answer: t.Text.Answer(), Tokens: t.Text.Generated(), Messages: s.Messages, Turns: t.Text.Turns,
		Conversation: t.Text.Conversation, SaidBy: t.Text.SaidBy, Drawn: t.Drawn,
		Temperature: s.Temperature, TopK: s.TopK, TopP: s.TopP, MinP: s.MinP, Vocabulary: s.Vocabulary,
		WeightsDigest: t.WeightsDigest, PolicyVersionMin: t.PolicyVersionMin, PolicyVersionMax: t.PolicyVersionMax,
	}
	for _, turn := range t.Text.Turns {
		if turn.Generated {
			x.FinishReason = turn.FinishReason
		} else {
			x.PromptTokens += turn.End - turn.Begin
		}
	}
	x.setTensors(t.Text)
	return x
}

// Numbers are those of the tokens of a text, NaN where the server that drew them gave none: null in JSON.
type Numbers []float32

// MarshalJSON writes a list of numbers and nulls.
func (n Numbers) MarshalJSON() ([]byte, error) {
	list := make([]*float32, len(n))
	for i, x := range n {
		if !math.IsNaN(float64(x)) {
			list[i] = &n[i]
		}
	}
	return json.Marshal(list)
}

// UnmarshalJSON reads what MarshalJSON writes.
func (n *Numbers) UnmarshalJSON(data []byte) error {
	var list []*float32
	if err := json.Unmarshal(data, &list); err != nil {
		return err
	}
	*n = make(Numbers, len(list))
	for i, x := range list {
		(*n)[i] = float32(math.NaN())
		if x != nil {
			(*n)[i] = *x
		}
	}
	return nil
}

// LoadText is TextOf with all tensors: it fetches those that are in the object store, and fails if one is gone.
func LoadText(ctx context.Context, b *bus.Bus, t *schemas.Trajectory) (*Text, error) {
	x := TextOf(t)
	if t.Text.IDs == nil || x.IDs != nil {
		return x, nil
	}
	text := *t.Text
	for _, tensor := range []**schemas.Tensor{
		&text.IDs, &text.Mask, &text.LogProbs, &text.ProcessedLogProbs, &text.Entropies,
	} {
		if *tensor == nil { // the engine does not give it
			continue
		}
		*tensor = new(**tensor)
		if err := b.LoadTensors(ctx, *tensor); err != nil {
			return nil, fmt.Errorf("text of %s sample %d: %w", t.UID, t.SampleIndex, err)
		}
	}
	x.setTensors(&text)
	return x, nil
}

// setTensors decodes the tensors whose bytes t has, into slices of x; without the ids, which are in the object store
// until Load, it does nothing.
func (x *Text) setTensors(t *schemas.TextResult) {
	if t.IDs == nil || t.IDs.Ref != nil {
		return
	}
	for at := 0; at+4 <= len(t.IDs.Data); at += 4 {
		x.IDs = append(x.IDs, int32(binary.LittleEndian.Uint32(t.IDs.Data[at:])))
	}
	for _, one := range t.Mask.Data {
		x.Mask = append(x.Mask, int32(one))
	}
	x.LogProbs, x.ProcessedLogProbs, x.Entropies = floats(t.LogProbs), floats(t.ProcessedLogProbs), floats(t.Entropies)
}

// floats decodes an F32 tensor; nil if there is none, or if its data are in the object store.
func floats(t *schemas.Tensor) []float32 {
	if t == nil {
		return nil
	}
	out := make([]float32, len(t.Data)/4)
	if t.Ref != nil || tensor.F32.DecodeFloats(out, t.Data) != nil {
		return nil
	}
	return out
}

// Confidences returns 1 - H / ln V for each generated token, from 0 to 1; H is its entropy, V the size of the
// vocabulary.
func (x *Text) Confidences() (list []float64) {
	for i, h := range x.Entropies {
		if x.Mask[i] == 1 {
			list = append(list, max(0, 1-float64(h)/math.Log(float64(max(x.Vocabulary, 2)))))
		}
	}
	return list
}

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
