// Package remotehttp is what clients of servers over HTTP have in common that draw samples: their addresses, requests
// with a JSON body, and the classes of their errors.
package remotehttp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/models/strictjson"
)

const (
	// maxAnswer bounds an answer to Ask, in bytes.
	maxAnswer = 4 << 20
	// askTimeout bounds a request that needs no computation.
	askTimeout = 10 * time.Second
)

// Errors of a server, besides those of a connection, see package pool. A retry may help against ErrGarbage.
var (
	ErrRefused = pool.ErrRefused
	ErrSilent  = pool.ErrSilent
	ErrGarbage = errors.New("not an answer")
)

// StatusError is an answer with another status than 200.
type StatusError struct {
	Status int
	Err    error
	// Paused says that the server takes no requests until it is told to go on, as vLLM does while weights change.
	Paused bool
}

// NewStatusError returns the error for an answer with a status, which said what err says in short.
func NewStatusError(status int, said []byte, err error) *StatusError {
	paused := status == http.StatusServiceUnavailable && bytes.Contains(bytes.ToLower(said), []byte("paused"))
	return &StatusError{Status: status, Err: err, Paused: paused}
}

// Error says what the server said.
func (e *StatusError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *StatusError) Unwrap() error { return e.Err }

// Is reports whether the status is of a class: refused if it says that a retry gives the same answer.
func (e *StatusError) Is(class error) bool {
	switch class {
	case pool.ErrPaused:
		return e.Paused
	case pool.ErrOverloaded:
		return !e.Paused && (e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable)
	case pool.ErrRefused:
		return e.Status >= 400 && e.Status < 500 && e.Status != http.StatusTooManyRequests &&
			e.Status != http.StatusRequestTimeout && e.Status != http.StatusConflict
	}
	return false
}

// Answered returns the status of an error that is an answer; 0: it is none.
func Answered(err error) int {
	if e, ok := errors.AsType[*StatusError](err); ok {
		return e.Status
	}
	return 0
}

// Split splits NAME=URL, and checks that URL is that of a server, over HTTP. base has no slash at its end.
func Split(server string) (name, base string, err error) {
	name, base, _ = strings.Cut(server, "=")
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" ||
		u.Fragment != "" {
		return name, "", fmt.Errorf("%q; must be NAME=URL, URL that of a server, such as %s=http://127.0.0.1:8000",
			server, name)
	}
	return name, strings.TrimRight(base, "/"), nil
}

// SplitAll splits NAME=URL[,URL ...] as Split does; no URL may be there twice.
func SplitAll(server string) (name string, bases []string, err error) {
	name, list, _ := strings.Cut(server, "=")
	seen := map[string]bool{}
	for one := range strings.SplitSeq(list, ",") {
		_, base, err := Split(name + "=" + one)
		if err != nil {
			return name, nil, err
		}
		if seen[base] {
			return name, nil, fmt.Errorf("%q; must name each server once, and names %s twice", server, base)
		}
		seen[base] = true
		bases = append(bases, base)
	}
	return name, bases, nil
}

// Hooks are told what becomes of the servers of a pool, see pool.Config; nil: no call.
type Hooks struct {
	Changed    func(server string, err error)
	Overloaded func(server string, most int, err error)
	Waiting    func(why error)
}

// lookEvery is the pause between two looks at a server.
const lookEvery = 2 * time.Second

// Pooled completes the settings of a pool of servers: when they are looked at, and who is told.
func Pooled[M pool.Member](c pool.Config[M], h Hooks) pool.Config[M] {
	c.Every, c.Retry, c.RetryMost = lookEvery, lookEvery, lookEvery
	c.Changed, c.Overloaded, c.Waiting = h.Changed, h.Overloaded, h.Waiting
	return c
}

// Client sends requests to a server. It is safe for concurrent use.
type Client struct {
	// Base is the URL of the server, without a slash at its end.
	Base string
	key  string
	http *http.Client
}

// New returns a client of the server at base. It sends key as a bearer token, unless that is empty, and waits for the
// header of an answer as long as patience.
func New(base, key string, patience time.Duration) *Client {
	return &Client{Base: base, key: key, http: &http.Client{Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 64, ResponseHeaderTimeout: patience,
	}}}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Do sends a request with a JSON body, unless body is nil, and returns a response with status 200. Another status is a
// *StatusError with the reason that the server gives.
func (c *Client) Do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var data io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		data = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, data)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	return nil, NewStatusError(resp.StatusCode, said, fmt.Errorf("%s %s: %s: %s", method, path, resp.Status,
		Reason(said)))
}

// Ask sends a request that needs no computation, and decodes its JSON answer into v, unless v is nil.
func (c *Client) Ask(ctx context.Context, method, path string, body, v any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return c.AskSlow(ctx, method, path, body, v)
}

// AskSlow is Ask for a request that the server may work on for as long as ctx lasts.
func (c *Client) AskSlow(ctx context.Context, method, path string, body, v any) error {
	resp, err := c.Do(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err == nil && v != nil {
		if err = errors.Join(strictjson.Check(data), json.Unmarshal(data, v)); err != nil {
			err = fmt.Errorf("%w: %w", ErrGarbage, err)
		}
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// Health returns nil if the server accepts requests, else why not.
func (c *Client) Health(ctx context.Context) error {
	return c.Ask(ctx, http.MethodGet, "/health", nil, nil)
}

// Reason returns what a server says about an error, in one line of at most 400 characters.
func Reason(body []byte) string {
	var e struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
		Because string          `json:"error_message"`
		Detail  json.RawMessage `json:"detail"`
	}
	said := string(body)
	if json.Unmarshal(body, &e) == nil {
		var in struct {
			Message string `json:"message"`
		}
		var text string
		switch {
		case json.Unmarshal(e.Error, &in) == nil && in.Message != "":
			said = in.Message
		case e.Message != "", e.Because != "":
			said = cmp.Or(e.Message, e.Because)
		case json.Unmarshal(e.Error, &text) == nil && text != "", json.Unmarshal(e.Detail, &text) == nil && text != "":
			said = text
		case len(e.Detail) > 0:
			said = string(e.Detail)
		}
	}
	if said = strings.Join(strings.Fields(strings.ToValidUTF8(said, "?")), " "); said == "" {
		return "no reason given"
	}
	return fmt.Sprintf("%.400s", said)
}
