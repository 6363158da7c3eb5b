package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/heap"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// plane is the event plane of a bench: an embedded server on a store in a temporary folder, and a
// connection to it.
type plane struct {
	bus    *bus.Bus
	server *natsd.Server
	store  string
	log    zerolog.Logger // of what waits, and for what
	tick   func(doing string, share float64)
	runs   int // so far
}

// nextRun is a run for each round: no subject comes twice.
func (p *plane) nextRun() schemas.Run {
	p.runs++
	return schemas.Run(fmt.Sprintf("r%04d", p.runs))
}

// withPlane runs a bench on an event plane of its own.
func withPlane(ctx context.Context, stderr io.Writer, do func(*plane) error) (err error) {
	heap.Bound()
	p := &plane{log: newLog(stderr)}
	stop := p.showProgress(stderr)
	defer stop()
	if p.store, err = os.MkdirTemp("", "meander-bench-"); err != nil {
		return fmt.Errorf("store of the bench: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.store)) }()
	if p.server, err = natsd.Start(ctx, natsd.Options{
		StoreDir: filepath.Join(p.store, "nats"), Listen: "127.0.0.1:0", Log: zerolog.Nop(),
	}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.server.Close()) }()
	if p.bus, err = p.connect(ctx, inProcess); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.bus.Close()) }()
	if err := p.bus.Setup(ctx); err != nil {
		return err
	}
	return do(p)
}

// How a connection reaches the server.
const (
	inProcess = "in-process"
	loopback  = "TCP"
)

// connect makes another connection.
func (p *plane) connect(ctx context.Context, transport string) (*bus.Bus, error) {
	c := bus.Config{InProcess: p.server.InProcess(), Name: "bench"}
	if transport == loopback {
		c = bus.Config{URL: p.server.ClientURL(), Name: "bench"}
	}
	return bus.Connect(ctx, c, p.log)
}

// showProgress makes tick: a line that is written over on a terminal, nothing elsewhere.
func (p *plane) showProgress(stderr io.Writer) (stop func()) {
	if !isTerminal(stderr) {
		p.tick = func(string, float64) {}
		return func() {}
	}
	const clear = "\r\x1b[K"
	p.tick = func(what string, share float64) { fmt.Fprintf(stderr, "%s%s %.0f %%\r", clear, what, 100*share) }
	return func() { fmt.Fprint(stderr, clear) }
}

// clear forgets what streams hold.
func (p *plane) clear(ctx context.Context, streams ...string) error {
	for _, name := range streams {
		s, err := p.bus.JetStream().Stream(ctx, name)
		if err == nil {
			err = s.Purge(ctx)
		}
		if err != nil {
			return fmt.Errorf("purge %s: %w", name, err)
		}
	}
	return nil
}

// wait does nothing for a time.
func (p *plane) wait(ctx context.Context, d time.Duration) error {
	p.tick("waiting", 1)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
