package command

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

// localOnly returns options for a server that only processes on the same store can use: its token is in the store's
// folder.
func localOnly() natsd.Options {
	return natsd.Options{Listen: "127.0.0.1:0", Token: rand.Text()}
}

// connection is a bus to the server of --nats, or to the server of the store. The latter runs in this process or in
// another one on the same store. When that process ends, the connection moves to the next one, which may be this one.
type connection struct {
	*bus.Bus
	// member shares the store, a folder, with other processes; nil with --nats.
	member *natsd.Member
	store  string
	log    zerolog.Logger
	closed chan struct{}
	// where names the server for people. proven: credentials were given for it.
	where  string
	proven bool
}

// connect opens the pipeline for a command that does not serve: the server of --nats, or the store's. If no process
// has the store open, this one opens it.
func (a *app) connect(ctx context.Context, log zerolog.Logger) (*connection, error) {
	return a.openConnection(ctx, natsd.MemberOptions{Options: localOnly()}, log)
}

// connectServing connects to the pipeline for a command that serves it if no other process does. Otherwise it adopts
// the settings of that process, so that it can take over later; flags that differ are usage errors.
func (a *app) connectServing(ctx context.Context, s *services, log zerolog.Logger) (*connection, error) {
	if a.nats.URL != "" {
		if _, err := a.joinsPipeline(s); err != nil {
			return nil, err
		}
	}
	return a.openConnection(ctx, natsd.MemberOptions{
		Options: localOnly(), ServesPipeline: true, Settings: s.settings,
		CheckSettings: func(running natsd.Info) error { return a.adoptFrom(s, running) },
	}, log)
}

// joinsPipeline reports whether a pipeline runs that a command with these services would join. If so the services
// adopt its settings; flags that differ are usage errors.
func (a *app) joinsPipeline(s *services) (bool, error) {
	if a.nats.URL != "" {
		return true, s.refuseFlags(fmt.Sprintf("the services at %s have their own settings; leave out this flag or "+
			"%s", bus.RedactURL(a.nats.URL), a.flag("nats")))
	}
	running, serving := natsd.Pipeline(a.store)
	if !serving {
		return false, nil
	}
	return true, a.adoptFrom(s, running)
}

// adoptFrom adopts the settings of the pipeline that runs on the store.
func (a *app) adoptFrom(s *services, running natsd.Info) error {
	return s.adoptSettings(running.Settings, fmt.Sprintf("the pipeline on store %q (process %d)", a.store, running.PID))
}

// checkServer refuses a URL of --nats that is not of a NATS server. A URL without a scheme is nats://.
func (a *app) checkServer() error {
	for _, server := range a.nats.Servers() {
		if _, err := url.Parse(server); err != nil || !strings.Contains(server, "://") {
			continue // the connection says what is wrong with it
		}
		if err := (boot.NATS{Config: bus.Config{URL: server}}).Validate(); err != nil {
			return errors.New(strings.ReplaceAll(err.Error(), "nats.url: ", a.flag("nats")+": "))
		}
	}
	return nil
}

// checkStoreSettings refuses settings that only a server of --nats has, and a store that is no folder.
func (a *app) checkStoreSettings() error {
	var errs []error
	for _, of := range []struct{ flag, value string }{
		{"nats-creds", a.nats.CredsFile},
		{"nats-tls-ca", a.nats.CAFile},
		{"nats-tls-cert", a.nats.CertFile},
		{"nats-tls-key", a.nats.KeyFile},
		{"js-domain", a.nats.Domain},
		{"js-prefix", a.nats.APIPrefix},
	} {
		if of.value != "" {
			errs = append(errs, fmt.Errorf("%s: given without a server; name the server with --nats, or leave it out",
				a.flag(of.flag)))
		}
	}
	if info, err := os.Stat(a.store); err == nil && !info.IsDir() {
		errs = append(errs, fmt.Errorf("%s: %q; must be a folder", a.flag("store"), a.store))
	}
	if err := errors.Join(errs...); err != nil {
		return usage(err)
	}
	return nil
}

// openConnection connects to the pipeline: to the server of --nats, or as a member of the store, whose server it may
// start (part says how). With set-up options it also sets up the streams on the server of --nats; without them
// another process must. The caller closes the connection.
func (a *app) openConnection(
	ctx context.Context, part natsd.MemberOptions, log zerolog.Logger, setup ...bus.SetupOption,
) (*connection, error) {
	c := &connection{store: a.store, where: bus.RedactURL(a.nats.URL), log: log, closed: make(chan struct{})}
	c.proven = a.nats.CredsFile != "" || a.nats.Token != "" || a.nats.CertFile != "" || a.nats.Context != "" ||
		strings.Contains(a.nats.URL, "@")
	cfg := a.nats.Bus("meander")
	cfg.ConnectTimeout = 0 // a command does not wait for ever
	if err := a.checkServer(); err != nil {
		return nil, usage(err)
	}
	if a.nats.URL == "" {
		if err := a.checkStoreSettings(); err != nil {
			return nil, err
		}
		part.StoreDir, part.Token, part.Log = a.store, cmp.Or(a.nats.Token, part.Token), log
		member, err := natsd.Join(ctx, part)
		if err != nil {
			if inUse, ok := errors.AsType[*natsd.InUseError](err); ok {
				err = fmt.Errorf("%w; wait until it ends, or use another --store", inUse)
			}
			return nil, err
		}
		c.member, c.where = member, member.Where()
		cfg.InProcess, cfg.Token, cfg.TokenHandler = member, "", member.Token
	}
	cfg.NoWait = len(setup) == 0
	if a.waits && a.nats.URL != "" {
		cfg.NoWait, cfg.ConnectTimeout = false, -1
		told := time.AfterFunc(tellAfter, func() {
			log.Warn().Msgf("waiting for the server at %s; this goes on by itself when it comes", c.where)
		})
		defer told.Stop()
	}
	b, err := bus.Connect(ctx, cfg, log)
	if err != nil {
		return nil, errors.Join(a.explainConnectError(err), c.leave())
	}
	c.Bus = b
	if c.member != nil {
		go c.closeOnFailure()
	}
	if a.asItIs {
		return c, nil
	}
	if err := c.awaitStreams(ctx, setup); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// explainConnectError adds to an error of connecting what the client library hides, the network's error for each
// server, and advice, except for doctor, which has its own.
func (a *app) explainConnectError(err error) error {
	if !errors.Is(err, nats.ErrNoServers) {
		return err
	}
	for _, server := range a.addresses() {
		c, dial := net.DialTimeout("tcp", server, time.Second)
		if dial != nil {
			err = fmt.Errorf("%w: %w", err, dial)
			continue
		}
		_ = c.Close() // the server listens, so something else is wrong
	}
	if a.asItIs {
		return err
	}
	return fmt.Errorf("%w; is the server up? 'meander up' starts one. "+
		"Name it with --nats or MEANDER_NATS_URL; leave both out to use the store", err)
}

// addresses returns host:port of each server of --nats, to dial it; a server that is no URL with a host is left out,
// and connecting says why.
func (a *app) addresses() (out []string) {
	for _, server := range a.nats.Servers() {
		if !strings.Contains(server, "://") {
			server = "nats://" + server
		}
		u, err := url.Parse(server)
		if err != nil || u.Hostname() == "" {
			continue
		}
		port := map[string]string{"ws": "80", "wss": "443"}[u.Scheme] // the client library's own
		out = append(out, net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), port, strconv.Itoa(nats.DefaultPort))))
	}
	return out
}

// closeOnFailure closes the connection when the store fails, so that no caller waits for it.
func (c *connection) closeOnFailure() {
	select {
	case <-c.closed:
	case <-c.member.Failed():
		c.log.Error().Err(c.member.Err()).Msg("the store has failed")
		c.Conn().Close()
	}
}

// tellAfter is how long a command waits without a message.
const tellAfter = 2 * time.Second

// awaitStreams waits until the streams exist. The process with the store's server sets them up; meanwhile this
// process may become that one. An error is of the server, or of ctx.
func (c *connection) awaitStreams(ctx context.Context, setup []bus.SetupOption) error {
	if c.member == nil && len(setup) == 0 {
		told := time.AfterFunc(tellAfter, func() {
			c.log.Warn().Msgf("waiting for the streams at %s: meander-intake or 'meander streams setup' creates them",
				c.where)
		})
		defer told.Stop()
		return c.Ready(ctx)
	}
	if c.member == nil || c.member.Owns() {
		return c.Setup(ctx, setup...)
	}
	ctx, stop := context.WithCancel(ctx)
	taken := make(chan error, 1)
	go func() { taken <- c.member.Serve(ctx, func(ctx context.Context) error { return c.Setup(ctx) }) }()
	err := c.Ready(ctx)
	stop()
	if setUp := <-taken; err != nil { // on success another process may have made them
		err = errors.Join(err, setUp)
	}
	return err
}

// serveWhenOwner waits until this process has the server of the store, then runs f. It returns when ctx ends, or with
// the error of f. Before f it makes the deliveries available again that a killed process had in flight.
func (c *connection) serveWhenOwner(ctx context.Context, f func(context.Context) error) error {
	if c.member == nil {
		<-ctx.Done()
		return nil
	}
	return c.member.Serve(ctx, func(ctx context.Context) error {
		err := c.Setup(ctx)
		if err == nil && c.member.Unfinished() {
			var taken int
			if taken, err = c.RedeliverAll(ctx); taken > 0 {
				c.log.Info().Int("deliveries", taken).Msg("took back deliveries that a killed process had in flight")
			}
		}
		if err == nil {
			return f(ctx)
		}
		if ctx.Err() != nil {
			return nil
		}
		return err
	})
}

// serves reports whether this process serves the store's pipeline.
func (c *connection) serves() bool { return c.member != nil && c.member.Owns() }

// asksUsers reports whether the server asks users for credentials.
func (c *connection) asksUsers() bool {
	if c.member != nil {
		server, _ := natsd.Running(c.store)
		return server.Users
	}
	return c.proven
}

// certificate returns the certificate of the store's server, which connections of this machine do not show; nil: it has
// none, or the server is that of --nats.
func (c *connection) certificate() *x509.Certificate {
	if c.member == nil {
		return nil
	}
	server, _ := natsd.Running(c.store)
	block, _ := pem.Decode([]byte(server.Certificate))
	if block == nil {
		return nil
	}
	cert, _ := x509.ParseCertificate(block.Bytes) // the server has read it
	return cert
}

// openExisting is connect for commands that read. A missing store is a usage error, so that none is made.
func (a *app) openExisting(ctx context.Context, log zerolog.Logger) (*connection, error) {
	if a.nats.URL == "" && !a.storeExists() {
		return nil, usage(fmt.Errorf("store %q is empty; make a rollout first (meander run --store %s ...), or "+
			"name a server with --nats", a.store, a.store))
	}
	return a.connect(ctx, log)
}

func (a *app) storeExists() bool {
	_, err := os.Stat(filepath.Join(a.store, "jetstream"))
	return !errors.Is(err, os.ErrNotExist)
}

type (
	// runE is what cobra calls for a command, action what the command does on its connection.
	runE   = func(c *cobra.Command, given []string) error
	action = func(c *cobra.Command, conn *connection, given []string) error
)

// withBus returns the RunE of a command that reads stored events: it opens the pipeline, calls f, and closes it.
func (a *app) withBus(f action) runE { return a.withConnection(a.openExisting, f) }

// withView is withBus for a view, which also waits for a server that is away.
func (a *app) withView(f action) runE {
	return func(c *cobra.Command, given []string) error {
		a.waits = true
		return a.withBus(f)(c, given)
	}
}

// withConnection returns the RunE of a command that works on a connection: it connects by open, calls f, and closes
// the connection.
func (a *app) withConnection(open func(context.Context, zerolog.Logger) (*connection, error), f action) runE {
	return func(c *cobra.Command, given []string) error {
		conn, err := open(c.Context(), a.logger())
		if err != nil {
			return err
		}
		defer conn.Close()
		return f(c, conn, given)
	}
}

// withRun returns the RunE of a command about one run: it connects, sets run to the latest if none is given, and
// calls f.
func (a *app) withRun(run *schemas.Run, f action) runE {
	return a.withBus(func(c *cobra.Command, conn *connection, given []string) (err error) {
		if *run == "" {
			if *run, err = latestRun(c.Context(), conn.Bus); err != nil {
				return err
			}
		}
		return f(c, conn, given)
	})
}

// runArgument reads the argument RUN of a command that also has the flag --run. Both, and different, are a usage error.
func runArgument(run *schemas.Run, given []string) error {
	if len(given) == 0 {
		return nil
	}
	if err := schemas.CheckToken("RUN", given[0]); err != nil {
		return usage(err)
	}
	if *run != "" && *run != schemas.Run(given[0]) {
		return usage(fmt.Errorf("RUN: %q, and --run %q; give only one of them", given[0], *run))
	}
	*run = schemas.Run(given[0])
	return nil
}

// Close drains the bus, then stops the server if this process runs it.
func (c *connection) Close() error {
	close(c.closed)
	return errors.Join(c.Bus.Close(), c.leave())
}

// leave ends the membership in the store; with --nats it does nothing.
func (c *connection) leave() error {
	if c.member == nil {
		return nil
	}
	return c.member.Close()
}

// latestRun returns the run for a command without --run: the latest one. An empty store is a usage error.
func latestRun(ctx context.Context, b *bus.Bus) (schemas.Run, error) {
	run, err := view.LatestRun(ctx, b)
	if errors.Is(err, bus.ErrNotFound) {
		err = usage(errors.New("nothing is stored yet; make a rollout first: meander run 'a red sign that says " +
			"\"OPEN\"'"))
	}
	return run, err
}
