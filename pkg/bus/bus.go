// Package bus carries the contract's events over NATS JetStream. A Bus is one connection: it creates the streams,
// publishes with confirmation, consumes with bounded pulls and reads. Delivery is at least once, the effect exactly
// once.
//
// Publishing: an event's subject is its idempotency key. A publish returns when the server has stored the event, or
// has refused it as a duplicate, which counts as success. After a failure that can pass it sends the event again with
// the same id, until the context ends. A full stream is ErrStreamFull. What can never succeed is a *TerminalError. A
// Publisher does the same without waiting for each confirmation. A guarded stream keeps the first message on each
// subject; the publisher of the true event displaces what is not that event: copies it to the dead letters and deletes
// it.
//
// Consuming: a durable is a consumer whose progress the server keeps; all replicas of a service share it. Consume
// calls a handler for each message, and acks the message when the handler has published its results. After an error
// the server delivers it again later; after a TerminalError, or the last of MaxDeliver failures, Consume writes a dead
// letter. Handlers run concurrently and must be idempotent: a message can come twice, while its first handler is still
// at work. A Subscription gives the messages to its caller, who acknowledges them. The server counts AckWait from the
// delivery, so the package asks for a message only when a handler is free, and sends heartbeats for messages in flight.
//
// Reading (Get, Last, LastMany, Read) takes nothing off a stream and leaves no state on the server. In a cluster a
// request may meet a server that lags, so a reader asks the leader how far to read (leader.go).
//
// A denial is what the server did not allow a user; the server sends it outside of any reply, so that a caller would
// only see a timeout. While the server is away, calls are repeated (retryWhileAway) for a bounded time. Unless a
// comment says more, an error is one of the server or of ctx.
package bus

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/auth"
)

// Config says how to reach the server. Exactly one of URL and InProcess is set.
type Config struct {
	URL         string `key:"nats.url" env:"MEANDER_NATS_URL" secret:"url" help:"NATS server, or several separated by commas"`
	Token       string `key:"nats.token" env:"MEANDER_NATS_TOKEN" secret:"true" help:"authentication token; the environment keeps it out of the process list"`
	CredsFile   string `key:"nats.creds" env:"MEANDER_NATS_CREDS" help:"file of credentials: a key, or a JWT and its key"`
	CAFile      string `key:"nats.tls_ca" env:"MEANDER_NATS_TLS_CA" help:"PEM file of the authority that signed the server's certificate"`
	CertFile    string `key:"nats.tls_cert" env:"MEANDER_NATS_TLS_CERT" help:"PEM file of the client's certificate"`
	KeyFile     string `key:"nats.tls_key" env:"MEANDER_NATS_TLS_KEY" help:"PEM file of the client's key"`
	TLSFirst    bool   `key:"nats.tls_first" env:"MEANDER_NATS_TLS_FIRST" help:"begin with the TLS handshake, as servers with handshake_first want it"`
	Context     string `key:"context" env:"NATS_CONTEXT" help:"context of the nats command that names the server and how to log in, or the full path of its file; flags come before it, the environment after it"`
	Domain      string `key:"js_domain" env:"MEANDER_JS_DOMAIN" help:"JetStream domain that has the streams, where the server is connected to it by a leaf node"`
	APIPrefix   string `key:"js_prefix" env:"MEANDER_JS_PREFIX" help:"what another account exports its JetStream API under, in place of $JS.API"`
	CloudEvents bool   `key:"nats.cloudevents" env:"MEANDER_NATS_CLOUDEVENTS" help:"give each event the attributes of CloudEvents 1.0, as headers ce-*"`

	// InProcess makes the connections instead of URL: to a server in this process, or to the process that has the
	// server at the time.
	InProcess nats.InProcessConnProvider `key:"-"`
	// TokenHandler returns the token for each connection.
	TokenHandler func() string `key:"-"`
	// Name is this client in the server's lists and logs.
	Name string `key:"-"`
	// InboxPrefix starts the subjects on which replies come. Some permissions ask for one per user. Default:
	// auth.InboxOf for a user with an NKey, else "_INBOX".
	InboxPrefix string `key:"-"`
	// ConnectTimeout bounds Connect; default 10 s, negative: only the context of Connect bounds it.
	ConnectTimeout time.Duration `key:"-"`
	// NoWait makes Connect fail at once when no server listens at URL: for commands that a person runs and waits for.
	NoWait bool `key:"-"`

	context *Context
}

// Validate checks the settings of a connection. It returns all faults, each with the name of its field.
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
	if c.Domain != "" && c.APIPrefix != "" {
		errs = append(errs, errors.New("js_domain: excludes js_prefix; use one of them"))
	}
	if strings.ContainsAny(c.Domain, ".*> \t\r\n") || strings.ContainsAny(c.APIPrefix, "*> \t\r\n") {
		errs = append(errs, fmt.Errorf("js_domain, js_prefix: %q, %q; must have no wildcards and spaces, and a "+
			"domain no dots", c.Domain, c.APIPrefix))
	}
	return errors.Join(errs...)
}

const (
	defaultConnectTimeout = 10 * time.Second
	// headroom is what MaxInline leaves of the payload limit for headers: the server counts them too.
	headroom = 16 << 10
	// apiTimeout bounds one request to the server.
	apiTimeout = 5 * time.Second
	// closeTimeout bounds the drain of a closing connection.
	closeTimeout = 10 * time.Second
	// The connection counts as lost when the server has left pingsLost pings unanswered, each pingEvery apart. A
	// client that only waits for messages has no other way to notice that the server's machine lost power, or that a
	// firewall dropped the connection.
	pingEvery, pingsLost = 4 * time.Second, 2
)

// Bus is one connection with its streams. Safe for concurrent use.
type Bus struct {
	nc          *nats.Conn
	js          jetstream.JetStream
	api         string // what the subjects of the JetStream API begin with
	cloudEvents bool
	log         zerolog.Logger

	closed chan struct{} // closed by the connection's last callback

	// link ends, and is replaced, when the connection is lost: no answer can come any more for requests that were
	// sent on it.
	link atomic.Pointer[link]
	// setUp is set once all streams have been seen. If one does not answer after that, the server is recovering it.
	setUp atomic.Bool

	user       auth.Identity
	denials    denials
	slow       atomic.Uint64
	reconnects atomic.Uint64
	waitLog    limiter
	unfinished limiter // of the looks for chunks of blobs that were never finished
	faultLog   faultLog
	streams    sync.Map // what withStream has asked for, by name (jetstream.Stream)
	versions   sync.Map // the sequences of versions that PolicyOf has found, by lane, tenant and number (uint64)
	changed    sync.Map // the durables that others have changed, by key: what was changed (error)
}

// link is the life of one connection to the server. Its context ends when the connection is lost, and so ends all
// waits for answers on it.
type link struct {
	ctx context.Context
	end context.CancelFunc
}

func newLink() *link {
	l := &link{}
	l.ctx, l.end = context.WithCancel(context.Background())
	return l
}

// errLinkLost is the error of a request whose connection was lost before the answer came.
var errLinkLost = errors.New("connection lost before the answer")

// Connect connects to a server. It returns when the connection is up, or an error when it is not up within
// Config.ConnectTimeout or the server refuses the user. After that, the bus replaces a lost connection for as long as
// it takes, and calls that need the connection wait for it.
func Connect(ctx context.Context, cfg Config, log zerolog.Logger) (*Bus, error) {
	cfg, err := cfg.InContext(nil)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
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
	b := &Bus{log: log, closed: make(chan struct{}), api: cfg.prefix(), cloudEvents: cfg.CloudEvents}
	b.link.Store(newLink())
	if cfg.CredsFile != "" {
		if b.user, err = auth.ReadIdentity(cfg.CredsFile); err != nil {
			return nil, fmt.Errorf("connect: %w", err)
		}
		cfg.InboxPrefix = cmp.Or(cfg.InboxPrefix, b.user.InboxPrefix())
	}
	opts := b.options(cfg)
	where := RedactURL(cfg.URL)
	if cfg.InProcess != nil {
		where = "in-process server"
	}
	var waiting limiter
	for {
		nc, err := cfg.dial(opts)
		if err == nil {
			b.nc = nc
			break
		}
		if text := RedactURL(err.Error()); text != err.Error() {
			err = errors.New(text) // the error quotes an address that is not valid
		}
		denied := errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired)
		if denied && cfg.TokenHandler == nil || !retryable(err) || cfg.NoWait && unreachable(err) {
			return nil, fmt.Errorf("connect to %s: %w%s", where, err, connectHint(cfg, err))
		}
		if waiting.allow(logEvery) {
			log.Info().Str("url", where).Err(err).Msg("waiting for the server")
		}
		if Pause(ctx, 100*time.Millisecond) != nil {
			return nil, fmt.Errorf("connect to %s: %w", where, err)
		}
	}
	timeout := jetstream.WithDefaultTimeout(apiTimeout)
	b.js, err = jetstream.NewWithAPIPrefix(b.nc, strings.TrimSuffix(b.api, "."), timeout)
	if err != nil {
		b.nc.Close()
		return nil, fmt.Errorf("connect to %s: %w", where, err)
	}
	return b, nil
}

// retryable reports whether another try to connect makes sense: a mistake in a file or an address does not go away.
func retryable(err error) bool {
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.Is(err, nats.ErrInvalidConnection), errors.Is(err, nats.ErrSecureConnWanted),
		errors.As(err, &certificate):
		return false
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrTimeout):
		return true
	}
	address, file := new(url.Error), new(fs.PathError)
	if errors.As(err, &address) || errors.As(err, &file) {
		return false
	}
	s := err.Error() // the client library has no values for these
	return !strings.Contains(s, "invalid URL") && !strings.Contains(s, "parse ") && !strings.Contains(s, "nkeys: ")
}

func unreachable(err error) bool {
	dial, ok := errors.AsType[*net.OpError](err)
	return errors.Is(err, nats.ErrNoServers) || ok && dial.Op == "dial"
}

// options returns the client library's options for cfg, with callbacks that note when the connection is lost, log,
// and count.
func (b *Bus) options(cfg Config) []nats.Option {
	var lost limiter
	opts := []nats.Option{
		nats.Name(cfg.Name), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.ReconnectWait(250 * time.Millisecond), nats.ReconnectJitter(100*time.Millisecond, time.Second),
		// Without a buffer, a publish during an outage fails at once, and we try it again. With one, it would be sent
		// twice: from the buffer and by our retry.
		nats.ReconnectBufSize(-1),
		nats.DrainTimeout(closeTimeout), nats.PingInterval(pingEvery), nats.MaxPingsOutstanding(pingsLost),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			b.link.Swap(newLink()).end()
			if lost.allow(logEvery) && err != nil {
				b.log.Warn().Err(err).Msg("connection lost, reconnecting")
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			b.reconnects.Add(1)
			b.log.Info().Str("server", nc.ConnectedServerName()).Msg("connected again")
		}),
		nats.ClosedHandler(func(*nats.Conn) { close(b.closed) }),
		nats.ErrorHandler(b.handleAsyncError),
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
	if option := b.user.Option(); option != nil {
		opts = append(opts, option)
	}
	if c := cfg.context; c != nil && c.User != "" {
		opts = append(opts, nats.UserInfo(c.User, c.Password))
	}
	if cfg.TLSFirst {
		opts = append(opts, nats.TLSHandshakeFirst())
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

// handleAsyncError handles errors that the server sends outside of any reply; the client library calls it. For the
// caller, a refused publish looks like a timeout: only this callback gets the reason, and gives it to callers that
// wait (noteDenial).
func (b *Bus) handleAsyncError(_ *nats.Conn, sub *nats.Subscription, err error) {
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		denied, met := b.noteDenial(err)
		level := zerolog.ErrorLevel
		if met {
			level = zerolog.DebugLevel // the caller returns it
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

// Close drains the connection and waits until all messages are delivered and it is closed, for up to 10 s, or until
// the server is gone. Close publishers and consumers first. An error means that messages may be lost.
func (b *Bus) Close() error {
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
	case <-l.ctx.Done(): // the drain would wait for a server that is gone
		b.nc.Close()
	case <-time.After(closeTimeout + time.Second):
		b.nc.Close()
		err = errors.Join(err, fmt.Errorf("connection did not drain in %v", closeTimeout))
	}
	return err
}

// Conn returns the connection, for core NATS requests and subscriptions.
func (b *Bus) Conn() *nats.Conn { return b.nc }

// JetStream returns the client library's view of the same connection.
func (b *Bus) JetStream() jetstream.JetStream { return b.js }

// MaxInline returns how many bytes an event may have to travel as one message: the server's payload limit less space
// for headers.
func (b *Bus) MaxInline() int { return max(0, int(b.nc.MaxPayload())-headroom) }

// request sends one request to the server and returns the reply. It fails at once when the connection is lost
// (errLinkLost) or the server does not allow the request (ErrPermission); retryWhileAway repeats it.
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

// patience bounds how long retryWhileAway repeats: a server that starts again first recovers its streams.
const patience = readyTimeout

// retryWhileAway calls f, and calls it again while f fails because the connection was lost or the stream has no
// leader. It returns the last error of f; after patience it gives up. It returns ErrPermission when the server denied
// twice what f asks. f must be safe to repeat.
func (b *Bus) retryWhileAway(ctx context.Context, f func(ctx context.Context) error) error {
	end, wait := time.Now().Add(patience), retryMin
	refused := false
	for {
		l := b.link.Load()
		allowed, denied, stop := b.watchDenials(ctx)
		try, cut := context.WithCancel(allowed)
		unlink := context.AfterFunc(l.ctx, cut)
		err := noLeader(f(withoutDeadline{try}))
		unlink()
		cut()
		note := denied()
		stop()
		if err != nil && note != nil {
			if refused { // denied twice: the note is about a request of f
				return note
			}
			refused = true
			continue
		}
		if b.clustered() && errors.Is(err, context.DeadlineExceeded) {
			// While a cluster has no leader, none of its servers may answer.
			err = fmt.Errorf("%w (%w)", ErrNoLeader, err)
		}
		if err == nil || ctx.Err() != nil || l.ctx.Err() == nil && !b.mayAnswerLater(err) || b.nc.IsClosed() ||
			time.Now().After(end) {
			return err
		}
		if b.waitLog.allow(logEvery) {
			b.log.Warn().Err(err).Msg("no answer, asking again")
		}
		if Pause(ctx, wait) != nil {
			return err
		}
		wait = min(2*wait, retryMax)
	}
}

// withoutDeadline hides the deadline of a context, which still ends it. The library then gives each request its own
// time limit, so that one lost request does not use up all the time.
type withoutDeadline struct{ context.Context }

func (withoutDeadline) Deadline() (time.Time, bool) { return time.Time{}, false }

// mayAnswerLater reports whether an error means that the server may answer later: the connection was lost, the stream
// has no leader, or the server has not recovered the stream yet.
func (b *Bus) mayAnswerLater(err error) bool {
	if errors.Is(err, jetstream.ErrNoStreamResponse) && b.setUp.Load() {
		return true
	}
	for _, away := range []error{
		errLinkLost, ErrNoLeader, nats.ErrReconnectBufExceeded, nats.ErrConnectionReconnecting,
		nats.ErrDisconnected,
	} {
		if errors.Is(err, away) {
			return true
		}
	}
	return false
}

// Pause waits for d; an error is that of ctx, which ended before.
func Pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// limiter lets one caller through every now and then.
type limiter struct{ last atomic.Int64 }

func (l *limiter) allow(every time.Duration) bool {
	now, last := time.Now().UnixNano(), l.last.Load()
	return now-last > int64(every) && l.last.CompareAndSwap(last, now)
}

// logEvery is the pause between log lines of one kind: an outage must not fill the log.
const logEvery = 10 * time.Second

var credentials = regexp.MustCompile(`([A-Za-z]+://)?[^\s,"]*@`)

// RedactURL hides the credentials in the URLs of a text, for logs and people: everything before an @, since a token
// is written where a user's name would be.
func RedactURL(text string) string { return credentials.ReplaceAllString(text, "${1}***@") }
