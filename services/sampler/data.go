package sampler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"image/png"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// encoder is a model, or an engine of one.
type encoder interface {
	Card() model.Card
	EncodeImage(ctx context.Context, img *image.NRGBA) ([]float32, error)
}

// LoadData returns the clean latents x0 of a sample: [1, S, C] of its image, encoded by m, or
// those of its group. What is not stored is bus.ErrNotFound; a fault of the image names the field.
func LoadData(ctx context.Context, b *bus.Bus, m encoder, data *schemas.SegmentData, height, width int64) (*schemas.Tensor, error) {
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
	img, err := readImage(file, height, width)
	if err != nil {
		return nil, fmt.Errorf("start.data.image: %w", err)
	}
	x, err := m.EncodeImage(ctx, img)
	if err != nil {
		return nil, fmt.Errorf("encode the image: %w", err)
	}
	c := int64(m.Card().LatentChannels)
	return &schemas.Tensor{DType: string(tensor.F32), Shape: []int64{1, int64(len(x)) / c, c}, Data: tensor.F32.AppendFloats(nil, x)}, nil
}

// errImage is wrapped by what is wrong with an image, however often it is read.
var errImage = errors.New("no image of the sample's size")

// image decodes a PNG of a known size. What it says of its size is read before its pixels.
func readImage(file []byte, height, width int64) (*image.NRGBA, error) {
	c, err := png.DecodeConfig(bytes.NewReader(file))
	if err == nil && (int64(c.Height) != height || int64(c.Width) != width) {
		err = fmt.Errorf("%d x %d pixels; must be %d x %d", c.Width, c.Height, width, height)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errImage, err)
	}
	img, err := png.Decode(bytes.NewReader(file))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errImage, err)
	}
	if same, ok := img.(*image.NRGBA); ok {
		return same, nil
	}
	out := image.NewNRGBA(image.Rect(0, 0, c.Width, c.Height))
	draw.Draw(out, out.Rect, img, img.Bounds().Min, draw.Src)
	return out, nil
}

// noiseOf makes the noise [S, C] that data is mixed with.
func noiseOf(seed uint64, n int) []float32 {
	noise := make([]float32, n)
	flow.InitialNoise(noise, seed)
	return noise
}

// StartFrom sets x [S, C] to what a sample begins with at sigma, from the states that it was
// given: those, or where they are its data x0, (1-sigma) x0 + sigma noise. Errors name the field.
func StartFrom(x []float32, start *schemas.SegmentStart, states *schemas.Tensor, sample int64, shape []int64, sigma float32, noiseSeed uint64) error {
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
		scheduled.Noised(x, x, noiseOf(noiseSeed, len(x)), scheduled.Level{U: float64(sigma), A: 1 - float64(sigma)})
	}
	return nil
}

// data loads what a request adds noise to. What can be seen to stay as it is is a fault of the
// request.
func (s *service) data(ctx context.Context, engine Engine, req *schemas.Request) (*schemas.Tensor, error) {
	m, ok := engine.(encoder)
	if !ok {
		return nil, bus.Terminal(schemas.CodeInvalid, errors.New("start.data: given; the model encodes no images"))
	}
	states, err := LoadData(ctx, s.bus, m, req.Start.Data, req.Height, req.Width)
	switch {
	case err == nil:
		return states, nil
	case errors.Is(err, errImage):
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("start.data: %w", err))
	}
	return nil, fmt.Errorf("load the data to start with: %w", err)
}
