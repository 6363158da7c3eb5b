package command

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/services/doctor"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/ui"
)

const pageToken = "MEANDER_UI_TOKEN"

// uiCommand makes the command 'meander ui'.
func uiCommand(a *app) *cobra.Command {
	p := pageFlags{Config: ui.DefaultConfig()}
	c := &cobra.Command{
		Use:   "ui",
		Short: "serve a page that shows runs, groups and samples while they are made",
		Long: `ui serves one page for a browser: runs with the progress of every stage and what they wait for, groups
with their images or texts, rewards and advantages, the steps and log-probs of each sample, samplers,
weights, streams and dead letters, and what 'meander doctor' finds. It follows the pipeline by itself.
It reads, and changes nothing, unless --admin lets people give verdicts and replay dead letters there.

Only this machine reaches it, unless --listen names another address; MEANDER_UI_TOKEN must then have a
token, which the page asks for. Put a proxy with TLS before it on a network that others share. Where the
server asks for credentials, the page asks for a token, too: open the link that is printed, which has it.
The page does what the credentials of the command may.`,
		Example: `  meander ui
  meander ui --listen 127.0.0.1:8080
  meander ui --admin                           # people judge samples on the page
  meander ui --nats tls://nats.example.org:4222 --nats-creds auth/viewer.creds --nats-tls-ca auth/tls/ca.pem
  meander ui --tokenizer deploy/models/sums    # shows the tokens of that model as text
  MEANDER_UI_TOKEN=secret meander ui --listen 0.0.0.0:4280 --host rollouts.example.org`,
		RunE: func(c *cobra.Command, given []string) error {
			running, _ := natsd.Pipeline(a.store)
			if a.nats.URL != "" {
				running.Settings = nil
			}
			if err := p.resolve(running.Settings["model"]); err != nil {
				return err
			}
			a.waits = true
			return a.withConnection(a.connect, func(c *cobra.Command, conn *connection, _ []string) error {
				return p.serve(c.Context(), conn, conn.log, c.ErrOrStderr())
			})(c, given)
		},
	}
	p.add(c.Flags())
	return c
}

type pageFlags struct {
	ui.Config
	Tokenizer string `key:"tokenizer" help:"folder of a language model, whose tokenizer shows tokens as text; default the model of the pipeline"`
	// as is a file of credentials with whose rights the page acts; empty: with those of the command.
	as string
	// shown: the token is one of its own, which is printed.
	shown bool
	// prefix is before the names of the flags. wanted is the flag of a command that serves the pipeline.
	prefix string
	wanted bool
}

// pageSettings are the fields that have flags.
var pageSettings = []string{"listen", "host", "tokenizer", "admin"}

func (p *pageFlags) add(f *pflag.FlagSet) {
	set := fields.Bind("", p)
	for _, name := range pageSettings {
		set.As(f, name, p.prefix+name)
	}
}

// resolveBeside is resolve for a command that serves the pipeline with this model. Flags of a page that is not wanted
// are usage errors.
func (p *pageFlags) resolveBeside(f *pflag.FlagSet, model string) error {
	if p.wanted {
		return p.resolve(model)
	}
	for _, name := range pageSettings {
		if f.Changed(p.prefix + name) {
			return usage(fmt.Errorf("--%s%s: given without the page; add --ui", p.prefix, name))
		}
	}
	return nil
}

// resolve checks the settings, and opens the tokenizer: that of the flag, or of the model if it has one. Faults are
// usage errors.
func (p *pageFlags) resolve(model string) error {
	p.Token = os.Getenv(pageToken)
	if err := p.Validate(); err != nil {
		return usage(fmt.Errorf("--%s%w", p.prefix, err))
	}
	folder := cmp.Or(p.Tokenizer, model)
	if folder == "" {
		return nil
	}
	for _, folder := range []string{folder, filepath.Join(folder, "tokenizer")} {
		t, err := tokenizer.Load(folder)
		if err == nil {
			p.Piece = t.Piece
			return nil
		}
		if p.Tokenizer != "" && (folder != p.Tokenizer || !errors.Is(err, os.ErrNotExist)) {
			return usage(fmt.Errorf("--%stokenizer: %w", p.prefix, err))
		}
	}
	return nil // it makes images, or another program has it
}

// onMachines are the areas of the doctor that are on machines which the page does not see.
var onMachines = []string{"disk", "model", "device", "rewards"}

// asRole has the page act as the user of a role of a folder of credentials: an admin where it may change something.
func (p *pageFlags) asRole(f *auth.Folder) error {
	role := auth.RoleViewer
	if p.Admin {
		role = auth.RoleAdmin
	}
	for _, u := range f.Users {
		if u.Role != role {
			continue
		}
		if _, err := auth.ReadIdentity(f.Credentials(u.Name)); err == nil {
			p.as = f.Credentials(u.Name)
			return nil
		}
	}
	return usage(fmt.Errorf("--ui: the page acts with the credentials of a user of the role %s, and %s has no such "+
		"file; put it back, or make one: meander auth add %[2]s NAME --role %[1]s", role, f.Dir()))
}

// serve serves the page until ctx ends, and says on out where it is.
func (p *pageFlags) serve(ctx context.Context, conn *connection, log zerolog.Logger, out io.Writer) error {
	p.Where = conn.where
	if p.Token == "" && conn.asksUsers() { // for credentials, which the page must not pass by
		p.Token, p.shown = rand.Text(), true
	}
	b := conn.Bus
	if p.as != "" {
		var err error
		b, err = bus.Connect(ctx, bus.Config{Name: "meander ui", InProcess: conn.member, CredsFile: p.as}, log)
		if err != nil {
			return fmt.Errorf("the page: %w", err)
		}
		defer func() { _ = b.Close() }() // it has nothing to send
	}
	p.Again = again
	p.Doctor = func(ctx context.Context) any {
		var findings []doctor.Finding
		o := doctor.Options{Bus: b, Where: conn.where, Own: conn.serves(), Version: boot.Version()}
		o.Certificate = conn.certificate()
		doctor.Run(ctx, o, func(f doctor.Finding) {
			if f.State == doctor.Unchecked && slices.Contains(onMachines, f.Area) {
				return
			}
			findings = append(findings, f)
		})
		return findings
	}
	return ui.Serve(ctx, b, p.Config, log, func(url string) {
		if p.shown {
			url += ui.TokenQuery + p.Token
		}
		fmt.Fprintf(out, "the page of %s is at %s; Ctrl-C ends it\n", conn.where, url)
	})
}

// serveBeside serves the pipeline, and the page beside it if it is wanted. If one fails, both end.
func (p *pageFlags) serveBeside(
	ctx context.Context, conn *connection, log zerolog.Logger, out io.Writer,
	pipeline func(context.Context, *connection, zerolog.Logger) error,
) error {
	if !p.wanted {
		return pipeline(ctx, conn, log)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.serve(ctx, conn, log, out) })
	g.Go(func() error { return pipeline(ctx, conn, log) })
	return g.Wait()
}
