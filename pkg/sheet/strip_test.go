package sheet_test

import (
	"bytes"
	"image"
	"image/color"
	"image/png"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/sheet"
)

func plain(c color.NRGBA) media.Media {
	im := image.NewNRGBA(image.Rect(0, 0, 32, 16))
	for i := range im.Pix {
		im.Pix[i] = [4]uint8{c.R, c.G, c.B, c.A}[i%4]
	}
	return media.Of(im)
}

// A sheet of strips has a place for each image, and shows what differs.
func TestDrawStrips(t *testing.T) {
	a, b := plain(color.NRGBA{100, 100, 100, 255}), plain(color.NRGBA{110, 100, 95, 255})
	off, gain := sheet.Differences([][2]media.Media{{a, b}, {a, {}}, {a, a}})
	if gain != 16 || !off[1].Empty() || off[0].Frames[0].At(3, 3) != (color.NRGBA{160, 0, 80, 255}) ||
		off[2].Frames[0].At(3, 3) != (color.NRGBA{0, 0, 0, 255}) {
		t.Fatalf("difference x %d of %v, %v, %v", gain, off[0].Frames[0].At(3, 3), off[1], off[2].Frames[0].At(3, 3))
	}
	drawn, err := sheet.DrawStrips("title", []string{"one", "other", "difference"}, []sheet.Strip{
		{Lines: []string{"#0"}, Media: []media.Media{a, b, off[0]}}, {Media: []media.Media{{}, a, {}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	im, err := png.Decode(bytes.NewReader(drawn))
	if err != nil {
		t.Fatal(err)
	}
	places := map[color.NRGBA]int{}
	for y := range im.Bounds().Dy() {
		for x := range im.Bounds().Dx() {
			places[color.NRGBAModel.Convert(im.At(x, y)).(color.NRGBA)]++
		}
	}
	const scaled = 32 * 16 * 5 * 5 // to 160 pixels
	if places[color.NRGBA{100, 100, 100, 255}] != 2*scaled || places[color.NRGBA{110, 100, 95, 255}] != scaled ||
		places[color.NRGBA{160, 0, 80, 255}] != scaled {
		t.Errorf("pixels %v", places[color.NRGBA{100, 100, 100, 255}])
	}
	for _, strips := range [][]sheet.Strip{nil, {{Media: make([]media.Media, 2)}}, {{Media: []media.Media{a}}}} {
		if _, err := sheet.DrawStrips("title", []string{"one", "other"}, strips); err == nil {
			t.Errorf("%d strips: no error", len(strips))
		}
	}
}
