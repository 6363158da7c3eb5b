package integration_test

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// On a disk without room no sample begins. One that runs full under the samples in hand stops the
// pipeline. Either way health says so, nothing is lost, and once there is room all goes on without
// a restart.
func TestFull_DiskAndBack(t *testing.T) {
	t.Parallel()
	dir, disk := t.TempDir(), t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=80m"); err != nil {
		t.Skipf("NOT TESTED: a full disk; it takes the right to mount one (%v)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	store, health := filepath.Join(disk, "store"), harness.FreeAddress(t)
	launch(t, dir, program(t, "meander"), "up", "--store", store, "--model", "synthetic", "--listen", "127.0.0.1:0",
		"--metrics-addr", health)
	ready(t, health, http.StatusOK, "ok")

	var free unix.Statfs_t
	if err := unix.Statfs(disk, &free); err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(disk, "ballast")
	fill := func() {
		if err := os.WriteFile(ballast, make([]byte, free.Bavail*uint64(free.Bsize)), 0o600); !errors.Is(err,
			unix.ENOSPC) {
			t.Fatalf("a full disk: %v", err)
		}
	}
	empty := func() {
		if err := os.Truncate(ballast, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(ballast, make([]byte, free.Bavail*uint64(free.Bsize)-8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	run := begin(t, dir, "run", "--store", store, "--run", "r1", "-n", "8", "--steps", "60", "--out", "-", "a red fox")
	ready(t, health, http.StatusServiceUnavailable, "8 samples wait for room on the server's disk")
	empty()
	bustest.Until(t, "a step", func() error {
		out := meander(t, dir, "streams", "--store", store, "--json")
		if strings.Contains(out.stdout, `"name":"MDR_STEPS","messages":0,`) {
			return errors.New(out.stdout)
		}
		return nil
	})
	fill()
	ready(t, health, http.StatusServiceUnavailable, "make room on its disk")
	empty()
	ready(t, health, http.StatusOK, "ok")
	if err := <-run.ended; err != nil {
		t.Fatalf("the run, with room again: %v\n%s", err, run.log)
	}
	out := meander(t, dir, "verify", "--store", store, "--run", "r1").must(t, 0)
	if !strings.Contains(out.stdout, "8 trajectories, 480 log-probs recomputed") {
		t.Errorf("verify says\n%s", out.stdout)
	}
}
