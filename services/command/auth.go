package command

import (
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/services/internal/present"
)

// authCommand makes the command 'meander auth' with its subcommands, which manage a folder of credentials.
func authCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "auth", Short: "make users, roles, credentials and certificates for the server",
		Long: `auth manages a credentials folder: a file for each user, the permissions of each role, and with TLS
the certificates. 'meander up --auth' uses the folder; so can any NATS server.`,
		Example: `  meander auth init auth --tls    # a user for each role
  meander up --auth auth
  meander auth add auth alice --role viewer --run demo
  meander auth show               # what each role may do`,
	}
	c.AddCommand(authInitCommand(a), authAddCommand(a), authRemoveCommand(a), authListCommand(a), authShowCommand(a),
		authUpdateCommand(a))
	return c
}

// authInitCommand makes the command 'meander auth init'.
func authInitCommand(*app) *cobra.Command {
	var hosts []string
	withTLS, listen := false, "127.0.0.1:4222"
	c := &cobra.Command{
		Use: "init DIR", Short: "make a credentials folder with a user for each role",
		Long: `init makes a folder with a credentials file for each role, a file of permissions for NATS servers, and
with --tls an authority and a server certificate. It prints what to do next. The secrets are in the
files *.creds and tls/*-key.pem and nowhere else; only their owner can read them.`,
		Example: `  meander auth init auth
  meander auth init auth --tls --tls-host nats.example.org,10.0.0.7 --listen 0.0.0.0:4222`,
		RunE: func(c *cobra.Command, given []string) error {
			_, port, err := net.SplitHostPort(listen)
			if _, number := strconv.ParseUint(port, 10, 16); err != nil || number != nil {
				return usage(fmt.Errorf("--listen: %q; must be host:port, and port a number", listen))
			}
			if err := refuseEmpty(c.Flags(), "tls-host", hosts); err != nil {
				return err
			}
			if withTLS && hosts == nil {
				hosts = []string{}
			}
			f, err := auth.Create(given[0], listen, hosts)
			if err != nil {
				return authError(err)
			}
			return printNextSteps(c.OutOrStdout(), f, listen)
		},
	}
	c.Flags().BoolVar(&withTLS, "tls", false,
		"make an authority and a certificate of the server, for localhost and --tls-host")
	c.Flags().StringSliceVar(&hosts, "tls-host", nil,
		"names and addresses that clients reach the server by; implies --tls")
	c.Flags().StringVar(&listen, "listen", listen, "address for clients in "+auth.ServerFile)
	return c
}

// authError makes a wrong request to a credentials folder a usage error.
func authError(err error) error {
	if mistake, ok := errors.AsType[*auth.InvalidError](err); ok {
		return usage(mistake)
	}
	return err
}

// refuseEmpty refuses a flag that was given with an empty name or none: an unset variable of a shell must not read as
// no limit, or as a host that the certificate lacks.
func refuseEmpty(f *pflag.FlagSet, flag string, names []string) error {
	if f.Changed(flag) && (len(names) == 0 || slices.Contains(names, "")) {
		return usage(fmt.Errorf("--%s: %q; must have no empty name; is a variable of the shell unset?", flag,
			strings.Join(names, ",")))
	}
	return nil
}

// openAuth reads a credentials folder.
func openAuth(dir string) (*auth.Folder, error) {
	f, err := auth.Open(dir)
	return f, authError(err)
}

// withFolder returns the RunE of a command that works on a credentials folder, its first argument; f gets the others.
func withFolder(f func(c *cobra.Command, dir *auth.Folder, given []string) error) runE {
	return func(c *cobra.Command, given []string) error {
		dir, err := openAuth(given[0])
		if err == nil {
			err = authError(f(c, dir, given[1:]))
		}
		return err
	}
}

// printNextSteps says what to do with a new credentials folder; 'meander auth init' ends with it.
func printNextSteps(w io.Writer, f *auth.Folder, listen string) error {
	host, port, _ := net.SplitHostPort(listen)
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	url, ca, flag := "nats://"+net.JoinHostPort(host, port), "", ""
	if f.HasTLS() {
		url = "tls://" + net.JoinHostPort(host, port)
		flag = " --nats-tls-ca " + f.CAFile()
		ca = "\n  export MEANDER_NATS_TLS_CA=" + f.CAFile()
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
`, f.Dir(), strings.Join(f.Names(), ", "), f.Dir(), listen, filepath.Join(f.Dir(), auth.ServerFile), url, f.Credentials("admin"), flag,
		url, ca, f.Credentials("trainer"), f.Dir())
	return err
}

// printChange says that a credentials folder was changed, and how a server gets to know it; what is the change.
func printChange(w io.Writer, what string) error {
	_, err := fmt.Fprintln(w,
		what+"; a NATS server reads it with: nats-server --signal reload; meander up at its next start")
	return err
}

// authAddCommand makes the command 'meander auth add', which adds a user to a folder of credentials.
func authAddCommand(*app) *cobra.Command {
	var role string
	c := &cobra.Command{
		Use: "add DIR NAME", Short: "add a user, with credentials of its own",
		Example: `  meander auth add auth alice --role viewer`,
		RunE: withFolder(func(c *cobra.Command, f *auth.Folder, given []string) error {
			u := auth.User{Name: given[0], Role: auth.Role(role)}
			if err := f.Add(u); err != nil {
				return err
			}
			return printChange(c.OutOrStdout(), fmt.Sprintf("%s has the role %s", f.Credentials(u.Name), u.Role))
		}),
	}
	c.Flags().StringVar(&role, "role", "", "what the user is for: "+strings.Join(auth.RoleNames(), ", "))
	return c
}

// authRemoveCommand makes the command 'meander auth rm', which removes a user and its credentials.
func authRemoveCommand(*app) *cobra.Command {
	return &cobra.Command{
		Use:     "rm DIR NAME",
		Example: "  meander auth rm auth trainer",
		Short:   "remove a user and its credentials",
		RunE: withFolder(func(c *cobra.Command, f *auth.Folder, given []string) error {
			if err := f.Remove(given[0]); err != nil {
				return err
			}
			return printChange(c.OutOrStdout(), given[0]+" is removed")
		}),
	}
}

// authListCommand makes the command 'meander auth ls', which lists the users of a folder.
func authListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "ls DIR",
		Example: "  meander auth ls auth",
		Short:   "list the users",
		RunE: withFolder(func(c *cobra.Command, f *auth.Folder, _ []string) error {
			if a.json {
				return encode(c.OutOrStdout(), f.Users...)
			}
			t := present.New("NAME", "ROLE", "PUBLIC KEY")
			for _, u := range f.Users {
				t.Row(u.Name, u.Role, u.Key)
			}
			t.Print(c.OutOrStdout())
			cert, err := f.Certificate()
			if err == nil && cert != nil {
				fmt.Fprintf(c.OutOrStdout(), "\nTLS for %s until %s\n", strings.Join(auth.Hosts(cert), ", "),
					cert.NotAfter.Format(time.DateOnly))
				if expired := auth.CheckExpiry(cert, time.Now()); expired != nil {
					fmt.Fprintf(c.OutOrStdout(), "%v; 'meander auth update %s' makes a new one\n", expired, f.Dir())
				}
			}
			return err
		}),
	}
}

// authUpdateCommand makes the command 'meander auth update'.
func authUpdateCommand(*app) *cobra.Command {
	var hosts []string
	c := &cobra.Command{
		Use:     "update DIR",
		Example: "  meander auth update auth --tls-host nats.example.org",
		Short:   "write the permissions of this release, and a new server certificate",
		Long: `update writes the permissions of the roles of this release. If the folder has an authority, it also
makes a new server certificate, for the hosts of the old one and --tls-host. Credentials do not change.`,
		RunE: withFolder(func(c *cobra.Command, f *auth.Folder, _ []string) error {
			if err := refuseEmpty(c.Flags(), "tls-host", hosts); err != nil {
				return err
			}
			if err := f.Update(hosts); err != nil {
				return err
			}
			return printChange(c.OutOrStdout(), f.Dir()+" is up to date")
		}),
	}
	c.Flags().StringSliceVar(&hosts, "tls-host", nil, "more names and addresses of the server, for its certificate")
	return c
}

// authShowCommand makes the command 'meander auth show', which lists roles and what they may do.
func authShowCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "show [ROLE]",
		Example: "  meander auth show viewer",
		Short:   "show what each role may do; with ROLE, every subject",
		RunE: func(c *cobra.Command, given []string) error {
			w := c.OutOrStdout()
			if len(given) == 0 {
				for _, g := range auth.Grants() {
					fmt.Fprintf(w, "%s\n  %s\n", present.Paint(w, present.Bold, string(g.Role)), g.Purpose)
					for _, line := range g.Describe() {
						present.Linef(w, "  %s", line)
					}
				}
				return nil
			}
			u := auth.User{Role: auth.Role(given[0]), Key: "KEY"}
			r, err := u.Rights()
			if err != nil {
				return usage(err)
			}
			if a.json {
				return encode(w, r)
			}
			if r.Unlimited {
				fmt.Fprintln(w, "everything")
			}
			for _, part := range []struct {
				what string
				list []string
			}{
				{"may publish on", r.Publish},
				{"but not on", r.Deny},
				{"may subscribe to (KEY is its public key)", r.Subscribe},
			} {
				if len(part.list) > 0 {
					fmt.Fprintf(w, "%s\n  %s\n", part.what, strings.Join(part.list, "\n  "))
				}
			}
			return nil
		},
	}
}
