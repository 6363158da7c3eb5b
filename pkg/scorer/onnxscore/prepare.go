package onnxscore

import (
	"errors"
	"fmt"
	"image"
	"math"

	"golang.org/x/image/draw"
)

// maxSide bounds a side of the frame. maxPixels bounds the image between the two passes of a resize (32 bytes a
// pixel), which may be large for a long thin image.
const (
	maxSide   = 4096
	maxPixels = 16 << 20
)

// Prepare writes one image to dst as the network needs it: float32, [3, H, W] or [H, W, 3] by Layout,
// 3*Height*Width elements. Transparent pixels are blended over black. Resizing is that of golang.org/x/image/draw
// in 8 bits; a pixel differs from Pillow by about 1/255 at most.
func (c Config) Prepare(dst []float32, img *image.NRGBA) error {
	if img == nil || img.Rect.Empty() {
		return errors.New("no image")
	}
	if len(dst) != 3*c.Width*c.Height {
		return errors.New("prepare: dst has another length than the frame")
	}
	target := c.placed(img.Rect.Dx(), img.Rect.Dy())
	if int64(target.Dx())*int64(img.Rect.Dy()) > maxPixels {
		return fmt.Errorf("image of %dx%d: too large to resize to a frame of %dx%d", img.Rect.Dx(), img.Rect.Dy(),
			c.Width, c.Height)
	}
	frame := image.NewRGBA(image.Rect(0, 0, c.Width, c.Height))
	for i := 3; i < len(frame.Pix); i += 4 {
		frame.Pix[i] = 255
	}
	switch {
	case target.Dx() == img.Rect.Dx() && target.Dy() == img.Rect.Dy():
		draw.Draw(frame, target, img, img.Rect.Min, draw.Over)
	case c.Filter == FilterBilinear:
		draw.BiLinear.Scale(frame, target, img, img.Rect, draw.Over, nil)
	default:
		draw.CatmullRom.Scale(frame, target, img, img.Rect, draw.Over, nil)
	}
	plane := c.Width * c.Height
	for i := range plane {
		for ch := range 3 {
			from, to := ch, ch*plane+i
			if c.Channels == ChannelsBGR {
				from = 2 - ch
			}
			if c.Layout == LayoutNHWC {
				to = 3*i + ch
			}
			x := float64(c.Scale*float64(frame.Pix[4*i+from])) - c.Mean[ch]
			dst[to] = float32(x / c.Std[ch])
		}
	}
	return nil
}

// placed returns where the whole image lies in or over the frame. One side fits exactly, the other is rounded down;
// the image is centred as in torchvision.
func (c Config) placed(width, height int) image.Rectangle {
	w, h := c.Width, c.Height
	wide := width*c.Height > height*c.Width // wider than the frame
	switch {
	case c.Resize == ResizeExact:
	case wide == (c.Resize == ResizeShort):
		w = max(1, width*c.Height/height)
	default:
		h = max(1, height*c.Width/width)
	}
	left := int(math.RoundToEven(float64(c.Width-w) / 2))
	top := int(math.RoundToEven(float64(c.Height-h) / 2))
	return image.Rect(left, top, left+w, top+h)
}
