// Package media holds what models of images, videos and sound make. Media are frames of pixels with their Size and a
// digest, and a Sound. EncodePNG and EncodeVideo write the file of an image and of a video, an animated PNG; Decode
// reads both. EncodeWAV and DecodeWAV do the same with a sound.
package media

import (
	"crypto/sha256"
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
