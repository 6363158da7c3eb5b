package sampler

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"sync/atomic"

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
	var why atomic.Pointer[string]
	changed, first, told := make(chan struct{}, 1), make(chan struct{}), c.Waiting
	begin := sync.OnceFunc(func() { close(first) })
	c.Waiting = func(text string) {
		switch {
		case told != nil:
			told(text)
		case text != "":
			log.Warn().Msg(text)
		}
		if why.Store(&text); text == "" {
			return
		}
		begin()
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	if c.Lane == "" {
		c.Lane = schemas.Lane(model.NameOf(c.Model))
	}
	instance := "starting-" + strings.ToLower(rand.Text()[:8])
	waiting, stop := context.WithCancel(ctx)
	var announcing sync.WaitGroup
	announcing.Go(func() {
		select {
		case <-first:
		case <-waiting.Done():
			return
		}
		err := b.Announce(waiting, func() *schemas.Presence {
			return &schemas.Presence{
				Service: schemas.ServiceStarting, Instance: instance, Lane: c.Lane,
				Waiting: *why.Load(),
			}
		}, changed)
		if err != nil {
			log.Error().Err(err).Msg("what the sampler waits for is not announced")
		}
	})
	defer announcing.Wait()
	defer stop()
	return c.openModel(ctx, log)
}
