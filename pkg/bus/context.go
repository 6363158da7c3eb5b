package bus

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/synadia-io/orbit.go/natscontext"

	"github.com/meander-rl/meander/pkg/models/userpath"
	"github.com/meander-rl/meander/schemas"
)

// Context is a context of the nats command: where the server is, and how to log in. Its settings jetstream_event_prefix
// and color_scheme have no effect here.
type Context struct {
	natscontext.Settings
	file string
}

// ReadContext reads a context by its name, or by the full path of its file. An error names the contexts that there are,
// or a setting that cannot be used.
func ReadContext(name string) (*Context, error) {
	c := &Context{file: name}
	if !filepath.IsAbs(name) {
		dir := os.Getenv("XDG_CONFIG_HOME")
		if home, err := os.UserHomeDir(); dir == "" && err == nil {
			dir = filepath.Join(home, ".config")
		}
		dir = filepath.Join(dir, "nats", "context")
		if c.file = filepath.Join(dir, name+".json"); strings.ContainsAny(name, `/\`) || !isRegular(c.file) {
			files, _ := filepath.Glob(filepath.Join(dir, "*.json"))
			for i, f := range files {
				files[i] = strings.TrimSuffix(filepath.Base(f), ".json")
			}
			return nil, fmt.Errorf("context: %q; must be a file by its full path, or one of those in %s: %s", name, dir,
				cmp.Or(strings.Join(files, ", "), "there is none; 'nats context add' makes one"))
		}
	}
	text, err := os.ReadFile(c.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("context: %w", err)
	}
	if err == nil {
		err = json.Unmarshal(text, &c.Settings)
	}
	if err != nil {
		return nil, fmt.Errorf("context %s: %w", c.file, err)
	}
	for _, of := range []struct{ setting, value string }{
		{"user_jwt", c.UserJwt}, {"nsc", c.NSCLookup}, {"windows_cert_store", c.WinCertStoreType},
	} {
		if of.value != "" {
			return nil, fmt.Errorf("context %s: %s: set; must be absent: name a file of credentials (creds) instead",
				c.file, of.setting)
		}
	}
	for _, path := range []*string{&c.Creds, &c.NKey, &c.CA, &c.Cert, &c.Key} {
		*path = userpath.Expand(*path)
	}
	servers := strings.FieldsFunc(cmp.Or(c.URL, nats.DefaultURL), func(r rune) bool { return r == ' ' || r == ',' })
	for i, s := range servers {
		if !strings.Contains(s, "://") {
			servers[i] = "nats://" + s
		}
	}
	c.URL = strings.Join(servers, ",")
	return c, nil
}

func isRegular(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular()
}

// InContext returns the settings of a connection with those of its context in place of others, except for what was
// given: by the names of the flags, as nats-url. Without given, what is not empty was given.
func (c Config) InContext(given func(flag string) bool) (Config, error) {
	if c.Context == "" || c.context != nil {
		return c, nil
	}
	s, err := ReadContext(c.Context)
	if err != nil {
		return c, err
	}
	c.context = s
	set := func(flag string, to *string, value string) {
		if value != "" && (given == nil && *to == "" || given != nil && !given(flag)) {
			*to = value
		}
	}
	own := c.Token != "" || c.CredsFile != ""
	if given != nil {
		own = given("nats-token") || given("nats-creds")
	}
	switch {
	case own:
		s.User, s.Password = "", ""
	case s.User+s.Token+s.Creds+s.NKey != "":
		c.Token, c.CredsFile = s.Token, cmp.Or(s.Creds, s.NKey)
	}
	set("nats-url", &c.URL, s.URL)
	set("nats-tls-ca", &c.CAFile, s.CA)
	set("nats-tls-cert", &c.CertFile, s.Cert)
	set("nats-tls-key", &c.KeyFile, s.Key)
	set("js-domain", &c.Domain, s.JSDomain)
	set("js-prefix", &c.APIPrefix, s.JSAPIPrefix)
	c.InboxPrefix = cmp.Or(c.InboxPrefix, s.InboxPrefix)
	c.TLSFirst = c.TLSFirst || s.TLSFirst
	return c, nil
}

// dial connects, through the proxy of the context if that has one.
func (c Config) dial(opts []nats.Option) (*nats.Conn, error) {
	if c.context == nil || c.context.SocksProxy == "" {
		return nats.Connect(c.URL, opts...)
	}
	ours := func(o *nats.Options) error { // opts say again who we are
		o.Servers = strings.Split(c.URL, ",")
		o.User, o.Password, o.Token, o.Nkey, o.UserJWT, o.SignatureCB = "", "", "", "", nil, nil
		return nil
	}
	nc, _, err := natscontext.Connect(c.context.file, slices.Insert(slices.Clone(opts), 0, ours)...)
	return nc, err
}

// The subjects of the JetStream API begin with apiPrefix, or with what a domain or an imported API has in its place.
const apiPrefix = "$JS.API."

// prefix returns what the subjects of the JetStream API begin with.
func (c Config) prefix() string {
	switch {
	case c.Domain != "":
		return "$JS." + c.Domain + ".API."
	case c.APIPrefix != "":
		return strings.TrimSuffix(c.APIPrefix, ".") + "."
	}
	return apiPrefix
}

// writeSubject returns the subject on which to publish what is stored under a subject. A domain and an imported API
// take entries of key-value buckets below their own prefix, and all else, as the objects, on its own subject.
func (b *Bus) writeSubject(stored string) string {
	if b.api != apiPrefix && schemas.InBucket(stored) {
		return b.api + stored
	}
	return stored
}
