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
type NATS struct {
	URL       string `key:"nats.url" env:"MEANDER_NATS_URL" secret:"url" help:"NATS server, or several separated by commas"`
	Token     string `key:"nats.token" env:"MEANDER_NATS_TOKEN" secret:"true" help:"authentication token; the environment keeps it out of the process list"`
	CredsFile string `key:"nats.creds" env:"MEANDER_NATS_CREDS" help:"file of credentials: a key, or a JWT and its key"`
	TLSCA     string `key:"nats.tls_ca" env:"MEANDER_NATS_TLS_CA" help:"PEM file of the authority that signed the server's certificate"`
	TLSCert   string `key:"nats.tls_cert" env:"MEANDER_NATS_TLS_CERT" help:"PEM file of the client's certificate"`
	TLSKey    string `key:"nats.tls_key" env:"MEANDER_NATS_TLS_KEY" help:"PEM file of the client's key"`
	TLSFirst  bool   `key:"nats.tls_first" env:"MEANDER_NATS_TLS_FIRST" help:"begin with the TLS handshake, as servers with handshake_first want it"`
	Context   string `key:"context" env:"NATS_CONTEXT" help:"context of the nats command that names the server and how to log in, or the full path of its file; flags come before it, the environment after it"`
	Domain    string `key:"js_domain" env:"MEANDER_JS_DOMAIN" help:"JetStream domain that has the streams, where the server is connected to it by a leaf node"`
	APIPrefix string `key:"js_prefix" env:"MEANDER_JS_PREFIX" help:"what another account exports its JetStream API under, in place of $JS.API"`

	CloudEvents bool `key:"nats.cloudevents" env:"MEANDER_NATS_CLOUDEVENTS" help:"give each event the attributes of CloudEvents 1.0, as headers ce-*"`

	in bus.Config // what the context says besides
}

// UseContext takes what the context says in place of all settings that were not given by the flags of services.
func (n *NATS) UseContext(given func(flag string) bool) error {
	c, err := n.Bus("").InContext(given)
	if err != nil {
		return err
	}
	n.in, n.URL, n.Token, n.CredsFile, n.TLSFirst = c, c.URL, c.Token, c.CredsFile, c.TLSFirst
	n.TLSCA, n.TLSCert, n.TLSKey, n.Domain, n.APIPrefix = c.CAFile, c.CertFile, c.KeyFile, c.Domain, c.APIPrefix
	return nil
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
		case u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme):
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
	c := n.in
	c.URL, c.Token, c.CredsFile, c.TLSFirst = strings.Join(n.Servers(), ","), n.Token, n.CredsFile, n.TLSFirst
	c.CAFile, c.CertFile, c.KeyFile, c.Domain, c.APIPrefix = n.TLSCA, n.TLSCert, n.TLSKey, n.Domain, n.APIPrefix
	c.Name, c.Context, c.CloudEvents, c.ConnectTimeout = name, n.Context, n.CloudEvents, -1
	return c
}
