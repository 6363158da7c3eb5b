package scorer

import (
	"context"
	"fmt"
)

// Synthetic rewards bright and even images. With Y the luma of each pixel
// (ITU-R BT.601 weights, 0 black to 1 white), alpha-weighted,
//
//	score = mean(Y) - var(Y)
//
// a polynomial of the pixels, hence smooth. It lies in [0, 1], since var(Y) <= mean(Y)*(1-mean(Y)) for any Y within [0,
// 1]: a white image scores 1, a black one 0, uniform noise about 0.46. It is cheap and needs no model, for load tests
// and first runs.
const Synthetic = "synthetic"

type synthetic struct{}

func (synthetic) Name() string { return Synthetic }

func (synthetic) Version() string { return "1" }

// Score returns mean(Y) - var(Y) of the image. Params are errors.
func (synthetic) Score(ctx context.Context, in Input) (float64, error) {
	img, err := imageOf(ctx, in)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", Synthetic, err)
	}
	// Row by row, so that the error of the sums grows with the edge, not the area.
	bounds := img.Rect
	var sum, squares float64
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		from := img.PixOffset(bounds.Min.X, y)
		row := img.Pix[from : from+4*bounds.Dx()]
		var rowSum, rowSquares float64
		for ; len(row) >= 4; row = row[4:] {
			bright := float64(luma(row)) / (1000 * 255 * 255)
			rowSum += bright
			rowSquares += float64(bright * bright)
		}
		sum += rowSum
		squares += rowSquares
	}
	n := float64(bounds.Dx()) * float64(bounds.Dy())
	mean := sum / n
	return mean - max(0, squares/n-float64(mean*mean)), nil
}
