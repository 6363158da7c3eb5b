// Package boot is what every main of the project shares: configuration, logging,
// signals, the health endpoint, the NATS connection's settings and the exit status.
// A Service is one program; Main runs it from its command line to its exit status.
//
// A configuration is one struct per program, whose value is the default and whose fields have tags (schemas.Field).
// Package fields takes the settings, in rising order of precedence, from a YAML file (--config), the environment
// (MEANDER_<PROGRAM>_<FIELD>) and flags. An error of a configuration is a usage error.
//
// Exit status of every program: 0 it did its work, or was stopped and finished what was
// begun; 1 it failed; 2 it was called wrongly.
package boot

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/heap"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// Service is one program that serves one stage of the pipeline until it is stopped.
type Service[T any] struct {
	// Name is the stage: "intake" is the program meander-intake, with variables MEANDER_INTAKE_*.
	Name string
	// Summary is what the program does, in a sentence without a period.
	Summary string
	// Examples are command lines for --help.
	Examples []string
	// Default is the settings of the service. A key that is also in the common settings (instance,
	// drain_timeout) is one setting with the default given here.
	Default T
	// HealthAddr is the default address of the health endpoint.
	HealthAddr string
	// Setup says whether the program creates the streams by default.
	Setup bool
	// Health puts h into the settings of a service that has conditions of readiness of its own;
	// nil: it has none.
	Health func(cfg *T, h *Health)
	// Run serves until ctx ends and the work in flight is finished, or returned to the server.
	Run func(ctx context.Context, cfg T, b *bus.Bus, log zerolog.Logger) error
}

// common is the settings that every service program has.
type common struct {
	Instance     string        `key:"instance" help:"name of this process in logs, events and service discovery; default host, process id and a random end"`
	HealthAddr   string        `key:"health_addr" help:"host:port of /healthz, /readyz and /metrics; empty for none"`
	DrainTimeout time.Duration `key:"drain_timeout" range:"(0.." help:"time for the work in flight at shutdown"`
	Setup        bool          `key:"setup" help:"create or update the streams at start; one program of a pipeline has to"`
	NATS
	Log
	Limits
}

// settings puts the service's own settings before the common ones: its defaults and help count.
type settings[T any] struct {
	Service T
	Common  common
}

// Validate checks the settings of a service program, its own and those that all share. It returns the faults of all
// parts, joined.
func (s settings[T]) Validate() error {
	err := schemas.CheckFields(&s.Common)
	if c, ok := any(s.Service).(interface{ Validate() error }); ok {
		err = errors.Join(c.Validate(), err)
	}
	if !s.Common.Setup && s.Common.Any() {
		err = errors.Join(err,
			errors.New("setup: false; limits and replicas of streams are for the program that sets them up"))
	}
	return errors.Join(err, s.Common.NATS.Validate(), s.Common.Limits.Validate())
}

// EnvPrefix is the start of the environment variables of a program: "meander-intake"
// and "intake" both give "MEANDER_INTAKE_".
func EnvPrefix(name string) string {
	name = strings.TrimPrefix(name, "meander-")
	return "MEANDER_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_")) + "_"
}

// grace is how long a program may run after its drain timeout before it is ended.
const grace = 5 * time.Second

// Main is the whole main function of a service program.
func Main[T any](s Service[T]) {
	heap.Bound()
	os.Exit(s.Execute(context.Background(), os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// Execute runs one command line of a service program and returns the exit status. It writes an error to stderr.
func (s Service[T]) Execute(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	err := s.execute(ctx, args, environ, stdout, stderr)
	code := ExitCode(err)
	if err != nil {
		fmt.Fprintf(stderr, "meander-%s: %v\n", s.Name, err)
	}
	if code == ExitUsage {
		fmt.Fprintf(stderr, "See 'meander-%s --help'\n", s.Name)
	}
	return code
}

// execute runs one command line: it prints the help, the version or the settings, or asks a running program for its
// health; otherwise it serves until ctx ends. An error about the command line is a usage error.
func (s Service[T]) execute(ctx context.Context, args, environ []string, stdout, stderr io.Writer) error {
	cfg := settings[T]{Service: s.Default, Common: common{
		HealthAddr: s.HealthAddr, DrainTimeout: 20 * time.Second, Setup: s.Setup, NATS: DefaultNATS(),
		Log: DefaultLog(),
	}}
	fs := pflag.NewFlagSet("meander-"+s.Name, pflag.ContinueOnError)
	fs.SortFlags = false
	fs.SetOutput(io.Discard)
	help := fs.BoolP("help", "h", false, "print this help and exit")
	version := fs.Bool("version", false, "print the version and exit")
	healthcheck := fs.Bool("healthcheck", false,
		"ask the running program at --health-addr whether it is ready, and exit 0 or 1")
	file := fs.String("config", "", "YAML `file` with settings; the environment and flags override it")
	printConfig := fs.Bool("print-config", false, "print the settings in effect as YAML and exit")
	set := fields.Bind(EnvPrefix(s.Name), &cfg)
	set.Register(fs)
	if err := fs.Parse(args); err != nil {
		return Usage(fields.FlagError(err, fs, nil))
	}
	switch {
	case *help:
		_, err := io.WriteString(stdout, s.help(fs))
		return err
	case *version:
		_, err := fmt.Fprintf(stdout, "meander-%s %s\n", s.Name, Version())
		return err
	case fs.NArg() > 0:
		return Usage(fmt.Errorf("%q is not a flag, and meander-%s takes no arguments", fs.Arg(0), s.Name))
	}
	err := set.Load(*file, environ)
	if err == nil {
		err = cfg.Common.UseContext(fs.Changed)
	}
	if err == nil {
		err = cfg.Validate()
	}
	switch {
	case err != nil:
		return Usage(err)
	case *printConfig:
		return set.Print(stdout)
	case *healthcheck:
		return askHealth(ctx, cfg.Common.HealthAddr)
	}
	if cfg.Common.Instance == "" {
		if err := set.Give("instance", NewInstance()); err != nil {
			return err
		}
	}
	// Of an address that is the default any port will do.
	return s.serve(ctx, cfg, !set.Given("health_addr") && cfg.Common.HealthAddr != "", stderr)
}

// serve connects to the server, runs the service, and drains once ctx ends or a signal comes. A stop by signal is no
// error. With anyPort health has another port where its own is taken.
func (s Service[T]) serve(ctx context.Context, cfg settings[T], anyPort bool, stderr io.Writer) error {
	c := cfg.Common
	log := c.Logger(stderr, s.Name, c.Instance)
	ctx, stop := Signals(ctx, log)
	defer stop()
	health := NewHealth(s.Name, c.Instance)
	_, stopHealth, err := health.Serve("--health-addr", c.HealthAddr, log)
	if anyPort && errors.Is(err, syscall.EADDRINUSE) { // another program of the kind runs beside it
		log.Warn().Str("addr", c.HealthAddr).Msg("the usual health address is taken; a free port is used instead")
		host, _, _ := net.SplitHostPort(c.HealthAddr)
		_, stopHealth, err = health.Serve("--health-addr", net.JoinHostPort(host, "0"), log)
	}
	if err != nil {
		return err
	}
	defer stopHealth()
	connected := health.Until("nats", "no server at "+bus.RedactURL(c.URL)+" yet; tries again")
	b, err := bus.Connect(ctx, c.Bus("meander-"+s.Name+" "+c.Instance), log)
	if err != nil {
		return ignoreStop(ctx, err)
	}
	connected()
	err = s.consume(ctx, cfg, b, health, log)
	if closing := b.Close(); closing != nil {
		err = errors.Join(err, fmt.Errorf("close the connection: %w", closing))
	}
	return ignoreStop(ctx, err)
}

// consume prepares the streams, runs the service until it ends, and reports readiness in between. An error is that of
// the preparation or of the service.
func (s Service[T]) consume(
	ctx context.Context, cfg settings[T], b *bus.Bus, health *Health, log zerolog.Logger,
) error {
	prepare, waits := b.Ready, "not all there yet: meander-intake or 'meander streams setup' creates them"
	if cfg.Common.Setup {
		waits = "being set up"
		prepare = func(ctx context.Context) error { return setUp(ctx, b, int(cfg.Common.StreamReplicas), log) }
	}
	prepared := health.Until("streams", waits)
	if err := prepare(ctx); err != nil {
		return err
	}
	prepared()
	if err := cfg.Common.Apply(ctx, b); err != nil {
		return err
	}
	leave, err := Announce(b, s.Name, s.Summary, cfg.Common.Instance, log)
	if err != nil {
		return err
	}
	if cfg.Common.Setup {
		// The program that sets the streams up also shows how full they are.
		defer instrument.ShowStreams(prometheus.DefaultRegisterer, b)()
	}
	health.Connected(b)
	if s.Health != nil {
		s.Health(&cfg.Service, health)
	}
	health.SetReady(true)
	log.Info().Str("server", bus.RedactURL(b.Conn().ConnectedUrl())).Msg("serving")

	draining := context.AfterFunc(ctx, func() { health.SetReady(false) })
	defer draining()
	err = s.runBounded(ctx, cfg, b, log)
	health.SetReady(false)
	leave()
	end := log.Info()
	if failed := ignoreStop(ctx, err); failed != nil { // printed as well; who collects the log needs it there
		end = log.Error().Err(failed)
	}
	end.Msg("stopped")
	return err
}

// setUp makes the streams. On a server with roles, a user who may not make them waits until the admin has.
func setUp(ctx context.Context, b *bus.Bus, replicas int, log zerolog.Logger) error {
	err := b.Setup(ctx, bus.Replicas(replicas))
	if errors.Is(err, bus.ErrPermission) && ctx.Err() == nil {
		log.Warn().Err(err).Msg("the streams are for the role admin to make (meander streams setup); waiting for them")
		return b.Ready(ctx)
	}
	return err
}

// runBounded runs the service until it ends. Once ctx has ended it waits for the service no longer than the drain
// timeout and some grace, and then returns an error; the server delivers unfinished work to another replica.
func (s Service[T]) runBounded(ctx context.Context, cfg settings[T], b *bus.Bus, log zerolog.Logger) error {
	work, end := context.WithCancel(ctx)
	defer end()
	g, work := errgroup.WithContext(work)
	g.Go(func() error {
		defer end() // the service decides when the program is done
		return s.Run(work, cfg.Service, b, log)
	})
	if cfg.Common.Setup {
		// The program that sets the streams up also watches which messages the server gave up on.
		g.Go(func() error { return b.WatchAdvisories(work) })
	}
	done := make(chan error, 1)
	go func() { done <- g.Wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	late := time.NewTimer(cfg.Common.DrainTimeout + grace)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C:
		return fmt.Errorf("not drained within %v; work in flight will be redelivered", cfg.Common.DrainTimeout+grace)
	}
}

// ignoreStop returns nil for the error of a stop that was asked for, else err.
func ignoreStop(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// help returns the text of --help of a service program.
func (s Service[T]) help(fs *pflag.FlagSet) string {
	var b strings.Builder
	fmt.Fprintf(&b, "meander-%s %s\n\nUsage:\n  meander-%s [flags]\n\nExamples:\n", s.Name, s.Summary, s.Name)
	for _, e := range s.Examples {
		fmt.Fprintf(&b, "  %s\n", e)
	}
	fmt.Fprintf(&b, "\nFlags:\n%s", fs.FlagUsagesWrapped(100))
	b.WriteString(`
Settings come from, in rising order of precedence: defaults, the file of --config, the
environment, flags. Durations and sizes carry units (30s, 64MiB). A limit of a stream that
is 0 is left as it is; a new stream has the one of the contract (meander streams).
Exit status: 0 stopped as asked, 1 failed, 2 called wrongly.
`)
	return b.String()
}

// NATS is the settings for the connection to the NATS server. The variables are shared by all programs.
type NATS struct{ bus.Config }

// UseContext takes what the context says in place of all settings that were not given by the flags of services.
func (n *NATS) UseContext(given func(flag string) bool) (err error) {
	n.Config, err = n.InContext(given)
	return err
}

// DefaultNATS is a server on this machine.
func DefaultNATS() NATS { return NATS{bus.Config{URL: "nats://127.0.0.1:4222"}} }

// Servers returns the URLs, in order.
func (n NATS) Servers() []string {
	return strings.FieldsFunc(n.URL, func(r rune) bool { return r == ' ' || r == ',' })
}

// Validate checks how a program reaches its server. It returns all faults, joined, each with the name of its field.
func (n NATS) Validate() error {
	var errs []error
	servers := n.Servers()
	if len(servers) == 0 {
		errs = append(errs, errors.New("nats.url: empty; must be a URL such as nats://127.0.0.1:4222"))
	}
	for _, s := range servers {
		u, err := url.Parse(s)
		switch {
		case err != nil:
			errs = append(errs, errors.New("nats.url: not a URL; must look like nats://127.0.0.1:4222"))
		case u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme):
			errs = append(errs, fmt.Errorf("nats.url: %q; must be nats://, tls://, ws:// or wss:// and a host",
				bus.RedactURL(s)))
		}
	}
	if n.Token != "" && n.CredsFile != "" {
		errs = append(errs, errors.New("nats.token: set beside nats.creds; give one of them"))
	}
	if (n.CertFile == "") != (n.KeyFile == "") {
		errs = append(errs, errors.New("nats.tls_cert: needs nats.tls_key, and the other way round"))
	}
	return errors.Join(errs...)
}

// NewInstance names this process: host, process id and a random end. It has at most 64 characters of A-Z a-z 0-9 _ -,
// so it can be a token of a subject.
func NewInstance() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "host"
	}
	host = strings.Trim(notInTags.ReplaceAllString(host, "-"), "-")
	return fmt.Sprintf("%s-%d-%s", host[:min(len(host), 40)], os.Getpid(), strings.ToLower(rand.Text()[:8]))
}

// Bus returns the settings as package bus wants them. The connection waits for a server that is not there yet, as
// long as the program runs: programs may start in any order.
func (n NATS) Bus(name string) bus.Config {
	c := n.Config
	c.URL, c.Name, c.ConnectTimeout = strings.Join(n.Servers(), ","), name, -1
	return c
}
