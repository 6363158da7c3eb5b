package bus

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
)

// Config says how to reach the server. Exactly one of URL and InProcess is set.
type Config struct {
	// URL of the server, or several separated by commas: "nats://127.0.0.1:4222".
	URL string
	// InProcess makes the connections instead: to a server in this process, or to whoever
	// has the server at the time.
	InProcess nats.InProcessConnProvider
	// Token, TokenHandler or CredsFile prove who we are; all optional. The handler is
	// asked for each connection. The file has a JWT and its key, or the seed of an NKey.
	Token        string
	TokenHandler func() string
	CredsFile    string
	// CAFile, CertFile and KeyFile are PEM files for TLS; all optional.
	CAFile   string
	CertFile string
	KeyFile  string
	// Name is this client in the server's lists and logs.
	Name string
	// InboxPrefix of replies, where permissions ask for one per user; by default that of
	// InboxOf for a user with an NKey, else "_INBOX".
	InboxPrefix string
	// ConnectTimeout bounds Connect; default 10 s, negative: as long as its context.
	ConnectTimeout time.Duration
	// NoWait has Connect fail at once when no server listens at URL: who asks for one thing wants to know.
	NoWait bool
}

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	if (c.URL == "") == (c.InProcess == nil) {
		errs = append(errs, errors.New("url: exactly one of a URL and an in-process server is needed"))
	}
	if c.Token != "" && c.CredsFile != "" {
		errs = append(errs, errors.New("token: excludes creds_file; use one of them"))
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		errs = append(errs, errors.New("tls_cert: needs tls_key, and tls_key needs tls_cert"))
	}
	return errors.Join(errs...)
}

const (
	defaultConnectTimeout = 10 * time.Second
	// headroom is what MaxInline leaves of the payload limit for headers, which count.
	headroom = 8 << 10
	// apiTimeout bounds one request to the server.
	apiTimeout = 5 * time.Second
	// closeTimeout bounds the drain of a closing connection.
	closeTimeout = 10 * time.Second
	// A server that left that many pings unanswered is gone, though nobody closed the connection:
	// a machine that lost its power, a firewall that forgot the connection. Nothing else tells who
	// waits for messages.
	pingEvery, pingsLost = 4 * time.Second, 2
)

// Bus is one connection with its streams. Safe for concurrent use.
type Bus struct {
	nc  *nats.Conn
	js  jetstream.JetStream
	log zerolog.Logger

	closed chan struct{} // by the connection's last callback
	done   context.Context
	cancel context.CancelFunc

	// link ends, and is replaced, when the connection is lost: what waits for an answer on
	// it waits in vain.
	link atomic.Pointer[link]
	// stands is set once all streams have been seen: one that does not answer then is one whose
	// server recovers it, and not one that nobody has made.
	stands atomic.Bool

	who        identity
	denials    denials
	slow       atomic.Uint64
	reconnects atomic.Uint64
	waitLog    limiter
	blobs      blobStore
	troubles   troubles
	changed    changed
}

// link is the life of one connection to the server.
type link struct {
	ctx context.Context
	end context.CancelFunc
}

func newLink() *link {
	l := &link{}
	l.ctx, l.end = context.WithCancel(context.Background())
	return l
}

// errLinkLost is why a request failed whose connection went away under it.
var errLinkLost = errors.New("connection lost before the answer")

// Connect returns when the connection is up, or an error when it is not within
// Config.ConnectTimeout. Afterwards a lost connection is made again for ever, and
// what waits for it waits.
func Connect(ctx context.Context, cfg Config, log zerolog.Logger) (*Bus, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = defaultConnectTimeout
	}
	if cfg.ConnectTimeout > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, cfg.ConnectTimeout)
		defer stop()
	}
	b := &Bus{log: log, closed: make(chan struct{})}
	b.done, b.cancel = context.WithCancel(context.Background())
	b.link.Store(newLink())
	if cfg.CredsFile != "" {
		var err error
		if b.who, err = readCredentials(cfg.CredsFile); err != nil {
			return nil, fmt.Errorf("connect: %w", err)
		}
		if cfg.InboxPrefix == "" && b.who.key != "" {
			cfg.InboxPrefix = InboxOf(b.who.key)
		}
	}
	opts := b.options(cfg)
	where := RedactURL(cfg.URL)
	if cfg.InProcess != nil {
		where = "in-process server"
	}
	var waiting limiter
	for {
		nc, err := nats.Connect(cfg.URL, opts...)
		if err == nil {
			b.nc = nc
			break
		}
		if text := RedactURL(err.Error()); text != err.Error() {
			err = errors.New(text) // of an address that is none
		}
		denied := errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired)
		if denied && cfg.TokenHandler == nil || !retryable(err) || cfg.NoWait && unreachable(err) {
			return nil, fmt.Errorf("connect to %s: %w%s", where, err, connectHint(cfg, err))
		}
		if waiting.allow() {
			log.Info().Str("url", where).Err(err).Msg("waiting for the server")
		}
		if pause(ctx, 100*time.Millisecond) != nil {
			return nil, fmt.Errorf("connect to %s: %w", where, err)
		}
	}
	js, err := jetstream.New(b.nc, jetstream.WithDefaultTimeout(apiTimeout))
	if err != nil {
		b.nc.Close()
		return nil, fmt.Errorf("connect to %s: %w", where, err)
	}
	b.js = js
	return b, nil
}

// retryable says whether another try to connect makes sense: a mistake in a file or
// an address does not go away.
func retryable(err error) bool {
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.Is(err, nats.ErrInvalidConnection), errors.Is(err, nats.ErrSecureConnWanted), errors.As(err, &certificate):
		return false
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrTimeout):
		return true
	}
	s := err.Error()
	return !strings.Contains(s, "no such file") && !strings.Contains(s, "invalid URL") && !strings.Contains(s, "parse ") &&
		!strings.Contains(s, "nkeys: ") // a file of credentials without a key
}

// unreachable says whether nobody listens where the server should be.
func unreachable(err error) bool {
	dial, ok := errors.AsType[*net.OpError](err)
	return errors.Is(err, nats.ErrNoServers) || ok && dial.Op == "dial"
}

func (b *Bus) options(cfg Config) []nats.Option {
	var lost limiter
	opts := []nats.Option{
		nats.Name(cfg.Name), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.ReconnectWait(250 * time.Millisecond), nats.ReconnectJitter(100*time.Millisecond, time.Second),
		// A publish during an outage fails at once and is tried again by us: buffered,
		// it would be sent once by the buffer and once more by the retry.
		nats.ReconnectBufSize(-1),
		nats.DrainTimeout(closeTimeout), nats.PingInterval(pingEvery), nats.MaxPingsOutstanding(pingsLost),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			b.link.Swap(newLink()).end()
			if lost.allow() && err != nil {
				b.log.Warn().Err(err).Msg("connection lost, reconnecting")
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			b.reconnects.Add(1)
			b.log.Info().Str("server", nc.ConnectedServerName()).Msg("connected again")
		}),
		nats.ClosedHandler(func(*nats.Conn) { close(b.closed) }),
		nats.ErrorHandler(b.asyncError),
	}
	if cfg.InProcess != nil {
		opts = append(opts, nats.InProcessServer(cfg.InProcess))
	}
	if cfg.Token != "" {
		opts = append(opts, nats.Token(cfg.Token))
	}
	if cfg.TokenHandler != nil {
		opts = append(opts, nats.TokenHandler(cfg.TokenHandler))
	}
	if b.who.option != nil {
		opts = append(opts, b.who.option)
	}
	if cfg.CAFile != "" {
		opts = append(opts, nats.RootCAs(cfg.CAFile))
	}
	if cfg.CertFile != "" {
		opts = append(opts, nats.ClientCert(cfg.CertFile, cfg.KeyFile))
	}
	if cfg.InboxPrefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(cfg.InboxPrefix))
	}
	return opts
}

// asyncError takes what the server says outside of any reply. A refused publish
// looks like a timeout to its caller: the reason arrives only here.
func (b *Bus) asyncError(_ *nats.Conn, sub *nats.Subscription, err error) {
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		denied, met := b.deny(err)
		level := zerolog.ErrorLevel
		if met {
			level = zerolog.DebugLevel // whoever met it says so
		}
		b.log.WithLevel(level).Err(denied).Msg("not allowed")
	case errors.Is(err, nats.ErrSlowConsumer):
		b.slow.Add(1)
		subject := ""
		if sub != nil {
			subject = sub.Subject
		}
		b.log.Error().Str("subject", subject).Msg("messages dropped: too slow to take them")
	default:
		b.log.Warn().Err(err).Msg("connection error")
	}
}

// Close drains the connection and waits until everything is delivered and it is
// closed, up to 10 s, or until the server is gone. Publishers and consumers are to be
// closed before.
func (b *Bus) Close() error {
	b.cancel()
	l := b.link.Load()
	err := b.nc.Drain()
	if err != nil {
		b.nc.Close()
		if errors.Is(err, nats.ErrConnectionClosed) || errors.Is(err, nats.ErrConnectionReconnecting) {
			err = nil
		}
	}
	select {
	case <-b.closed:
	case <-l.ctx.Done(): // draining would wait for a server that does not come
		b.nc.Close()
	case <-time.After(closeTimeout + time.Second):
		b.nc.Close()
		err = errors.Join(err, fmt.Errorf("connection did not drain in %v", closeTimeout))
	}
	return err
}

// Conn is the connection, for core NATS requests and subscriptions.
func (b *Bus) Conn() *nats.Conn { return b.nc }

// JetStream is the client library's view of the same connection.
func (b *Bus) JetStream() jetstream.JetStream { return b.js }

// MaxInline is the largest event that travels as one message, in bytes: the server's
// payload limit less room for headers.
func (b *Bus) MaxInline() int { return max(0, int(b.nc.MaxPayload())-headroom) }

// request is one question to the server. It fails at once when the connection is lost, or when
// it is not allowed (ErrPermission).
func (b *Bus) request(ctx context.Context, m *nats.Msg) (*nats.Msg, error) {
	l := b.link.Load()
	ctx, stop := context.WithTimeout(ctx, apiTimeout)
	defer stop()
	lost := context.AfterFunc(l.ctx, stop)
	defer lost()
	ctx, refuse := context.WithCancelCause(ctx)
	defer refuse(nil)
	defer b.denials.listen(m.Subject, func(_ string, note error) { refuse(note) })()
	resp, err := b.nc.RequestMsgWithContext(ctx, m)
	if err != nil && errors.Is(context.Cause(ctx), ErrPermission) {
		return nil, context.Cause(ctx)
	}
	if err != nil && l.ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", errLinkLost, err)
	}
	return resp, err
}

// patience bounds how long an answer is waited for over lost connections: a server that
// starts again recovers its streams first.
const patience = readyTimeout

// patiently runs f, again each time the connection was away or was lost under it, or the stream
// had no leader: what it asks, the server answers that comes after. f must be safe to repeat. What
// is not allowed is ErrPermission.
func (b *Bus) patiently(ctx context.Context, f func(ctx context.Context) error) error {
	end, wait := time.Now().Add(patience), retryMin
	refused := false
	for {
		l := b.link.Load()
		allowed, denied, stop := b.undenied(ctx)
		try, cut := context.WithCancel(allowed)
		unlink := context.AfterFunc(l.ctx, cut)
		err := noLeader(f(own{try}))
		unlink()
		cut()
		note := denied()
		stop()
		if err != nil && note != nil {
			if refused { // twice: it is what f asks that is not allowed
				return note
			}
			refused = true
			continue
		}
		if b.clustered() && errors.Is(err, context.DeadlineExceeded) {
			// While a cluster has no leader, none of its servers may answer.
			err = fmt.Errorf("%w (%w)", ErrNoLeader, err)
		}
		if err == nil || ctx.Err() != nil || l.ctx.Err() == nil && !b.isAway(err) || b.nc.IsClosed() || time.Now().After(end) {
			return err
		}
		if b.waitLog.allow() {
			b.log.Warn().Err(err).Msg("no answer, asking again")
		}
		if pause(ctx, wait) != nil {
			return err
		}
		wait = min(2*wait, retryMax)
	}
}

// own hides the deadline of a context, which still ends it: then each request to the server has a
// time of its own, and one that was lost does not take all of it.
type own struct{ context.Context }

func (own) Deadline() (time.Time, bool) { return time.Time{}, false }

// isAway says whether an error is that of a connection, of a stream's leader, or of a stream that its
// server has not recovered yet, that is not there.
func (b *Bus) isAway(err error) bool {
	if errors.Is(err, jetstream.ErrNoStreamResponse) && b.stands.Load() {
		return true
	}
	for _, away := range []error{errLinkLost, ErrNoLeader, nats.ErrReconnectBufExceeded, nats.ErrConnectionReconnecting, nats.ErrDisconnected} {
		if errors.Is(err, away) {
			return true
		}
	}
	return false
}

// pause waits for d or the end of ctx, whose error it returns.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// limiter lets one log line through every 10 s: an outage must not fill the log.
type limiter struct{ last atomic.Int64 }

func (l *limiter) allow() bool {
	now, last := time.Now().UnixNano(), l.last.Load()
	return now-last > int64(10*time.Second) && l.last.CompareAndSwap(last, now)
}
