package reward

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"image/png"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// pixelBytes is what one pixel counts for: 4 bytes decoded, as many again while another
	// layout is converted, and 8 for what functions make of the image.
	pixelBytes = 16
	// filePixelBytes and fileBytes bound the file of an image by its size: no PNG is larger.
	filePixelBytes = 8
	fileBytes      = 64 << 10
	// fetchTimeout bounds the way of an image from the store.
	fetchTimeout = time.Minute
)

// errNoRoom says that other images take the memory.
var errNoRoom = errors.New("no room for the image now")

// room bounds the memory of all images that are in hand. Whoever holds one never waits
// for another: two that did would wait for each other.
type room struct {
	left *semaphore.Weighted
	mib  int
}

func newRoom(mib int) *room { return &room{semaphore.NewWeighted(int64(mib) << 20), mib} }

// cost is what an image takes, by what its trajectory says; more than there is at all is
// a terminal error.
func (r *room) cost(im *schemas.Image) (int64, error) {
	pixels, file := im.Width*im.Height, int64(len(im.Data))
	if im.Ref != nil {
		file = im.Ref.Size
	}
	if most := filePixelBytes*pixels + fileBytes; file > most {
		return 0, bus.Terminal(schemas.CodeDecode, fmt.Errorf("image: %d bytes; a PNG of %dx%d pixels has at most %d", file, im.Width, im.Height, most))
	}
	cost := pixelBytes*pixels + file
	if most := int64(r.mib) << 20; cost > most {
		return 0, bus.Terminal(schemas.CodeTooLarge, fmt.Errorf("image: %dx%d pixels count for %d MiB; must be at most image_mib, %d",
			im.Width, im.Height, (cost+1<<20-1)>>20, r.mib))
	}
	return cost, nil
}

// sharedImage is the image of a sample, decoded only while somebody looks at it: samples
// that wait hold no pixels.
type sharedImage struct {
	bus    *bus.Bus
	room   *room
	stored *schemas.Image

	mu      sync.Mutex
	users   int
	cost    int64
	decoded *image.NRGBA
}

// hold fetches the image, or shares it with those who hold it already. With wait it
// waits until there is room; that is for who holds no other. Without, it is errNoRoom.
func (p *sharedImage) hold(ctx context.Context, wait bool) (*image.NRGBA, error) {
	if wait {
		p.mu.Lock()
	} else if !p.mu.TryLock() {
		return nil, errNoRoom
	}
	defer p.mu.Unlock()
	if p.decoded == nil {
		cost, err := p.room.cost(p.stored)
		switch {
		case err != nil:
			return nil, err
		case wait:
			if err := p.room.left.Acquire(ctx, cost); err != nil {
				return nil, err
			}
		case !p.room.left.TryAcquire(cost):
			return nil, errNoRoom
		}
		fetch, stop := context.WithTimeout(ctx, fetchTimeout)
		defer stop()
		if p.decoded, err = load(fetch, p.bus, p.stored); err != nil {
			p.room.left.Release(cost)
			return nil, err
		}
		p.cost = cost
	}
	p.users++
	return p.decoded, nil
}

func (p *sharedImage) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users--; p.users == 0 {
		p.decoded = nil
		p.room.left.Release(p.cost)
	}
}

// load fetches and decodes an image. Bytes that are not the image the event describes
// are a terminal error.
func load(ctx context.Context, b *bus.Bus, im *schemas.Image) (*image.NRGBA, error) {
	data := im.Data
	if im.Ref != nil {
		var err error
		if data, err = b.GetBlob(ctx, *im.Ref); err != nil {
			return nil, fmt.Errorf("load image: %w", err)
		}
	}
	conf, err := png.DecodeConfig(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("image: %w", err))
	}
	if int64(conf.Width) != im.Width || int64(conf.Height) != im.Height {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("image: %dx%d; the trajectory says %dx%d", conf.Width, conf.Height, im.Width, im.Height))
	}
	decoded, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("image: %w", err))
	}
	switch d := decoded.(type) {
	case *image.NRGBA:
		return d, nil
	case *image.RGBA:
		if d.Opaque() { // then the bytes are the same
			return &image.NRGBA{Pix: d.Pix, Stride: d.Stride, Rect: d.Rect}, nil
		}
	}
	n := image.NewNRGBA(decoded.Bounds())
	draw.Draw(n, n.Bounds(), decoded, decoded.Bounds().Min, draw.Src)
	return n, nil
}
