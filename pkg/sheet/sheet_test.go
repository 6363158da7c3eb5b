package sheet_test

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/sheet"
)

// square is an image of one colour.
func square(side int, c color.Color) media.Media {
	im := image.NewNRGBA(image.Rect(0, 0, side, side))
	for i := range side * side {
		im.Set(i%side, i/side, c)
	}
	return media.Of(im)
}

func Example() {
	data, err := sheet.Draw("a red square", []sheet.Tile{
		{Media: square(64, color.White), Caption: "#1  r 0.900", Note: "A +1.200", Tone: 1.2},
		{Media: square(64, color.Black), Caption: "#0  r 0.100  dark", Note: "A -1.200", Tone: -1.2},
		{Media: square(64, color.Black)},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	im, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(im.Bounds().Max)
	// Output: (644,316)
}

// Every image is on the sheet, in the order given, as large as the others.
func TestDraw_Order(t *testing.T) {
	colours := []color.NRGBA{
		{200, 0, 0, 255},
		{0, 200, 0, 255},
		{0, 0, 200, 255},
		{200, 200, 0, 255},
		{0, 200, 200, 255},
		{200, 0, 200, 255},
		{90, 0, 0, 255},
		{0, 90, 0, 255},
		{0, 0, 90, 255},
	}
	var tiles []sheet.Tile
	for i, c := range colours {
		tiles = append(tiles, sheet.Tile{Media: square(32, c), Caption: fmt.Sprint("#", i)})
	}
	data, err := sheet.Draw("title", tiles)
	if err != nil {
		t.Fatal(err)
	}
	im, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	area := map[color.NRGBA]int{}
	var order []color.NRGBA
	for y := range im.Bounds().Dy() {
		for x := range im.Bounds().Dx() {
			c := color.NRGBAModel.Convert(im.At(x, y)).(color.NRGBA)
			for _, known := range colours {
				if c == known {
					if area[c]++; area[c] == 1 {
						order = append(order, c)
					}
				}
			}
		}
	}
	for i, c := range colours {
		if i >= len(order) || order[i] != c {
			t.Fatalf("images in the order %v, want %v", order, colours)
		}
		if area[c] != 160*160 { // the least side, a whole multiple of 32
			t.Errorf("image %d covers %d pixels, want %d", i, area[c], 160*160)
		}
	}
}

func TestDraw_Errors(t *testing.T) {
	if _, err := sheet.Draw("nothing", nil); err == nil {
		t.Error("a sheet of no images")
	}
	_, err := sheet.Draw("none", []sheet.Tile{{Media: square(8, color.White)}, {}})
	if err == nil || !strings.Contains(err.Error(), "image 1") {
		t.Errorf("no image: %v; want it named", err)
	}
}

// What samples were made from keeps its form, within their size, and is no sample.
func TestDraw_Given(t *testing.T) {
	wide := media.Of(image.NewNRGBA(image.Rect(0, 0, 64, 16)))
	for i := range wide.Frames[0].Pix {
		wide.Frames[0].Pix[i] = []byte{200, 0, 0, 255}[i%4]
	}
	data, err := sheet.Draw("title", []sheet.Tile{
		{Media: wide, Given: true}, {Media: square(32, color.NRGBA{0, 0, 200, 255})},
	})
	if err != nil {
		t.Fatal(err)
	}
	im, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	red, blue := 0, 0
	for y := range im.Bounds().Dy() {
		for x := range im.Bounds().Dx() {
			switch color.NRGBAModel.Convert(im.At(x, y)).(color.NRGBA) {
			case color.NRGBA{200, 0, 0, 255}:
				red++
			case color.NRGBA{0, 0, 200, 255}:
				blue++
			}
		}
	}
	if red != 160*40 || blue != 160*160 {
		t.Errorf("%d red and %d blue pixels; want %d and %d", red, blue, 160*40, 160*160)
	}
	if _, err := sheet.Draw("title", []sheet.Tile{{Media: wide, Given: true}}); err == nil {
		t.Error("a sheet of no samples")
	}
}

// A video is a row of its frames at even distances, the first and the last among them; large ones are reduced.
func TestDraw_Filmstrip(t *testing.T) {
	for side, shown := range map[int]int{32: 160, 512: 256} {
		var video media.Media
		for f := range 11 {
			video.Frames = append(video.Frames, square(side, color.NRGBA{uint8(20 * f), 0, 200, 255}).Frames...)
		}
		data, err := sheet.Draw("title", []sheet.Tile{{Media: video}, {Media: video}})
		if err != nil {
			t.Fatal(err)
		}
		im, err := png.Decode(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		for row := range 2 {
			for k := range sheet.StripFrames {
				x, y := 20+k*(shown+3)+shown/2, 64+row*(shown+54)+shown/2
				if r, _, b, _ := im.At(x, y).RGBA(); r>>8 != uint32(40*k) || b>>8 != 200 {
					t.Errorf("side %d, row %d, frame %d: red %d, want %d", side, row, k, r>>8, 40*k)
				}
			}
		}
	}
}

// Large images are reduced: a sheet of eight of 1024 x 1024 pixels stays one that a screen shows.
func TestDraw_ReducesLargeImages(t *testing.T) {
	t.Parallel()
	tiles := make([]sheet.Tile, 8)
	strip := sheet.Strip{}
	for i := range tiles {
		tiles[i].Media = square(1024, color.White)
		strip.Media = append(strip.Media, tiles[i].Media)
	}
	for name, draw := range map[string]func() ([]byte, error){
		"tiles":  func() ([]byte, error) { return sheet.Draw("title", tiles) },
		"strips": func() ([]byte, error) { return sheet.DrawStrips("title", make([]string, 8), []sheet.Strip{strip}) },
	} {
		data, err := draw()
		if err != nil {
			t.Fatal(err)
		}
		im, err := png.DecodeConfig(bytes.NewReader(data))
		if err != nil || im.Width > 8*400+240 || im.Height > 2*450+100 {
			t.Errorf("%s: %d x %d pixels: %v", name, im.Width, im.Height, err)
		}
	}
}
