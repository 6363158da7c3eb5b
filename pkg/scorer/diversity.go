package scorer

import (
	"context"
	"fmt"
	"image"
	"math"

	"github.com/meander-rl/meander/pkg/models/media"
)

// Diversity rewards samples that differ from the others of their group. The score, in
// [0, 1], is the mean over the others of the root mean square difference of pixels. All
// images are first averaged over boxes to at most DiversitySide pixels a side, so that
// noise does not count. Of videos, at most DiversityFrames frames are compared, evenly spaced, each with that of the
// other at the same place. A group of one scores 0. All samples of a group have one size.
const Diversity = "diversity"

// DiversityFrames is how many frames of a video are compared.
const DiversityFrames = 8

// DiversitySide is the side in pixels of the images that are compared; smaller images keep their size.
const DiversitySide = 32

type diversity struct{}

func (diversity) Name() string { return Diversity }

func (diversity) Version() string { return "2" }

// Frames returns DiversityFrames.
func (diversity) Frames() int { return DiversityFrames }

// ScoreGroup implements GroupScorer. A sample that cannot be fetched gets its own error; one that is not an image,
// or of another size, fails the whole group.
func (diversity) ScoreGroup(ctx context.Context, g Group) []Result {
	n := len(g.Members)
	out := make([]Result, n)
	small := make([][]float64, n) // nil: none
	var size media.Size
	first := -1
	for i := range n {
		x, release, err := g.Sample(ctx, i)
		if err != nil {
			out[i].Err = err
			continue
		}
		frames, err := framesOf(ctx, x)
		if err == nil && first >= 0 && x.Media.Size() != size {
			err = fmt.Errorf("%v, image %d %v; must be of one size", x.Media.Size(), first, size)
		}
		if err != nil {
			release()
			for k := range out {
				out[k].Err = fmt.Errorf("%s: image %d: %w", Diversity, i, err)
			}
			return out
		}
		if first < 0 {
			first, size = i, x.Media.Size()
		}
		for _, frame := range frames {
			small[i] = append(small[i], averageBoxes(frame, DiversitySide)...)
		}
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
				sum += rootMeanSquare(small[i], small[j])
			}
		}
		out[i].Value = sum / float64(max(rated-1, 1))
	}
	return out
}

// framesOf returns the frames of a sample, one for an image. Texts, params and a done ctx are errors.
func framesOf(ctx context.Context, in Input) ([]*image.NRGBA, error) {
	first := in
	if len(in.Media.Frames) > 1 {
		first.Media = media.Media{Frames: in.Media.Frames[:1]}
	}
	if _, err := imageOf(ctx, first); err != nil {
		return nil, err
	}
	return in.Media.Frames, nil
}

// rootMeanSquare returns the root mean square difference of two lists of one length.
func rootMeanSquare(a, b []float64) float64 {
	sum := 0.0
	for i := range a {
		d := a[i] - b[i]
		sum += float64(d * d)
	}
	return math.Sqrt(sum / float64(len(a)))
}

// averageBoxes averages an image over a grid of at most side x side boxes. It returns RGB over black for each box,
// in [0, 1].
func averageBoxes(im *image.NRGBA, side int) []float64 {
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
