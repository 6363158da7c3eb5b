package boot

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
)

// NATS is the settings for the connection to the NATS server. The variables are shared by all programs: use it as a
// field with the tags koanf:"nats" env:"MEANDER_NATS_".
type NATS struct {
	URL       string `koanf:"url" help:"NATS server, or several separated by commas"`
	Token     string `koanf:"token" secret:"true" help:"authentication token; the environment keeps it out of the process list"`
	CredsFile string `koanf:"creds" help:"file of credentials: a key, or a JWT and its key"`
	TLSCA     string `koanf:"tls_ca" help:"PEM file of the authority that signed the server's certificate"`
	TLSCert   string `koanf:"tls_cert" help:"PEM file of the client's certificate"`
	TLSKey    string `koanf:"tls_key" help:"PEM file of the client's key"`
}

// DefaultNATS is a server on this machine.
func DefaultNATS() NATS { return NATS{URL: "nats://127.0.0.1:4222"} }

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
		case u.Host == "" || oneOf("", u.Scheme, "nats", "tls", "ws", "wss") != nil:
			errs = append(errs, fmt.Errorf("nats.url: %q; must be nats://, tls://, ws:// or wss:// and a host",
				bus.RedactURL(s)))
		}
	}
	if n.Token != "" && n.CredsFile != "" {
		errs = append(errs, errors.New("nats.token: set beside nats.creds; give one of them"))
	}
	if (n.TLSCert == "") != (n.TLSKey == "") {
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
	return bus.Config{
		URL: strings.Join(n.Servers(), ","), Token: n.Token, CredsFile: n.CredsFile,
		CAFile: n.TLSCA, CertFile: n.TLSCert, KeyFile: n.TLSKey, Name: name, ConnectTimeout: -1,
	}
}
