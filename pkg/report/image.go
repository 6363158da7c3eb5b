package report

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"html/template"
	"image"
	"image/color"
	"image/jpeg"
	"math"
	"strings"

	"golang.org/x/image/draw"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/schemas"
)

// sides are the longer sides to which an image that is too large is reduced, in pixels.
var sides = []int{1024, 768, 512, 384, 256, 192, 128, 96, 64}

const (
	// leastImage is what every image may take, in bytes, as long as there is room.
	leastImage = 2 << 10
	quality    = 85
	// leastPerPixel is less than the bytes that a pixel of a JPEG of this quality takes, but for flat images.
	leastPerPixel = 0.08
)

// fitter makes images fit into the page.
type fitter struct {
	bus *bus.Bus
	// left is the room for images in bytes, images how many are still to come.
	left, images int
	contents     *Contents
}

// image returns the image of a trajectory as an address of its bytes, or why there is none on the page. An error is of
// the server.
func (f *fitter) image(ctx context.Context, t *schemas.Trajectory) (uri template.URL, absent string, err error) {
	allowed := min(f.left, max(f.left/max(f.images, 1), leastImage))
	f.images--
	data, err := client.New(f.bus).Image(ctx, t)
	if errors.Is(err, client.ErrNotFound) {
		f.contents.ImagesGone++
		return "", "no longer stored", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("image of %s sample %d: %w", t.UID, t.SampleIndex, err)
	}
	uri = address("png", data)
	if sizeInPage(uri) > allowed {
		stored, err := media.Decode(data, media.ImageSize(t.Image.Height, t.Image.Width))
		if err != nil || stored.Empty() {
			f.contents.ImagesGone++
			return "", "cannot be read", nil
		}
		if uri = reduce(stored.Frames[0], allowed); uri == "" {
			f.contents.ImagesLeftOut++
			return "", "left out: no room", nil
		}
		f.contents.Reduced++
	}
	f.contents.Images++
	f.left -= sizeInPage(uri)
	return uri, "", nil
}

// address returns the bytes of an image as its address.
func address(kind string, data []byte) template.URL {
	return template.URL("data:image/" + kind + ";base64," + base64.StdEncoding.EncodeToString(data))
}

// sizeInPage is how many bytes an address takes in the page, where a plus is written &#43;.
func sizeInPage(uri template.URL) int { return len(uri) + 4*strings.Count(string(uri), "+") }

// reduce returns the largest JPEG of an image that takes at most that many bytes of the page; "" if none does.
func reduce(src *image.NRGBA, allowed int) template.URL {
	flat := image.NewRGBA(image.Rectangle{Max: src.Rect.Size()}) // JPEG knows no transparency
	draw.Draw(flat, flat.Rect, image.NewUniform(color.White), image.Point{}, draw.Src)
	draw.Draw(flat, flat.Rect, src, src.Rect.Min, draw.Over)
	size := flat.Rect.Size()
	longer := max(size.X, size.Y)
	hopeless := math.Sqrt(float64(allowed)*3/4/leastPerPixel) * math.Sqrt(float64(longer)/float64(min(size.X, size.Y)))
	for _, side := range append([]int{longer}, sides...) {
		if side > longer || side > sides[len(sides)-1] && float64(side) > hopeless {
			continue
		}
		small := flat
		if side < longer {
			small = image.NewRGBA(image.Rect(0, 0, max(1, size.X*side/longer), max(1, size.Y*side/longer)))
			draw.BiLinear.Scale(small, small.Rect, flat, flat.Rect, draw.Src, nil)
		}
		var buf bytes.Buffer
		if err := jpeg.Encode(&buf, small, &jpeg.Options{Quality: quality}); err != nil {
			return "" // too wide for the format
		}
		if uri := address("jpeg", buf.Bytes()); sizeInPage(uri) <= allowed {
			return uri
		}
	}
	return ""
}
