package command

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
	"os"
	"slices"

	"golang.org/x/image/draw"
	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/opentype"
	"golang.org/x/image/math/fixed"
)

// tile is one picture of a contact sheet.
type tile struct {
	png               []byte
	sample            int64
	reward, advantage *float64
	detail            string // what was read in it
}

// Geometry of a contact sheet in pixels.
const (
	sheetMargin  = 20
	sheetGap     = 14
	sheetTitle   = 44
	sheetCaption = 40
	sheetSide    = 160 // least length of a tile's longer side: small pictures are enlarged by whole factors
	sheetColumns = 8
)

var (
	sheetPaper = color.NRGBA{0xfa, 0xfa, 0xf8, 0xff}
	sheetInk   = color.NRGBA{0x22, 0x22, 0x26, 0xff}
	sheetQuiet = color.NRGBA{0x70, 0x70, 0x78, 0xff}
	sheetGood  = color.NRGBA{0x1f, 0x8a, 0x4c, 0xff}
	sheetBad   = color.NRGBA{0xb8, 0x32, 0x2a, 0xff}
)

// writeSheet draws the pictures of one group, best reward first, each with its
// reward and advantage under it.
func writeSheet(path, title string, tiles []tile) error {
	tiles = slices.Clone(tiles)
	slices.SortStableFunc(tiles, func(a, b tile) int { return compareDown(a.reward, b.reward) })
	pictures := make([]image.Image, len(tiles))
	side := 0
	for i, t := range tiles {
		im, err := png.Decode(bytes.NewReader(t.png))
		if err != nil {
			return fmt.Errorf("contact sheet: picture of sample %d: %w", t.sample, err)
		}
		pictures[i] = im
		side = max(side, im.Bounds().Dx(), im.Bounds().Dy())
	}
	scale := max(1, int(math.Ceil(float64(sheetSide)/float64(side))))
	w, h := pictures[0].Bounds().Dx()*scale, pictures[0].Bounds().Dy()*scale
	columns := min(sheetColumns, len(tiles), max(2, 1600/(w+sheetGap)))
	columns = min(columns, len(tiles))
	// Few columns would make rows of unequal length where equal ones fit.
	rows := (len(tiles) + columns - 1) / columns
	columns = (len(tiles) + rows - 1) / rows
	cell := image.Pt(w+sheetGap, h+sheetCaption+sheetGap)
	sheet := image.NewNRGBA(image.Rect(0, 0, max(2*sheetMargin+columns*cell.X-sheetGap, 420), sheetMargin+sheetTitle+rows*cell.Y+sheetMargin-sheetGap))
	draw.Draw(sheet, sheet.Bounds(), image.NewUniform(sheetPaper), image.Point{}, draw.Src)

	bold, err := face(gobold.TTF, 20)
	if err != nil {
		return err
	}
	regular, err := face(goregular.TTF, 14)
	if err != nil {
		return err
	}
	text(sheet, bold, sheetInk, sheetMargin, sheetMargin+18, fit(bold, title, sheet.Bounds().Dx()-2*sheetMargin))
	for i, t := range tiles {
		x, y := sheetMargin+i%columns*cell.X, sheetMargin+sheetTitle+i/columns*cell.Y
		draw.NearestNeighbor.Scale(sheet, image.Rect(x, y, x+w, y+h), pictures[i], pictures[i].Bounds(), draw.Src, nil)
		caption := fmt.Sprintf("#%d  r %s  %s", t.sample, number(t.reward, "%.3f"), t.detail)
		text(sheet, regular, sheetQuiet, x, y+h+17, fit(regular, caption, w))
		tone := sheetQuiet
		if t.advantage != nil && *t.advantage > 0 {
			tone = sheetGood
		} else if t.advantage != nil && *t.advantage < 0 {
			tone = sheetBad
		}
		text(sheet, regular, tone, x, y+h+34, "A "+number(t.advantage, "%+.3f"))
	}
	var buf bytes.Buffer
	if err := png.Encode(&buf, sheet); err != nil {
		return fmt.Errorf("encode contact sheet: %w", err)
	}
	if err := os.WriteFile(path, buf.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write contact sheet: %w", err)
	}
	return nil
}

// compareDown puts larger values first and missing ones last.
func compareDown(a, b *float64) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return 1
	case b == nil || *a > *b:
		return -1
	case *a < *b:
		return 1
	}
	return 0
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
