package media

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// MaxInputPixels bounds the pixels of a file that a model is given, over all frames: 4 bytes each while it is read.
const MaxInputPixels = 1 << 26

// ReadInput returns the size of a PNG file that a model is to be given, without reading pixels. It refuses what cannot
// be made 8 bits of red, green and blue as other libraries do: 16 bits, palettes with transparency, and images that are
// turned by EXIF data. Other alpha is dropped.
func ReadInput(file []byte) (Size, error) {
	size, err := ReadSize(file)
	if err != nil {
		return Size{}, err
	}
	if size.Frames > MaxInputPixels || size.Frames*size.Height > MaxInputPixels ||
		size.Frames*size.Height*size.Width > MaxInputPixels {
		return Size{}, fmt.Errorf("%v; must be at most %d pixels", size, MaxInputPixels)
	}
	palette := false
	err = eachChunk(file, func(kind string, data []byte) error {
		switch {
		case kind == "IHDR" && data[8] > 8:
			return fmt.Errorf("%d bits for each colour; must be 8: save it so", data[8])
		case kind == "IHDR":
			palette = data[9] == 3
		case kind == "tRNS" && palette:
			return errors.New("a palette with transparency; must be without: save it as RGB")
		case kind == "tRNS":
			return errors.New("a transparent colour; must be without: save it as RGB")
		case kind == "eXIf" && Orientation(data) > 1:
			return fmt.Errorf("turned by its EXIF data (orientation %d); save it upright", Orientation(data))
		}
		return nil
	})
	return size, err
}

// Orientation returns the tag 0x0112 of EXIF data, 1 to 8; 0: it has none.
func Orientation(exif []byte) int {
	if len(exif) < 8 {
		return 0
	}
	var order binary.ByteOrder = binary.BigEndian
	if bytes.HasPrefix(exif, []byte("II")) {
		order = binary.LittleEndian
	}
	at := uint64(order.Uint32(exif[4:]))
	if at+2 > uint64(len(exif)) {
		return 0
	}
	entries := exif[at+2:]
	for range order.Uint16(exif[at:]) {
		if len(entries) < 12 {
			break
		}
		if order.Uint16(entries) == 0x0112 {
			return int(order.Uint16(entries[8:]))
		}
		entries = entries[12:]
	}
	return 0
}

// DecodeInput decodes a file that ReadInput takes.
func DecodeInput(file []byte) (Media, error) {
	size, err := ReadInput(file)
	if err != nil {
		return Media{}, err
	}
	return Decode(file, size)
}

// RGB returns the pixels of media without alpha, [frames, height, width, 3].
func (m Media) RGB() []byte {
	size := m.Size()
	out := make([]byte, 3*size.Frames*size.Height*size.Width)
	rest := out
	for _, f := range m.Frames {
		for y := range size.Height {
			dropAlpha(rest, f.Pix[y*f.Stride:][:4*size.Width])
			rest = rest[3*size.Width:]
		}
	}
	return out
}

// Luma returns the brightness of the pixels, [frames, height, width]: ITU-R 601 in integers, as Pillow's mode L has it.
func (m Media) Luma() []byte {
	rgb := m.RGB()
	out := make([]byte, len(rgb)/3)
	for i := range out {
		r, g, b := uint32(rgb[3*i]), uint32(rgb[3*i+1]), uint32(rgb[3*i+2])
		out[i] = byte((19595*r + 38470*g + 7471*b + 1<<15) >> 16)
	}
	return out
}
