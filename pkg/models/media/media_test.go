package media_test

import (
	"crypto/sha256"
	"encoding/hex"
	"image"
	"image/color"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
)

// sample is a part of a larger image, whose rows are not beside each other in memory.
func sample() *image.NRGBA {
	whole := image.NewNRGBA(image.Rect(0, 0, 7, 5))
	for i := range whole.Pix {
		whole.Pix[i] = uint8(37 * i)
	}
	return whole.SubImage(image.Rect(2, 1, 6, 4)).(*image.NRGBA)
}

func TestMedia_Digest(t *testing.T) {
	img := sample()
	var rgb []byte
	for y := img.Rect.Min.Y; y < img.Rect.Max.Y; y++ {
		for x := img.Rect.Min.X; x < img.Rect.Max.X; x++ {
			c := img.NRGBAAt(x, y)
			rgb = append(rgb, c.R, c.G, c.B)
		}
	}
	want := func(b []byte) string {
		sum := sha256.Sum256(b)
		return hex.EncodeToString(sum[:])
	}
	if got := media.Of(img).Digest(); got != want(rgb) {
		t.Errorf("an image: %s, want %s", got, want(rgb))
	}
	video := media.Media{Frames: []*image.NRGBA{img, img}}
	if got := video.Digest(); got != want(slices.Concat(rgb, rgb)) {
		t.Errorf("a video: %s", got)
	}
}

func TestMedia_Image(t *testing.T) {
	img := sample()
	if got, err := media.Of(img).Image(); got != img || err != nil {
		t.Errorf("the frame of an image: %v, %v", got, err)
	}
	if got := media.Of(img).Size(); got != media.ImageSize(3, 4) {
		t.Errorf("size %v", got)
	}
	video := media.Media{Frames: []*image.NRGBA{img, img}}
	if _, err := video.Image(); err == nil || !strings.Contains(err.Error(), "2 frames") {
		t.Errorf("a video is an image: %v", err)
	}
	for _, none := range []media.Media{{}, media.Of(nil), media.Of(image.NewNRGBA(image.Rect(3, 3, 3, 9)))} {
		if _, err := none.Image(); err == nil || !none.Empty() || none.Size() != (media.Size{}) {
			t.Errorf("%v: an image of %v", none, none.Size())
		}
	}
}

func TestPNG(t *testing.T) {
	opaque := image.NewNRGBA(image.Rect(0, 0, 4, 3))
	for i := range opaque.Pix {
		opaque.Pix[i] = uint8(31*i) | 255*uint8(i%4/3)
	}
	clear := sample()
	for _, img := range []*image.NRGBA{opaque, clear} {
		file, err := media.EncodePNG(img)
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []media.Size{{}, media.ImageSize(3, 4)} {
			decoded, err := media.Decode(file, size)
			if err != nil {
				t.Fatal(err)
			}
			got := decoded.Frames[0]
			for i := range 12 {
				at, from := got.NRGBAAt(i%4, i/4), img.Rect.Min
				if want := img.NRGBAAt(from.X+i%4, from.Y+i/4); at != want && (color.NRGBA{}) != want {
					t.Fatalf("pixel %d is %v, want %v", i, at, want)
				}
			}
		}
		if _, err := media.Decode(file, media.ImageSize(4, 3)); err == nil ||
			!strings.Contains(err.Error(), "4x3 pixels; must be 3x4") {
			t.Errorf("another size: %v", err)
		}
		if _, err := media.Decode(file[:40], media.Size{}); err == nil {
			t.Error("half a file is an image")
		}
	}
}
