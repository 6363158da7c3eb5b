package auth

import (
	"fmt"
	"os"
	"strings"
)

// serverConfig returns the text of nats-server's configuration, for a server outside of meander that listens on an
// address. It includes the file of rights, which changes more often. Create writes it once.
func (f *Folder) serverConfig(listen string) string {
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
`, f.path(ServerFile), listen, f.path("data"))
	if f.HasTLS() {
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

// rightsConfig returns all users with their rights in the syntax of nats-server's configuration. It has public keys
// only, no secrets. It fails for a user whose role has no such rights.
func (f *Folder) rightsConfig() (string, error) {
	c := &configWriter{}
	c.line("# Written by meander auth: who may do what, by public keys. Changed with: meander auth add, rm, update.")
	c.line("accounts {\n  %s {\n    jetstream: enabled", f.Account)
	f.include(c, exportsFile)
	c.writeUsers(f.Users)
	c.line("  }")
	f.include(c, accountsFile)
	c.line("}")
	return c.text.String(), c.err
}

// include has the server read a file of the folder, if the operator has made it.
func (f *Folder) include(c *configWriter, name string) {
	if _, err := os.Stat(f.path(name)); err == nil {
		c.line("    include %q", name)
	}
}

// configWriter writes the configuration of a NATS server. It keeps the first error.
type configWriter struct {
	text strings.Builder
	err  error
}

func (c *configWriter) line(format string, args ...any) { fmt.Fprintf(&c.text, format+"\n", args...) }

// writeUsers writes the list of users of one account, each with its public key and its permissions. The first error
// about a user's rights stays in c.err.
func (c *configWriter) writeUsers(users []User) {
	c.line("    users: [")
	for _, u := range users {
		r, err := u.Rights()
		if c.err == nil {
			c.err = err
		}
		c.line("      # %s: %s\n      {\n        nkey: %s", u.Name, u.Role, u.Key)
		if !r.Unlimited {
			c.line("        permissions: {\n          publish: {")
			c.writeSubjects("allow", r.Publish)
			c.writeSubjects("deny", r.Deny)
			c.line("          }\n          subscribe: {")
			c.writeSubjects("allow", r.Subscribe)
			c.line("          }")
			if r.Answers > 0 {
				c.line("          allow_responses: {max: %d, expires: %q}", r.Answers, r.AnswerWithin)
			}
			c.line("        }")
		}
		c.line("      }")
	}
	c.line("    ]")
}

// writeSubjects writes a list of subjects under a name of the configuration; an empty list is left out.
func (c *configWriter) writeSubjects(name string, list []string) {
	if len(list) == 0 {
		return
	}
	c.line("            %s: [", name)
	for _, subject := range list {
		c.line("              %q", subject)
	}
	c.line("            ]")
}
