package scorer

import (
	"context"
	"fmt"
	"math"
)

// Motion rewards videos that move smoothly. With Y the luma of a pixel (ITU-R BT.601 weights, 0 black to 1 white) and
// a = Y(t) - Y(t-1), b = Y(t+1) - Y(t) its change into and out of a frame,
//
//	score = 2 mean( min(|a|, |b|) where a and b have the same sign, else 0 )
//
// over all pixels of all frames t but the first and the last. It counts change that goes on, so neither a still nor
// flicker scores: both have 0, grey noise 1/12, an image that fades from black to white over F frames 2/(F-1). It lies
// in [0, 1]. Videos of fewer than three frames are errors. It is computed in float64, and needs no model.
const Motion = "motion"

type motion struct{}

func (motion) Name() string { return Motion }

func (motion) Version() string { return "1" }

// Frames says that it sees all frames.
func (motion) Frames() int { return math.MaxInt }

// Score returns the motion of a video. Params are errors.
func (motion) Score(ctx context.Context, in Input) (float64, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("%s: %w", Motion, err)
	}
	frames, params := in.Media.Frames, in.noParams()
	switch {
	case in.Media.Empty():
		return 0, fmt.Errorf("%s: no image", Motion)
	case params != nil:
		return 0, fmt.Errorf("%s: %w", Motion, params)
	case len(frames) < 3:
		return 0, fmt.Errorf("%s: %d frames; must be 3 or more", Motion, len(frames))
	}
	size := frames[0].Rect.Size()
	bright := make([][]float64, len(frames)) // one row of each frame
	for t := range bright {
		bright[t] = make([]float64, size.X)
	}
	var sum float64
	for y := range size.Y {
		for t, img := range frames {
			row := img.Pix[img.PixOffset(img.Rect.Min.X, img.Rect.Min.Y+y):]
			for x := range size.X {
				bright[t][x] = float64(luma(row[4*x:])) / (1000 * 255 * 255)
			}
		}
		var rowSum float64 // so that the error of the sums grows with the edge, not the area
		for t := 1; t < len(frames)-1; t++ {
			for x := range size.X {
				in, out := bright[t][x]-bright[t-1][x], bright[t+1][x]-bright[t][x]
				if in > 0 == (out > 0) {
					rowSum += min(max(in, -in), max(out, -out))
				}
			}
		}
		sum += rowSum
	}
	return 2 * sum / (float64(size.X) * float64(size.Y) * float64(len(frames)-2)), nil
}
