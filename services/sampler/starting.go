package sampler

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/models"
)

// openAnnounced is openModel; while a server is waited for, presence says so, for those who ask for its lane.
func (c Config) openAnnounced(ctx context.Context, b *bus.Bus, log zerolog.Logger) (*models.Devices, error) {
	if c.Engine == "" || models.IsTorch(c.Engine) {
		return c.openModel(ctx, log)
	}
	if c.Lane == "" {
		c.Lane = schemas.Lane(model.NameOf(c.Model))
	}
	var mu sync.Mutex
	var end func() error // of the announcement; nil: there is none
	why, over := "", false
	changed, told, instance := make(chan struct{}, 1), c.Waiting, "starting-"+strings.ToLower(rand.Text()[:8])
	presence := func() *schemas.Presence {
		mu.Lock()
		defer mu.Unlock()
		return &schemas.Presence{Service: schemas.ServiceStarting, Instance: instance, Lane: c.Lane, Waiting: why}
	}
	c.Waiting = func(text string) {
		switch {
		case told != nil:
			told(text)
		case text != "":
			log.Warn().Msg(text)
		}
		mu.Lock()
		defer mu.Unlock()
		if over || text == "" {
			return
		}
		if why = text; end == nil {
			end = b.Announcing(ctx, presence, changed)
			return
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	defer func() {
		mu.Lock()
		over = true
		mu.Unlock()
		if end == nil {
			return
		}
		if err := end(); err != nil {
			log.Error().Err(err).Msg("what the sampler waits for is not announced")
		}
	}()
	return c.openModel(ctx, log)
}
