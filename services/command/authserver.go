package command

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
)

// pipelineAccount is the account of a NATS server that all are in who are no guests. The server's
// default one cannot give anything to others.
const pipelineAccount = "meander"

// guests are the users who are limited to runs.
func (f *authFolder) guests() (out []bus.Guest) {
	for _, u := range f.Users {
		if len(u.Runs) > 0 {
			out = append(out, u.guest())
		}
	}
	return out
}

func (u authUser) guest() bus.Guest {
	return bus.Guest{Name: u.Name, Key: u.Key, Role: u.Role, Runs: u.Runs, Blobs: u.Blobs, Mark: u.Mark, CopyBytes: u.copyBytes()}
}

func (u authUser) copyBytes() int64 {
	if u.CopyBytes > 0 {
		return u.CopyBytes
	}
	return bus.DefaultCopyBytes
}

// render is the users with their rights as a NATS server reads them: no secrets are in it.
func (f *authFolder) render() (string, error) {
	var s strings.Builder
	s.WriteString("# Written by meander auth: who may do what, by public keys. Changed with: meander auth add, rm, update.\n")
	if f.Account == "" {
		s.WriteString("authorization {\n")
		if err := f.renderUsers(&s, func(authUser) bool { return true }); err != nil {
			return "", err
		}
		s.WriteString("}\n")
		return s.String(), nil
	}
	fmt.Fprintf(&s, "accounts {\n  %s {\n    jetstream: enabled\n", f.Account)
	if err := f.renderUsers(&s, func(u authUser) bool { return len(u.Runs) == 0 }); err != nil {
		return "", err
	}
	asked, imports := map[string][]string{}, ""
	s.WriteString("    exports: [\n")
	for _, g := range f.guests() {
		crossings, err := g.Crossings()
		if err != nil {
			return "", err
		}
		for _, c := range crossings {
			if !slices.Contains(asked[c.To], g.Account()) {
				asked[c.To] = append(asked[c.To], g.Account())
			}
		}
		for _, subject := range g.Hears() {
			fmt.Fprintf(&s, "      {stream: %q, accounts: [%s]}\n", subject, g.Account())
		}
		imports += fmt.Sprintf("      {service: {account: %s, subject: %q}, to: %q}\n", g.Account(), g.API().To, g.API().From)
	}
	for _, subject := range slices.Sorted(maps.Keys(asked)) {
		fmt.Fprintf(&s, "      {service: %q, accounts: [%s]}\n", subject, strings.Join(asked[subject], ", "))
	}
	fmt.Fprintf(&s, "    ]\n    imports: [\n%s    ]\n  }\n", imports)
	for _, u := range f.Users {
		if len(u.Runs) > 0 {
			if err := f.renderGuest(&s, u); err != nil {
				return "", err
			}
		}
	}
	s.WriteString("}\n")
	return s.String(), nil
}

// renderGuest is the account of a guest: from it goes what is named here, and nothing else.
func (f *authFolder) renderGuest(s *strings.Builder, u authUser) error {
	g := u.guest()
	fmt.Fprintf(s, "  %s {\n    jetstream: {max_mem: 0, max_file: %d}\n", g.Account(), u.copyBytes())
	if err := f.renderUsers(s, func(other authUser) bool { return other.Name == u.Name }); err != nil {
		return err
	}
	fmt.Fprintf(s, "    exports: [\n      {service: %q, accounts: [%s]}\n    ]\n    imports: [\n", g.API().To, f.Account)
	for _, subject := range g.Hears() {
		fmt.Fprintf(s, "      {stream: {account: %s, subject: %q}}\n", f.Account, subject)
	}
	crossings, err := g.Crossings()
	for _, c := range crossings {
		fmt.Fprintf(s, "      {service: {account: %s, subject: %q}, to: %q}\n", f.Account, c.To, c.From)
	}
	s.WriteString("    ]\n  }\n")
	return err
}

func (f *authFolder) renderUsers(s *strings.Builder, which func(authUser) bool) error {
	s.WriteString("    users: [\n")
	for _, u := range f.Users {
		if !which(u) {
			continue
		}
		r, err := u.rights()
		if err != nil {
			return err
		}
		fmt.Fprintf(s, "      # %s: %s, runs %s\n      {\n        nkey: %s\n", u.Name, u.Role, runsOf(u.Runs), u.Key)
		if !r.Unlimited {
			s.WriteString("        permissions: {\n          publish: {\n")
			subjects(s, "allow", r.Publish)
			subjects(s, "deny", r.Deny)
			s.WriteString("          }\n          subscribe: {\n")
			subjects(s, "allow", r.Subscribe)
			s.WriteString("          }\n")
			if r.Answers > 0 {
				fmt.Fprintf(s, "          allow_responses: {max: %d, expires: %q}\n", r.Answers, r.AnswerWithin)
			}
			s.WriteString("        }\n")
		}
		s.WriteString("      }\n")
	}
	s.WriteString("    ]\n")
	return nil
}

func subjects(s *strings.Builder, name string, list []string) {
	if len(list) == 0 {
		return
	}
	fmt.Fprintf(s, "            %s: [\n", name)
	for _, subject := range list {
		fmt.Fprintf(s, "              %q\n", subject)
	}
	s.WriteString("            ]\n")
}

// options are the users and the certificate as the embedded server takes them.
func (f *authFolder) options(o *natsd.Options) error {
	for _, u := range f.Users {
		r, err := u.rights()
		if err != nil {
			return err
		}
		user := natsd.User{
			Name: u.Name, Key: u.Key, Unlimited: r.Unlimited, Publish: r.Publish, DenyPublish: r.Deny, Subscribe: r.Subscribe,
			Answers: r.Answers, AnswerWithin: r.AnswerWithin,
		}
		if len(u.Runs) > 0 {
			guest, err := u.account()
			if err != nil {
				return err
			}
			user.Account, o.Guests = guest.Account, append(o.Guests, guest)
		}
		o.Users = append(o.Users, user)
	}
	if f.hasTLS() {
		o.TLS = &natsd.TLS{Cert: f.path(serverCert), Key: f.path(serverKey)}
	}
	return nil
}

// account is that of a guest as the embedded server takes it.
func (u authUser) account() (natsd.Guest, error) {
	g := u.guest()
	out := natsd.Guest{Account: g.Account(), MaxStore: u.copyBytes(), API: natsd.Service(g.API()), Hears: g.Hears()}
	crossings, err := g.Crossings()
	for _, c := range crossings {
		out.Services = append(out.Services, natsd.Service(c))
	}
	return out, err
}
