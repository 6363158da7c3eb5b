package chaos_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/chaos"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// through is a program's connection through a proxy, and the server's end of it.
type through struct {
	proxy           *chaos.Proxy
	program, server net.Conn
}

func newThrough(t *testing.T) *through {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := chaos.NewProxy(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	x := &through{proxy: p}
	if x.program, err = net.Dial("tcp", p.Addr()); err != nil {
		t.Fatal(err)
	}
	if x.server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = errors.Join(x.program.Close(), x.server.Close(), l.Close())
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	carries(t, x.program, x.server, 10) // until then the proxy may not know of it
	return x
}

// carries sends bytes one way and compares what comes out.
func carries(t *testing.T, from, to net.Conn, n int) {
	t.Helper()
	sent := bytes.Repeat([]byte("0123456789"), n/10)
	go func() {
		if _, err := from.Write(sent); err != nil {
			t.Error(err)
		}
	}()
	got := make([]byte, len(sent))
	if err := to.SetReadDeadline(time.Now().Add(bustest.Patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(to, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes came through otherwise, %v", len(sent), err)
	}
}

// ended waits until a connection ends.
func ended(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(bustest.Patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read %d bytes, %v; want the end", n, err)
	}
}

// Whatever a proxy does to the time of what goes through, it changes no byte of it.
func TestProxy_KeepsBytes(t *testing.T) {
	t.Parallel()
	x := newThrough(t)
	carries(t, x.program, x.server, 1<<20)
	if !x.proxy.Latency(5*time.Millisecond, time.Minute) {
		t.Error("nothing went through it")
	}
	carries(t, x.program, x.server, 1<<18)
	carries(t, x.server, x.program, 1<<18)
	x = newThrough(t)
	if !x.proxy.SlowReader(time.Millisecond, time.Minute) {
		t.Error("it was not connected")
	}
	carries(t, x.server, x.program, 10_000)
}

// A network that is cut ends the connection on both sides; one that is half-open ends it on none,
// or on the program's alone, and nothing comes through any more.
func TestProxy_CutsAndFreezes(t *testing.T) {
	t.Parallel()
	t.Run("cut", func(t *testing.T) {
		x := newThrough(t)
		if !x.proxy.Cut(time.Hour) {
			t.Error("there was no connection")
		}
		ended(t, x.program)
		ended(t, x.server)
		refused, err := net.Dial("tcp", x.proxy.Addr())
		switch {
		case err == nil:
			defer refused.Close()
			ended(t, refused)
		case !errors.Is(err, syscall.ECONNRESET): // the reset may come before Dial is back
			t.Error(err)
		}
		if x.proxy.Cut(0) {
			t.Error("nothing was there to be cut, and it was")
		}
	})
	for _, told := range []bool{false, true} {
		t.Run(fmt.Sprintf("half-open, told: %t", told), func(t *testing.T) {
			x := newThrough(t)
			if !x.proxy.HalfOpen(told) {
				t.Error("there was no connection")
			}
			silent(t, x.program, x.server)
			if told {
				ended(t, x.program)
			} else {
				silent(t, x.server, x.program)
			}
			if x.proxy.HalfOpen(told) || x.proxy.Cut(0) {
				t.Error("a connection that is dead was hurt again")
			}
		})
	}
}

// silent says that what one end sends does not reach the other, which is not told that it is over.
func silent(t *testing.T, from, to net.Conn) {
	t.Helper()
	_, _ = from.Write([]byte("lost"))
	if err := to.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := to.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read %d bytes, %v; want silence", n, err)
	}
}
