// Package sheet draws contact sheets: the images of one group beside each other, each
// with what is said of it below, so that a person sees at a glance what a group learns from.
package sheet

import (
	"bytes"
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
)

// Tile is one image of a contact sheet with two lines below it, cut to its width.
type Tile struct {
	PNG     []byte
	Caption string
	// Note is the second line: green where Tone is above 0, red where it is below.
	Note string
	Tone float64
}

// Geometry in pixels.
const (
	margin        = 20
	gap           = 14
	titleHeight   = 44
	captionHeight = 40
	leastSide     = 160 // least length of a tile's longer side: small images are enlarged by whole factors
	mostColumns   = 8
)

var (
	paper = color.NRGBA{0xfa, 0xfa, 0xf8, 0xff}
	ink   = color.NRGBA{0x22, 0x22, 0x26, 0xff}
	quiet = color.NRGBA{0x70, 0x70, 0x78, 0xff}
	good  = color.NRGBA{0x1f, 0x8a, 0x4c, 0xff}
	bad   = color.NRGBA{0xb8, 0x32, 0x2a, 0xff}
)

// Draw returns the contact sheet of one group as a PNG: its tiles in their order, at least
// one, below the title. Images have one size; small ones are enlarged by a whole factor.
func Draw(title string, tiles []Tile) ([]byte, error) {
	if len(tiles) == 0 {
		return nil, errors.New("contact sheet: no images; needs one at least")
	}
	images := make([]image.Image, len(tiles))
	side := 0
	for i, t := range tiles {
		im, err := png.Decode(bytes.NewReader(t.PNG))
		if err != nil {
			return nil, fmt.Errorf("contact sheet: image %d: %w", i, err)
		}
		images[i] = im
		side = max(side, im.Bounds().Dx(), im.Bounds().Dy())
	}
	scale := max(1, int(math.Ceil(float64(leastSide)/float64(side))))
	w, h := images[0].Bounds().Dx()*scale, images[0].Bounds().Dy()*scale
	columns, rows := layout(len(tiles), w)
	cell := image.Pt(w+gap, h+captionHeight+gap)
	sheet, regular, err := titled(title, max(2*margin+columns*cell.X-gap, 420), margin+titleHeight+rows*cell.Y+margin-gap)
	if err != nil {
		return nil, err
	}
	for i, t := range tiles {
		x, y := margin+i%columns*cell.X, margin+titleHeight+i/columns*cell.Y
		draw.NearestNeighbor.Scale(sheet, image.Rect(x, y, x+w, y+h), images[i], images[i].Bounds(), draw.Src, nil)
		text(sheet, regular, quiet, x, y+h+17, fit(regular, t.Caption, w))
		text(sheet, regular, colour(t.Tone), x, y+h+34, fit(regular, t.Note, w))
	}
	return encode(sheet)
}

// titled is an empty sheet of that size under its title, and the face of what comes on it.
func titled(title string, width, height int) (*image.NRGBA, font.Face, error) {
	sheet := image.NewNRGBA(image.Rect(0, 0, width, height))
	draw.Draw(sheet, sheet.Bounds(), image.NewUniform(paper), image.Point{}, draw.Src)
	bold, err := face(gobold.TTF, 20)
	if err != nil {
		return nil, nil, err
	}
	text(sheet, bold, ink, margin, margin+18, fit(bold, title, width-2*margin))
	regular, err := face(goregular.TTF, 14)
	return sheet, regular, err
}

func encode(sheet image.Image) ([]byte, error) {
	var buf bytes.Buffer
	if err := png.Encode(&buf, sheet); err != nil {
		return nil, fmt.Errorf("encode contact sheet: %w", err)
	}
	return buf.Bytes(), nil
}

// layout is how n tiles of that width are placed: in rows of equal length where they fit.
func layout(n, width int) (columns, rows int) {
	columns = min(mostColumns, n, max(2, 1600/(width+gap)))
	rows = (n + columns - 1) / columns
	return (n + rows - 1) / rows, rows
}

func colour(tone float64) color.Color {
	switch {
	case tone > 0:
		return good
	case tone < 0:
		return bad
	}
	return quiet
}

func face(ttf []byte, size float64) (font.Face, error) {
	f, err := opentype.Parse(ttf)
	if err != nil {
		return nil, fmt.Errorf("contact sheet font: %w", err)
	}
	return opentype.NewFace(f, &opentype.FaceOptions{Size: size, DPI: 72, Hinting: font.HintingFull})
}

func text(dst draw.Image, f font.Face, c color.Color, x, y int, s string) {
	d := font.Drawer{Dst: dst, Src: image.NewUniform(c), Face: f, Dot: fixed.P(x, y)}
	d.DrawString(s)
}

// fit cuts s to width pixels.
func fit(f font.Face, s string, width int) string {
	if font.MeasureString(f, s).Ceil() <= width {
		return s
	}
	r := []rune(s)
	for len(r) > 0 && font.MeasureString(f, string(r)+"…").Ceil() > width {
		r = r[:len(r)-1]
	}
	return string(r) + "…"
}
