// Package client publishes prompts and reads what the pipeline makes of them. With package schemas it is all that a
// Go program needs; other languages need a NATS client and a msgpack decoder. A Client publishes (Ask, Publish,
// Control, PushPolicy), reads results as they come (Groups, FreshGroups, Trajectories) and loads what they name (Steps,
// Latents, Image). Use errors.Is with the Err values of this package, and errors.As with its two error types,
// RefusedError and HeldError.
//
// Methods that wait do so until their ctx ends. Errors that only the server or the network can cause are returned as
// they are.
//
// The methods that a trainer calls are those of Client; connectError, readLive, publishNext and resolveLane are their
// common parts.
package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
)

// Client is a connection to a pipeline. Its methods may be called concurrently. It reconnects after the connection is
// lost, and repeats open requests.
type Client struct {
	bus *bus.Bus
	// own says that Connect made the bus, so Close closes it.
	own bool
}

// Option is a setting of Connect.
type Option func(*bus.Config)

// WithToken sends the server a token. It excludes WithCredentials.
func WithToken(token string) Option { return func(c *bus.Config) { c.Token = token } }

// WithCredentials logs in as the user of a credentials file (JWT and key). The file is read again at each
// reconnection. It excludes WithToken.
func WithCredentials(file string) Option { return func(c *bus.Config) { c.CredsFile = file } }

// WithCA uses TLS, and trusts the authorities in this PEM file instead of the system's.
func WithCA(file string) Option { return func(c *bus.Config) { c.CAFile = file } }

// WithCertificate shows the server a client certificate, from two PEM files.
func WithCertificate(certFile, keyFile string) Option {
	return func(c *bus.Config) { c.CertFile, c.KeyFile = certFile, keyFile }
}

// WithContext takes what is open, the URL where it is empty, from a context of the nats command: its name, or the full
// path of its file.
func WithContext(name string) Option { return func(c *bus.Config) { c.Context = name } }

// WithDomain names the JetStream domain that has the pipeline's streams, where a leaf node leads to them.
func WithDomain(domain string) Option { return func(c *bus.Config) { c.Domain = domain } }

// WithAPIPrefix says what another account exports its JetStream API under, in place of $JS.API.
func WithAPIPrefix(prefix string) Option { return func(c *bus.Config) { c.APIPrefix = prefix } }

// WithConnectTimeout bounds how long Connect waits for the server; default 10 s, negative: until its context ends.
func WithConnectTimeout(d time.Duration) Option {
	return func(c *bus.Config) { c.ConnectTimeout = d }
}

// Connect dials the NATS server at url, or one of several separated by commas, and waits up to two minutes for the
// pipeline's streams. Unless the options are wrong, the error is one of ErrUnreachable, ErrUnauthorized, ErrUntrusted
// and ErrNoPipeline.
func Connect(ctx context.Context, url string, options ...Option) (*Client, error) {
	config := bus.Config{URL: url, Name: "meander-client"}
	for _, option := range options {
		option(&config)
	}
	b, err := bus.Connect(ctx, config, zerolog.Nop())
	if err != nil {
		return nil, connectError(err)
	}
	if err := b.Ready(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrNoPipeline, err), b.Close())
	}
	return &Client{bus: b, own: true}, nil
}

// connectError joins an error of Connect with the Err value that names its cause, as far as it knows the cause, so
// that callers can use errors.Is.
func connectError(err error) error {
	var untrusted *tls.CertificateVerificationError
	var network *net.OpError
	refused := errors.Is(err, nats.ErrTLS) || errors.As(err,
		&network) && network.Op == "remote error" // a TLS alert
	for _, why := range []struct {
		sentinel error
		is       bool
	}{
		{ErrUntrusted, errors.As(err, &untrusted) || errors.Is(err, nats.ErrSecureConnWanted)},
		{ErrUnauthorized, errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || refused},
		{ErrUnreachable, errors.Is(err, nats.ErrNoServers) || errors.Is(err, nats.ErrTimeout)},
	} {
		if why.is {
			return fmt.Errorf("%w: %w", why.sentinel, err)
		}
	}
	return err
}

// New returns a client of a connected bus. Close leaves the bus open.
func New(b *bus.Bus) *Client { return &Client{bus: b} }

// Close closes the connection that Connect made.
func (c *Client) Close() error {
	if !c.own {
		return nil
	}
	return c.bus.Close()
}

// Errors of Connect.
var (
	// ErrUnreachable: no server answered in time.
	ErrUnreachable = errors.New("no server answers")
	// ErrUnauthorized: the server refuses our token, credentials or certificate, or wants one.
	ErrUnauthorized = errors.New("not let in")
	// ErrUntrusted: the server's certificate is not signed by a trusted authority, or it has
	// none although WithCA or WithCertificate asks for TLS.
	ErrUntrusted = errors.New("server not trusted")
	// ErrNoPipeline: the server has no streams of a pipeline; intake makes them.
	ErrNoPipeline = errors.New("no pipeline was set up there")
)

// Errors of all other calls.
var (
	// ErrNoAnswer means that no intake answered in time. What was published is stored, and
	// the next intake that runs handles it.
	ErrNoAnswer = errors.New("no intake answered in time; what was published is stored")
	// ErrJudged means that the sample already has another verdict of that name: the first counts.
	ErrJudged = errors.New("the sample has a verdict already")
	// ErrNoMedium means that a sample has no file of a kind: it failed, it stops with noise in it, or it is of another.
	ErrNoMedium = errors.New("no such file")
	// ErrNotFound means that no event or object of that name is stored, or no longer.
	ErrNotFound = bus.ErrNotFound
	// ErrCorrupt means that stored bytes do not have the digest that the trajectory names.
	ErrCorrupt = bus.ErrCorrupt
	// ErrFull means that the stream is full. Try again later: consumers, age limits or a purge
	// free space.
	ErrFull = bus.ErrStreamFull
	// ErrTooLarge means that an event is larger than the server allows.
	ErrTooLarge = bus.ErrTooLarge
	// ErrPermission means that our user may not publish that.
	ErrPermission = bus.ErrPermission
	// ErrClosed means that the client has been closed.
	ErrClosed = bus.ErrClosed
	// ErrCursor means that a cursor is malformed, or is from another store.
	ErrCursor = bus.ErrCursor
	// ErrEvicted means that groups after a cursor may have been removed before they were read.
	ErrEvicted = bus.ErrEvicted
)

// RefusedError says that a prompt, control or policy was refused. What intake refused is in the dead letters. A
// control of something that does not exist, or a policy that no sampler could use, is refused before it is stored.
type RefusedError struct {
	// Code is the class of the reason, one of the schemas.Code constants.
	Code   string
	Reason string
	// What was refused: prompt, control or policy.
	What string
}

func (e *RefusedError) Error() string { return e.What + " refused (" + e.Code + "): " + e.Reason }

// HeldError says that a prompt is neither accepted nor refused yet: it is stored, and intake continues once it has
// what it waits for.
type HeldError struct{ Reason string }

func (e *HeldError) Error() string { return "prompt held: " + e.Reason }
