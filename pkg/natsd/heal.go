package natsd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"
)

// When one write fails because the disk is full, the server refuses all later writes, of that stream or of all,
// until it is started again. So this package checks the server, and restarts it in the process once the disk takes
// writes again.

const (
	// healEvery is how often the server is checked.
	healEvery = time.Second
	// probeBytes is how much the disk must take before the server is restarted: a block of the store.
	probeBytes = 8 << 20
	probeFile  = "meander.probe"
)

// Fault returns why the server stores nothing, and what to do; nil when it stores. The fault ends by itself: the
// server is restarted once its disk takes writes.
func (s *Server) Fault() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fault
}

// InProcessConn connects to the server without a socket.
func (s *Server) InProcessConn() (net.Conn, error) {
	ns := s.runningServer()
	if ns == nil {
		return nil, errors.New("the embedded server is starting again")
	}
	return ns.InProcessConn()
}

func (s *Server) runningServer() *server.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ns
}

func (s *Server) setState(ns *server.Server, fault error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ns, s.fault = ns, fault
}

// restartAfterFullDisk checks the server until ctx ends; Start runs it in the background. When the disk has refused a
// write, it sets Fault, waits until the disk takes writes again, and restarts the server. A restart that fails is
// tried again at the next check.
func (s *Server) restartAfterFullDisk(ctx context.Context) {
	tick := time.NewTicker(healEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ns := s.runningServer()
		if ns != nil {
			cause := diskFault(ns)
			if cause == nil {
				s.setState(ns, nil)
				continue
			}
			if s.Fault() == nil {
				s.opts.Log.Error().Err(cause).Str("store",
					s.opts.StoreDir).Msg("the store takes no writes; make room on its disk, and the server starts " +
					"again by itself")
			}
			s.setState(ns, fmt.Errorf("no writes to %q (%w); make room on its disk, it goes on by itself then",
				s.opts.StoreDir, cause))
			if probeDisk(s.opts.StoreDir) != nil {
				continue
			}
			s.setState(nil, s.Fault())
			stopServer(ns)
		}
		restarted, err := s.restart(ctx)
		if err != nil {
			err = fmt.Errorf("start again on %q: %w", s.opts.StoreDir, err)
			if last := s.Fault(); last == nil || last.Error() != err.Error() {
				s.opts.Log.Error().Err(err).Msg("the server does not start again; tried until it does")
			}
			s.setState(nil, err)
			continue
		}
		s.opts.Log.Warn().Str("store", s.opts.StoreDir).Msg("the disk takes writes, the server has started again")
		s.setState(restarted, diskFault(restarted))
	}
}

func (s *Server) restart(ctx context.Context) (*server.Server, error) {
	native, err := s.opts.serverOptions()
	if err != nil {
		return nil, err
	}
	return startServer(ctx, native, s.opts, true)
}

// diskFault returns why the server has stopped writing to its disk; nil if it has not.
func diskFault(ns *server.Server) error {
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

// DiskFree returns how many bytes the disk of the store can still take, whichever process has the store open.
func (m *Member) DiskFree() (int64, error) { return DiskFree(m.opts.StoreDir) }

// DiskFree returns how many bytes the disk of a folder can still take.
func DiskFree(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, fmt.Errorf("disk of store %q: %w", dir, err)
	}
	return int64(s.Bavail * uint64(s.Bsize)), nil
}

// NewStorage returns how many bytes the streams of a store may take: three quarters of what is free on its disk and
// what they have stored, so that it is the same at each start. The folder need not be there yet.
func NewStorage(dir string) (int64, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return 0, err
	}
	stored := int64(0)
	err = filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			var info fs.FileInfo
			if info, err = entry.Info(); err == nil {
				stored += info.Size()
			}
		}
		if errors.Is(err, fs.ErrNotExist) { // another process removed it
			return nil
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("store %q: %w", dir, err)
	}
	for {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) || dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	free, err := DiskFree(dir)
	return (free + stored) / 4 * 3, err
}

// probeDisk writes a file to the disk and removes it. An error means that the disk still takes no writes.
func probeDisk(dir string) error {
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
