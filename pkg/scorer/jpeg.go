package scorer

import (
	"context"
	"fmt"
	"image"
	"image/jpeg"
	"runtime"
	"strconv"
)

// The JPEG rewards of DDPO (Black et al. 2023, section 5.1): the size of the image
// as a JPEG file of quality 95, in kilobytes (1000 bytes), and the negative of it. Params:
//
//	divisor  a number above 0 that the size is divided by; default 1. Flow-GRPO and
//	         verl-omni divide by 500 in jpeg_compressibility, and not in the other.
//
// The encoder is Go's. Pillow's, libjpeg-turbo, which the references use, writes about 0.03 kB more for 128x64 pixels
// (0.02 to 0.06 for images of signs) and about 0.3 % less for contact sheets of 1106x434.
const (
	JPEGIncompressibility = "jpeg_incompressibility"
	JPEGCompressibility   = "jpeg_compressibility"
)

const jpegQuality = 95

var jpegParams = []string{"divisor"}

type jpegSize struct {
	name string
	sign float64
}

func (s jpegSize) Name() string { return s.name }

// Version names the Go release too: its encoder decides the bytes.
func (s jpegSize) Version() string { return "1-" + runtime.Version() }

// Score returns the size of the image as a JPEG file in kilobytes, with the sign of the reward function, over the
// divisor.
func (s jpegSize) Score(ctx context.Context, in Input) (float64, error) {
	img, err := in.image(ctx)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", s.name, err)
	}
	divisor, err := jpegDivisor(in.Params)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", s.name, err)
	}
	var pixels image.Image = img
	if img.Opaque() { // the same bytes, which the encoder has a faster way for
		pixels = &image.RGBA{Pix: img.Pix, Stride: img.Stride, Rect: img.Rect}
	}
	var size counter
	if err := jpeg.Encode(&size, pixels, &jpeg.Options{Quality: jpegQuality}); err != nil {
		return 0, fmt.Errorf("%s: encode image: %w", s.name, err)
	}
	return s.sign * float64(size) / 1000 / divisor, nil
}

// jpegDivisor returns the param divisor, 1 by default. Other params are errors.
func jpegDivisor(params map[string]string) (float64, error) {
	divisor := 1.0
	for name, value := range params {
		if name != jpegParams[0] {
			return 0, fmt.Errorf("params: %q; must be %s", name, jpegParams[0])
		}
		var err error
		if divisor, err = strconv.ParseFloat(value, 64); err != nil || !(divisor >= 1e-6 && divisor <= 1e6) {
			return 0, fmt.Errorf("params.divisor: %q; must be a number from 0.000001 to 1000000", value)
		}
	}
	return divisor, nil
}

// counter counts the bytes written to it.
type counter int

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
