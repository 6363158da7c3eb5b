package images

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// LoadData returns the clean latents x0 that noise is added to: either the stored latents of the group, [n, S, C] or
// [1, S, C], or [1, S, C] of the stored image or video of that size, which m encodes. A missing blob is
// bus.ErrNotFound, a file that is no PNG of the size ErrImage.
func LoadData(ctx context.Context, b *bus.Bus, m engine.Encoder, data *schemas.SegmentData,
	size media.Size,
) (*schemas.Tensor, error) {
	if t := data.Latents; t != nil {
		if t.Ref == nil {
			return t, nil
		}
		bytes, err := b.GetBlob(ctx, *t.Ref)
		return &schemas.Tensor{DType: t.DType, Shape: t.Shape, Data: bytes}, err
	}
	file, err := b.GetBlob(ctx, *data.Image)
	if err != nil {
		return nil, err
	}
	sample, err := media.Decode(file, size)
	if err != nil {
		return nil, fmt.Errorf("start.data.image: %w: %w", ErrImage, err)
	}
	x, err := m.EncodeMedia(ctx, sample)
	if err != nil {
		return nil, fmt.Errorf("encode the image: %w", err)
	}
	c := int64(m.Card().LatentChannels)
	return &schemas.Tensor{
		DType: string(tensor.F32), Shape: []int64{1, int64(len(x)) / c, c},
		Data: tensor.F32.AppendFloats(nil, x),
	}, nil
}

// ErrImage says that a file is no PNG of the sample's size.
var ErrImage = errors.New("no image of the sample's size")

// drawNoise returns n values of the initial noise of a seed.
func drawNoise(seed uint64, n int) []float32 {
	noise := make([]float32, n)
	flow.InitialNoise(noise, seed)
	return noise
}

// StartFrom sets x [S, C] to the state that a sample begins with at sigma: the sample's own of states or, if states
// are data x0, (1-sigma) x0 + sigma noise. Errors name the field.
func StartFrom(
	x []float32, start *schemas.SegmentStart, states *schemas.Tensor, sample int64, shape []int64, sigma float32,
	noiseSeed uint64,
) error {
	field := "start.latents."
	switch {
	case start.Data != nil:
		field = "start.data.latents."
	case start.Branch != nil:
		field = "start.branch."
	}
	if err := StartState(x, states, sample, shape); err != nil {
		return fmt.Errorf("%s%w", field, err)
	}
	if start.Data != nil {
		scheduled.Noised(x, x, drawNoise(noiseSeed, len(x)), scheduled.Level{U: float64(sigma), A: 1 - float64(sigma)})
	}
	return nil
}

// StartState sets x to the state of one sample: the one at index sample of states [n, S, C], or the only one of [1, S,
// C]. shape is [S, C]. Errors name the field of states.
func StartState(x []float32, states *schemas.Tensor, sample int64, shape []int64) error {
	dtype := tensor.DType(states.DType)
	if len(states.Shape) != 3 || !slices.Equal(states.Shape[1:], shape) {
		return fmt.Errorf("shape: %v; must be %v after the samples", states.Shape, shape)
	}
	if states.Shape[0] == 1 {
		sample = 0
	}
	size := int64(len(x) * dtype.Size())
	if end := (sample + 1) * size; sample >= states.Shape[0] || int64(len(states.Data)) < end {
		return fmt.Errorf("data: %d bytes of shape %v; must have a state of sample %d", len(states.Data), states.Shape,
			sample)
	}
	if err := dtype.DecodeFloats(x, states.Data[sample*size:(sample+1)*size]); err != nil {
		return fmt.Errorf("data: %w", err)
	}
	return nil
}
