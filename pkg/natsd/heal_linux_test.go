package natsd_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"

	"github.com/meander-rl/meander/pkg/natsd"
)

// smallDisk is a file system of its own with so many MiB.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("NOT TESTED: a full disk; it takes the right to mount one (%v)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill writes a file that leaves so many bytes of a disk.
func fill(t *testing.T, dir string, leave uint64) (ballast string) {
	t.Helper()
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		t.Fatal(err)
	}
	ballast = filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, disk.Bavail*uint64(disk.Bsize)-leave), 0o600); err != nil {
		t.Fatal(err)
	}
	return ballast
}

// A process that is being started has the lock file open until it is another program: a store is free all the same.
func TestStart_lockFileOpenElsewhere(t *testing.T) {
	dir := t.TempDir()
	s := start(t, natsd.Options{StoreDir: dir})
	open, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(open, func(fd string) bool {
		name, err := os.Readlink(fd)
		return err == nil && name == filepath.Join(dir, "meander.lock")
	})
	if i < 0 {
		t.Fatalf("no lock file among %d that are open", len(open))
	}
	fd, err := strconv.Atoi(filepath.Base(open[i]))
	if err == nil {
		fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	start(t, natsd.Options{StoreDir: dir})
}

// A server whose disk was full stores again once there is room, for the clients that it
// had, with all that it had confirmed.
func TestServer_fullDisk(t *testing.T) {
	for name, listen := range map[string]string{"in-process": "", "tcp": "127.0.0.1:0"} {
		t.Run(name, func(t *testing.T) {
			disk := smallDisk(t, "64m")
			s := start(t, natsd.Options{StoreDir: filepath.Join(disk, "store"), Listen: listen})
			var nc *nats.Conn
			var err error
			forever := []nats.Option{nats.MaxReconnects(-1), nats.ReconnectWait(50 * time.Millisecond)}
			if listen == "" {
				nc, err = nats.Connect("", append(forever, nats.InProcessServer(s.InProcess()))...)
			} else {
				nc, err = nats.Connect(s.ClientURL(), forever...)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			js, err := jetstream.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{
				Name: "S", Subjects: []string{"s.*"},
			}); err != nil {
				t.Fatal(err)
			}
			ballast := fill(t, disk, 4<<20)
			publish := func() error {
				ctx, stop := context.WithTimeout(t.Context(), time.Second)
				defer stop()
				_, err := js.Publish(ctx, "s.x", bytes.Repeat([]byte("x"), 500_000))
				return err
			}
			confirmed := uint64(0)
			// One that times out on a busy machine does not mean that the disk is full.
			until(t, "a fault", func() bool {
				if publish() == nil {
					if confirmed++; confirmed > 20 {
						t.Fatal("the disk is never full")
					}
				}
				return s.Fault() != nil
			})
			if err := s.Fault(); !strings.Contains(err.Error(), "no space left") ||
				!strings.Contains(err.Error(), "make room on its disk") {
				t.Errorf("the fault is %v", err)
			}
			if err := publish(); err == nil {
				t.Error("stored on a full disk")
			}
			if err := os.Remove(ballast); err != nil {
				t.Fatal(err)
			}
			until(t, "no fault", func() bool { return s.Fault() == nil })
			until(t, "a publish", func() bool { return publish() == nil })
			stream, err := js.Stream(t.Context(), "S")
			if err != nil {
				t.Fatal(err)
			}
			if got := stream.CachedInfo().State.Msgs; got <= confirmed {
				t.Errorf("%d messages are there, %d were confirmed before", got, confirmed)
			}
			if listen != "" && s.ClientURL() != nc.ConnectedUrl() {
				t.Errorf("moved to %s from %s", s.ClientURL(), nc.ConnectedUrl())
			}
			if left, err := filepath.Glob(filepath.Join(disk, "store", "meander.probe*")); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}
