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
	// memberPause is how often a member looks whether it is its turn.
	memberPause = 100 * time.Millisecond
	// joinTimeout bounds the wait for a process that has the store and does not answer:
	// one that was just killed is gone sooner. One that starts has readyTimeout.
	joinTimeout = 15 * time.Second
	// dialTimeout bounds one connection to another member, on this machine.
	dialTimeout = 2 * time.Second
)

// MemberOptions say what a process is to the others on its store.
type MemberOptions struct {
	// Options of the server when this process has it. Listen must be set: others join.
	Options
	// Serves says that this process serves the store's pipeline when no other does.
	Serves bool
	// Agree is called with the settings of a pipeline that runs before it is joined, and
	// when another takes its place. An error keeps this process from joining; later it is
	// logged.
	Agree func(running Info) error
	// Settings are those of the pipeline that this process would serve, for others to see.
	Settings func() map[string]string
}

// Member is the part of this process in a store that several processes use: one has the
// server, the others are its clients, and when it ends, however it does, another takes
// the server over. A connection made through a member (InProcessConn, Token) is made
// again to whoever has the server then.
//
// At most one process serves the pipeline, and that one has the server: a member that
// only reads gives it up when another comes to serve.
type Member struct {
	opts   MemberOptions
	cancel context.CancelFunc
	done   chan struct{} // closed when the keeper has ended
	failed chan struct{} // closed when this process could not take its turn

	mu       sync.Mutex
	pipeline *held
	tenure   *tenure       // nil: another process has the server
	changed  chan struct{} // closed, and made anew, when tenure changes
	token    string        // of the server dialled last
	err      error         // why it failed
	warned   int           // process whose settings were objected to
}

// tenure is the time in which this process has the server.
type tenure struct {
	server *Server
	// ctx ends when the server is about to be given up; it is then waited for users.
	ctx   context.Context
	end   context.CancelFunc
	users sync.WaitGroup
}

// Join makes this process a member of a store, which is made when missing. It returns
// when the process has the server, or can reach the one that has it. The error is
// *InUseError when a process has the store that cannot be joined; ctx bounds the wait.
func Join(ctx context.Context, opts MemberOptions) (*Member, error) {
	if _, err := opts.native(); err != nil {
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
		joined, err := m.join(ctx)
		if err == nil && joined {
			break
		}
		inUse, _ := errors.AsType[*InUseError](err)
		switch {
		case err != nil && inUse == nil:
		case inUse != nil && inUse.Holder.PID != 0 && inUse.Holder.URL == "" && time.Since(began) > time.Second:
		case inUse != nil && time.Since(began) > joinTimeout && (inUse.Holder.PID != 0 || time.Since(began) > readyTimeout):
		case pause(ctx, memberPause/2) != nil:
			err = errors.Join(err, ctx.Err())
		default:
			continue
		}
		return nil, errors.Join(err, m.leave())
	}
	keep, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m.cancel = cancel
	go m.keep(keep)
	return m, nil
}

// join is one try: it takes the server, or finds it within reach.
func (m *Member) join(ctx context.Context) (bool, error) {
	if err := m.turn(ctx); err != nil {
		inUse, ok := errors.AsType[*InUseError](err)
		if !ok {
			return false, err
		}
		holder, running := look(m.opts.StoreDir, serverClaim)
		if m.pipeline != nil || !running || holder.URL == "" {
			// A reader gives way; a process that starts will say where it is.
			return false, &InUseError{StoreDir: m.opts.StoreDir, Holder: holder}
		}
		inUse.Holder = holder
		if knock(holder) != nil {
			return false, inUse // it is on its way out
		}
		if by, serving := look(m.opts.StoreDir, pipelineClaim); serving && m.opts.Agree != nil {
			if by.PID == 0 {
				return false, inUse
			}
			if err := m.opts.Agree(by); err != nil {
				return false, err
			}
		}
	}
	return true, nil
}

// turn takes the server if this process may have it now: *InUseError if not.
func (m *Member) turn(ctx context.Context) error {
	if m.opts.Serves && m.pipeline == nil {
		claim, err := take(ctx, m.opts.StoreDir, pipelineClaim)
		if err != nil {
			return err
		}
		info := Info{PID: os.Getpid()}
		if m.opts.Settings != nil {
			info.Settings = m.opts.Settings()
		}
		if err := claim.describe(info); err != nil {
			return errors.Join(err, claim.release())
		}
		m.mu.Lock()
		m.pipeline = claim
		m.mu.Unlock()
	}
	if !m.opts.Serves {
		if by, serving := look(m.opts.StoreDir, pipelineClaim); serving {
			return &InUseError{StoreDir: m.opts.StoreDir, Holder: by}
		}
	}
	server, err := Start(ctx, m.opts.Options)
	if err != nil {
		return err
	}
	t := &tenure{server: server}
	t.ctx, t.end = context.WithCancel(context.Background())
	m.set(t)
	return nil
}

// keep takes the server over when it is this process's turn, and gives it up when
// another comes to serve.
func (m *Member) keep(ctx context.Context) {
	defer close(m.done)
	var waiting time.Time // until when another process may keep the server that is ours to take
	for pause(ctx, memberPause) == nil {
		by, serving := look(m.opts.StoreDir, pipelineClaim)
		switch {
		case m.Owns() && m.opts.Serves: // until Close
		case m.Owns():
			if serving {
				m.opts.Log.Info().Int("pid", by.PID).Msg("giving the store to the process that serves")
				m.fail(m.resign())
			}
		case !m.opts.Serves && serving: // that one takes it
		default:
			if serving && m.pipeline == nil {
				m.watch(by)
			}
			err := m.turn(ctx)
			switch {
			case err == nil:
				waiting = time.Time{}
				m.opts.Log.Info().Str("store", m.opts.StoreDir).Msg("took the store over")
			case errors.As(err, new(*InUseError)):
				if m.pipeline != nil && waiting.IsZero() {
					waiting = time.Now().Add(joinTimeout)
				} else if m.pipeline != nil && time.Now().After(waiting) {
					m.fail(fmt.Errorf("take the store over: %w, and is not given up", err))
				}
			case ctx.Err() == nil:
				m.fail(fmt.Errorf("take the store over: %w", err))
			}
		}
	}
}

// watch objects, once, to a pipeline that came after the one that was joined and is
// not what this process can work with.
func (m *Member) watch(by Info) {
	if m.opts.Agree == nil || by.PID == 0 || by.PID == m.warned {
		return
	}
	m.warned = by.PID
	if err := m.opts.Agree(by); err != nil {
		m.opts.Log.Warn().Err(err).Msg("waiting for another process, which serves something else, to end")
	}
}

func (m *Member) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil && m.err == nil {
		m.err = err
		close(m.failed)
	}
}

func (m *Member) set(t *tenure) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tenure = t
	close(m.changed)
	m.changed = make(chan struct{})
}

// resign gives the server up, if this process has it.
func (m *Member) resign() error {
	m.mu.Lock()
	t := m.tenure
	m.mu.Unlock()
	if t == nil {
		return nil
	}
	t.end()
	m.set(nil)
	t.users.Wait()
	return t.server.Close()
}

// leave gives up everything.
func (m *Member) leave() error {
	err := m.resign()
	if m.pipeline != nil {
		err = errors.Join(err, m.pipeline.release())
	}
	return err
}

// Close gives the server up if this process has it, and what it serves ends before. It
// does not end connections: close them first. Later calls do nothing.
func (m *Member) Close() error {
	m.cancel()
	<-m.done
	err := m.leave()
	m.pipeline = nil
	return err
}

// Owns says whether this process has the server now.
func (m *Member) Owns() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tenure != nil
}

// Failed is closed when this process should have taken the server over and could not;
// Err then says why. Its connections wait in vain.
func (m *Member) Failed() <-chan struct{} { return m.failed }

// Err is why Failed is closed.
func (m *Member) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Unfinished says whether the process that served the pipeline before this one ended
// without handing back its work.
func (m *Member) Unfinished() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pipeline != nil && m.pipeline.stale
}

// Serve calls f each time this process gets the server, now if it has it. The context
// of f ends when ctx does, or when the server is about to be given up, which waits for
// f. Serve returns when ctx has ended and f has returned, or the error of f or of the
// member.
func (m *Member) Serve(ctx context.Context, f func(context.Context) error) error {
	var last *tenure
	for {
		m.mu.Lock()
		t, changed := m.tenure, m.changed
		if t != nil && t != last && t.ctx.Err() == nil {
			t.users.Add(1)
		} else {
			t = nil
		}
		m.mu.Unlock()
		if t != nil {
			last = t
			err := t.use(ctx, f)
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

func (t *tenure) use(ctx context.Context, f func(context.Context) error) error {
	defer t.users.Done()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(t.ctx, stop)()
	return f(ctx)
}

// InProcessConn connects to whoever has the server: in this process, or in another
// through its socket.
func (m *Member) InProcessConn() (net.Conn, error) {
	m.mu.Lock()
	t := m.tenure
	m.mu.Unlock()
	if t != nil {
		return t.server.InProcessConn()
	}
	holder, running := look(m.opts.StoreDir, serverClaim)
	if !running || holder.URL == "" {
		return nil, fmt.Errorf("nobody serves the store %q at the moment", m.opts.StoreDir)
	}
	conn, err := dial(holder)
	if err == nil && holder.Certificate != "" {
		var secured net.Conn
		if secured, err = holder.secure(conn); err != nil {
			return nil, errors.Join(fmt.Errorf("the server of process %d at %s: %w", holder.PID, holder.URL, err), conn.Close())
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

// dial connects to a member that has the server.
func dial(holder Info) (net.Conn, error) {
	u, err := url.Parse(holder.URL)
	if err != nil {
		return nil, fmt.Errorf("address of process %d: %w", holder.PID, err)
	}
	return net.DialTimeout("tcp", u.Host, dialTimeout)
}

// knock returns nil when the server of a member answers: the socket of one that was
// just killed still takes connections.
func knock(holder Info) error {
	conn, err := dial(holder)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // nothing was sent
	if err := conn.SetReadDeadline(time.Now().Add(dialTimeout)); err != nil {
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

// Token is what the server that InProcessConn connected to last wants to see.
func (m *Member) Token() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.token
}

// Where names the other end for people.
func (m *Member) Where() string {
	if m.Owns() {
		return "embedded server on " + m.opts.StoreDir
	}
	holder, _ := look(m.opts.StoreDir, serverClaim)
	return fmt.Sprintf("%s (process %d)", holder.URL, holder.PID)
}

// ClientURL is where other processes reach the server of this one; empty while another
// process has it.
func (m *Member) ClientURL() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tenure == nil {
		return ""
	}
	return m.tenure.server.ClientURL()
}

// Fault says why the server of this process stores nothing; nil while another has it.
func (m *Member) Fault() error {
	m.mu.Lock()
	t := m.tenure
	m.mu.Unlock()
	if t == nil {
		return nil
	}
	return t.server.Fault()
}

// Pipeline says which process serves the store's pipeline, or is about to.
func Pipeline(storeDir string) (Info, bool) { return look(storeDir, pipelineClaim) }

// pause waits for d or the end of ctx, whose error it returns.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
