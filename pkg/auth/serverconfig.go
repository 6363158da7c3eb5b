package auth

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// serverConfig returns the whole configuration of a separate NATS server.
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

// rightsConfig returns the users with their rights in the form of a NATS server's configuration. It has no secrets.
func (f *Folder) rightsConfig() (string, error) {
	c := &configWriter{}
	c.line("# Written by meander auth: who may do what, by public keys. Changed with: meander auth add, rm, update.")
	if f.Account == "" {
		c.line("authorization {")
		c.users(f.Users)
		c.line("}")
		return c.text.String(), c.err
	}
	var others []User
	for _, u := range f.Users {
		if !u.IsGuest() {
			others = append(others, u)
		}
	}
	c.line("accounts {\n  %s {\n    jetstream: enabled", f.Account)
	c.users(others)
	guests := f.Guests()
	askedBy := map[string][]string{} // accounts by subject
	c.line("    exports: [")
	for _, u := range guests {
		for _, crossing := range c.crossings(u) {
			if !slices.Contains(askedBy[crossing.To], u.Account()) {
				askedBy[crossing.To] = append(askedBy[crossing.To], u.Account())
			}
		}
		for _, subject := range u.Hears() {
			c.line("      {stream: %q, accounts: [%s]}", subject, u.Account())
		}
	}
	for _, subject := range slices.Sorted(maps.Keys(askedBy)) {
		c.line("      {service: %q, accounts: [%s]}", subject, strings.Join(askedBy[subject], ", "))
	}
	c.line("    ]\n    imports: [")
	for _, u := range guests {
		c.line("      {service: {account: %s, subject: %q}, to: %q}", u.Account(), u.API().To, u.API().From)
	}
	c.line("    ]\n  }")
	for _, u := range guests {
		c.guest(u, f.Account)
	}
	c.line("}")
	return c.text.String(), c.err
}

// configWriter writes the configuration of a NATS server. It keeps the first error.
type configWriter struct {
	text strings.Builder
	err  error
}

func (c *configWriter) line(format string, args ...any) { fmt.Fprintf(&c.text, format+"\n", args...) }

// crossings returns the crossings of a guest, and notes an error.
func (c *configWriter) crossings(u User) []Crossing {
	out, err := u.Crossings()
	if c.err == nil {
		c.err = err
	}
	return out
}

// guest writes the account of a guest. Only the subjects named here lead out of it.
func (c *configWriter) guest(u User, pipeline string) {
	c.line("  %s {\n    jetstream: {max_mem: 0, max_file: %d}", u.Account(), u.CopySpace())
	c.users([]User{u})
	c.line("    exports: [\n      {service: %q, accounts: [%s]}\n    ]\n    imports: [", u.API().To, pipeline)
	for _, subject := range u.Hears() {
		c.line("      {stream: {account: %s, subject: %q}}", pipeline, subject)
	}
	for _, crossing := range c.crossings(u) {
		c.line("      {service: {account: %s, subject: %q}, to: %q}", pipeline, crossing.To, crossing.From)
	}
	c.line("    ]\n  }")
}

// users writes the users of an account, each with its key and rights.
func (c *configWriter) users(users []User) {
	c.line("    users: [")
	for _, u := range users {
		r, err := u.Rights()
		if c.err == nil {
			c.err = err
		}
		c.line("      # %s: %s, runs %s\n      {\n        nkey: %s", u.Name, u.Role, u.RunNames(), u.Key)
		if !r.Unlimited {
			c.line("        permissions: {\n          publish: {")
			c.subjects("allow", r.Publish)
			c.subjects("deny", r.Deny)
			c.line("          }\n          subscribe: {")
			c.subjects("allow", r.Subscribe)
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

// subjects writes a list of subjects under a name, unless it is empty.
func (c *configWriter) subjects(name string, list []string) {
	if len(list) == 0 {
		return
	}
	c.line("            %s: [", name)
	for _, subject := range list {
		c.line("              %q", subject)
	}
	c.line("            ]")
}
