// Package pipeline runs the four services in one process: intake, sampler, reward and advantage. Prompts that are
// published on a bus become trajectories, rewards and advantages. The janitor, which frees what is no longer needed,
// runs in the same process.
package pipeline

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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

// A sampler that failed begins again after keepFirst, then after twice that, and so on up to keepMost; one that served
// for keepReset begins with keepFirst.
const (
	keepFirst = time.Second
	keepMost  = time.Minute
	keepReset = 5 * time.Minute
)

type keptSampler struct {
	lane schemas.Lane
	bus  *bus.Bus
	log  zerolog.Logger

	mu     sync.Mutex
	served bool
	why    error                   // why the lane is not served; nil: it is, or was never yet
	saying func() error            // ends what presence says of it; nil: nothing
	checks map[string]func() error // conditions of readiness of the sampler that runs
	notes  []func() []string
}

// keepSampling serves with a sampler until ctx ends. One that fails after it has served begins again, with its model
// opened anew; meanwhile presence and readiness say why its lane waits. An error is of a sampler that never served, or
// says that the connection is closed.
func keepSampling(ctx context.Context, c Config, b *bus.Bus, log zerolog.Logger) error {
	k := &keptSampler{lane: c.Lane(), bus: b, log: log, checks: map[string]func() error{}}
	own := c.Sampler
	if c.Health != nil {
		c.Health("sampler", k.fault)
		own.Health = func(name string, check func() error) { k.setCheck(c.Health, name, check) }
	}
	if c.Note != nil {
		c.Note(k.allNotes)
		own.Note = k.addNote
	}
	announced := sync.OnceFunc(func() {
		if c.Sampler.Announced != nil {
			c.Sampler.Announced()
		}
	})
	own.Announced = func() {
		k.say(ctx, nil)
		announced()
	}
	for pause := keepFirst; ; pause = min(2*pause, keepMost) {
		began := time.Now()
		err := sampler.Run(ctx, own, b, log)
		if err == nil || ctx.Err() != nil || !k.hasServed() || errors.Is(err, bus.ErrClosed) {
			k.stopSaying()
			return err
		}
		if time.Since(began) > keepReset {
			pause = keepFirst
		}
		k.say(ctx, fmt.Errorf("lane %s is not served; the next try is at %s: %w", k.lane,
			time.Now().Add(pause).Format(time.RFC3339), err))
		_ = bus.Pause(ctx, pause)
		k.addNote(nil)
	}
}

func (k *keptSampler) hasServed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.served
}

func (k *keptSampler) fault() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.why
}

// say has readiness, presence and log say why the lane is not served; nil: it is.
func (k *keptSampler) say(ctx context.Context, why error) {
	k.stopSaying()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.why = why; why == nil {
		k.served = true
		return
	}
	k.log.Error().Err(why).Msg("the sampler failed; all else goes on")
	instance := "starting-" + strings.ToLower(rand.Text()[:8])
	k.saying = k.bus.Announcing(ctx, func() *schemas.Presence {
		return &schemas.Presence{
			Service: schemas.ServiceStarting, Instance: instance, Lane: k.lane, Waiting: why.Error(),
		}
	}, nil)
}

// stopSaying ends what presence says of the lane.
func (k *keptSampler) stopSaying() {
	k.mu.Lock()
	saying := k.saying
	k.saying = nil
	k.mu.Unlock()
	if saying == nil {
		return
	}
	if err := saying(); err != nil {
		k.log.Error().Err(err).Msg("why the lane waits is not announced")
	}
}

// setCheck sets a condition of readiness of the sampler that runs, in place of that of the one before; add adds it the
// first time.
func (k *keptSampler) setCheck(add func(string, func() error), name string, check func() error) {
	k.mu.Lock()
	_, there := k.checks[name]
	k.checks[name] = check
	k.mu.Unlock()
	if there {
		return
	}
	add(name, func() error {
		k.mu.Lock()
		check, down := k.checks[name], k.why != nil
		k.mu.Unlock()
		if down {
			return nil // said already
		}
		return check()
	})
}

// addNote adds a source of notes of the sampler that runs; nil: another one will run.
func (k *keptSampler) addNote(say func() []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.notes = append(k.notes, say); say == nil {
		k.notes = nil
	}
}

// allNotes returns the notes of the sampler that runs.
func (k *keptSampler) allNotes() (lines []string) {
	k.mu.Lock()
	notes := slices.Clone(k.notes)
	k.mu.Unlock()
	for _, say := range notes {
		lines = append(lines, say()...)
	}
	return lines
}
