// Package bustest gives a test its own event plane (a [Plane]): an embedded server with the project's streams,
// connected buses, services that run until they are stopped or killed, and the stored events. Its waits end when the
// awaited event has come. They give up when nothing has changed for [Patience], not after a total time.
//
// Failures fail the test: almost no function returns an error.
package bustest

import (
	"context"
	"errors"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// storage is what the streams of a plane may take, whatever is free on the disk of this machine: all of their limits.
const storage = 256 << 30

// Plane is a server on a store of its own, and a bus that is connected to it.
type Plane struct {
	*bus.Bus
	Server *natsd.Server
	// Options are the server's; a change of the test takes effect at the next Start.
	Options natsd.Options
}

// New starts a server that runs until the test ends, and sets its streams up. Each change is applied to the server's
// options first.
func New(t testing.TB, change ...func(*natsd.Options)) *Plane {
	t.Helper()
	p := Bare(t, change...)
	if err := p.Setup(context.Background()); err != nil {
		t.Fatal(err)
	}
	return p
}

// Bare starts a server without streams, and a bus to it, for the test; change sets options of the server. See [New].
func Bare(t testing.TB, change ...func(*natsd.Options)) *Plane {
	t.Helper()
	p := &Plane{Options: natsd.Options{StoreDir: t.TempDir(), MaxFileStore: storage, Log: zerolog.Nop()}}
	for _, f := range change {
		f(&p.Options)
	}
	p.Start(t)
	p.Bus = p.Connect(t)
	return p
}

// TCP is a change of options: the server listens on a free port of this machine, and buses
// connect through it instead of within the process.
func TCP(o *natsd.Options) { o.Listen = "127.0.0.1:0" }

// Start starts the server on its store: again, after the test has closed it. It is closed when the test ends.
func (p *Plane) Start(t testing.TB) {
	t.Helper()
	server, err := natsd.Start(context.Background(), p.Options)
	if err != nil {
		t.Fatal(err)
	}
	p.Server = server
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
}

// Config returns the settings with which a bus reaches the server.
func (p *Plane) Config() bus.Config {
	if p.Options.Listen != "" {
		return bus.Config{Name: "test", URL: p.Server.ClientURL(), Token: p.Options.Token}
	}
	return bus.Config{Name: "test", InProcess: p.Server.InProcess()}
}

// Connect returns another bus to the server, which is closed when the test ends.
func (p *Plane) Connect(t testing.TB) *bus.Bus {
	t.Helper()
	return Connect(t, p.Config())
}

// Connect returns a bus to any server, which is closed when the test ends.
func Connect(t testing.TB, c bus.Config) *bus.Bus {
	t.Helper()
	b, err := bus.Connect(context.Background(), c, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close bus: %v", err)
		}
	})
	return b
}

// Service is a service that runs beside the test. It is stopped when the test ends.
type Service struct {
	t      testing.TB
	bus    *bus.Bus
	cancel context.CancelFunc
	ending atomic.Bool
	done   chan struct{}
}

// Serve runs a service on its own connection, in the background until it is stopped or killed, or the test ends. An
// error of a service that was not stopped fails the test.
func (p *Plane) Serve(t testing.TB, run func(ctx context.Context, b *bus.Bus) error) *Service {
	t.Helper()
	b := p.Connect(t)
	ctx, cancel := context.WithCancel(context.Background())
	s := &Service{t: t, bus: b, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		err := run(ctx, b)
		for _, expected := range []error{context.Canceled, bus.ErrClosed, nats.ErrConnectionClosed} {
			if errors.Is(err, expected) && s.ending.Load() { // it was stopped before it was up, or killed
				return
			}
		}
		if err != nil {
			t.Errorf("service: %v", err)
		}
	}()
	t.Cleanup(s.Stop)
	return s
}

// Stop lets the service finish its work in flight, and waits for its end. A service that does not end fails the test,
// which then prints its goroutines.
func (s *Service) Stop() {
	s.ending.Store(true)
	s.cancel()
	select {
	case <-s.done:
	case <-time.After(5 * Patience):
		var stacks strings.Builder
		_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
		s.t.Errorf("service: still runs %v after it was stopped\n%s", 5*Patience, &stacks)
	}
}

// Kill ends the service as kill -9 would: it closes the connection in the middle of the work.
func (s *Service) Kill() {
	s.ending.Store(true)
	s.bus.Conn().Close()
	s.Stop()
}

// Info returns the state of a stream.
func (p *Plane) Info(t testing.TB, stream string) *jetstream.StreamInfo {
	t.Helper()
	s, err := p.JetStream().Stream(context.Background(), stream)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo()
}

// Change updates the settings of a stream, for example to make it full or small.
func (p *Plane) Change(t testing.TB, stream string, change func(c *jetstream.StreamConfig)) {
	t.Helper()
	c := p.Info(t, stream).Config
	change(&c)
	if _, err := p.JetStream().UpdateStream(context.Background(), c); err != nil {
		t.Fatal(err)
	}
}

// Forge stores bytes on a subject with the right message id, as a forger can who knows the subject. The test fails if
// something is stored there.
func (p *Plane) Forge(t testing.TB, subject string, data []byte) bus.Ack {
	t.Helper()
	ack, err := p.PublishRaw(t.Context(), subject, data, nats.Header{schemas.HeaderType: {"forged/1"}},
		schemas.MessageID(subject))
	if err != nil || ack.Duplicate {
		t.Fatalf("%s: got %+v, %v; want stored", subject, ack, err)
	}
	return ack
}

// Encode returns the bytes of an event, valid or not.
func Encode(t testing.TB, e schemas.Event) []byte {
	t.Helper()
	data, err := schemas.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
