package scorer

import (
	"context"
	"fmt"
	"image/jpeg"
	"runtime"
)

// The JPEG rewards of DDPO (Black et al. 2023, section 5.1): the size of the picture
// as a JPEG file of quality 95, in kilobytes (1000 bytes), and the negative of it.
const (
	JPEGIncompressibility = "jpeg_incompressibility"
	JPEGCompressibility   = "jpeg_compressibility"
)

const jpegQuality = 95

type jpegSize struct {
	name string
	sign float64
}

func (s jpegSize) Name() string { return s.name }

// Version names the Go release too: its encoder decides the bytes.
func (s jpegSize) Version() string { return "1-" + runtime.Version() }

func (s jpegSize) Score(ctx context.Context, in Input) (float64, error) {
	if err := check(ctx, in); err != nil {
		return 0, fmt.Errorf("%s: %w", s.name, err)
	}
	var size counter
	if err := jpeg.Encode(&size, in.Image, &jpeg.Options{Quality: jpegQuality}); err != nil {
		return 0, fmt.Errorf("%s: encode picture: %w", s.name, err)
	}
	return s.sign * float64(size) / 1000, nil
}

// counter counts the bytes written to it.
type counter int

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
