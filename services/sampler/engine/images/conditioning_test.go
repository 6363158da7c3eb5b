package images_test

import (
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// Events have the masks that the card names: those of the family, ones where it has none of that name, and none where
// the card says so.
func TestConditioning_Masks(t *testing.T) {
	embeds := model.Tensor{Name: "prompt_embeds", Shape: []int{2, 3}, Data: make([]float32, 6)}
	pooled := model.Tensor{Name: "pooled_prompt_embeds", Shape: []int{3}, Data: make([]float32, 3)}
	own := model.Tensor{Name: "prompt_attention_mask", Shape: []int{2}, Data: []float32{1, 0}}
	for _, c := range []struct {
		what    string
		masks   map[string]string
		tensors []model.Tensor
		want    []string
	}{
		{
			"by default", nil,
			[]model.Tensor{embeds, pooled},
			[]string{"prompt_embeds", "prompt_embeds_mask", "pooled_prompt_embeds"},
		},
		{"none", map[string]string{}, []model.Tensor{embeds, pooled}, []string{"prompt_embeds", "pooled_prompt_embeds"}},
		{
			"another name",
			map[string]string{"prompt_embeds": "prompt_attention_mask"},
			[]model.Tensor{embeds, own},
			[]string{"prompt_embeds", "prompt_attention_mask"},
		},
		{
			"one that the family lacks",
			map[string]string{"prompt_embeds": "mask", "pooled_prompt_embeds": "mask"},
			[]model.Tensor{embeds, pooled},
			[]string{"prompt_embeds", "mask", "pooled_prompt_embeds"},
		},
	} {
		cond := &model.Conditioning{Tensors: c.tensors}
		got := images.Conditioning(model.Card{Masks: c.masks}, cond, cond)
		var names []string
		for _, x := range got {
			names = append(names, x.Name)
			if x.Tensor.DType == "U8" && !slices.Equal(x.Tensor.Data, []byte{1, 1}) {
				t.Errorf("%s: %s is %v; want ones for both tokens", c.what, x.Name, x.Tensor.Data)
			}
		}
		want := slices.Clone(c.want)
		for _, name := range c.want {
			want = append(want, "negative_"+name)
		}
		if !slices.Equal(names, want) {
			t.Errorf("%s: %v; want %v", c.what, names, want)
		}
	}
}
