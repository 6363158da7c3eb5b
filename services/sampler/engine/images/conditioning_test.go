package images_test

import (
	"context"
	"errors"
	"fmt"
	"image"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// editor is a pipeline that keeps nothing of what it is conditioned on.
type editor struct{ model.Model }

func (editor) Card() model.Card {
	return model.Card{Pipeline: &model.Pipeline{Conditions: []model.Input{
		{Name: "image", Type: model.InputImages}, {Name: "mask", Type: model.InputMask},
	}, Arguments: []model.Input{{Name: model.NegativePrompt, Type: model.InputText}}}}
}

func (editor) EncodeRecipe(_ context.Context, r *model.Recipe) (*model.Conditioning, error) {
	return &model.Conditioning{Recipe: r}, nil
}

func (editor) DecodeRecipe(context.Context, []float32, model.Size, *model.Conditioning) (media.Media, error) {
	return media.Media{}, nil
}

// A file is loaded, decoded and named once for all samples, and again for another type of condition.
func TestEncode_FilesAreReadOnce(t *testing.T) {
	img := image.NewNRGBA(image.Rect(0, 0, 3, 2))
	img.Pix[0], img.Pix[3] = 200, 255
	file, err := media.EncodePNG(img)
	if err != nil {
		t.Fatal(err)
	}
	var loads atomic.Int64
	files := images.NewFiles(func(_ context.Context, ref schemas.Ref) ([]byte, error) {
		if loads.Add(1); ref.Digest == "gone" {
			return nil, bus.ErrNotFound
		}
		return file, nil
	})
	given := func(name, kind, digest string) schemas.Condition {
		return schemas.Condition{
			Name: name, Type: kind, DataImage: schemas.DataImage{Ref: &schemas.Ref{Digest: digest}},
		}
	}
	s := &schemas.Sampling{Conditions: []schemas.Condition{
		given("image", "image", "a"), given("image", "image", "a"), given("mask", "mask", "a"),
	}}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			of, err := images.Encode(t.Context(), editor{}, s, files)
			if err != nil {
				t.Error(err)
				return
			}
			c := of[0].Recipe.Conditions
			if len(c) != 3 || c[0].Name != "image" || len(c[0].Data) != 18 || c[0].Data[0] != 200 ||
				&c[0].Data[0] != &c[1].Data[0] {
				t.Errorf("images: %v", c)
			}
			if c[2].Name != "mask" || len(c[2].Data) != 6 || c[2].Data[0] != 60 || c[2].Digest == c[0].Digest {
				t.Errorf("a mask: %v", c[2])
			}
		})
	}
	all.Wait()
	if n := loads.Load(); n != 2 {
		t.Errorf("%d loads of one file with two types", n)
	}
	s.Conditions = []schemas.Condition{given("image", "image", "gone")}
	if _, err := images.Encode(t.Context(), editor{}, s, files); !errors.Is(err, images.ErrCondition) {
		t.Errorf("a file that is gone: %v", err)
	}
	if _, err := images.Encode(t.Context(), editor{}, s, images.NewFiles(nil)); !errors.Is(err, images.ErrCondition) {
		t.Errorf("no store of files: %v", err)
	}
}

// unguided is a pipeline without an argument of guidance: it takes no scale.
type unguided struct{ editor }

func (unguided) Card() model.Card {
	return model.Card{
		Pipeline: &model.Pipeline{}, TrueCFGScale: 1, Size: media.ImageSize(4, 4), PixelsPerToken: 1, LatentChannels: 1,
		MaxPixels: 64,
	}
}

func (unguided) Velocity(_ context.Context, rows []model.Row, _ model.Size) error {
	if g := rows[0].Conditioning.Recipe.Guidance; g != 0 {
		return fmt.Errorf("guidance: %g; must be 0", g)
	}
	return nil
}

func TestNetwork_CanaryOfAPipelineWithoutGuidance(t *testing.T) {
	if _, err := (&images.Network{Model: unguided{}}).Canary(t.Context()); err != nil {
		t.Error(err)
	}
}

// A pipeline is given a negative prompt where one is there, an empty one too, with or without guidance.
func TestEncode_NegativePrompt(t *testing.T) {
	for _, c := range []struct {
		s    schemas.Sampling
		want any
	}{
		{schemas.Sampling{NoNegativePrompt: true, TrueCFGScale: 4}, nil},
		{schemas.Sampling{TrueCFGScale: 4}, ""},
		{schemas.Sampling{NegativePrompt: "grey", TrueCFGScale: 1}, "grey"},
	} {
		of, err := images.Encode(t.Context(), editor{}, &c.s, images.NewFiles(nil))
		if err != nil {
			t.Fatal(err)
		}
		if got := of[0].Recipe.Arguments[model.NegativePrompt]; got != c.want {
			t.Errorf("%+v: given %v; must be %v", c.s, got, c.want)
		}
	}
}

// A file that comes slowly holds up the samples that have it, and no others; one who gives up leaves it to the next.
func TestEncode_ASlowFileHoldsUpNoOther(t *testing.T) {
	file, err := media.EncodePNG(image.NewNRGBA(image.Rect(0, 0, 3, 2)))
	if err != nil {
		t.Fatal(err)
	}
	asked, come := make(chan struct{}, 2), make(chan struct{})
	files := images.NewFiles(func(ctx context.Context, ref schemas.Ref) ([]byte, error) {
		if ref.Digest == "slow" {
			asked <- struct{}{}
			select {
			case <-come:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		return file, nil
	})
	encode := func(ctx context.Context, digest string) error {
		_, err := images.Encode(ctx, editor{}, &schemas.Sampling{Conditions: []schemas.Condition{{
			Name: "image", Type: "image", DataImage: schemas.DataImage{Ref: &schemas.Ref{Digest: digest}},
		}}}, files)
		return err
	}
	ctx, giveUp := context.WithCancel(t.Context())
	var first, second error
	var slow sync.WaitGroup
	slow.Go(func() { first = encode(ctx, "slow") })
	<-asked
	slow.Go(func() { second = encode(t.Context(), "slow") })
	if err := encode(t.Context(), "fast"); err != nil {
		t.Errorf("beside a slow file: %v", err)
	}
	giveUp()
	<-asked // the second asks itself
	close(come)
	slow.Wait()
	if !errors.Is(first, context.Canceled) || second != nil {
		t.Errorf("one that gave up: %v; the next: %v", first, second)
	}
}

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
