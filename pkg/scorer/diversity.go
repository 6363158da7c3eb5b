package scorer

import (
	"context"
	"fmt"
	"image"
	"math"
)

// Diversity rewards samples that differ from the others of their group: the mean over
// the others of the root mean square difference of their pixels, in [0, 1], both
// images averaged over boxes to DiversitySide pixels a side first, so that noise
// does not count. A group of one scores 0. All images of a group have one size.
const Diversity = "diversity"

// DiversitySide is the side that images are compared at; smaller ones keep theirs.
const DiversitySide = 32

type diversity struct{}

func (diversity) Name() string { return Diversity }

func (diversity) Version() string { return "1" }

func (diversity) ScoreGroup(ctx context.Context, n int, sample func(i int) (in Input, release func(), err error)) []Result {
	out := make([]Result, n)
	small := make([][]float64, n) // nil: none
	var size image.Point
	first := -1
	for i := range n {
		x, release, err := sample(i)
		if err != nil {
			out[i].Err = err
			continue
		}
		err = check(ctx, x)
		if err == nil && first >= 0 && x.Image.Rect.Size() != size {
			err = fmt.Errorf("%dx%d, image %d %dx%d; must be of one size", x.Image.Rect.Dx(), x.Image.Rect.Dy(), first, size.X, size.Y)
		}
		if err != nil {
			release()
			for k := range out {
				out[k].Err = fmt.Errorf("%s: image %d: %w", Diversity, i, err)
			}
			return out
		}
		if first < 0 {
			first, size = i, x.Image.Rect.Size()
		}
		small[i] = boxes(x.Image, DiversitySide)
		release()
	}
	rated := 0
	for _, x := range small {
		if x != nil {
			rated++
		}
	}
	for i := range out {
		sum := 0.0
		for j := range out {
			if i != j && small[i] != nil && small[j] != nil {
				sum += rms(small[i], small[j])
			}
		}
		out[i].Value = sum / float64(max(rated-1, 1))
	}
	return out
}

func rms(a, b []float64) float64 {
	sum := 0.0
	for i := range a {
		d := a[i] - b[i]
		sum += float64(d * d)
	}
	return math.Sqrt(sum / float64(len(a)))
}

// boxes averages an image over a grid of at most side x side boxes: RGB over black, in
// [0, 1].
func boxes(im *image.NRGBA, side int) []float64 {
	w, h := im.Rect.Dx(), im.Rect.Dy()
	nx, ny := min(w, side), min(h, side)
	out := make([]float64, 0, 3*nx*ny)
	for y := range ny {
		for x := range nx {
			var sum [3]uint64
			y0, y1, x0, x1 := y*h/ny, (y+1)*h/ny, x*w/nx, (x+1)*w/nx
			for row := y0; row < y1; row++ {
				at := im.PixOffset(im.Rect.Min.X+x0, im.Rect.Min.Y+row)
				for pix := im.Pix[at : at+4*(x1-x0)]; len(pix) >= 4; pix = pix[4:] {
					for c := range sum {
						sum[c] += uint64(pix[c]) * uint64(pix[3])
					}
				}
			}
			for _, s := range sum {
				out = append(out, float64(s)/float64(255*255*(y1-y0)*(x1-x0)))
			}
		}
	}
	return out
}
