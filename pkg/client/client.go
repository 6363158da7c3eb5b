// Package client publishes prompts and reads what the pipeline makes of them. With
// package schemas it is all that a Go program needs; any other language needs a
// NATS client and a msgpack decoder.
//
// Errors are told apart with errors.Is by the values of this package, and with errors.As
// by its two types, RefusedError and HeldError.
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

// Client is a connection to a pipeline. Its methods may be called concurrently. A lost
// connection is made again for as long as it takes; what was asked over it is asked again.
type Client struct {
	bus *bus.Bus
	// own says that Close closes the bus.
	own bool
}

// Option is a setting of Connect.
type Option func(*bus.Config)

// WithToken shows the server a token. It excludes WithCredentials.
func WithToken(token string) Option { return func(c *bus.Config) { c.Token = token } }

// WithCredentials shows the server the user of a credentials file (JWT and key), which is
// read again each time that the connection is made. It excludes WithToken.
func WithCredentials(file string) Option { return func(c *bus.Config) { c.CredsFile = file } }

// WithCA speaks TLS, with a server whose certificate is signed by an authority of this PEM
// file instead of those of the system.
func WithCA(file string) Option { return func(c *bus.Config) { c.CAFile = file } }

// WithCertificate shows the server a certificate of ours, from two PEM files.
func WithCertificate(certFile, keyFile string) Option {
	return func(c *bus.Config) { c.CertFile, c.KeyFile = certFile, keyFile }
}

// WithName is what the server's lists and logs call this client; "meander-client" without.
func WithName(name string) Option { return func(c *bus.Config) { c.Name = name } }

// WithConnectTimeout bounds how long Connect waits for the server; 10 s without, negative:
// as long as its context.
func WithConnectTimeout(d time.Duration) Option {
	return func(c *bus.Config) { c.ConnectTimeout = d }
}

// Connect dials the NATS server at url, or one of several that are separated by commas, and
// waits up to two minutes for the pipeline's streams. Why it fails is one of
// ErrUnreachable, ErrUnauthorized, ErrUntrusted and ErrNoPipeline, where it is none of the
// options themselves.
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

// connectError joins the error that says why to what the server or the network said.
func connectError(err error) error {
	var untrusted *tls.CertificateVerificationError
	var network *net.OpError
	refused := errors.Is(err, nats.ErrTLS) || errors.As(err, &network) && network.Op == "remote error" // an alert of TLS
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

// New uses a bus that is connected already, and leaves it open.
func New(b *bus.Bus) *Client { return &Client{bus: b} }

// Close ends the connection that Connect made.
func (c *Client) Close() error {
	if !c.own {
		return nil
	}
	return c.bus.Close()
}
