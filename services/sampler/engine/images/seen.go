package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"

	"golang.org/x/image/draw"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// seenSide is the longest side of the image of a prediction, in pixels.
const seenSide = 256

var _ engine.Seer = (*flowEngine)(nil)

// seen is what the prompt of the sample that was asked for last is encoded as: its other states come next.
type seen struct {
	of            string // its content digest
	conditionings []*model.Conditioning
}

// Seen returns what the network takes a state before step i for: the sample that it would end with if its velocity
// held until sigma 0, decoded and reduced, as a PNG. Of a video it is the middle frame. After the last step it is the
// sample.
func (e *flowEngine) Seen(ctx context.Context, t *schemas.Trajectory, i int64, state []float32) ([]byte, error) {
	if err := errors.Join(CheckLatents(e.card, t), CheckSettings(e.card, &t.Sampling)); err != nil {
		return nil, err
	}
	conds := e.seen.conditionings
	if t.ContentDigest == "" || e.seen.of != t.ContentDigest {
		var err error
		if conds, err = Encode(ctx, e.model, &t.Sampling, e.files); err != nil {
			return nil, fmt.Errorf("encode the prompt: %w", err)
		}
		e.seen = seen{t.ContentDigest, conds}
	}
	x := append([]float32{}, state...)
	if i < int64(len(t.Transitions)) {
		given := Given{Velocities: NewVelocities(e.model), Sampling: &t.Sampling, Conditionings: conds}
		v, err := given.Velocity(ctx, Point{Step: i, X: state, Sigma: t.Sigmas[i]})
		if err != nil {
			return nil, err
		}
		x = Predicted(state, v, t.Sigmas[i])
	}
	m, err := model.Decode(ctx, e.model, x, sampling.SizeOf(&t.Sampling), conds[0])
	if err != nil {
		return nil, fmt.Errorf("decode the prediction: %w", err)
	}
	if m.Empty() {
		return nil, errors.New("the prediction has no pixels")
	}
	src := m.Middle().Frames[0]
	size := src.Rect.Size()
	if longer := max(size.X, size.Y); longer > seenSide {
		small := image.NewNRGBA(image.Rect(0, 0, max(1, size.X*seenSide/longer), max(1, size.Y*seenSide/longer)))
		draw.BiLinear.Scale(small, small.Rect, src, src.Rect, draw.Src, nil)
		src = small
	}
	var out bytes.Buffer
	err = png.Encode(&out, src)
	return out.Bytes(), err
}
