package natsd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"sync"
	"time"
)

const (
	// memberPause is how often a member checks whether it is its turn.
	memberPause = 100 * time.Millisecond
	// joinTimeout bounds the wait for a process that has the store and does not answer: a process that was just
	// killed is gone sooner. For a process that starts, readyTimeout holds.
	joinTimeout = 15 * time.Second
	// dialTimeout bounds one connection to another member, on this machine.
	dialTimeout = 2 * time.Second
)

// MemberOptions say what a process does on a store that it shares with others.
type MemberOptions struct {
	// Options of the server when this process has it. Listen must be set: others join.
	Options
	// ServesPipeline means that this process serves the store's pipeline when no other process does.
	ServesPipeline bool
	// CheckSettings is called with the settings of a running pipeline before this process joins it, and when another
	// process takes the pipeline over. An error keeps this process from joining; later it is only logged.
	CheckSettings func(running Info) error
	// Settings returns the settings of the pipeline that this process would serve, for others to see.
	Settings func() map[string]string
}

// Member is one of several processes that share a store. One of them has the server, the others are its clients.
// When the process with the server ends, in whatever way, another takes the server over. A connection that was made
// through a member (InProcessConn, Token) then reconnects to the new server.
//
// At most one process serves the pipeline, and that process has the server: a member that only reads gives the
// server up when another process comes to serve.
type Member struct {
	opts   MemberOptions
	cancel context.CancelFunc
	done   chan struct{} // closed when watchClaims has returned
	failed chan struct{} // closed when this process could not take its turn

	mu       sync.Mutex
	pipeline *heldClaim
	tenure   *tenure       // nil: another process has the server
	changed  chan struct{} // closed and replaced when tenure changes
	token    string        // of the server that was dialled last
	err      error         // why failed is closed
	warned   int           // process about whose settings a warning was logged
}

// tenure is a period in which this process has the server.
type tenure struct {
	server *Server
	// ending is closed before the server is given up. calls are those of Serve that must return first.
	ending chan struct{}
	calls  sync.WaitGroup
}

// Join makes this process a member of a store, and creates the store if there is none. It returns when this process
// has the server or can reach the process that has it. It tries again while another process starts or ends. The error
// is *InUseError if that process cannot be joined; other errors are about the options, the folder or the server. ctx
// bounds the wait only.
func Join(ctx context.Context, opts MemberOptions) (*Member, error) {
	if _, err := opts.serverOptions(); err != nil {
		return nil, fmt.Errorf("join store: %w", err)
	}
	if opts.Listen == "" {
		return nil, errors.New("join store: listen: empty; must be an address for the other members")
	}
	if err := os.MkdirAll(opts.StoreDir, 0o700); err != nil {
		return nil, fmt.Errorf("make store: %w", err)
	}
	m := &Member{opts: opts, done: make(chan struct{}), failed: make(chan struct{}), changed: make(chan struct{})}
	began := time.Now()
	for {
		joined, err := m.tryJoin(ctx)
		if err == nil && joined {
			break
		}
		inUse, _ := errors.AsType[*InUseError](err)
		switch {
		case err != nil && inUse == nil:
		case inUse != nil && inUse.Holder.PID != 0 && inUse.Holder.URL == "" && time.Since(began) > time.Second:
		case inUse != nil && time.Since(began) > joinTimeout &&
			(inUse.Holder.PID != 0 || time.Since(began) > readyTimeout):
		case pause(ctx, memberPause/2) != nil:
			err = errors.Join(err, ctx.Err())
		default:
			continue
		}
		return nil, errors.Join(err, m.releaseAll())
	}
	watching, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m.cancel = cancel
	go m.watchClaims(watching)
	return m, nil
}

// tryJoin is one try of Join: it starts the server, or finds the process that has it within reach. On *InUseError
// Join tries again for a while; any other error ends Join.
func (m *Member) tryJoin(ctx context.Context) (bool, error) {
	if err := m.tryStartServer(ctx); err != nil {
		inUse, ok := errors.AsType[*InUseError](err)
		if !ok {
			return false, err
		}
		holder, running := readClaim(m.opts.StoreDir, serverClaim)
		if m.pipeline != nil || !running || holder.URL == "" {
			// A reader will give the server up, and a process that starts will soon say where it listens.
			return false, &InUseError{StoreDir: m.opts.StoreDir, Holder: holder}
		}
		inUse.Holder = holder
		if checkAnswers(holder) != nil {
			return false, inUse // that process is ending
		}
		if holderOfPipeline, serving := readClaim(m.opts.StoreDir, pipelineClaim); serving &&
			m.opts.CheckSettings != nil {
			if holderOfPipeline.PID == 0 {
				return false, inUse
			}
			if err := m.opts.CheckSettings(holderOfPipeline); err != nil {
				return false, err
			}
		}
	}
	return true, nil
}

// tryStartServer starts the server if no other process has it, and begins a tenure; otherwise it returns *InUseError.
// A process that serves the pipeline first claims that; one that only reads lets such a process go first. Join calls
// it, and watchClaims when the process with the server may have ended.
func (m *Member) tryStartServer(ctx context.Context) error {
	if m.opts.ServesPipeline && m.pipeline == nil {
		claim, err := acquireClaim(ctx, m.opts.StoreDir, pipelineClaim)
		if err != nil {
			return err
		}
		info := Info{PID: os.Getpid()}
		if m.opts.Settings != nil {
			info.Settings = m.opts.Settings()
		}
		if err := claim.writeInfo(info); err != nil {
			return errors.Join(err, claim.release())
		}
		m.mu.Lock()
		m.pipeline = claim
		m.mu.Unlock()
	}
	if !m.opts.ServesPipeline {
		if holder, serving := readClaim(m.opts.StoreDir, pipelineClaim); serving {
			return &InUseError{StoreDir: m.opts.StoreDir, Holder: holder}
		}
	}
	server, err := Start(ctx, m.opts.Options)
	if err != nil {
		return err
	}
	m.setTenure(&tenure{server: server, ending: make(chan struct{})})
	return nil
}

// watchClaims runs in the background of a member until ctx ends. It starts the server here when the process that had
// it is gone, and gives it up when another process comes to serve the pipeline. What goes wrong for good is set as
// the member's error (Err).
func (m *Member) watchClaims(ctx context.Context) {
	defer close(m.done)
	var giveUpAt time.Time // until when another process may keep the server although it is our turn
	for pause(ctx, memberPause) == nil {
		if m.Owns() && m.opts.ServesPipeline { // until Close
			continue
		}
		holder, serving := readClaim(m.opts.StoreDir, pipelineClaim)
		switch {
		case m.Owns():
			if serving {
				m.opts.Log.Info().Int("pid", holder.PID).Msg("giving the store to the process that serves")
				m.setFailed(m.giveServerUp())
			}
		case !m.opts.ServesPipeline && serving: // the process that serves takes the server
		default:
			if serving && m.pipeline == nil {
				m.warnIfDifferent(holder)
			}
			err := m.tryStartServer(ctx)
			switch {
			case err == nil:
				giveUpAt = time.Time{}
				m.opts.Log.Info().Str("store", m.opts.StoreDir).Msg("took the store over")
			case errors.As(err, new(*InUseError)):
				if m.pipeline != nil && giveUpAt.IsZero() {
					giveUpAt = time.Now().Add(joinTimeout)
				} else if m.pipeline != nil && time.Now().After(giveUpAt) {
					m.setFailed(fmt.Errorf("take the store over: %w, and that process does not give it up", err))
				}
			case ctx.Err() == nil:
				m.setFailed(fmt.Errorf("take the store over: %w", err))
			}
		}
	}
}

// warnIfDifferent logs once when the pipeline that another process now serves has settings that CheckSettings
// refuses. This process then waits for the other to end.
func (m *Member) warnIfDifferent(by Info) {
	if m.opts.CheckSettings == nil || by.PID == 0 || by.PID == m.warned {
		return
	}
	m.warned = by.PID
	if err := m.opts.CheckSettings(by); err != nil {
		m.opts.Log.Warn().Err(err).Msg("waiting for another process, which serves something else, to end")
	}
}

func (m *Member) setFailed(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil && m.err == nil {
		m.err = err
		close(m.failed)
	}
}

func (m *Member) setTenure(t *tenure) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tenure = t
	close(m.changed)
	m.changed = make(chan struct{})
}

// giveServerUp ends the tenure of this process: it cancels the calls of Serve, waits until they have returned, and
// stops the server, so that another process can start it. Without a tenure it does nothing. The error is of the
// server's stop.
func (m *Member) giveServerUp() error {
	m.mu.Lock()
	t := m.tenure
	m.mu.Unlock()
	if t == nil {
		return nil
	}
	m.setTenure(nil)
	close(t.ending)
	t.calls.Wait()
	return t.server.Close()
}

func (m *Member) releaseAll() error {
	err := m.giveServerUp()
	if m.pipeline != nil {
		err = errors.Join(err, m.pipeline.release())
	}
	return err
}

// Close ends the membership. It first ends what Serve runs, then stops the server if this process has it. It does not
// end connections: close them first. Later calls do nothing.
func (m *Member) Close() error {
	m.cancel()
	<-m.done
	err := m.releaseAll()
	m.pipeline = nil
	return err
}

// Owns reports whether this process has the server now.
func (m *Member) Owns() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tenure != nil
}

// Failed returns a channel that is closed when this process should have taken the server over, or given it up, and
// could not. Then its connections wait in vain; Err says why.
func (m *Member) Failed() <-chan struct{} { return m.failed }

// Err returns why Failed is closed; nil before that.
func (m *Member) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Unfinished reports whether the process that served the pipeline before this one died with work in flight.
func (m *Member) Unfinished() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pipeline != nil && m.pipeline.leftByKilled
}

// Serve calls f each time this process gets the server, and at once if it has it. The context of f ends when ctx
// does, or before the server is given up, which waits for f. Serve returns nil when ctx has ended and f has returned;
// otherwise the error of f, or that of a member that cannot take the server over.
func (m *Member) Serve(ctx context.Context, f func(context.Context) error) error {
	var last *tenure
	for {
		m.mu.Lock()
		t, changed := m.tenure, m.changed
		if t != nil && t != last {
			t.calls.Add(1)
		} else {
			t = nil
		}
		m.mu.Unlock()
		if t != nil {
			last = t
			err := t.runCall(ctx, f)
			if err != nil {
				return err
			}
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-m.failed:
			return m.Err()
		case <-changed:
		}
	}
}

// runCall calls f of Serve with a context that also ends when the server is to be given up, and returns the error of
// f.
func (t *tenure) runCall(ctx context.Context, f func(context.Context) error) error {
	defer t.calls.Done()
	var watcher sync.WaitGroup
	defer watcher.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	watcher.Go(func() {
		select {
		case <-t.ending:
			stop()
		case <-ctx.Done():
		}
	})
	return f(ctx)
}

// InProcessConn connects to the store's server: directly in this process, or through the socket of the process that
// has it. The NATS client calls it for each connection and reconnection. It fails while no process has the server;
// the client then tries again.
func (m *Member) InProcessConn() (net.Conn, error) {
	m.mu.Lock()
	t := m.tenure
	m.mu.Unlock()
	if t != nil {
		return t.server.InProcessConn()
	}
	holder, running := readClaim(m.opts.StoreDir, serverClaim)
	if !running || holder.URL == "" {
		return nil, fmt.Errorf("no process serves the store %q at the moment", m.opts.StoreDir)
	}
	conn, err := dial(holder)
	if err == nil && holder.Certificate != "" {
		var secured net.Conn
		if secured, err = holder.startTLS(conn); err != nil {
			return nil, errors.Join(fmt.Errorf("the server of process %d at %s: %w", holder.PID, holder.URL, err),
				conn.Close())
		}
		conn = secured
	}
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.token = holder.Token
	m.mu.Unlock()
	return conn, nil
}

func dial(holder Info) (net.Conn, error) {
	u, err := url.Parse(holder.URL)
	if err != nil {
		return nil, fmt.Errorf("address of process %d: %w", holder.PID, err)
	}
	return net.DialTimeout("tcp", u.Host, dialTimeout)
}

// checkAnswers returns nil if the server of another process answers. It reads the greeting, because the socket of a
// process that was just killed still accepts connections. An error means that the process is ending.
func checkAnswers(holder Info) error {
	conn, err := dial(holder)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // nothing was sent
	if err := conn.SetReadDeadline(time.Now().Add(dialTimeout)); err != nil {
		return err
	}
	if holder.Certificate != "" {
		_, err := holder.startTLS(conn) // a server logs an error for who leaves before that
		return err
	}
	greeting := make([]byte, len("INFO "))
	if _, err := io.ReadFull(conn, greeting); err != nil {
		return err
	}
	if string(greeting) != "INFO " {
		return fmt.Errorf("%s is no NATS server", holder.URL)
	}
	return nil
}

// Token returns the token of the server that InProcessConn connected to last.
func (m *Member) Token() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.token
}

// Where describes the server's place in a text for people.
func (m *Member) Where() string {
	if m.Owns() {
		return "embedded server on " + m.opts.StoreDir
	}
	holder, _ := readClaim(m.opts.StoreDir, serverClaim)
	return fmt.Sprintf("%s (process %d)", holder.URL, holder.PID)
}

// ClientURL returns where other processes reach the server of this one; "" while another process has the server.
func (m *Member) ClientURL() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tenure == nil {
		return ""
	}
	return m.tenure.server.ClientURL()
}

// Fault returns why the server of this process stores nothing (Server.Fault); nil while it stores, and while another
// process has the server.
func (m *Member) Fault() error {
	m.mu.Lock()
	t := m.tenure
	m.mu.Unlock()
	if t == nil {
		return nil
	}
	return t.server.Fault()
}

// Pipeline returns which process serves the store's pipeline, or is about to; false: none does.
func Pipeline(storeDir string) (Info, bool) { return readClaim(storeDir, pipelineClaim) }

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
