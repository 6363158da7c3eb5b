package boot

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
)

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
