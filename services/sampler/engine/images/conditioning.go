package images

import (
	"bytes"
	"context"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// negativePrefix is put before the names of the negative prompt's tensors, as in diffusers.
const negativePrefix = "negative_"

// ConditioningName returns the name that events have for a tensor of a family, by the family's own name.
func ConditioningName(name string, negative bool) string {
	if negative {
		return negativePrefix + name
	}
	return name
}

// Conditioning returns encoded texts as events have them: the tensors of the prompt in F32 and, unless negative is
// nil, those of the negative prompt. Where the card names a mask that is no tensor of the family, it is [tokens] of
// ones in U8.
func Conditioning(card model.Card, cond, negative *model.Conditioning) []schemas.NamedTensor {
	list := namedTensors(card, cond, false)
	if negative != nil {
		list = append(list, namedTensors(card, negative, true)...)
	}
	return list
}

// namedTensors returns the tensors of one encoded text, with masks of ones if the model family gives none.
func namedTensors(card model.Card, c *model.Conditioning, negative bool) (list []schemas.NamedTensor) {
	has := map[string]bool{}
	for _, t := range c.Tensors {
		has[t.Name] = true
	}
	for _, t := range c.Tensors {
		x := schemas.Tensor{DType: string(tensor.F32), Data: tensor.F32.AppendFloats(nil, t.Data)}
		for _, n := range t.Shape {
			x.Shape = append(x.Shape, int64(n))
		}
		list = append(list, schemas.NamedTensor{Name: ConditioningName(t.Name, negative), Tensor: x})
		if mask := card.MaskOf(t); mask != "" && !has[mask] && len(t.Shape) > 0 {
			has[mask] = true // several tensors may share one
			list = append(list, schemas.NamedTensor{Name: ConditioningName(mask, negative), Tensor: schemas.Tensor{
				DType: "U8", Shape: []int64{int64(t.Shape[0])}, Data: bytes.Repeat([]byte{1}, t.Shape[0]),
			}})
		}
	}
	return list
}

// Encode makes the conditioning of a sample's prompt and, with guidance, of its negative prompt.
func Encode(ctx context.Context, m model.Model, s *schemas.Sampling) ([]*model.Conditioning, error) {
	prompts := []model.Texts{s.Texts()}
	if s.TrueCFGScale > 1 {
		prompts = append(prompts, model.Texts{s.NegativePrompt})
	}
	return model.Encode(ctx, m, prompts, s.TruncatePrompt)
}
