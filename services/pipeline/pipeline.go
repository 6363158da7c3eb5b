// Package pipeline is the four services in one process: prompts that come to a bus become
// trajectories, rewards and advantages.
package pipeline

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/instrument"
	"github.com/meander-rl/meander/services/janitor"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler"
)

// Config is the settings of the four services. What they share stands here once, and counts.
type Config struct {
	Intake    intake.Config
	Sampler   sampler.Config
	Reward    reward.Config
	Advantage advantage.Config
	// Janitor frees what nobody needs any more, where it has a rule.
	Janitor janitor.Config
	// Replicas is the copies of each service, 1 to 64.
	Replicas int
	// AckWait is after how long work that nobody reports on is taken up again.
	AckWait time.Duration
	// DiskFree says how many bytes of the server's disk are free; nil: nobody knows.
	DiskFree func() (int64, error)
	// Health adds a condition of readiness; nil: nobody asks.
	Health func(name string, check func() error)
	// Note adds what readiness says of work that waits on purpose; nil: nobody asks.
	Note func(say func() []string)
}

// Lane is the lane of the sampler.
func (c Config) Lane() schemas.Lane {
	return cmp.Or(c.Sampler.Lane, schemas.Lane(model.NameOf(c.Sampler.Model)))
}

// DefaultConfig paints with the model signs, a copy of each service.
func DefaultConfig() Config {
	c := Config{
		Intake: intake.DefaultConfig(), Sampler: sampler.DefaultConfig(),
		Reward: reward.DefaultConfig(), Advantage: advantage.DefaultConfig(), Janitor: janitor.DefaultConfig(), Replicas: 1,
		// All work is in this process: there is no network to be patient with.
		AckWait: 5 * time.Second,
	}
	c.share()
	return c
}

// Validate joins every fault by field name.
func (c Config) Validate() error {
	c.share()
	err := errors.Join(c.Intake.Validate(), c.Sampler.Validate(), c.Reward.Validate(), c.Advantage.Validate(), c.Janitor.Validate())
	if c.Replicas < 1 || c.Replicas > 64 {
		err = errors.Join(err, fmt.Errorf("replicas: %d; must be between 1 and 64", c.Replicas))
	}
	return err
}

// share gives each service what they have in common.
func (c *Config) share() {
	c.Intake.AckWait, c.Sampler.AckWait, c.Reward.AckWait, c.Advantage.AckWait = c.AckWait, c.AckWait, c.AckWait, c.AckWait
}

// Run serves until ctx ends and everything is drained; then the error is nil. The streams
// have to be set up (bus.Setup). The order is the order in which data flows. Metrics go to
// Prometheus' default registry.
func Run(ctx context.Context, b *bus.Bus, c Config, log zerolog.Logger) error {
	boot.SpareGC()
	c.share()
	c.Intake.Models = []schemas.Lane{c.Lane()}
	c.Intake.Health, c.Sampler.Health, c.Sampler.DiskFree = c.Health, c.Health, c.DiskFree
	c.Intake.Note, c.Sampler.Note = c.Note, c.Note
	registry := prometheus.DefaultRegisterer
	c.Intake.Metrics, c.Sampler.Metrics, c.Reward.Metrics, c.Advantage.Metrics, c.Janitor.Metrics = registry, registry, registry, registry, registry
	defer instrument.Plane(registry, b)()
	g, work := errgroup.WithContext(ctx)
	for range c.Replicas {
		serve := func(name, summary string, run func(zerolog.Logger) error) {
			g.Go(func() error {
				log := log.With().Str("service", name).Logger()
				leave, err := boot.Announce(b, name, summary, boot.NewInstance(), log)
				if err != nil {
					return err
				}
				defer leave()
				return run(log)
			})
		}
		serve("intake", intake.Summary, func(log zerolog.Logger) error { return intake.Run(work, c.Intake, b, log) })
		serve("sampler", sampler.Summary, func(log zerolog.Logger) error { return sampler.Run(work, c.Sampler, b, log) })
		serve("reward", reward.Summary, func(log zerolog.Logger) error { return reward.Run(work, c.Reward, b, log) })
		serve("advantage", advantage.Summary, func(log zerolog.Logger) error { return advantage.Run(work, c.Advantage, b, log) })
	}
	g.Go(func() error { return b.WatchAdvisories(work) })
	g.Go(func() error {
		return janitor.Run(work, c.Janitor, b, log.With().Str("service", "janitor").Logger())
	})
	err := g.Wait()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // stopped before it was up
	}
	return err
}
