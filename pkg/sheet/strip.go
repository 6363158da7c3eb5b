package sheet

import (
	"errors"
	"fmt"
	"image"

	"github.com/meander-rl/meander/pkg/models/media"
)

// Strip is one row of a sheet: a sample in several states, with a few lines of text on the left.
type Strip struct {
	Lines []string
	// Media has one entry per column; an empty one leaves its place blank. Of a video, the first frame is drawn.
	Media []media.Media
}

// Geometry of strips in pixels.
const (
	labelWidth = 190
	lineHeight = 20
)

// DrawStrips returns a sheet of strips, one below the other, as a PNG. It needs at least one image: the first one
// sets the size of all. Small images are enlarged by a whole factor, large ones reduced.
func DrawStrips(title string, columns []string, strips []Strip) ([]byte, error) {
	var size media.Size
	for _, s := range strips {
		if len(s.Media) != len(columns) {
			return nil, fmt.Errorf("sheet of strips: %d images; must be %d, one per column", len(s.Media), len(columns))
		}
		for _, m := range s.Media {
			if size == (media.Size{}) {
				size = m.Size()
			}
		}
	}
	if size == (media.Size{}) {
		return nil, errors.New("sheet of strips: no images; needs one at least")
	}
	scale := tileScale(max(size.Width, size.Height), mostSide)
	w, h := int(float64(size.Width)*scale), int(float64(size.Height)*scale)
	high := max(h, 3*lineHeight)
	sheet, regular, err := newSheet(title, 2*margin+labelWidth+len(columns)*(w+gap)-gap,
		margin+titleHeight+lineHeight+len(strips)*(high+gap)+margin)
	if err != nil {
		return nil, err
	}
	left := func(k int) int { return margin + labelWidth + k*(w+gap) }
	for k, name := range columns {
		drawText(sheet, regular, ink, left(k), margin+titleHeight+6, fitText(regular, name, w))
	}
	for i, s := range strips {
		y := margin + titleHeight + lineHeight + i*(high+gap)
		for n, line := range s.Lines {
			drawText(sheet, regular, quiet, margin, y+16+n*lineHeight, fitText(regular, line, labelWidth-gap))
		}
		for k, m := range s.Media {
			if !m.Empty() {
				paste(sheet, image.Rect(left(k), y, left(k)+w, y+h), m.Frames[0])
			}
		}
	}
	return encodePNG(sheet)
}

// Differences returns |a - b| for each pair of images of one size, all multiplied by one whole factor of at most
// 16, the gain, chosen so that about one value in a thousand is white. If one image of a pair is empty, its
// difference is, too.
func Differences(pairs [][2]media.Media) (differences []media.Media, gain int) {
	var counts [256]int
	total := 0
	differences = make([]media.Media, len(pairs))
	for i, p := range pairs {
		if p[0].Empty() || p[1].Empty() {
			continue
		}
		a, b := p[0].Frames[0], p[1].Frames[0]
		d := image.NewNRGBA(image.Rect(0, 0, min(a.Rect.Dx(), b.Rect.Dx()), min(a.Rect.Dy(), b.Rect.Dy())))
		for y := range d.Rect.Dy() {
			for k := range 4 * d.Rect.Dx() {
				off := int(a.Pix[y*a.Stride+k]) - int(b.Pix[y*b.Stride+k])
				off = max(off, -off)
				if k%4 == 3 {
					off = 255 // alpha is not compared
				} else {
					counts[off]++
					total++
				}
				d.Pix[y*d.Stride+k] = uint8(off)
			}
		}
		differences[i] = media.Of(d)
	}
	most := 255
	for beyond := counts[255]; most > 1 && beyond <= total/1000; beyond += counts[most] {
		most--
	}
	gain = min(max(255/most, 1), 16)
	for _, m := range differences {
		for _, d := range m.Frames {
			for k := range d.Pix {
				if k%4 != 3 {
					d.Pix[k] = uint8(min(int(d.Pix[k])*gain, 255))
				}
			}
		}
	}
	return differences, gain
}
