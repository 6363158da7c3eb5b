// Package natsd embeds a NATS server with JetStream in the process: for the program meander, for tests, and for other
// programs that want meander's streams without operating a server. No other package imports the server's code.
//
// A [Server] stores to files, installs no signal handlers, and opens a socket only when asked. A store (a folder)
// belongs to one server at a time. A claim guards it: a lock file, with an info file beside it that says which
// process holds the lock and how clients reach it. The server's claim is for the process with the server, the
// pipeline's for the process whose services work on the store.
//
// A [Member] is a process that shares a store with others, as every meander command does: the first to [Join] has the
// server, the others are its clients, and one of them takes the server over when the first ends. A tenure is the time
// in which a member has the server. When the disk was full, the server restarts by itself.
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
	// TLS, if set, is required from all clients that connect through the socket: the first thing a client says is who
	// it is, and without TLS it might say that unencrypted.
	TLS *TLS
	// MaxPayload is the largest message in bytes; 0: 1 MiB.
	MaxPayload int
	// MaxFileStore bounds what all streams may store, in bytes; 0: NewStorage. It is raised to what streams were
	// promised.
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

// Start locks the store, starts the server and returns when it is ready. The error is *InUseError if another process
// has the store; otherwise it is about the options, the folder, the address, or from the server itself. ctx bounds
// the start only; Close stops the server.
func Start(ctx context.Context, opts Options) (*Server, error) {
	native, err := opts.serverOptions()
	if err != nil {
		return nil, fmt.Errorf("start embedded server: %w", err)
	}
	if err := os.MkdirAll(opts.StoreDir, 0o700); err != nil {
		return nil, fmt.Errorf("make store: %w", err)
	}
	claim, err := acquireClaim(ctx, opts.StoreDir, serverClaim)
	if err != nil {
		return nil, err
	}
	ns, err := startServer(ctx, native, opts, claim.leftByKilled)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start embedded server on %q: %w", opts.StoreDir, err), claim.release())
	}
	s := &Server{ns: ns, opts: opts, claim: claim}
	if ns.Addr() != nil {
		s.url, s.opts.Listen = ns.ClientURL(), ns.Addr().String()
	}
	var heal context.Context
	heal, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.healer.Go(func() { s.restartAfterFullDisk(heal) })
	s.close = sync.OnceValue(s.shutdown)
	certificate, err := opts.certificatePEM()
	if err == nil {
		err = claim.writeInfo(Info{
			PID: os.Getpid(), URL: s.ClientURL(), Token: opts.Token, Users: len(opts.Users) > 0,
			Certificate: certificate,
		})
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// serverOptions checks the options and returns them in the form of the NATS server's library. An error names the
// option and what it must be.
func (o Options) serverOptions() (*server.Options, error) {
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
			n.CustomClientAuthentication, n.AlwaysEnableNonce = o.newAuthenticator(), true
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

// startServer starts a NATS server with enough space for what its streams were promised. With
// holderWasKilled, the process that had the store before was killed: its socket may exist a moment longer than its
// lock, so it tries the address for a second. An error is about the address or from the server; the server is stopped
// then.
func startServer(
	ctx context.Context, native *server.Options, opts Options, holderWasKilled bool,
) (*server.Server, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !native.DontListen {
		// The server would only log that it cannot listen, and wait.
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", opts.Listen)
		for tries := 0; holderWasKilled && tries < 20 && errors.Is(err, syscall.EADDRINUSE) &&
			pause(ctx, 50*time.Millisecond) == nil; tries++ {
			listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", opts.Listen)
		}
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; must be an address that nothing listens on, or one with port 0 for any that is free",
				err)
		}
		if err != nil {
			return nil, err
		}
		if err := listener.Close(); err != nil {
			return nil, err
		}
	}
	if opts.MaxFileStore == 0 {
		var err error
		if native.JetStreamMaxStore, err = NewStorage(opts.StoreDir); err != nil {
			return nil, err
		}
	}
	ns, err := startAndWait(ctx, native, opts.Log)
	if err != nil {
		return nil, err
	}
	return restartWithPromisedSpace(ctx, ns, native, opts)
}

// spareStore is how much a store may still take that has promised more than it has: a newer release may add small
// streams.
const spareStore = 256 << 20

// restartWithPromisedSpace returns the running server ns, or one restarted with a larger store limit, when its
// streams were promised more than the limit: others have filled its disk, perhaps. Without
// that, the server would refuse every change of a limit, even to a lower one. A write that the disk cannot take is
// refused later. After an error no server runs.
func restartWithPromisedSpace(
	ctx context.Context, ns *server.Server, native *server.Options, opts Options,
) (*server.Server, error) {
	info, err := ns.Jsz(nil)
	if err != nil {
		stopServer(ns)
		return nil, err
	}
	promised, limit := int64(info.ReservedStore), info.Config.MaxStore
	if info.Disabled || promised <= limit {
		return ns, nil
	}
	opts.Log.Warn().Str("store", opts.StoreDir).Int64("room", limit).Int64("promised", promised).
		Msg("the store has less room than its streams were promised; make room on its disk, " +
			"or lower limits (meander streams limit)")
	stopServer(ns)
	larger := native.Clone()
	larger.JetStreamMaxStore = promised + spareStore
	return startAndWait(ctx, larger, opts.Log)
}

func stopServer(ns *server.Server) {
	ns.Shutdown()
	ns.WaitForShutdown()
}

// startAndWait starts a NATS server and waits until it accepts connections. It fails if the server does, if ctx ends
// or after two minutes; the server is stopped then.
func startAndWait(ctx context.Context, native *server.Options, log zerolog.Logger) (*server.Server, error) {
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
	ns := s.runningServer()
	if ns == nil {
		return 0
	}
	return ns.NumSlowConsumers()
}

// Close stops the server, waits until the store is written, and unlocks it. Later calls return what the first one
// returned. Close the clients before.
func (s *Server) Close() error { return s.close() }

func (s *Server) shutdown() error {
	s.cancel()
	s.healer.Wait()
	if ns := s.runningServer(); ns != nil {
		stopServer(ns)
	}
	return s.claim.release()
}
