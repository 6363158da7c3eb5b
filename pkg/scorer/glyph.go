package scorer

import (
	"bytes"
	"context"
	_ "embed" // the templates
	"fmt"
	"image"
	"image/png"
	"math"
	"strings"
	"sync"
)

// Glyph reads the signs that the shipped model paints, and compares the text with the target as OCR does (see
// Target and TextReward). It reads only images of that model, 128 x 64 pixels with up to six digits or capitals in
// three fonts, and needs no other program: it compares each cell with every glyph in every font and size. Most
// signs have either digits or capitals, which tells 0 from O; a digit among capitals is read only if it fits much
// better. A cell that fits no glyph is read as "?", which no target has.
const Glyph = "glyph"

// Geometry of a sign in pixels, as it is drawn for training (deploy/models/signs/trainer).
const (
	signHeight, signWidth = 64, 128
	cellWidth             = 20    // from one glyph to the next; the row of cells is centred
	cellRows              = 36    // of a template
	cellTop               = 16    // first of them when the capitals are centred
	fieldTop, fieldBottom = 8, 59 // the tail of a low Q ends here, a frame begins at 60
)

// signOffsets are the possible distances of the text below the middle, in rows. signJitter is
// how many rows a glyph may be off.
var signOffsets = [...]int{-8, 0, 8}

const signJitter = 1

const (
	// minContrast is the least difference of ink and sign in luma, of 255: the palest ink on the palest sign has 95.
	minContrast = 40
	// maxResidual bounds the squared difference of a glyph from its template, as a share of the squares of the
	// template. Beyond it the glyph is "?".
	maxResidual = 0.5
)

// glyphSheet is an image with a row per font and size and a cell per character. The trainer's glyphs.py makes it.
//
//go:embed glyphs.png
var glyphSheet []byte

const glyphChars = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"

// template is the coverage of one glyph in its cell, 0 to 255.
type template struct {
	char        byte
	first, last int // rows that are not empty, last exclusive
	pix         [cellRows * cellWidth]uint8
	squares     int64
}

// loadTemplates reads the templates from glyphSheet once.
var loadTemplates = sync.OnceValues(func() ([]template, error) {
	decoded, err := png.Decode(bytes.NewReader(glyphSheet))
	if err != nil {
		return nil, fmt.Errorf("glyph templates: %w", err)
	}
	sheet, ok := decoded.(*image.Gray)
	if !ok || sheet.Rect.Dx() != len(glyphChars)*cellWidth || sheet.Rect.Dy()%cellRows != 0 {
		return nil, fmt.Errorf("glyph templates: %T of %v", decoded, decoded.Bounds())
	}
	var out []template
	for row := range sheet.Rect.Dy() / cellRows {
		for c := range glyphChars {
			t := template{char: glyphChars[c], first: cellRows}
			for y := range cellRows {
				for x := range cellWidth {
					v := sheet.GrayAt(c*cellWidth+x, row*cellRows+y).Y
					if v == 0 {
						continue
					}
					t.pix[y*cellWidth+x] = v
					t.squares += int64(v) * int64(v)
					t.first, t.last = min(t.first, y), y+1
				}
			}
			out = append(out, t)
		}
	}
	return out, nil
})

type glyphReader struct {
	templates []template
	faintest  int64 // least squares of a template
}

// newGlyph returns the reader with its templates.
func newGlyph() (Scorer, error) {
	templates, err := loadTemplates()
	if err != nil {
		return nil, err
	}
	g := glyphReader{templates, templates[0].squares}
	for i := range templates {
		g.faintest = min(g.faintest, templates[i].squares)
	}
	return g, nil
}

func (glyphReader) Name() string { return Glyph }

func (glyphReader) Version() string { return "2" }

func (g glyphReader) Score(ctx context.Context, in Input) (float64, error) {
	r := g.ScoreDetail(ctx, in)
	return r.Value, r.Err
}

// ScoreDetail returns the score with the text that was read. An image of another size than a sign is an error.
func (g glyphReader) ScoreDetail(ctx context.Context, in Input) Result {
	fail := func(err error) Result { return Result{Err: fmt.Errorf("%s: %w", Glyph, err)} }
	img, err := imageOf(ctx, in)
	if err != nil {
		return fail(err)
	}
	target, err := Target(in.Prompt, in.GroundTruth)
	if err != nil {
		return fail(err)
	}
	if size := img.Rect.Size(); size != image.Pt(signWidth, signHeight) {
		return fail(fmt.Errorf("image of %dx%d; it reads signs of %dx%d alone, use the reward ocr", size.X, size.Y,
			signWidth, signHeight))
	}
	text := g.read(img)
	return readResult(target, text)
}

// field is the amount of ink of each pixel, 0 to 255.
type field [signHeight * signWidth]uint8

// read returns the characters of a sign, "?" for each that it cannot read; "" if there is no ink.
func (g glyphReader) read(im *image.NRGBA) string {
	ink, ok := inkOf(im)
	if !ok {
		return ""
	}
	// An odd number of glyphs has one in the middle, an even number two beside it.
	best, text := int64(math.MaxInt64), ""
	for _, left := range []int{(signWidth - 5*cellWidth) / 2, (signWidth - 6*cellWidth) / 2} {
		for _, offset := range signOffsets {
			for _, r := range g.readRow(ink, left, offset) {
				if r.difference < best {
					best, text = r.difference, r.text()
				}
			}
		}
	}
	return text
}

// inkOf separates the ink from the sign; it returns false if there is none. Ink is always brighter than the sign.
// Frames, and the wall behind round corners, lie outside the rows and columns that are used.
func inkOf(im *image.NRGBA) (*field, bool) {
	var y [signHeight * signWidth]uint8
	var count [256]int
	total := 0
	for row := range signHeight {
		for col := range signWidth {
			v := uint8(luma(im.Pix[im.PixOffset(im.Rect.Min.X+col, im.Rect.Min.Y+row):]) / (1000 * 255))
			y[row*signWidth+col] = v
			if row >= fieldTop && row < fieldBottom && col >= 4 && col < signWidth-4 {
				count[v]++
				total++
			}
		}
	}
	sign, bright := quantile(count[:], total/2), quantile(count[:], total-total/100)
	contrast := bright - sign
	if contrast < minContrast {
		return nil, false
	}
	// Shades of the sign are up to an eighth of the contrast away from its median.
	floor := sign + contrast/8
	var ink field
	for i, v := range y {
		ink[i] = uint8(min(255, 255*max(0, int(v)-floor)/(bright-floor)))
	}
	return &ink, true
}

// quantile returns the least value v such that at least n counted values are v or lower.
func quantile(count []int, n int) int {
	for v, c := range count {
		if n -= c; n <= 0 {
			return v
		}
	}
	return len(count) - 1
}

// reading is a row of cells read as characters of one class (digits or capitals), except for cells that are clearly
// of the other class.
type reading struct {
	chars []byte
	// difference of the field from what was read, squared.
	difference int64
}

func (r reading) text() string { return strings.TrimSpace(string(r.chars)) }

// readRow reads the cells from column left on, once as digits and once as capitals.
func (g glyphReader) readRow(ink *field, left, offset int) [2]reading {
	var out [2]reading
	right := left
	for col := left; col+cellWidth <= signWidth; col += cellWidth {
		right = col + cellWidth
		energy := ink.energy(col, right)
		var found [2]*template
		best := [2]int64{energy, energy} // of an empty cell
		templates := g.templates
		if 4*energy < g.faintest { // by the Cauchy-Schwarz inequality an empty cell fits better than any template
			templates = nil
		}
		for i := range templates {
			t := &templates[i]
			class := 0
			if t.char > '9' {
				class = 1
			}
			for off := offset - signJitter; off <= offset+signJitter; off++ {
				if d := energy + t.squares - 2*ink.dot(t, col, off); d < best[class] {
					best[class], found[class] = d, t
				}
			}
		}
		for class := range found {
			if other := 1 - class; best[other]+mixed < best[class] {
				best[class], found[class] = best[other]+mixed, found[other]
				break // the other one is the nearer
			}
		}
		for class, t := range found {
			char := byte(' ')
			switch {
			case t == nil && energy > smudge, t != nil && float64(best[class]) > maxResidual*float64(t.squares):
				char = '?'
			case t != nil:
				char = t.char
			}
			out[class].chars = append(out[class].chars, char)
			out[class].difference += best[class]
		}
	}
	outside := ink.energy(0, left) + ink.energy(right, signWidth)
	for class := range out {
		out[class].difference += outside
	}
	return out
}

// mixed is how much better a digit among capitals must fit than any capital, and the reverse: 13 pixels of full
// ink. With less, a worn 0 among digits is read as O.
const mixed = 13 * 255 * 255

// smudge is the energy above which a cell without a glyph is not empty but "?": 40 pixels of full ink.
const smudge = 40 * 255 * 255

// energy returns the sum of squares of the ink in the columns from to to, to exclusive.
func (f *field) energy(from, to int) int64 {
	var sum int64
	for row := fieldTop; row < fieldBottom; row++ {
		for _, v := range f[row*signWidth+from : row*signWidth+to] {
			sum += int64(v) * int64(v)
		}
	}
	return sum
}

// dot returns the dot product of a template with the cell at column col. off is how many rows its capitals are
// below the middle.
func (f *field) dot(t *template, col, off int) int64 {
	var sum int64
	for row := t.first; row < t.last; row++ {
		cells := f[(cellTop+off+row)*signWidth+col:][:cellWidth]
		pix := t.pix[row*cellWidth:][:cellWidth]
		part := uint32(0)
		for x, v := range pix {
			part += uint32(v) * uint32(cells[x])
		}
		sum += int64(part)
	}
	return sum
}
