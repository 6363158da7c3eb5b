package reward

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/media"
	"github.com/meander-rl/meander/schemas"
)

const (
	// pixelBytes is the memory that one pixel counts for: 4 bytes decoded, 4 more while another layout is converted,
	// and 8 for what functions make of the image.
	pixelBytes = 16
	// An image file has at most filePixelBytes for each pixel, and fileBytes: no PNG needs more.
	filePixelBytes = 8
	fileBytes      = 64 << 10
	// fetchTimeout bounds how long it takes to read an image from the store.
	fetchTimeout = time.Minute
)

// errNoMemory means that other images use the memory now.
var errNoMemory = errors.New("no memory for the image now")

// imageMemory bounds the memory of all images in use. A call that holds an image must not wait for another one:
// otherwise two calls could wait for each other.
type imageMemory struct {
	free *semaphore.Weighted
	mib  int
}

func newImageMemory(mib int) *imageMemory {
	return &imageMemory{semaphore.NewWeighted(int64(mib) << 20), mib}
}

// cost returns the memory in bytes that an image needs, by the size that its trajectory names. An image that could
// never fit, or whose file is too large for its pixels, is a terminal error.
func (r *imageMemory) cost(im *schemas.Image) (int64, error) {
	pixels, file := im.Width*im.Height, int64(len(im.Data))
	if im.Ref != nil {
		file = im.Ref.Size
	}
	if most := filePixelBytes*pixels + fileBytes; file > most {
		return 0, bus.Terminal(schemas.CodeDecode,
			fmt.Errorf("image: %d bytes; a PNG of %dx%d pixels has at most %d", file, im.Width, im.Height, most))
	}
	cost := pixelBytes*pixels + file
	if most := int64(r.mib) << 20; cost > most {
		return 0, bus.Terminal(schemas.CodeTooLarge,
			fmt.Errorf("image: %dx%d pixels count for %d MiB; must be at most image_mib, %d",
				im.Width, im.Height, (cost+1<<20-1)>>20, r.mib))
	}
	return cost, nil
}

// sharedImage is the image of a sample for all its functions. It is decoded only while a function uses it, so samples
// that wait take no memory.
type sharedImage struct {
	bus    *bus.Bus
	memory *imageMemory
	stored *schemas.Image

	mu      sync.Mutex
	users   int
	cost    int64
	decoded media.Media
}

// hold returns the decoded image, which it loads if no other function uses it. Each success needs a release. If wait,
// it waits for memory; only a call that holds no image may do that. Otherwise it returns errNoMemory.
func (p *sharedImage) hold(ctx context.Context, wait bool) (media.Media, error) {
	if wait {
		p.mu.Lock()
	} else if !p.mu.TryLock() {
		return media.Media{}, errNoMemory
	}
	defer p.mu.Unlock()
	if p.decoded.Empty() {
		cost, err := p.memory.cost(p.stored)
		switch {
		case err != nil:
			return media.Media{}, err
		case wait:
			if err := p.memory.free.Acquire(ctx, cost); err != nil {
				return media.Media{}, err
			}
		case !p.memory.free.TryAcquire(cost):
			return media.Media{}, errNoMemory
		}
		fetch, stop := context.WithTimeout(ctx, fetchTimeout)
		defer stop()
		if p.decoded, err = load(fetch, p.bus, p.stored); err != nil {
			p.memory.free.Release(cost)
			return media.Media{}, err
		}
		p.cost = cost
	}
	p.users++
	return p.decoded, nil
}

// release ends one use of the image. The last one frees its memory.
func (p *sharedImage) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users--; p.users == 0 {
		p.decoded = media.Media{}
		p.memory.free.Release(p.cost)
	}
}

// load reads an image from the store and decodes it. The error is terminal if the bytes are not a PNG of the size that
// the event names.
func load(ctx context.Context, b *bus.Bus, im *schemas.Image) (media.Media, error) {
	data := im.Data
	if im.Ref != nil {
		var err error
		if data, err = b.GetBlob(ctx, *im.Ref); err != nil {
			return media.Media{}, fmt.Errorf("load image: %w", err)
		}
	}
	img, err := media.DecodePNG(data, media.ImageSize(im.Height, im.Width))
	if err != nil {
		return media.Media{}, bus.Terminal(schemas.CodeDecode, fmt.Errorf("image: %w", err))
	}
	return media.Of(img), nil
}
