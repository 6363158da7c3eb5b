package chaos

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// chunk is how much a proxy forwards at a time, in bytes; slowChunk, to a slow reader.
const chunk, slowChunk = 32 << 10, 512

// Proxy is the network between one program and the server: a TCP proxy that delays, cuts
// and freezes what goes through it. It changes no byte and no order: a connection that
// loses bytes is a connection that ends.
type Proxy struct {
	listener net.Listener
	server   string
	running  sync.WaitGroup // accept, and a join for each connection

	mu      sync.Mutex
	closed  bool
	links   map[*link]bool
	refused time.Time // until then no connection gets through
	delayed time.Time // until then each chunk waits for delay
	delay   time.Duration
	slow    time.Time // until then the program reads slowChunk bytes at a time, with delay between
}

// link is one connection of the program, and that to the server which stands for it.
type link struct {
	program, server *net.TCPConn
	frozen          atomic.Bool
	ended           chan struct{}
	once            sync.Once
}

// NewProxy listens on a free port of this machine for a program that wants the server's address.
func NewProxy(server string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{listener: l, server: server, links: map[*link]bool{}}
	p.running.Go(p.accept)
	return p, nil
}

// Addr is where the program connects to, host:port.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Close ends the proxy and all of its connections, and waits for its goroutines.
func (p *Proxy) Close() error {
	err := p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for l := range p.links {
		l.end(true, true)
	}
	p.mu.Unlock()
	p.running.Wait()
	return err
}

// Open says whether a connection goes through it that carries something.
func (p *Proxy) Open() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		if !l.frozen.Load() && !l.over() {
			return true
		}
	}
	return false
}

// over says whether its connections are closed: it is forgotten a moment later.
func (l *link) over() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.join(conn.(*net.TCPConn)) })
	}
}

func (p *Proxy) join(program *net.TCPConn) {
	p.mu.Lock()
	refused := time.Now().Before(p.refused)
	p.mu.Unlock()
	var server net.Conn
	var err error
	if !refused {
		server, err = net.DialTimeout("tcp", p.server, time.Second)
	}
	if refused || err != nil {
		reset(program)
		return
	}
	l := &link{program: program, server: server.(*net.TCPConn), ended: make(chan struct{})}
	p.mu.Lock()
	p.links[l] = true
	closed := p.closed
	p.mu.Unlock()
	if closed {
		l.end(true, true)
	}
	var both sync.WaitGroup
	both.Go(func() { p.pump(l, l.server, l.program, false) })
	both.Go(func() { p.pump(l, l.program, l.server, true) })
	both.Wait()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// pump forwards one direction until an end of it closes. A frozen link forwards nothing, not even
// that an end has closed: it stays until the proxy closes.
func (p *Proxy) pump(l *link, to, from *net.TCPConn, toProgram bool) {
	buf := make([]byte, chunk)
	for {
		size, wait := p.pace(toProgram)
		n, err := from.Read(buf[:size])
		if wait > 0 {
			select {
			case <-time.After(wait):
			case <-l.ended:
			}
		}
		if l.frozen.Load() {
			<-l.ended
			return
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil && !l.frozen.Load() {
				l.end(true, true)
			}
		}
		if err != nil && l.frozen.Load() {
			<-l.ended
			return
		}
		if err != nil {
			cut := !errors.Is(err, io.EOF)
			l.end(cut, cut)
			return
		}
	}
}

// pace is how much is forwarded at a time, in bytes, and what it waits for before.
func (p *Proxy) pace(toProgram bool) (size int, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	switch {
	case toProgram && now.Before(p.slow):
		return slowChunk, p.delay
	case now.Before(p.delayed):
		return chunk, p.delay
	}
	return chunk, 0
}

// end closes both connections: with a reset, as of a machine that is gone, or in order.
func (l *link) end(resetProgram, resetServer bool) {
	l.once.Do(func() {
		for conn, hard := range map[*net.TCPConn]bool{l.program: resetProgram, l.server: resetServer} {
			if hard {
				reset(conn)
			} else {
				_ = conn.Close()
			}
		}
		close(l.ended)
	})
}

func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// Latency delays what goes through by delay per chunk, for d. False: nothing went through it.
func (p *Proxy) Latency(delay, d time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay, p.delayed = delay, time.Now().Add(d)
	return len(p.links) > 0
}

// SlowReader has the program take a few bytes at a time for d, so that what the server has for it
// piles up there. False: it was not connected.
func (p *Proxy) SlowReader(delay, d time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay, p.slow = delay, time.Now().Add(d)
	return len(p.links) > 0
}

// Cut resets all connections, on both sides, and refuses others for d. False: there was none.
func (p *Proxy) Cut(d time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	cut := 0
	for l := range p.links {
		if !l.frozen.Load() && !l.over() {
			l.end(true, true)
			cut++
		}
	}
	if cut > 0 {
		p.refused = time.Now().Add(d)
	}
	return cut > 0
}

// HalfOpen has the connections of now never carry a byte again, while the server takes them for
// open; the program does too, unless it is told. Others can be made. False: there was none.
func (p *Proxy) HalfOpen(told bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	frozen := 0
	for l := range p.links {
		if l.over() || l.frozen.Swap(true) {
			continue
		}
		frozen++
		if told {
			reset(l.program)
		}
	}
	return frozen > 0
}
