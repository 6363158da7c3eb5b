// Command meander-intake turns prompts into one request per sample. See --help.
package main

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/janitor"
)

// config is the settings of intake and of the janitor: the program that sets the streams up also frees them.
type config struct {
	Intake  intake.Config
	Janitor janitor.Config
}

// Validate joins the faults of both.
func (c config) Validate() error { return errors.Join(c.Intake.Validate(), c.Janitor.Validate()) }

// run runs intake and the janitor until ctx ends or one of them fails.
func run(ctx context.Context, c config, b *bus.Bus, log zerolog.Logger) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return intake.Run(ctx, c.Intake, b, log) })
	g.Go(func() error { return janitor.Run(ctx, c.Janitor, b, log) })
	return g.Wait()
}

func main() {
	defaults := config{Intake: intake.DefaultConfig(), Janitor: janitor.DefaultConfig()}
	// what the health endpoint shows
	defaults.Intake.Metrics, defaults.Janitor.Metrics = prometheus.DefaultRegisterer, prometheus.DefaultRegisterer
	boot.Main(boot.Service[config]{
		Name:       "intake",
		Summary:    intake.Summary,
		Default:    defaults,
		HealthAddr: "127.0.0.1:8081",
		Setup:      true, // the one program every pipeline has once
		Examples: []string{
			"meander-intake --nats-url nats://127.0.0.1:4222",
			"meander-intake --reward jpeg_incompressibility --log-level debug",
			"MEANDER_NATS_TOKEN=... meander-intake --config intake.yaml",
			"meander-intake --gc-above 80 --gc-age 48h    # frees closed groups",
			"meander-intake --print-config > intake.yaml",
		},
		Health: func(c *config, h *boot.Health) { c.Intake.Health, c.Intake.Note = h.Check, h.Note },
		Run:    run,
	})
}
