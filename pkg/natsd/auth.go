package natsd

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"
)

// tokenAuth lets in whoever shows the token, and every connection from within the
// process.
type tokenAuth string

// Check compares digests, so that neither length nor content of the token leaks in
// the time it takes.
func (t tokenAuth) Check(c server.ClientAuthentication) bool {
	if addr := c.RemoteAddress(); addr != nil && addr.Network() == "pipe" {
		return true
	}
	given, want := sha256.Sum256([]byte(c.GetOpts().Token)), sha256.Sum256([]byte(t))
	return subtle.ConstantTimeCompare(given[:], want[:]) == 1
}

// logBridge hands the server's log to zerolog. What the server calls a notice
// (banner, recovery, listening) is detail here.
type logBridge struct {
	log zerolog.Logger

	mu    sync.Mutex
	cause error
}

func (b *logBridge) Noticef(format string, v ...any) { b.log.Debug().Msg(fmt.Sprintf(format, v...)) }

func (b *logBridge) Debugf(format string, v ...any) { b.log.Trace().Msg(fmt.Sprintf(format, v...)) }

func (b *logBridge) Tracef(format string, v ...any) { b.log.Trace().Msg(fmt.Sprintf(format, v...)) }
func (b *logBridge) Warnf(format string, v ...any)  { b.log.Warn().Msg(fmt.Sprintf(format, v...)) }
func (b *logBridge) Errorf(format string, v ...any) { b.log.Error().Msg(fmt.Sprintf(format, v...)) }

// Fatalf must not end the process: Start returns the error instead.
func (b *logBridge) Fatalf(format string, v ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cause = errors.Join(b.cause, fmt.Errorf(format, v...))
}

func (b *logBridge) fatal() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cause
}
