package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/instrument"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler"
)

// connection is a bus and, when this process opened the store, the server behind it.
type connection struct {
	*bus.Bus
	// server is nil when someone else runs the pipeline.
	server *natsd.Server
	// where names the other end for people.
	where string
}

// connect joins the server named by --nats, or the pipeline that runs on the store,
// or opens the store itself. Then listen is the address for others to join us (empty:
// none), who must show the token unless that is empty; commands on the same store find
// both in its folder.
func (a *app) connect(ctx context.Context, listen, token string, log zerolog.Logger) (*connection, error) {
	cfg := bus.Config{Name: "meander", URL: a.natsURL, Token: a.token, CredsFile: a.creds}
	c := &connection{where: a.natsURL}
	if a.natsURL == "" {
		if info, ok := natsd.Running(a.store); ok {
			if info.URL == "" {
				return nil, fmt.Errorf("store %q is in use by process %d, which does not listen; wait for it to end, or use another --store", a.store, info.PID)
			}
			cfg.URL, cfg.Token, c.where = info.URL, info.Token, fmt.Sprintf("%s (process %d)", info.URL, info.PID)
		} else {
			server, err := natsd.Start(ctx, natsd.Options{StoreDir: a.store, Listen: listen, Token: token, Log: log})
			if err != nil {
				return nil, err
			}
			c.server, cfg.InProcess, c.where = server, server.InProcess(), "embedded server on "+a.store
		}
	}
	b, err := bus.Connect(ctx, cfg, log)
	if err != nil {
		return nil, errors.Join(err, c.closeServer())
	}
	c.Bus = b
	if c.server != nil {
		err = b.Setup(ctx)
	} else {
		err = b.Ready(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// openExisting is connect for commands that read: a store that is not there is the
// caller's mistake, not a reason to make one.
func (a *app) openExisting(ctx context.Context, log zerolog.Logger) (*connection, error) {
	if a.natsURL == "" {
		if _, err := os.Stat(filepath.Join(a.store, "jetstream")); errors.Is(err, os.ErrNotExist) {
			return nil, usage(fmt.Errorf("store %q has nothing in it; make a rollout first (meander run --store %s ...), or name a server with --nats", a.store, a.store))
		}
	}
	return a.connect(ctx, "", "", log)
}

// Close drains the bus, then stops the server if it is ours.
func (c *connection) Close() error {
	return errors.Join(c.Bus.Close(), c.closeServer())
}

func (c *connection) closeServer() error {
	if c.server == nil {
		return nil
	}
	return c.server.Close()
}

// services is the configuration of the four services in one process.
type services struct {
	intake    intake.Config
	sampler   sampler.Config
	reward    reward.Config
	advantage advantage.Config
	replicas  int
	// ackWait is that of all four.
	ackWait time.Duration
	// limits are those of streams.
	limits boot.Limits
	// store says what is wrong with the server in this process; nil: there is none.
	store func() error
	// metricsAddr is where metrics and health are served; empty: nowhere.
	metricsAddr string
}

func defaultServices() services {
	return services{
		intake: intake.DefaultConfig(), sampler: sampler.DefaultConfig(),
		reward: reward.DefaultConfig(), advantage: advantage.DefaultConfig(), replicas: 1,
		// All work is in this process: there is no network to be patient with.
		ackWait: 5 * time.Second,
	}
}

// validate applies what the services share and checks each.
func (s *services) validate() error {
	s.intake.AckWait, s.sampler.AckWait, s.reward.AckWait, s.advantage.AckWait = s.ackWait, s.ackWait, s.ackWait, s.ackWait
	err := errors.Join(s.limits.Validate(), s.intake.Validate(), s.sampler.Validate(), s.reward.Validate(), s.advantage.Validate())
	if s.replicas < 1 || s.replicas > 64 {
		err = errors.Join(err, fmt.Errorf("replicas: %d; must be between 1 and 64", s.replicas))
	}
	if err != nil {
		return usage(err)
	}
	return nil
}

// run serves until ctx ends and everything is drained. The order is the order in
// which data flows.
func (s services) run(ctx context.Context, b *bus.Bus, log zerolog.Logger) error {
	boot.SpareGC()
	registry := prometheus.DefaultRegisterer
	s.intake.Metrics, s.sampler.Metrics, s.reward.Metrics, s.advantage.Metrics = registry, registry, registry, registry
	defer instrument.Plane(registry, b)()
	health := boot.NewHealth("meander", boot.NewInstance())
	_, stop, err := health.Serve("--metrics-addr", s.metricsAddr, log)
	if err != nil {
		return err
	}
	defer stop()
	health.Connected(b)
	if s.store != nil {
		health.Check("store", s.store)
	}
	s.intake.Health = health.Check
	health.SetReady(true)
	defer context.AfterFunc(ctx, func() { health.SetReady(false) })()
	g, work := errgroup.WithContext(ctx)
	for range s.replicas {
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
		serve("intake", intake.Summary, func(log zerolog.Logger) error { return intake.Run(work, s.intake, b, log) })
		serve("sampler", sampler.Summary, func(log zerolog.Logger) error { return sampler.Run(work, s.sampler, b, log) })
		serve("reward", reward.Summary, func(log zerolog.Logger) error { return reward.Run(work, s.reward, b, log) })
		serve("advantage", advantage.Summary, func(log zerolog.Logger) error { return advantage.Run(work, s.advantage, b, log) })
	}
	g.Go(func() error { return b.WatchAdvisories(work) })
	err = g.Wait()
	switch {
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return nil // stopped before it was up
	case errors.Is(err, model.ErrUnknown):
		return usage(err)
	}
	return err
}

// newRunID is unique and sorts by time.
func newRunID() string {
	return "r" + time.Now().UTC().Format("20060102-150405") + "-" + shortToken()
}

// shortToken is random and readable.
func shortToken() string { return strings.ToLower(rand.Text()[:6]) }
