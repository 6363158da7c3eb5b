package sampler

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// negativePrefix is what diffusers puts before the names of the negative prompt's tensors.
const negativePrefix = "negative_"

// ConditioningName is the name in events of a tensor that a family names so.
func ConditioningName(name string, negative bool) string {
	if negative {
		return negativePrefix + name
	}
	return name
}

// Conditioning is what events have of encoded texts: the tensors of the prompt in F32 and, where it is not
// nil, of the negative prompt. Embeddings of a family that pads none get a mask [tokens] of ones in U8.
func Conditioning(cond, negative *model.Conditioning) []schemas.NamedTensor {
	list := named(cond, false)
	if negative != nil {
		list = append(list, named(negative, true)...)
	}
	return list
}

func named(c *model.Conditioning, negative bool) (list []schemas.NamedTensor) {
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
		if mask := t.Name + "_mask"; strings.HasSuffix(t.Name, "_embeds") && len(t.Shape) == 2 && !has[mask] {
			list = append(list, schemas.NamedTensor{Name: ConditioningName(mask, negative), Tensor: schemas.Tensor{
				DType: "U8", Shape: []int64{int64(t.Shape[0])}, Data: bytes.Repeat([]byte{1}, t.Shape[0]),
			}})
		}
	}
	return list
}

// kept are the texts' tensors where the request asks for them.
func kept(req *schemas.Request, cond, negative *model.Conditioning) []schemas.NamedTensor {
	if !req.ReturnConditioning {
		return nil
	}
	return Conditioning(cond, negative)
}

// storeConditioning puts the texts' tensors into the object store. Samples of one prompt follow one another,
// so that the first stores them, and the others find them there.
func (r *recorder) storeConditioning(ctx context.Context, list []schemas.NamedTensor) error {
	if len(list) == 0 {
		return nil
	}
	r.s.encoded.Lock()
	defer r.s.encoded.Unlock()
	for i := range list {
		t := &list[i].Tensor
		ref, err := r.s.bus.PutBlob(ctx, t.Data)
		if err != nil {
			return fmt.Errorf("store %s: %w", list[i].Name, err)
		}
		t.Ref, t.Data = &ref, nil
	}
	return nil
}
