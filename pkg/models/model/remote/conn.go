package remote

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

// conn is a connection to a worker, for one call at a time.
type conn struct {
	net.Conn
	r      *bufio.Reader
	id     uint64 // of the last call
	bodies int    // bound of a body in bytes
}

// lostError says that a call got no answer: the worker or its connection is gone, or what it sent is no answer.
type lostError struct{ err error }

func (e *lostError) Error() string { return e.err.Error() }
func (e *lostError) Unwrap() error { return e.err }

// dial connects to a worker. A *wire.Fault says that its certificate is not valid here.
func dial(ctx context.Context, network, address string, secure bool) (*conn, error) {
	var c net.Conn
	var err error
	d := net.Dialer{Timeout: helloPatience}
	if secure {
		s := tls.Dialer{NetDialer: &d, Config: &tls.Config{MinVersion: tls.VersionTLS12}}
		if c, err = s.DialContext(ctx, network, address); err != nil {
			err = explainTLS(address, err)
		}
	} else {
		c, err = d.DialContext(ctx, network, address)
	}
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, r: bufio.NewReaderSize(c, 64<<10), bodies: wire.FirstBody}, nil
}

// explainTLS says what to do about TLS. A certificate that is not valid is of class config: waiting does not help.
func explainTLS(address string, err error) error {
	invalid, isInvalid := errors.AsType[*tls.CertificateVerificationError](err)
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return err // no worker is there
	}
	if !isInvalid {
		return fmt.Errorf("TLS: %w; a worker without --tls-cert wants torch=%s", err, address)
	}
	fix := "give the worker another"
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		fix = "use a name that it is for in torch=tls:NAME:PORT"
	} else if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		fix = "name the file of its authority in SSL_CERT_FILE"
	}
	said := fmt.Sprintf("certificate of %s: %v; %s", address, invalid.Err, fix)
	return &wire.Fault{Class: wire.ClassConfig, Message: said}
}

// exchange makes a call and decodes its result, unless result is nil. A *wire.Fault is the worker's error. After any
// other error the connection is closed: the end of ctx, or a *lostError.
func (c *conn) exchange(ctx context.Context, within time.Duration, call string, args any, tensors []wire.Tensor,
	result any,
) ([]wire.Tensor, error) {
	if err := ctx.Err(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	encoded, err := wire.Encode(args)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	c.id++
	_ = c.SetDeadline(time.Now().Add(within)) // a connection that takes none fails below
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	answer, err := c.ask(&wire.Message{ID: c.id, Call: call, Args: encoded, Tensors: tensors}, result)
	switch fault, isFault := errors.AsType[*wire.Fault](err); {
	case !stop() && ctx.Err() != nil:
		_ = c.Close()
		return nil, ctx.Err()
	case isFault:
		return nil, fault
	case err != nil:
		_ = c.Close()
		return nil, &lostError{fmt.Errorf("%s: %w", call, err)}
	}
	return answer, nil
}

// ask sends a request and reads its answer.
func (c *conn) ask(request *wire.Message, result any) ([]wire.Tensor, error) {
	if err := wire.Write(c, request); err != nil {
		return nil, err
	}
	answer, err := wire.Read(c.r, c.bodies)
	switch {
	case err != nil:
		return nil, err
	case answer.ID != request.ID:
		return nil, fmt.Errorf("%w: the answer to call %d; must be that to %d", wire.ErrFrame, answer.ID, request.ID)
	case answer.Error != nil:
		return nil, answer.Error
	case answer.Call != "":
		return nil, fmt.Errorf("%w: a call %.40q; must be an answer", wire.ErrFrame, answer.Call)
	case result != nil:
		if err := msgpack.Unmarshal(answer.Result, result); err != nil {
			return nil, fmt.Errorf("%w: result: %w", wire.ErrFrame, err)
		}
	}
	return answer.Tensors, nil
}
