package reward

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/draw"
	"image/png"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// picture is the picture of a sample, decoded only while somebody looks at it: samples
// that wait hold no pixels.
type picture struct {
	bus    *bus.Bus
	stored *schemas.Image

	mu      sync.Mutex
	users   int
	decoded *image.NRGBA
}

// hold fetches the picture, or shares it with those who hold it already.
func (p *picture) hold(ctx context.Context) (*image.NRGBA, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.decoded == nil {
		im, err := load(ctx, p.bus, p.stored)
		if err != nil {
			return nil, err
		}
		p.decoded = im
	}
	p.users++
	return p.decoded, nil
}

func (p *picture) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users--; p.users == 0 {
		p.decoded = nil
	}
}

// load fetches and decodes a picture. Bytes that are not the picture the event describes
// are a terminal error.
func load(ctx context.Context, b *bus.Bus, im *schemas.Image) (*image.NRGBA, error) {
	data := im.Data
	if im.Ref != nil {
		var err error
		if data, err = b.GetBlob(ctx, *im.Ref); err != nil {
			return nil, fmt.Errorf("load picture: %w", err)
		}
	}
	conf, err := png.DecodeConfig(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %w", err))
	}
	if int64(conf.Width) != im.Width || int64(conf.Height) != im.Height {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %dx%d; the trajectory says %dx%d", conf.Width, conf.Height, im.Width, im.Height))
	}
	decoded, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %w", err))
	}
	if n, ok := decoded.(*image.NRGBA); ok {
		return n, nil
	}
	n := image.NewNRGBA(decoded.Bounds())
	draw.Draw(n, n.Bounds(), decoded, decoded.Bounds().Min, draw.Src)
	return n, nil
}
