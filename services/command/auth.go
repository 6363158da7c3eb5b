package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

func authCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "auth", Short: "who may do what on the server: users, roles, credentials, certificates",
		Long: `auth keeps a folder of credentials: a file for each user, what each may do by the role
that it has, and certificates where TLS is asked for. meander up --auth takes it, and any
NATS server does.`,
		Example: `  meander auth init auth --tls    # a user for each role
  meander up --auth auth
  meander auth add auth alice --role viewer --run demo
  meander auth show               # what each role may do`,
		Args: args(noSuchCommand),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(authInitCommand(a), authAddCommand(a), authRemoveCommand(a), authListCommand(a), authShowCommand(a), authUpdateCommand(a))
	return c
}

func authInitCommand(*app) *cobra.Command {
	var hosts []string
	withTLS, listen := false, "127.0.0.1:4222"
	c := &cobra.Command{
		Use: "init DIR", Short: "make a folder of credentials with a user for each role",
		Long: `init makes a folder with a file of credentials for each role, the permissions of all of them
for a NATS server, and with --tls an authority and a certificate of the server. It says what
to do next. The secrets are in the files *.creds and tls/*-key.pem, which only their owner may
read, and nowhere else.`,
		Example: `  meander auth init auth
  meander auth init auth --tls --tls-host nats.example.org,10.0.0.7 --listen 0.0.0.0:4222`,
		Args: args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, given []string) error {
			if _, port, err := net.SplitHostPort(listen); err != nil || port == "" {
				return usage(fmt.Errorf("--listen: %q; must be host:port", listen))
			}
			if entries, err := os.ReadDir(given[0]); err == nil && len(entries) > 0 {
				return usage(fmt.Errorf("%q: not empty; must be a new folder. One of credentials is changed with: meander auth add, rm, update", given[0]))
			}
			dir, err := filepath.Abs(given[0])
			if err == nil {
				err = os.MkdirAll(dir, 0o700)
			}
			if err != nil {
				return err
			}
			f := &authFolder{dir: dir, Account: pipelineAccount}
			if withTLS || len(hosts) > 0 {
				if err := errors.Join(f.makeAuthority(), f.makeServer(hosts)); err != nil {
					return err
				}
			}
			for _, g := range bus.Grants() {
				if err := f.add(authUser{Name: string(g.Role), Role: g.Role}); err != nil {
					return err
				}
			}
			if err := errors.Join(f.write(), os.WriteFile(f.path(serverFile), []byte(f.serverConfig(listen)), 0o644)); err != nil {
				return err
			}
			return f.next(c.OutOrStdout(), listen)
		},
	}
	c.Flags().BoolVar(&withTLS, "tls", false, "make an authority and a certificate of the server, for localhost and --tls-host")
	c.Flags().StringSliceVar(&hosts, "tls-host", nil, "names and addresses that clients reach the server by; implies --tls")
	c.Flags().StringVar(&listen, "listen", listen, "address for clients in "+serverFile)
	return c
}

// serverConfig is a whole configuration of a NATS server of its own.
func (f *authFolder) serverConfig(listen string) string {
	text := fmt.Sprintf(`# Written by meander auth init: a NATS server for meander, with roles.
#   nats-server --config %s
server_name: meander
listen: %q
http: "127.0.0.1:8222" # monitoring and /healthz, without permissions: loopback alone

jetstream {
  store_dir: %q
  sync_interval: "1s"
}

# A client that stops reading is cut off rather than buffered without end.
write_deadline: "10s"
max_pending: 64MB
lame_duck_duration: "30s"
`, f.path(serverFile), listen, f.path("data"))
	if f.hasTLS() {
		text += fmt.Sprintf(`
tls {
  cert_file: %q
  key_file: %q
  min_version: "1.2"
  timeout: 5
}
`, f.path(serverCert), f.path(serverKey))
	}
	return text + fmt.Sprintf("\ninclude %q\n", rightsFile)
}

// next says what to do with a new folder.
func (f *authFolder) next(w io.Writer, listen string) error {
	host, port, _ := net.SplitHostPort(listen)
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	url, ca, flag := "nats://"+net.JoinHostPort(host, port), "", ""
	if f.hasTLS() {
		url = "tls://" + net.JoinHostPort(host, port)
		flag = " --nats-tls-ca " + f.path(caCert)
		ca = "\n  export MEANDER_NATS_TLS_CA=" + f.path(caCert)
	}
	_, err := fmt.Fprintf(w, `%s is ready: a file of credentials for each of %s.

A server, the whole pipeline in it:
  meander up --auth %s --listen %s
or a NATS server of its own, and its streams, once:
  nats-server --config %s
  meander streams setup --nats %s --nats-creds %s%s

Where a client or a service of them runs, with its own file alone:
  export MEANDER_NATS_URL=%s%s
  export MEANDER_NATS_CREDS=%s
  meander publish --run demo 'a red sign that says "OPEN"'
  meander-intake, meander-sampler, meander-reward, meander-advantage: the file of that name

What each role may do: meander auth show. One more user: meander auth add %s NAME --role ROLE
`, f.dir, strings.Join(f.names(), ", "), f.dir, listen, f.path(serverFile), url, f.credentials("admin"), flag, url, ca, f.credentials("trainer"), f.dir)
	return err
}

// minCopyBytes is the least that the copies of a guest need.
const minCopyBytes = 64 * boot.MiB

// copying is what to do, after the server knows of a guest, so that his copies are made, or end.
func (f *authFolder) copying(u authUser) string {
	if len(u.Runs) == 0 {
		return ""
	}
	return fmt.Sprintf("and for a guest that is new to it once more; the copies that it reads begin and end, after that, with: meander streams setup --auth %s --nats-creds %s --nats URL; meander up does it itself\n", f.dir, f.credentials("admin"))
}

// setAccount gives a folder of an older kind the account that guests need, where it has some, and
// says what that means for a server that has streams.
func (f *authFolder) setAccount() (says string) {
	if f.Account != "" || len(f.guests()) == 0 {
		return ""
	}
	f.Account = pipelineAccount
	return fmt.Sprintf("all others are in the account %[1]s of a NATS server now, because its default one gives guests nothing: where the server has streams, stop it,\nmove jetstream/$G in its store_dir to jetstream/%[1]s, and start it again. Streams of meander up stay where they are\n", f.Account)
}

// reload is what to do so that a server knows of a change.
const reload = "a NATS server reads it with: nats-server --signal reload; meander up at its next start"

func authAddCommand(*app) *cobra.Command {
	var u authUser
	var role string
	var runs []string
	var copies boot.Bytes
	c := &cobra.Command{
		Use: "add DIR NAME", Short: "add a user, with credentials of its own",
		Example: `  meander auth add auth alice --role viewer
  meander auth add auth team-b --role trainer --run b1,b2    # prompts and results of these runs alone`,
		Args: args(cobra.ExactArgs(2)),
		RunE: func(c *cobra.Command, given []string) error {
			f, err := openAuth(given[0])
			if err != nil {
				return err
			}
			if copies != 0 && copies < minCopyBytes {
				return usage(fmt.Errorf("--copy-bytes: %v; must be at least %v", copies, minCopyBytes))
			}
			u.CopyBytes = int64(copies)
			u.Name, u.Role = given[1], bus.Role(role)
			for _, run := range runs {
				u.Runs = append(u.Runs, schemas.Run(run))
			}
			if err := f.add(u); err != nil {
				return err
			}
			moves, err := f.setAccount(), f.write()
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "%s has the role %s, runs %s; %s\n%s%s", f.credentials(u.Name), u.Role, runsOf(u.Runs), reload, f.copying(u), moves)
			return err
		},
	}
	c.Flags().StringVar(&role, "role", "", "what the user is for: "+strings.Join(roleNames(), ", "))
	c.Flags().StringSliceVar(&runs, "run", nil, "limit a trainer or a viewer to runs of these names, in an account of its own; not given: all")
	c.Flags().TextVar(&copies, "copy-bytes", boot.Bytes(0), fmt.Sprintf("with --run: what the copies may take that the user reads; 0: %v", boot.Bytes(bus.DefaultCopyBytes)))
	c.Flags().BoolVar(&u.Blobs, "blobs", false, "with --run: blobs too (large images, embeddings), which are of no run: those of others as well")
	return c
}

func authRemoveCommand(*app) *cobra.Command {
	return &cobra.Command{
		Use: "rm DIR NAME", Short: "remove a user and its credentials",
		Args: args(cobra.ExactArgs(2)),
		RunE: func(c *cobra.Command, given []string) error {
			f, err := openAuth(given[0])
			if err != nil {
				return err
			}
			i := f.index(given[1])
			var gone authUser
			if i >= 0 {
				gone = f.Users[i]
			}
			if err := errors.Join(f.remove(given[1]), f.write()); err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "%s is let in no more; %s\n%s", given[1], reload, f.copying(gone))
			return err
		},
	}
}

func authListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls DIR", Short: "list the users",
		Args: args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, given []string) error {
			f, err := openAuth(given[0])
			if err != nil {
				return err
			}
			if a.json {
				for _, u := range f.Users {
					if err := json.NewEncoder(c.OutOrStdout()).Encode(u); err != nil {
						return err
					}
				}
				return nil
			}
			t := newColumns(c.OutOrStdout())
			fmt.Fprintln(t, "NAME\tROLE\tRUNS\tPUBLIC KEY")
			for _, u := range f.Users {
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", u.Name, u.Role, runsOf(u.Runs), u.Key)
			}
			if cert, err := f.certificate(); err != nil {
				return err
			} else if cert != nil {
				fmt.Fprintf(t, "\nTLS for %s until %s\n", strings.Join(hostsOf(cert), ", "), cert.NotAfter.Format(time.DateOnly))
			}
			return t.Flush()
		},
	}
}

func authUpdateCommand(*app) *cobra.Command {
	var hosts []string
	c := &cobra.Command{
		Use: "update DIR", Short: "write the permissions of this release, and a new certificate of the server",
		Long: `update writes the permissions anew, as the roles of this release have them, and where the folder
has an authority a new certificate of the server, for the hosts of the old one and --tls-host.
Credentials stay as they are.`,
		Args: args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, given []string) error {
			f, err := openAuth(given[0])
			if err != nil {
				return err
			}
			cert, err := f.certificate()
			switch {
			case err != nil:
				return err
			case cert != nil:
				err = f.makeServer(slices.Concat(hostsOf(cert), hosts))
			case len(hosts) > 0:
				err = errors.Join(f.makeAuthority(), f.makeServer(hosts))
			}
			f.markGuests()
			moves := f.setAccount()
			if err := errors.Join(err, f.write()); err != nil {
				return err
			}
			text := ""
			if guests := f.guests(); len(guests) > 0 {
				text = f.copying(f.Users[f.index(guests[0].Name)])
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "%s is up to date; %s\n%s%s", f.dir, reload, text, moves)
			return err
		},
	}
	c.Flags().StringSliceVar(&hosts, "tls-host", nil, "more names and addresses that clients reach the server by")
	return c
}

func authShowCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "show [ROLE]", Short: "what each role may do; of one role, every subject",
		Args: args(cobra.MaximumNArgs(1)),
		RunE: func(c *cobra.Command, given []string) error {
			w := c.OutOrStdout()
			if len(given) == 0 {
				for _, g := range bus.Grants() {
					fmt.Fprintf(w, "%s\n  %s\n", bold(w, string(g.Role)), g.Purpose)
					for _, line := range g.Says() {
						fmt.Fprintf(w, "  %s\n", breakLines(line, lineWidth(w)-4, "\n    "))
					}
				}
				return nil
			}
			r, err := authUser{Role: bus.Role(given[0]), Key: "KEY"}.rights()
			if err != nil {
				return usage(err)
			}
			if a.json {
				return json.NewEncoder(w).Encode(r)
			}
			if r.Unlimited {
				fmt.Fprintln(w, "everything")
			}
			for _, part := range []struct {
				what string
				list []string
			}{{"may publish on", r.Publish}, {"but not on", r.Deny}, {"may subscribe to (KEY is its public key)", r.Subscribe}} {
				if len(part.list) > 0 {
					fmt.Fprintf(w, "%s\n  %s\n", part.what, strings.Join(part.list, "\n  "))
				}
			}
			return nil
		},
	}
}
