package results

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Text is a sample of text.
type Text struct {
	// Answer is what the model says in its last turn, FinishReason why that ended.
	Answer       string `json:"answer"`
	FinishReason string `json:"finish_reason,omitempty"`
	// PromptTokens were given, Tokens generated.
	PromptTokens int64             `json:"prompt_tokens"`
	Tokens       int64             `json:"tokens"`
	Messages     []schemas.Message `json:"messages"`
	Turns        []schemas.Turn    `json:"turns"`
	// Conversation is how that with an interaction ended, or why it failed.
	Conversation string `json:"conversation,omitempty"`
	// IDs are the whole sequence, Mask is 1 where a token was generated; LogProbs are those before temperature and filters,
	// ProcessedLogProbs those that the tokens were drawn with, 0 where they were given. Absent where they are in the object store:
	// see Load.
	IDs               []int32   `json:"ids,omitempty"`
	Mask              []int32   `json:"mask,omitempty"`
	LogProbs          []float32 `json:"log_probs,omitempty"`
	ProcessedLogProbs []float32 `json:"processed_log_probs,omitempty"`
	Entropies         []float32 `json:"entropies,omitempty"`
	// Drawn says which server drew the tokens; absent: the sampler did. Of what it does not give there are no numbers.
	Drawn *schemas.DrawnText `json:"drawn,omitempty"`
	// Settings are how the text was asked for, without the messages.
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

// MarshalJSON writes what is of the contract with the contract's names.
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

// TextOf is that of a trajectory, as far as it carries its tensors itself.
func TextOf(t *schemas.Trajectory) *Text {
	s := t.Text.Settings
	x := &Text{
		Answer: t.Text.Answer(), Tokens: t.Text.Generated(), Messages: s.Messages, Turns: t.Text.Turns, Conversation: t.Text.Conversation, Drawn: t.Text.Drawn,
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
	x.read(t.Text)
	return x
}

// Load reads what of the texts of a run is in the object store.
func (r *Run) Load(ctx context.Context, b *bus.Bus) error {
	for _, g := range r.Groups {
		for i := range g.Members {
			m := &g.Members[i]
			if m.Text == nil || m.trajectory.Text.IDs == nil || m.Text.IDs != nil {
				continue
			}
			of := *m.trajectory.Text
			for _, t := range []**schemas.Tensor{&of.IDs, &of.Mask, &of.LogProbs, &of.ProcessedLogProbs, &of.Entropies} {
				if *t == nil { // of an engine that does not give them
					continue
				}
				*t = new(**t)
				if err := b.LoadTensors(ctx, *t); err != nil {
					return fmt.Errorf("text of %s sample %d: %w", g.UID, m.SampleIndex, err)
				}
			}
			m.Text.read(&of)
		}
	}
	return nil
}

// read takes the tensors that are there.
func (x *Text) read(t *schemas.TextResult) {
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

// Confidences are 1 - H / ln V of the tokens that were generated, from 0 to 1.
func (x *Text) Confidences() (list []float64) {
	for i, h := range x.Entropies {
		if x.Mask[i] == 1 {
			list = append(list, max(0, 1-float64(h)/math.Log(float64(max(x.Vocabulary, 2)))))
		}
	}
	return list
}
