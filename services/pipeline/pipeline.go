// Package pipeline runs the four services in one process: intake, sampler, reward and advantage. Prompts that are
// published on a bus become trajectories, rewards and advantages. The janitor, which frees what is no longer needed,
// runs in the same process.
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
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/instrument"
	"github.com/meander-rl/meander/services/janitor"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler"
)

// Config holds the settings of all services. A setting that they share, such as AckWait, is here once, before theirs,
// and replaces theirs.
type Config struct {
	Replicas  int           `key:"replicas" range:"1..64" help:"copies of each service in this process"`
	AckWait   time.Duration `key:"ack_wait" range:"1s.." help:"deliver the work of a crashed process again after this long"`
	Intake    intake.Config
	Sampler   sampler.Config
	Reward    reward.Config
	Advantage advantage.Config
	// Janitor says what is freed; without a rule nothing is.
	Janitor janitor.Config
	// Keep has a sampler that has served, and fails, begin again after a pause that grows: its lane waits, and all
	// else goes on. Without it, as in a command that ends, the failure ends all services.
	Keep bool `key:"-"`
	// DiskFree returns how many bytes of the server's disk are free; nil: not known.
	DiskFree func() (int64, error) `key:"-"`
	// Health adds a condition of readiness; it may be nil.
	Health func(name string, check func() error) `key:"-"`
	// Note adds what readiness says about work that waits on purpose; it may be nil.
	Note func(say func() []string) `key:"-"`
}

// Lane returns the lane of the sampler: the configured one, or the name of its model.
func (c Config) Lane() schemas.Lane {
	return cmp.Or(c.Sampler.Lane, schemas.Lane(model.NameOf(c.Sampler.Model)))
}

// DefaultConfig returns settings for one copy of each service, with the built-in model signs, and settings that all
// services share.
func DefaultConfig() Config {
	c := Config{
		Intake: intake.DefaultConfig(), Sampler: sampler.DefaultConfig(),
		Reward: reward.DefaultConfig(), Advantage: advantage.DefaultConfig(), Janitor: janitor.DefaultConfig(),
		Replicas: 1,
		// All work is in this process: no network delays a heartbeat.
		AckWait: 5 * time.Second,
	}
	c.share()
	return c
}

// Validate checks the settings of all services. It returns their faults joined, each with its field name.
func (c Config) Validate() error {
	c.share()
	err := errors.Join(c.Intake.Validate(), c.Sampler.Validate(), c.Reward.Validate(), c.Advantage.Validate(),
		c.Janitor.Validate())
	if c.Replicas < 1 || c.Replicas > 64 {
		err = errors.Join(err, fmt.Errorf("replicas: %d; must be between 1 and 64", c.Replicas))
	}
	return err
}

// share copies the settings that the services share into theirs.
func (c *Config) share() {
	for _, wait := range []*time.Duration{
		&c.Intake.AckWait, &c.Sampler.AckWait, &c.Reward.AckWait,
		&c.Advantage.AckWait,
	} {
		*wait = c.AckWait
	}
	c.Janitor.WeightsDir = c.Sampler.WeightsDir
}

// Run serves with all services until ctx ends and they have drained; then the error is nil. If one service fails, all
// end, and its error is returned; Config.Keep is the exception. The streams must be set up before (bus.Setup). Metrics
// go to the default registry of Prometheus.
func Run(ctx context.Context, b *bus.Bus, c Config, log zerolog.Logger) error {
	c.share()
	c.Intake.Models = []schemas.Lane{c.Lane()}
	c.Intake.Health, c.Sampler.Health, c.Sampler.DiskFree = c.Health, c.Health, c.DiskFree
	c.Intake.DiskFree = c.DiskFree
	c.Intake.Note, c.Sampler.Note = c.Note, c.Note
	registry := prometheus.DefaultRegisterer
	c.Intake.Metrics, c.Sampler.Metrics, c.Reward.Metrics = registry, registry, registry
	c.Advantage.Metrics, c.Janitor.Metrics = registry, registry
	defer instrument.ShowStreams(registry, b)()
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
		serve("sampler", sampler.Summary, func(log zerolog.Logger) error {
			if c.Keep {
				return keepSampling(work, c, b, log)
			}
			return sampler.Run(work, c.Sampler, b, log)
		})
		serve("reward", reward.Summary, func(log zerolog.Logger) error { return reward.Run(work, c.Reward, b, log) })
		serve("advantage", advantage.Summary,
			func(log zerolog.Logger) error { return advantage.Run(work, c.Advantage, b, log) })
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
