package media_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"image"
	"image/color"
	"image/png"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
)

// What cannot be made eight bits of RGB, or is too large to be read, is refused by its header.
func TestReadInput(t *testing.T) {
	img := image.NewNRGBA(image.Rect(0, 0, 4, 2))
	img.Set(0, 0, color.NRGBA{R: 10, G: 20, B: 30, A: 7})
	file, err := media.EncodePNG(img)
	if err != nil {
		t.Fatal(err)
	}
	size, err := media.ReadInput(file)
	if err != nil || size != media.ImageSize(2, 4) {
		t.Errorf("%v: %v", size, err)
	}
	m, err := media.Decode(file, size)
	if err != nil {
		t.Fatal(err)
	}
	if rgb := m.RGB(); len(rgb) != 24 || !slices.Equal(rgb[:3], []byte{10, 20, 30}) {
		t.Errorf("red, green and blue without alpha: %v", rgb)
	}
	if l := m.Luma(); len(l) != 8 || l[0] != 18 { // Pillow: Image.new("RGB", (1, 1), (10, 20, 30)).convert("L")
		t.Errorf("brightness: %v", l)
	}
	bomb := slices.Clone(file)
	binary.BigEndian.PutUint32(bomb[16:], 1<<14)
	binary.BigEndian.PutUint32(bomb[20:], 1<<14)
	binary.BigEndian.PutUint32(bomb[29:], crc32.ChecksumIEEE(bomb[12:29]))
	var deep, palette bytes.Buffer
	if err := png.Encode(&deep, image.NewGray16(image.Rect(0, 0, 2, 2))); err != nil {
		t.Fatal(err)
	}
	colours := color.Palette{color.NRGBA{R: 9, A: 9}, color.Black}
	if err := png.Encode(&palette, image.NewPaletted(image.Rect(0, 0, 2, 2), colours)); err != nil {
		t.Fatal(err)
	}
	// EXIF data with one tag, the orientation 6; Pillow reads them behind the pixels, too.
	exif := []byte("eXIfMM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03" +
		"\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00")
	chunk := binary.BigEndian.AppendUint32(nil, uint32(len(exif)-4))
	chunk = binary.BigEndian.AppendUint32(append(chunk, exif...), crc32.ChecksumIEEE(exif))
	turned := slices.Insert(slices.Clone(file), len(file)-12, chunk...)
	for want, file := range map[string][]byte{
		"(orientation 6); save it upright": turned,
		"must be at most 67108864 pixels":  bomb, "16 bits for each colour": deep.Bytes(),
		"a palette with transparency": palette.Bytes(),
	} {
		if _, err := media.ReadInput(file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; must be %q", err, want)
		}
	}
}
