package command

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/instrument"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler"
)

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
	// metricsAddr is where metrics and health are served; empty: nowhere.
	metricsAddr string
	// flags set all this; nil where the command has none.
	flags *pflag.FlagSet
	// adopted are the settings of the pipeline that this process has joined.
	adopted map[string]string
}

func defaultServices() services {
	return services{
		intake: intake.DefaultConfig(), sampler: sampler.DefaultConfig(),
		reward: reward.DefaultConfig(), advantage: advantage.DefaultConfig(), replicas: 1,
		// All work is in this process: there is no network to be patient with.
		ackWait: 5 * time.Second,
	}
}

// ofProcess are flags of the process alone: another one that goes on has its own.
var ofProcess = []string{"metrics-addr"}

// settings are the values of the flags, as another process can use them.
func (s *services) settings() map[string]string {
	out := map[string]string{}
	s.flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(ofProcess, f.Name) {
			out[f.Name] = setting(f)
		}
	})
	return out
}

// setting is the value of a flag; a file by its full name.
func setting(f *pflag.Flag) string {
	value := f.Value.String()
	if f.Value.Type() != "string" || value == "" {
		return value
	}
	if full, err := filepath.Abs(value); err == nil {
		if _, err := os.Stat(full); err == nil {
			return full
		}
	}
	return value
}

// adopt takes on the settings of a pipeline that runs. Flags that were given otherwise
// are refused: only who serves can honour them. Once settled, another pipeline is
// agreed with when it has the same settings.
func (s *services) adopt(running map[string]string, where string) error {
	var errs []error
	s.flags.VisitAll(func(f *pflag.Flag) {
		value, known := running[f.Name]
		switch {
		case slices.Contains(ofProcess, f.Name):
			if s.adopted == nil && f.Changed {
				errs = append(errs, fmt.Errorf("--%s: %q; %s has its own; leave it out", f.Name, f.Value, where))
			}
		case !known:
		case s.adopted != nil && s.adopted[f.Name] != value, s.adopted == nil && f.Changed && setting(f) != value:
			errs = append(errs, fmt.Errorf("--%s: %q; %s runs with %q; leave it out, or use another --store", f.Name, f.Value, where, value))
		case s.adopted == nil && !f.Changed:
			if err := f.Value.Set(value); err != nil {
				errs = append(errs, fmt.Errorf("--%s: %s runs with %q: %w", f.Name, where, value, err))
			}
		}
	})
	if err := errors.Join(errs...); err != nil {
		return usage(err)
	}
	if s.adopted == nil {
		s.adopted = running
	}
	return nil
}

// refuse is the error when flags were given that only who serves can honour.
func (s *services) refuse(why string) error {
	var errs []error
	s.flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			errs = append(errs, fmt.Errorf("--%s: %q; %s", f.Name, f.Value, why))
		}
	})
	if len(errs) > 0 {
		return usage(errors.Join(errs...))
	}
	return nil
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
func (s services) run(ctx context.Context, conn *connection, log zerolog.Logger) error {
	b := conn.Bus
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
	if conn.member != nil {
		health.Check("store", conn.member.Fault)
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
