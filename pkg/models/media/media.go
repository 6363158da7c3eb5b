// Package media holds what models of images, videos and sound make. Media are frames of pixels with their Size and a
// digest, and a Sound. EncodePNG and EncodeVideo write the file of an image and of a video, an animated PNG; Decode
// reads both. EncodeWAV and DecodeWAV do the same with a sound.
package media

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"image"
)

// Size is the size of a sample: Frames of Height x Width pixels. An image has one frame.
type Size struct {
	Frames int `json:"frames" msgpack:"frames"`
	Height int `json:"height" msgpack:"height"`
	Width  int `json:"width" msgpack:"width"`
}

// String says what a size is, for errors: "64x48 pixels", or "9 frames of 64x48 pixels"; width comes first.
func (s Size) String() string {
	image := fmt.Sprintf("%dx%d pixels", s.Width, s.Height)
	if s.Frames == 1 {
		return image
	}
	return fmt.Sprintf("%d frames of %s", s.Frames, image)
}

// ImageSize returns the size of an image of height x width pixels.
func ImageSize[T int | int64](height, width T) Size {
	return Size{Frames: 1, Height: int(height), Width: int(width)}
}

// Media is a sample: the frames of a video in order, or the one frame of an image, all of one size, and its sound,
// alone or beside them. The zero value is no sample.
type Media struct {
	Frames []*image.NRGBA
	Sound  Sound
}

// Of returns an image as Media; empty media for nil.
func Of(img *image.NRGBA) Media {
	if img == nil {
		return Media{}
	}
	return Media{Frames: []*image.NRGBA{img}}
}

// Empty reports whether there are no pixels.
func (m Media) Empty() bool { return len(m.Frames) == 0 || m.Frames[0].Rect.Empty() }

// Size returns the number of frames and the size of the first; zero for empty media.
func (m Media) Size() Size {
	if m.Empty() {
		return Size{}
	}
	size := m.Frames[0].Rect.Size()
	return Size{Frames: len(m.Frames), Height: size.Y, Width: size.X}
}

// Image returns the frame of an image. Media without pixels and videos are errors.
func (m Media) Image() (*image.NRGBA, error) {
	switch {
	case m.Empty():
		return nil, errors.New("no image")
	case len(m.Frames) > 1:
		return nil, fmt.Errorf("a video of %d frames; must be an image", len(m.Frames))
	}
	return m.Frames[0], nil
}

// Middle returns the frame at the index frames / 2, which stands for a video where an image is wanted; all of an image.
func (m Media) Middle() Media {
	if m.Empty() {
		return m
	}
	m.Frames = m.Frames[len(m.Frames)/2:][:1]
	return m
}

// Spaced returns n frames at even distances: the first, the last and those between; the middle one if n is 1, all of
// media that have no more than n.
func (m Media) Spaced(n int) Media {
	most := len(m.Frames)
	switch {
	case n >= most:
		return m
	case n <= 1:
		return m.Middle()
	}
	spaced := make([]*image.NRGBA, n)
	for i := range n {
		spaced[i] = m.Frames[(2*i*(most-1)+n-1)/(2*(n-1))] // rounded to the nearest
	}
	m.Frames = spaced
	return m
}

// CheckFrames refuses a number of frames that a model does not make: it must be 1 more than a multiple of perToken, and
// at most most. The error names the nearest numbers that fit. 0 for perToken or most means 1.
func CheckFrames(frames, perToken, most int) error {
	perToken, most = max(perToken, 1), max(most, 1)
	largest := (most-1)/perToken*perToken + 1
	below := min((max(frames, 1)-1)/perToken*perToken+1, largest)
	switch {
	case frames == below:
		return nil
	case most == 1:
		return fmt.Errorf("frames: %d; must be 1, the model makes images", frames)
	case below == largest:
		return fmt.Errorf("frames: %d; must be at most %d", frames, largest)
	case frames < 1:
		return fmt.Errorf("frames: %d; must be 1 for an image, %d or more for a video", frames, perToken+1)
	}
	return fmt.Errorf("frames: %d; must be 1 more than a multiple of %d, such as %d or %d", frames, perToken, below,
		below+perToken)
}

// Digest returns the SHA-256 in hex of red, green and blue of every pixel, frame by frame, row by row. It depends
// neither on a file format nor on alpha.
func (m Media) Digest() string {
	h := sha256.New()
	for _, f := range m.Frames {
		size := f.Rect.Size()
		rgb := make([]byte, 3*size.X)
		for y := range size.Y {
			dropAlpha(rgb, f.Pix[y*f.Stride:][:4*size.X])
			h.Write(rgb)
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

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
