package natsd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"
)

// A write that fails once, for want of space, makes the server refuse all that come
// after, until it is started again: per stream, or by switching its storage off. So the
// server is looked at, and started again in place once the disk takes writes.

const (
	// healEvery is how often the server is looked at.
	healEvery = time.Second
	// probeBytes is what the disk must take before the server is started again: a block
	// of the store.
	probeBytes = 8 << 20
	probeFile  = "meander.probe"
)

// Fault says why the server stores nothing, and what to do; nil: it does. It goes by
// itself: the server is started again once its disk takes writes.
func (s *Server) Fault() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fault
}

// InProcessConn connects to the server without a socket.
func (s *Server) InProcessConn() (net.Conn, error) {
	ns := s.current()
	if ns == nil {
		return nil, errors.New("the embedded server is starting again")
	}
	return ns.InProcessConn()
}

// current is the server, nil while it starts again.
func (s *Server) current() *server.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ns
}

func (s *Server) set(ns *server.Server, fault error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ns, s.fault = ns, fault
}

// heal looks after the server until ctx ends.
func (s *Server) heal(ctx context.Context) {
	tick := time.NewTicker(healEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ns := s.current()
		if ns != nil {
			cause := broken(ns)
			if cause == nil {
				s.set(ns, nil)
				continue
			}
			if s.Fault() == nil {
				s.opts.Log.Error().Err(cause).Str("store", s.opts.StoreDir).Msg("the store takes no writes; make room on its disk, and the server starts again by itself")
			}
			s.set(ns, fmt.Errorf("no writes to %q (%w); make room on its disk, it goes on by itself then", s.opts.StoreDir, cause))
			if probe(s.opts.StoreDir) != nil {
				continue
			}
			s.set(nil, s.Fault())
			end(ns)
		}
		again, err := s.again(ctx)
		if err != nil {
			s.set(nil, fmt.Errorf("start again on %q: %w", s.opts.StoreDir, err))
			continue
		}
		s.opts.Log.Warn().Str("store", s.opts.StoreDir).Msg("the disk takes writes, the server has started again")
		s.set(again, broken(again))
	}
}

// again starts the server where it was.
func (s *Server) again(ctx context.Context) (*server.Server, error) {
	native, err := s.opts.native()
	if err != nil {
		return nil, err
	}
	return run(ctx, native, s.opts, true)
}

// broken says whether the server has given up on its disk.
func broken(ns *server.Server) error {
	if !ns.JetStreamEnabled() {
		return errors.New("storage is switched off")
	}
	for _, e := range ns.Healthz(&server.HealthzOptions{Details: true}).Errors {
		if _, cause, ok := strings.Cut(e.Error, "write error: "); ok {
			return fmt.Errorf("stream %s: %s", e.Stream, cause)
		}
	}
	return nil
}

// DiskFree is the bytes that may still be written to the disk of the store, whoever has it open.
func (m *Member) DiskFree() (int64, error) { return DiskFree(m.opts.StoreDir) }

// DiskFree is the bytes that may still be written to the disk of a folder.
func DiskFree(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, fmt.Errorf("disk of store %q: %w", dir, err)
	}
	return int64(s.Bavail * uint64(s.Bsize)), nil
}

// probe writes a file to the disk and removes it.
func probe(dir string) error {
	f, err := os.CreateTemp(dir, probeFile)
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(make([]byte, probeBytes))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
