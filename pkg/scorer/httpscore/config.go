package httpscore

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/scorer/internal/wire"
	"github.com/meander-rl/meander/schemas"
)

// Config is the settings of one server. Fields that a file leaves out have the values of DefaultConfig.
type Config struct {
	// URL is the address of the requests: http or https, with the path. Required.
	URL string `key:"url"`
	// Format of requests and replies: json or msgpack. Msgpack saves the third that base64 adds to images.
	Format string `key:"format" enum:"json,msgpack"`
	// Image is the format of images in requests: png, or jpeg of quality 95.
	Image string `key:"image" enum:"ScoreImageFormats"`
	// Frames is the most frames of a video that are sent beside the one in the middle, evenly spaced; 0 or 1: none,
	// 1024: all of any video.
	Frames int `key:"frames" range:"0..MaxFrames"`
	// Headers are sent with every request. ${NAME} in a value stands for the environment
	// variable NAME. Values are secrets: they appear in no error and no printed form.
	Headers map[string]string `key:"headers"`
	// Timeout bounds one attempt, from the connection to the last byte of the reply.
	Timeout time.Duration `key:"timeout" range:"(0s..1h]"`
	// Concurrency is how many requests run at once. Rate is how many start in a second, retries included; 0: no limit.
	Concurrency int     `key:"concurrency" range:"1..1024"`
	Rate        float64 `key:"rate" range:"0.."`
	// Retries is how often a request is repeated if the server cannot be reached, is too
	// slow, or answers 408, 429 or 5xx.
	Retries int `key:"retries" range:"0..16"`
	// RetryWait is the wait before the first retry; it doubles with each. At most 30 s.
	RetryWait time.Duration `key:"retry_wait" range:"(0s..30s]"`
	// MaxBatch is the most samples of one request.
	MaxBatch int `key:"max_batch" range:"1..256"`
	// Version names what runs on the server; it is a part of Scorer.Version.
	Version string `key:"version" size:"0..128"`
}

// DefaultConfig returns the default settings: JSON, one image per request, three retries.
func DefaultConfig() Config {
	return Config{
		Format: wire.FormatJSON, Image: wire.PNG, Timeout: 30 * time.Second, Concurrency: 4,
		Retries: 3, RetryWait: 500 * time.Millisecond, MaxBatch: 1,
	}
}

// maxWait bounds one wait before a retry, also if the server asks for a longer one.
const maxWait = 30 * time.Second

var (
	headerName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
	variable   = regexp.MustCompile(`\$\{([^{}]*)\}`)
	varName    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// reserved are headers that the scorer sets itself.
var reserved = []string{
	"Accept", "Accept-Encoding", "Connection", "Content-Encoding", "Content-Length", "Content-Type",
	"Host", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// Validate joins all faults; each names its field. It does not read the environment.
func (c Config) Validate() error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch u, err := url.Parse(c.URL); {
	case c.URL == "":
		fault("url: missing; must be http://HOST:PORT/PATH or https://...")
	case err != nil: // the error would show the address, password and all
		fault("url: no address that can be read; must be http://HOST:PORT/PATH or https://...")
	case u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		fault("url: %s; must be http://HOST:PORT/PATH or https://...", redactURL(c.URL))
	}
	names := map[string]bool{}
	for _, name := range c.headerNames() {
		switch {
		case len(name) > 64 || !headerName.MatchString(name):
			fault("headers: %q is no name of a header", name)
		case names[http.CanonicalHeaderKey(name)]:
			fault("headers.%s: comes twice", name)
		case slices.Contains(reserved, http.CanonicalHeaderKey(name)):
			fault("headers.%s: is set by the scorer itself", name)
		}
		for _, m := range variable.FindAllStringSubmatch(c.Headers[name], -1) {
			if !varName.MatchString(m[1]) {
				fault("headers.%s: ${%s} is no name of an environment variable", name, m[1])
			}
		}
		if strings.Contains(variable.ReplaceAllString(c.Headers[name], ""), "${") {
			fault("headers.%s: ${ without its }", name)
		}
		names[http.CanonicalHeaderKey(name)] = true
	}
	return errors.Join(append(errs, schemas.CheckFields(&c))...)
}

// headerNames returns the names of the headers, sorted.
func (c Config) headerNames() []string {
	names := make([]string, 0, len(c.Headers))
	for name := range c.Headers {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// String shows no secrets: only the names of headers, and the address without user and query.
func (c Config) String() string {
	return fmt.Sprintf("%s (%s, %s, headers %v, timeout %v, concurrency %d, rate %v, retries %d, max_batch %d)",
		redactURL(c.URL), c.Format, c.Image, c.headerNames(), c.Timeout, c.Concurrency, c.Rate, c.Retries, c.MaxBatch)
}

// GoString is String, for %#v.
func (c Config) GoString() string { return c.String() }

// MarshalText is String, for JSON, YAML and structured logs.
func (c Config) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// expandHeaders returns the headers with ${NAME} replaced from the environment, and the texts that errors must not
// show. A variable that is not set is an error.
func (c Config) expandHeaders() (header http.Header, secrets []string, err error) {
	header = http.Header{}
	var errs []error
	for _, name := range c.headerNames() {
		value := variable.ReplaceAllStringFunc(c.Headers[name], func(ref string) string {
			env := ref[2 : len(ref)-1]
			value, ok := os.LookupEnv(env)
			if !ok || value == "" {
				errs = append(errs, fmt.Errorf("headers.%s: environment variable %s is not set", name, env))
			}
			secrets = append(secrets, value)
			return value
		})
		if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			errs = append(errs, fmt.Errorf("headers.%s: the value has a line break or another control character", name))
		}
		secrets = append(secrets, value)
		header.Set(name, value)
	}
	if u, err := url.Parse(c.URL); err == nil {
		if password, ok := u.User.Password(); ok {
			secrets = append(secrets, password,
				base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password)))
		}
		for _, values := range u.Query() {
			secrets = append(secrets, values...)
		}
		secrets = append(secrets, u.RawQuery)
	}
	return header, secrets, errors.Join(errs...)
}

// redactURL returns an address without user, password, query and fragment.
func redactURL(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Opaque != "" {
		return "***"
	}
	shown := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}
	if u.RawQuery != "" {
		return shown.String() + "?***"
	}
	return shown.String()
}

// redactor returns a replacer of secrets in texts. It tries longer secrets first, as one may contain another.
func redactor(secrets []string) *strings.Replacer {
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, s := range slices.Compact(secrets) {
		if s != "" {
			pairs = append(pairs, s, "***")
		}
	}
	return strings.NewReplacer(pairs...)
}
