// Package sheet draws contact sheets as PNG files, so that a person sees at a glance what a
// group learns from. Draw puts the images of one group (Tiles) side by side, each with two
// lines of text below. DrawStrips puts several states of a sample (a Strip) in one row.
package sheet

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"

	"golang.org/x/image/draw"
	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/opentype"
	"golang.org/x/image/math/fixed"

	"github.com/meander-rl/meander/pkg/models/media"
)

// Tile is one image of a contact sheet with two lines of text below it. Lines are cut to the width of the image.
type Tile struct {
	// Media is the image or the video.
	Media media.Media
	// Given says that samples were made from it: it may have another size, and is drawn within that of the samples.
	Given   bool
	Caption string
	// Note is the second line: green where Tone is above 0, red where it is below.
	Note string
	Tone float64
}

// StripFrames is the most frames of a video that a contact sheet shows.
const StripFrames = 6

// Geometry in pixels.
const (
	margin        = 20
	gap           = 14
	titleHeight   = 44
	captionHeight = 40
	leastSide     = 160 // least length of a tile's longer side: small images are enlarged by whole factors
	mostSide      = 384 // most length of it: a sheet of large images is for a look, the images lie beside it
	mostColumns   = 8
	frameGap      = 3   // between the frames of a filmstrip
	mostFrameSide = 256 // most length of a frame's longer side
)

var (
	paper = color.NRGBA{0xfa, 0xfa, 0xf8, 0xff}
	ink   = color.NRGBA{0x22, 0x22, 0x26, 0xff}
	quiet = color.NRGBA{0x70, 0x70, 0x78, 0xff}
	good  = color.NRGBA{0x1f, 0x8a, 0x4c, 0xff}
	bad   = color.NRGBA{0xb8, 0x32, 0x2a, 0xff}
)

// Draw returns the contact sheet of one group as a PNG: at least one tile, in order, below the title. All samples
// have the size of the first; small ones are enlarged by a whole factor, large ones reduced. A video is a filmstrip:
// some of its frames in a row. What samples were made from, a Given one, keeps its form within their size.
func Draw(title string, tiles []Tile) ([]byte, error) {
	if len(tiles) == 0 {
		return nil, errors.New("contact sheet: no images; needs one at least")
	}
	var first media.Size // of the samples
	side := 0
	for i, t := range tiles {
		size := t.Media.Size()
		if size == (media.Size{}) {
			return nil, fmt.Errorf("contact sheet: image %d: no pixels", i)
		}
		if !t.Given {
			first, side = cmp.Or(first, size), max(side, size.Width, size.Height)
		}
	}
	if side == 0 {
		return nil, errors.New("contact sheet: no sample; needs one at least")
	}
	frames, most := min(first.Frames, StripFrames), mostSide
	if frames > 1 {
		most = mostFrameSide
	}
	scale := tileScale(side, most)
	wide, h := int(float64(first.Width)*scale), int(float64(first.Height)*scale)
	w := frames*(wide+frameGap) - frameGap
	columns, rows := layout(len(tiles), w, 3-min(frames, 2)) // videos may be alone in a row, images are not
	cell := image.Pt(w+gap, h+captionHeight+gap)
	sheet, regular, err := newSheet(title, max(2*margin+columns*cell.X-gap, 420),
		margin+titleHeight+rows*cell.Y+margin-gap)
	if err != nil {
		return nil, err
	}
	for i, t := range tiles {
		x, y := margin+i%columns*cell.X, margin+titleHeight+i/columns*cell.Y
		for k, img := range t.Media.Spaced(frames).Frames {
			left := x + k*(wide+frameGap)
			to := image.Rect(left, y, left+wide, y+h)
			if t.Given {
				of := img.Rect.Size()
				factor := min(float64(wide)/float64(of.X), float64(h)/float64(of.Y))
				to.Max = to.Min.Add(image.Pt(int(float64(of.X)*factor), int(float64(of.Y)*factor)))
			}
			paste(sheet, to, img)
		}
		drawText(sheet, regular, quiet, x, y+h+17, fitText(regular, t.Caption, w))
		drawText(sheet, regular, toneColour(t.Tone), x, y+h+34, fitText(regular, t.Note, w))
	}
	return encodePNG(sheet)
}

// tileScale returns the factor for images whose longer side has that length: a whole one that enlarges small images to
// leastSide, or one below 1 that reduces large ones to most.
func tileScale(side, most int) float64 {
	return min(max(1, math.Ceil(float64(leastSide)/float64(side))), float64(most)/float64(side))
}

// paste draws an image into a place of the sheet: enlarged pixels stay squares, reduced ones are averaged.
func paste(sheet draw.Image, place image.Rectangle, img *image.NRGBA) {
	var how draw.Scaler = draw.NearestNeighbor
	if place.Dx() < img.Rect.Dx() {
		how = draw.CatmullRom
	}
	how.Scale(sheet, place, img, img.Rect, draw.Src, nil)
}

// newSheet returns an empty sheet of that size with its title, and the font for further text.
func newSheet(title string, width, height int) (*image.NRGBA, font.Face, error) {
	sheet := image.NewNRGBA(image.Rect(0, 0, width, height))
	draw.Draw(sheet, sheet.Bounds(), image.NewUniform(paper), image.Point{}, draw.Src)
	bold, err := newFace(gobold.TTF, 20)
	if err != nil {
		return nil, nil, err
	}
	drawText(sheet, bold, ink, margin, margin+18, fitText(bold, title, width-2*margin))
	regular, err := newFace(goregular.TTF, 14)
	return sheet, regular, err
}

func encodePNG(sheet image.Image) ([]byte, error) {
	var buf bytes.Buffer
	if err := png.Encode(&buf, sheet); err != nil {
		return nil, fmt.Errorf("encode contact sheet: %w", err)
	}
	return buf.Bytes(), nil
}

// layout returns how many columns and rows n tiles of that width get, at least so many columns; rows are of equal
// length if possible.
func layout(n, width, least int) (columns, rows int) {
	columns = min(mostColumns, n, max(least, 1600/(width+gap)))
	rows = (n + columns - 1) / columns
	return (n + rows - 1) / rows, rows
}

// toneColour returns the colour of a note by its tone, such as an advantage: good above 0, bad
// below, else a quiet one.
func toneColour(tone float64) color.Color {
	switch {
	case tone > 0:
		return good
	case tone < 0:
		return bad
	}
	return quiet
}

func newFace(ttf []byte, size float64) (font.Face, error) {
	f, err := opentype.Parse(ttf)
	if err != nil {
		return nil, fmt.Errorf("contact sheet font: %w", err)
	}
	return opentype.NewFace(f, &opentype.FaceOptions{Size: size, DPI: 72, Hinting: font.HintingFull})
}

func drawText(dst draw.Image, f font.Face, c color.Color, x, y int, s string) {
	d := font.Drawer{Dst: dst, Src: image.NewUniform(c), Face: f, Dot: fixed.P(x, y)}
	d.DrawString(s)
}

// fitText cuts s to width pixels, with "…" at the cut, which is all that is left of it where it is too narrow.
func fitText(f font.Face, s string, width int) string {
	if font.MeasureString(f, s).Ceil() <= width {
		return s
	}
	r := []rune(s)
	for len(r) > 0 && font.MeasureString(f, string(r)+"…").Ceil() > width {
		r = r[:len(r)-1]
	}
	return string(r) + "…"
}

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
