package ui

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"math"

	"golang.org/x/image/draw"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/view"
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

// place is an image or a sound of a report.
type place struct {
	key string
	t   *schemas.Trajectory
	of  *schemas.Medium // nil: a condition of it
	at  int             // which condition
}

// places returns the images and sounds of the samples, or of their stages.
func (r *report) places() (places []place) {
	rows := r.Answers["runs/"+string(r.Run)+"/groups"].(*view.Groups).Rows
	for _, row := range rows {
		g := r.Answers["runs/"+string(r.Run)+"/groups/"+string(row.UID)].(*view.Group)
		at, seen := fmt.Sprintf("%s/%s/", r.Run, g.UID), false
		add := func(l *view.Line, t *schemas.Trajectory, of string) {
			for i := range l.Conditions {
				places = append(places, place{fmt.Sprintf("%scondition-%d", of, i), t, nil, i})
			}
			for _, kind := range l.Media {
				if kind != schemas.KindVideo { // its image stands for it
					places = append(places, place{at + l.Place + "/" + kind, t, t.Medium(kind), 0})
				}
			}
		}
		for _, l := range g.Stages {
			add(l.Line, l.Trajectory(), at+l.Place+"/")
		}
		for _, l := range g.Samples {
			if len(g.Stages) > 0 {
				break
			}
			line := *l
			if seen { // a group has conditions once: they are of its prompt
				line.Conditions = nil
			}
			add(&line, g.Trajectory(l.SampleIndex), at)
			seen = seen || len(l.Conditions) > 0
		}
	}
	return places
}

// addImages adds the images and sounds of samples: they share the room of left bytes evenly, and what one does not need
// is for those after it. An error is of the server.
func (r *report) addImages(ctx context.Context, b *bus.Bus, left int, c *Contents) error {
	places, first := r.places(), map[[sha256.Size]byte]string{}
	for i, at := range places {
		allowed := min(left, max(left/(len(places)-i), leastImage))
		var data []byte
		var err error
		size := media.Size{}
		if at.of != nil {
			data, err = client.New(b).Medium(ctx, at.t, at.of.Kind)
			size = media.ImageSize(at.of.Height, at.of.Width)
		} else if data, err = client.New(b).Condition(ctx, at.t.Conditions[at.at]); err == nil {
			size, _ = media.ReadInput(data) // it is no image: Decode says so
		}
		if errors.Is(err, client.ErrNotFound) {
			c.ImagesGone++
			continue
		}
		if err != nil {
			return fmt.Errorf("file %s: %w", at.key, err)
		}
		sum := sha256.Sum256(data)
		if key, there := first[sum]; there { // a judge sees what was painted
			r.Media[at.key] = key
			c.Images++
			continue
		}
		sound := at.of != nil && at.of.Kind == schemas.KindAudio
		uri := address(contentTypes[schemas.KindImage], data)
		if sound {
			uri = address(contentTypes[schemas.KindAudio], data)
		}
		if sound && len(uri) > allowed {
			c.ImagesLeftOut++
			continue
		}
		if !sound && (len(uri) > allowed || !bytes.HasPrefix(data, pngMagic)) {
			stored, err := media.Decode(data, size)
			if err != nil || stored.Empty() {
				c.ImagesGone++
				continue
			}
			if uri = reduce(stored.Frames[0], allowed); uri == "" {
				c.ImagesLeftOut++
				continue
			}
			c.Reduced++
		}
		c.Images++
		left -= len(uri)
		r.Media[at.key], first[sum] = uri, at.key
	}
	return nil
}

// address returns the bytes of a file as its address.
func address(contentType string, data []byte) string {
	return "data:" + contentType + ";base64," + base64.StdEncoding.EncodeToString(data)
}

// reduce returns the largest JPEG of an image that takes at most that many bytes of the file; "" if none does.
func reduce(src *image.NRGBA, allowed int) string {
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
		if uri := address("image/jpeg", buf.Bytes()); len(uri) <= allowed {
			return uri
		}
	}
	return ""
}
