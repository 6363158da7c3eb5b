// Package natsd embeds a NATS server with JetStream in the process: for the all-in-one command, for tests, and for
// other programs that want the event plane without operating a server. No other package imports the server's code.
//
// A [Server] stores to files, installs no signal handlers, and opens a socket only when asked. A store (a folder)
// belongs to one server at a time. A claim guards it: a lock file, with a file beside it that says which process
// holds the lock and how to join it. A [Member] shares a store with other processes; its tenure is the time in which
// it has the server. A guest is a user in an account with its own streams. When the disk was full, the server
// restarts by itself.
package natsd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
)

// DefaultSyncInterval is how often the store is flushed to the disk when Options.SyncInterval is 0. A power failure
// may lose that much; the end of the process loses nothing.
const DefaultSyncInterval = time.Second

// readyTimeout bounds the recovery of the streams at the start, which takes seconds for gigabytes.
const readyTimeout = 2 * time.Minute

// tlsTimeout bounds the handshake with a client, from the connection on.
const tlsTimeout = 5 * time.Second

// Options of an embedded server.
type Options struct {
	// StoreDir is the folder of the streams. It is created when missing. Required.
	StoreDir string
	// SyncInterval is the time between flushes to the disk; 0: DefaultSyncInterval.
	SyncInterval time.Duration
	// SyncAlways flushes before each acknowledgement, so that a power failure loses nothing. Small messages are much
	// slower then.
	SyncAlways bool
	// Listen is the host:port for other processes, e.g. "127.0.0.1:0" for any free port;
	// empty: no socket at all.
	Listen string
	// Token is what clients that connect through the socket must show; empty: none. Connections from within the
	// process need none.
	Token string
	// Users may connect as well as clients with the token, each with its own rights. With neither users nor a token,
	// every client may connect.
	Users []User
	// Guests are the accounts of users who have their own.
	Guests []Guest
	// TLS, if set, is required from all clients that connect through the socket: the first thing a client says is who
	// it is, and without TLS it might say that unencrypted.
	TLS *TLS
	// MaxPayload is the largest message in bytes; 0: 1 MiB.
	MaxPayload int
	// MaxFileStore bounds what all streams may store, in bytes; 0: three quarters of the space that is free at the
	// start. It is raised to what streams and guests were promised.
	MaxFileStore int64
	// Log receives the server's warnings and errors, and the rest at debug level.
	Log zerolog.Logger
}

// Server is a running embedded server.
type Server struct {
	opts   Options // with the port that was chosen
	claim  *heldClaim
	url    string
	healer sync.WaitGroup
	cancel context.CancelFunc
	close  func() error

	mu    sync.Mutex
	ns    *server.Server // nil while it is restarted
	fault error
}

// Start locks the store, starts the server and returns when it is ready. The error is *InUseError when another
// process has the store; otherwise it is about the folder, the address, or from the server itself. ctx bounds the
// start only.
func Start(ctx context.Context, opts Options) (*Server, error) {
	native, err := opts.native()
	if err != nil {
		return nil, fmt.Errorf("start embedded server: %w", err)
	}
	if err := os.MkdirAll(opts.StoreDir, 0o700); err != nil {
		return nil, fmt.Errorf("make store: %w", err)
	}
	claim, err := acquire(ctx, opts.StoreDir, serverClaim)
	if err != nil {
		return nil, err
	}
	ns, err := run(ctx, native, opts, claim.stale)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start embedded server on %q: %w", opts.StoreDir, err), claim.release())
	}
	s := &Server{ns: ns, opts: opts, claim: claim}
	if ns.Addr() != nil {
		s.url, s.opts.Listen = ns.ClientURL(), ns.Addr().String()
	}
	var heal context.Context
	heal, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.healer.Go(func() { s.heal(heal) })
	s.close = sync.OnceValue(s.shutdown)
	certificate, err := opts.certificatePEM()
	if err == nil {
		err = claim.describe(Info{PID: os.Getpid(), URL: s.ClientURL(), Token: opts.Token, Certificate: certificate})
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// native checks the options and returns them in the form of the server's library.
func (o Options) native() (*server.Options, error) {
	if o.StoreDir == "" {
		return nil, errors.New("store_dir: empty; must be a folder")
	}
	if o.SyncInterval < 0 {
		return nil, fmt.Errorf("sync_interval: %v; must not be negative", o.SyncInterval)
	}
	const maxPayload = 64 << 20 // the server's own hard limit
	if o.MaxPayload < 0 || o.MaxPayload > maxPayload {
		return nil, fmt.Errorf("max_payload: %d; must be between 0 and %d", o.MaxPayload, maxPayload)
	}
	if o.MaxFileStore < 0 {
		return nil, fmt.Errorf("max_file_store: %d; must not be negative", o.MaxFileStore)
	}
	if o.SyncInterval == 0 {
		o.SyncInterval = DefaultSyncInterval
	}
	// maxConsumers is the limit of each stream. The server's own is 1000, but every sampler has a consumer of the
	// controls, and there may be more samplers than that.
	const maxConsumers = 16 << 10
	n := &server.Options{
		ServerName: "meander-" + strconv.Itoa(os.Getpid()),
		JetStream:  true, StoreDir: o.StoreDir, JetStreamMaxStore: o.MaxFileStore,
		SyncInterval: o.SyncInterval, SyncAlways: o.SyncAlways,
		MaxPayload:      int32(o.MaxPayload),
		JetStreamLimits: server.JSLimitOpts{DefaultMaxConsumers: maxConsumers},
		DontListen:      true, NoSigs: true, DisableJetStreamBanner: true,
	}
	if o.Listen != "" {
		host, port, err := net.SplitHostPort(o.Listen)
		if err != nil {
			return nil, fmt.Errorf("listen: %w", err)
		}
		n.Host, n.DontListen = host, false
		if n.Port, err = strconv.Atoi(port); err != nil || n.Port < 0 || n.Port > 65535 {
			return nil, fmt.Errorf("listen: port %q; must be 0 (any) to 65535", port)
		}
		if n.Port == 0 {
			n.Port = server.RANDOM_PORT
		}
		if o.Token != "" || len(o.Users) > 0 {
			n.CustomClientAuthentication, n.AlwaysEnableNonce = o.gate(), true
		}
		if o.TLS != nil {
			if n.TLSConfig, err = o.TLS.config(); err != nil {
				return nil, err
			}
			n.TLSTimeout = tlsTimeout.Seconds()
		}
	}
	return n, nil
}

// run starts the server with enough space for what it has promised, and lets guests in. killed means that the process
// before was killed: then its socket may exist a moment longer than its lock, and run waits for it.
func run(ctx context.Context, native *server.Options, opts Options, killed bool) (*server.Server, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !native.DontListen {
		// The server would only log that it cannot listen, and wait.
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", opts.Listen)
		for tries := 0; killed && tries < 20 && errors.Is(err, syscall.EADDRINUSE) &&
			pause(ctx, 50*time.Millisecond) == nil; tries++ {
			l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", opts.Listen)
		}
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; must be an address that nothing listens on, or one with port 0 for any that is free", err)
		}
		if err != nil {
			return nil, err
		}
		if err := l.Close(); err != nil {
			return nil, err
		}
	}
	ns, err := launch(ctx, native, opts.Log)
	if err == nil {
		ns, err = withPromisedSpace(ctx, ns, native, opts)
	}
	if err != nil {
		return nil, err
	}
	if g, ok := native.CustomClientAuthentication.(gate); ok {
		if err := setupGuestAccounts(ns, opts.Guests, g); err != nil {
			stopServer(ns)
			return nil, err
		}
	}
	return ns, nil
}

// spareStore is how much a store may still take that has promised more than it has: a newer release may add small
// streams.
const spareStore = 256 << 20

// withPromisedSpace returns the server, restarted with a larger store limit when its streams and guests were promised
// more than the limit, which is computed from the free disk space at the start. Without that, the server would refuse
// guests, and every change of a limit, even to a lower one. A write that the disk cannot take is refused later.
func withPromisedSpace(
	ctx context.Context, ns *server.Server, native *server.Options, opts Options,
) (*server.Server, error) {
	info, err := ns.Jsz(nil)
	if err != nil {
		stopServer(ns)
		return nil, err
	}
	promised, room := int64(info.ReservedStore), info.Config.MaxStore
	for _, g := range opts.Guests {
		promised += g.MaxStore
	}
	if info.Disabled || promised <= room {
		return ns, nil
	}
	opts.Log.Warn().Str("store", opts.StoreDir).Int64("room", room).Int64("promised", promised).
		Msg("the store has less room than its streams and guests were promised; make room on its disk, " +
			"or lower limits (meander streams limit)")
	stopServer(ns)
	larger := native.Clone() // it shares the gate, which setupGuestAccounts opens for guests
	larger.JetStreamMaxStore = promised + spareStore
	return launch(ctx, larger, opts.Log)
}

// stopServer stops a server and waits until its store is written.
func stopServer(ns *server.Server) {
	ns.Shutdown()
	ns.WaitForShutdown()
}

// launch starts the server and waits until it accepts connections.
func launch(ctx context.Context, native *server.Options, log zerolog.Logger) (*server.Server, error) {
	ns, err := server.NewServer(native)
	if err != nil {
		return nil, err
	}
	bridge := &logBridge{log: log}
	ns.SetLoggerV2(bridge, log.GetLevel() <= zerolog.DebugLevel, false, false)
	ns.Start()
	deadline := time.Now().Add(readyTimeout)
	for !ns.ReadyForConnections(50 * time.Millisecond) {
		err := bridge.fatal()
		switch {
		case err != nil:
		case ctx.Err() != nil:
			err = ctx.Err()
		case time.Now().After(deadline):
			err = fmt.Errorf("not ready after %v", readyTimeout)
		default:
			continue
		}
		stopServer(ns)
		return nil, err
	}
	return ns, nil
}

// InProcess returns the provider of connections within this process, which need no socket.
func (s *Server) InProcess() nats.InProcessConnProvider { return s }

// ClientURL returns where other processes connect; "" without a listener.
func (s *Server) ClientURL() string { return s.url }

// SlowConsumers returns how many clients the server has disconnected because they read too slowly. It should stay 0.
func (s *Server) SlowConsumers() int64 {
	ns := s.current()
	if ns == nil {
		return 0
	}
	return ns.NumSlowConsumers()
}

// Close stops the server, waits until the store is written, and unlocks it. Later calls return what the first one
// returned. Close the clients before.
func (s *Server) Close() error { return s.close() }

// shutdown is the first Close.
func (s *Server) shutdown() error {
	s.cancel()
	s.healer.Wait()
	if ns := s.current(); ns != nil {
		stopServer(ns)
	}
	return s.claim.release()
}
