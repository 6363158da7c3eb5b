package command

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/pipeline"
)

// services is the pipeline of a command that runs one, as its flags configure it.
type services struct {
	pipeline.Config
	// limits are the limits of the streams.
	limits boot.Limits
	// metricsAddr is host:port for metrics and health; empty: none.
	metricsAddr string
	// certificate is that of the server of this process; nil: it has none.
	certificate *x509.Certificate
	// flags set the fields above; nil if the command has none.
	flags *pflag.FlagSet
	// adopted are the settings of the pipeline that this process has joined.
	adopted map[string]string
	// loading says how far the sampler's model is loaded.
	loading *loading
	// ready is closed, by announced, once the sampler of this process has announced its model.
	ready     chan struct{}
	announced func()
}

// defaultServices returns the pipeline without flags.
func defaultServices() services {
	ready := make(chan struct{})
	return services{
		Config: pipeline.DefaultConfig(), loading: &loading{}, ready: ready,
		announced: sync.OnceFunc(func() { close(ready) }),
	}
}

// bind returns the settings of the services as flags. One that several services share is set in all.
func (s *services) bind() *fields.Set { return fields.Bind("", &s.Config) }

// ofProcess are flags of one process; a process that takes over uses its own.
var ofProcess = []string{"metrics-addr"}

// settings returns the values of the service flags by name, in a form that another process on the store can adopt.
func (s *services) settings() map[string]string {
	out := map[string]string{}
	s.flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(ofProcess, f.Name) {
			out[f.Name] = flagSetting(f)
		}
	})
	return out
}

// flagSetting returns the value of a flag as another process can use it; a file with its absolute path.
func flagSetting(f *pflag.Flag) string {
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

// adoptSettings sets the flags that were not given to the settings of a running pipeline. Given flags that differ are
// usage errors: only the process that runs the pipeline can obey them. Once adopted, only pipelines with the same
// settings are accepted.
func (s *services) adoptSettings(running map[string]string, where string) error {
	var errs []error
	s.flags.VisitAll(func(f *pflag.Flag) {
		value, known := running[f.Name]
		switch {
		case slices.Contains(ofProcess, f.Name):
			if s.adopted == nil && f.Changed {
				errs = append(errs, fmt.Errorf("--%s: %q; %s has its own; leave this flag out", f.Name, f.Value, where))
			}
		case !known:
		case s.adopted != nil && s.adopted[f.Name] != value, s.adopted == nil && f.Changed && flagSetting(f) != value:
			errs = append(errs, fmt.Errorf("--%s: %q; %s runs with %q; leave this flag out, or use another --store",
				f.Name, f.Value, where, value))
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

// refuseFlags returns a usage error that names each service flag that the user set, with the reason why this command
// cannot obey it: another process runs the pipeline. nil: the user set none.
func (s *services) refuseFlags(why string) error {
	var errs []error
	s.flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			errs = append(errs, fmt.Errorf("--%s: %q; %s%s", f.Name, f.Value, why,
				present.When(f.Name == "model", "; --lane names one of its lanes")))
		}
	})
	if len(errs) > 0 {
		return usage(errors.Join(errs...))
	}
	return nil
}

// validate checks the settings of the services, before they start; the usage error names the flags.
func (s *services) validate() error {
	s.Sampler.EngineKey = engineKey(s.Sampler.Engine)
	err := errors.Join(s.limits.Validate(), s.Validate())
	if s.metricsAddr != "" {
		if _, _, bad := net.SplitHostPort(s.metricsAddr); bad != nil {
			err = errors.Join(err, fmt.Errorf("metrics_addr: %q; must be host:port, such as 127.0.0.1:9090",
				s.metricsAddr))
		}
	}
	for key, path := range map[string]string{"adapter": s.Sampler.Adapter, "scorers": s.Reward.Scorers} {
		if _, ok := hub.Parse(path); ok && key == "adapter" {
			continue // it is there, or fetched
		}
		if _, missing := os.Stat(path); path != "" && missing != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", key, missing))
		}
	}
	return settingError(err)
}

// engineKeyVariable has the key of the server of --engine, or the token of its worker; meander-sampler reads it, too.
const engineKeyVariable = "MEANDER_SAMPLER_ENGINE_KEY"

// engineKey returns the key for an engine at an address; empty for one that is started here.
func engineKey(engine string) string {
	if !strings.Contains(engine, "=") {
		return ""
	}
	return os.Getenv(engineKeyVariable)
}

// settingKey matches the key of a setting at the beginning of an error.
var settingKey = regexp.MustCompile(`(?m)^[a-z]+(_[a-z]+)*: `)

// settingError makes an error of settings a usage error that names the flags; nil stays nil.
func settingError(err error) error {
	if err == nil {
		return nil
	}
	return usage(errors.New(settingKey.ReplaceAllStringFunc(err.Error(), func(key string) string {
		return "--" + strings.ReplaceAll(key, "_", "-")
	})))
}

// serve runs the services of the pipeline, its metrics and its health until ctx ends and everything is drained. An
// unknown model or device is a usage error.
func (s services) serve(ctx context.Context, conn *connection, log zerolog.Logger) error {
	health := boot.NewHealth("meander", boot.NewInstance())
	_, stop, err := health.Serve("--metrics-addr", s.metricsAddr, log)
	if err != nil {
		return err
	}
	defer stop()
	health.Connected(conn.Bus)
	if s.certificate != nil {
		health.Check("certificate", func() error { return auth.CheckExpiry(s.certificate, time.Now()) })
	}
	if conn.member != nil {
		health.Check("store", conn.member.Fault)
		s.DiskFree = conn.member.DiskFree
	}
	s.Sampler.Loading = s.loading.update
	s.Health, s.Note = health.Check, health.Note
	loaded := health.Until("model", "loading")
	s.Sampler.Announced = func() { loaded(); s.announced() }
	health.SetReady(true)
	defer context.AfterFunc(ctx, func() { health.SetReady(false) })()
	err = pipeline.Run(ctx, conn.Bus, s.Config, log)
	if errors.Is(err, model.ErrUnknown) || errors.Is(err, hub.ErrName) || errors.Is(err, devices.ErrUnavailable) {
		return usage(err)
	}
	return err
}
