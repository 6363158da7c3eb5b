package command

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

// private is where the others on the same store find the server of a command, and
// nobody else: the token is in the store's folder.
func private() natsd.Options {
	return natsd.Options{Listen: "127.0.0.1:0", Token: rand.Text()}
}

// connection is a bus to the server of --nats, or to whoever has the server of the
// store: this process, or another that runs on it. When that one ends, the connection
// goes on with the next, which may be this process.
type connection struct {
	*bus.Bus
	// member is our part in the store; nil with --nats.
	member *natsd.Member
	log    zerolog.Logger
	closed chan struct{}
	// where names the other end for people.
	where string
}

// connect reaches the pipeline for a command that serves none: the server named by
// --nats, or the one on the store, which it opens itself while nobody else has it.
func (a *app) connect(ctx context.Context, log zerolog.Logger) (*connection, error) {
	return a.open(ctx, natsd.MemberOptions{Options: private()}, log)
}

// connectServing is connect for a command with a pipeline of its own, which serves the
// store when no other does. Of one that runs it takes on the settings, so that it can go
// on in its place; flags that differ from them are refused.
func (a *app) connectServing(ctx context.Context, s *services, log zerolog.Logger) (*connection, error) {
	if a.natsURL != "" {
		if _, err := a.joins(s); err != nil {
			return nil, err
		}
	}
	return a.open(ctx, natsd.MemberOptions{Options: private(), Serves: true, Settings: s.settings, Agree: func(running natsd.Info) error {
		return a.agree(s, running)
	}}, log)
}

// joins says whether a pipeline runs that a command with these services would join, and
// takes on its settings.
func (a *app) joins(s *services) (bool, error) {
	if a.natsURL != "" {
		return true, s.refuse(fmt.Sprintf("the services at %s have settings of their own; leave it out, or leave out --nats", bus.RedactURL(a.natsURL)))
	}
	running, serving := natsd.Pipeline(a.store)
	if !serving {
		return false, nil
	}
	return true, a.agree(s, running)
}

func (a *app) agree(s *services, running natsd.Info) error {
	return s.adopt(running.Settings, fmt.Sprintf("the pipeline on store %q (process %d)", a.store, running.PID))
}

// server is the server of --nats.
func (a *app) server() bus.Config {
	return bus.Config{Name: "meander", URL: a.natsURL, Token: a.token, CredsFile: a.creds, CAFile: a.tlsCA, CertFile: a.tlsCert, KeyFile: a.tlsKey}
}

// checkServer refuses a URL of --nats that is of no NATS server. One without a scheme is nats://.
func (a *app) checkServer() error {
	for _, server := range (boot.NATS{URL: a.natsURL}).Servers() {
		if _, err := url.Parse(server); err != nil || !strings.Contains(server, "://") {
			continue // the connection says what is wrong with it
		}
		if err := (boot.NATS{URL: server}).Validate(); err != nil {
			return errors.New(strings.ReplaceAll(err.Error(), "nats.url: ", "--nats: "))
		}
	}
	return nil
}

// open reaches the pipeline. With options of a set-up, the streams of a server that --nats names
// are set up, too; else somebody else has to.
func (a *app) open(ctx context.Context, part natsd.MemberOptions, log zerolog.Logger, setup ...bus.SetupOption) (*connection, error) {
	c := &connection{where: bus.RedactURL(a.natsURL), log: log, closed: make(chan struct{})}
	cfg := a.server()
	if err := a.checkServer(); err != nil {
		return nil, usage(err)
	}
	if a.natsURL == "" {
		for flag, value := range map[string]string{"nats-creds": a.creds, "nats-tls-ca": a.tlsCA, "nats-tls-cert": a.tlsCert, "nats-tls-key": a.tlsKey} {
			if value != "" {
				return nil, usage(fmt.Errorf("--%s: set without a server; name it with --nats", flag))
			}
		}
		if info, err := os.Stat(a.store); err == nil && !info.IsDir() {
			return nil, usage(fmt.Errorf("--store: %q; must be a folder", a.store))
		}
		part.StoreDir, part.Token, part.Log = a.store, cmp.Or(a.token, part.Token), log
		member, err := natsd.Join(ctx, part)
		if err != nil {
			if inUse, ok := errors.AsType[*natsd.InUseError](err); ok {
				err = fmt.Errorf("%w; wait for it to end, or use another --store", inUse)
			}
			return nil, err
		}
		c.member, c.where = member, member.Where()
		cfg.InProcess, cfg.Token, cfg.TokenHandler = member, "", member.Token
	}
	cfg.NoWait = len(setup) == 0
	b, err := bus.Connect(ctx, cfg, log)
	if err != nil {
		return nil, errors.Join(a.why(err), c.leave())
	}
	c.Bus = b
	if c.member != nil {
		go c.watch()
	}
	if a.asItIs {
		return c, nil
	}
	if err := c.prepare(ctx, setup); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// why adds to the error of a connection what the network says of each server, which the client library
// keeps to itself, and what to do about it.
func (a *app) why(err error) error {
	if !errors.Is(err, nats.ErrNoServers) {
		return err
	}
	for _, server := range (boot.NATS{URL: a.natsURL}).Servers() {
		if _, host, ok := strings.Cut(server, "://"); ok {
			server = host
		}
		server = server[strings.LastIndexByte(server, '@')+1:]
		if _, _, err := net.SplitHostPort(server); err != nil {
			server = net.JoinHostPort(server, "4222")
		}
		c, dial := net.DialTimeout("tcp", server, time.Second)
		if dial != nil {
			err = fmt.Errorf("%w: %w", err, dial)
			continue
		}
		_ = c.Close() // it is there, and the trouble is another
	}
	if a.asItIs {
		return err
	}
	return fmt.Errorf("%w; is the server up? 'meander up' starts one; "+
		"--nats and MEANDER_NATS_URL name it, and without them the store is used", err)
}

// watch closes the connection when there is nobody left to connect to: what waits for
// it is told so.
func (c *connection) watch() {
	select {
	case <-c.closed:
	case <-c.member.Failed():
		c.log.Error().Err(c.member.Err()).Msg("the store cannot be used any more")
		c.Conn().Close()
	}
}

// tellAfter is how long a command waits in silence.
const tellAfter = 2 * time.Second

// prepare returns when the streams are there. Who has the server sets them up, and
// that may become us meanwhile.
func (c *connection) prepare(ctx context.Context, setup []bus.SetupOption) error {
	if c.member == nil && len(setup) == 0 {
		told := time.AfterFunc(tellAfter, func() {
			c.log.Warn().Msgf("waiting for the streams at %s: meander-intake makes them, or 'meander streams setup'", c.where)
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
	if setUp := <-taken; err != nil { // else they are there, whoever made them
		err = errors.Join(err, setUp)
	}
	return err
}

// serve runs f while the server of the store is in this process, from when it is; it
// returns when ctx ends, or with the error of f. Work that the process before had in
// hand when it was killed is taken back first.
func (c *connection) serve(ctx context.Context, f func(context.Context) error) error {
	if c.member == nil {
		<-ctx.Done()
		return nil
	}
	return c.member.Serve(ctx, func(ctx context.Context) error {
		err := c.Setup(ctx)
		if err == nil && c.member.Unfinished() {
			var taken int
			if taken, err = c.TakeBack(ctx); taken > 0 {
				c.log.Info().Int("deliveries", taken).Msg("took back what a killed process had in hand")
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

// serves says whether the pipeline of this store is for this process to serve.
func (c *connection) serves() bool { return c.member != nil && c.member.Owns() }

// openExisting is connect for commands that read: a store that is not there is the
// caller's mistake, not a reason to make one.
func (a *app) openExisting(ctx context.Context, log zerolog.Logger) (*connection, error) {
	if a.natsURL == "" {
		if _, err := os.Stat(filepath.Join(a.store, "jetstream")); errors.Is(err, os.ErrNotExist) {
			return nil, usage(fmt.Errorf("store %q has nothing in it; make a rollout first (meander run --store %s ...), or name a server with --nats", a.store, a.store))
		}
	}
	return a.connect(ctx, log)
}

// withBus opens the pipeline for a command that reads what is stored.
func (a *app) withBus(f func(c *cobra.Command, conn *connection, given []string) error) func(*cobra.Command, []string) error {
	return a.with(a.openExisting, f)
}

// with opens the pipeline for a command.
func (a *app) with(
	open func(context.Context, zerolog.Logger) (*connection, error),
	f func(c *cobra.Command, conn *connection, given []string) error,
) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, given []string) error {
		log, err := a.logger()
		if err != nil {
			return err
		}
		conn, err := open(c.Context(), log)
		if err != nil {
			return err
		}
		defer conn.Close()
		return f(c, conn, given)
	}
}

// withRun is withBus for a command about one run: the latest, where none is named.
func (a *app) withRun(run *schemas.Run, f func(c *cobra.Command, conn *connection, given []string) error) func(*cobra.Command, []string) error {
	return a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
		if *run == "" {
			var err error
			if *run, err = latestRun(c.Context(), conn.Bus); err != nil {
				return err
			}
		}
		if err := schemas.CheckToken("--run", *run); err != nil {
			return usage(err)
		}
		return f(c, conn, given)
	})
}

// runFilter is the run that a filter names, empty for all.
func runFilter(run schemas.Run) schemas.Run {
	if run == "*" {
		return ""
	}
	return run
}

// optionalToken checks what a flag names, if anything.
func optionalToken[S ~string](flag string, token S) error {
	if token == "" {
		return nil
	}
	if err := schemas.CheckToken(flag, token); err != nil {
		return usage(err)
	}
	return nil
}

// runArgument takes the run of the argument RUN, of a command that has --run as well.
func runArgument(run *schemas.Run, given []string) error {
	if len(given) == 0 {
		return nil
	}
	if *run != "" && *run != schemas.Run(given[0]) {
		return usage(fmt.Errorf("RUN: %q, and --run %q; name one of them", given[0], *run))
	}
	*run = schemas.Run(given[0])
	return nil
}

// Close drains the bus, then gives up the server if it is ours.
func (c *connection) Close() error {
	close(c.closed)
	return errors.Join(c.Bus.Close(), c.leave())
}

func (c *connection) leave() error {
	if c.member == nil {
		return nil
	}
	return c.member.Close()
}
