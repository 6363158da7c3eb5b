package sheet

import (
	"errors"
	"fmt"
	"image"
	"image/color"
	"math"

	"golang.org/x/image/draw"
)

// Row is images of one sample in different states, beside a few lines of text.
type Row struct {
	Lines []string
	// Images are one per column; nil leaves a place empty.
	Images []image.Image
}

// Geometry of rows in pixels.
const (
	labelWidth = 190
	lineHeight = 20
)

// DrawRows returns a sheet with a row for each sample as a PNG, at least one. The places are as
// large as the first image that there is; small images are enlarged by a whole factor.
func DrawRows(title string, columns []string, rows []Row) ([]byte, error) {
	var size image.Point
	for _, r := range rows {
		if len(r.Images) != len(columns) {
			return nil, fmt.Errorf("sheet of rows: %d images; must be %d, one per column", len(r.Images), len(columns))
		}
		for _, im := range r.Images {
			if im != nil && size == (image.Point{}) {
				size = im.Bounds().Size()
			}
		}
	}
	if size == (image.Point{}) {
		return nil, errors.New("sheet of rows: no images; needs one at least")
	}
	scale := max(1, int(math.Ceil(float64(leastSide)/float64(max(size.X, size.Y)))))
	w, h := size.X*scale, size.Y*scale
	high := max(h, 3*lineHeight)
	sheet, regular, err := titled(title, 2*margin+labelWidth+len(columns)*(w+gap)-gap, margin+titleHeight+lineHeight+len(rows)*(high+gap)+margin)
	if err != nil {
		return nil, err
	}
	left := func(k int) int { return margin + labelWidth + k*(w+gap) }
	for k, name := range columns {
		text(sheet, regular, ink, left(k), margin+titleHeight+6, fit(regular, name, w))
	}
	for i, r := range rows {
		y := margin + titleHeight + lineHeight + i*(high+gap)
		for n, line := range r.Lines {
			text(sheet, regular, quiet, margin, y+16+n*lineHeight, fit(regular, line, labelWidth-gap))
		}
		for k, im := range r.Images {
			if im != nil {
				draw.NearestNeighbor.Scale(sheet, image.Rect(left(k), y, left(k)+w, y+h), im, im.Bounds(), draw.Src, nil)
			}
		}
	}
	return encode(sheet)
}

// Differences are |a - b| of pairs of images of one size, enlarged by one whole factor of at most
// 16, so that one in a thousand values is white; nil where one of a pair is.
func Differences(pairs [][2]image.Image) (images []image.Image, gain int) {
	var counts [256]int
	total := 0
	images = make([]image.Image, len(pairs))
	raw := make([]*image.NRGBA, len(pairs))
	for i, p := range pairs {
		if p[0] == nil || p[1] == nil {
			continue
		}
		a, b := p[0].Bounds(), p[1].Bounds()
		raw[i] = image.NewNRGBA(image.Rect(0, 0, min(a.Dx(), b.Dx()), min(a.Dy(), b.Dy())))
		for at := range len(raw[i].Pix) / 4 {
			x, y := at%raw[i].Rect.Dx(), at/raw[i].Rect.Dx()
			c := color.NRGBAModel.Convert(p[0].At(a.Min.X+x, a.Min.Y+y)).(color.NRGBA)
			d := color.NRGBAModel.Convert(p[1].At(b.Min.X+x, b.Min.Y+y)).(color.NRGBA)
			off := [3]int{int(c.R) - int(d.R), int(c.G) - int(d.G), int(c.B) - int(d.B)}
			for ch, o := range off {
				raw[i].Pix[4*at+ch] = uint8(max(o, -o))
				counts[max(o, -o)]++
				total++
			}
			raw[i].Pix[4*at+3] = 255
		}
	}
	most := 255
	for beyond := counts[255]; most > 1 && beyond <= total/1000; beyond += counts[most] {
		most--
	}
	gain = min(max(255/most, 1), 16)
	for i, im := range raw {
		if im == nil {
			continue
		}
		for k := range im.Pix {
			if k%4 != 3 {
				im.Pix[k] = uint8(min(int(im.Pix[k])*gain, 255))
			}
		}
		images[i] = im
	}
	return images, gain
}
