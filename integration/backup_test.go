package integration_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
)

// The commands of deploy/guide/backup.md do what the page says. While the store is in use, runs are exported and
// imported, and a copy of its folder is refused.
func TestBackup_Drills(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("flock"); err != nil {
		t.Skip("no flock on PATH: the drills of a whole store did not run")
	}
	dir := t.TempDir()
	if err := os.Symlink(filepath.Dir(program(t, "meander")), filepath.Join(dir, "bin")); err != nil {
		t.Fatal(err)
	}
	sh := func(commands string) (string, error) {
		c := exec.CommandContext(t.Context(), "sh", "-ec", commands)
		c.Dir = dir
		out, err := c.CombinedOutput()
		return string(out), err
	}
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(read(t, "deploy/guide/backup.md"), -1)
	if len(blocks) != 6 {
		t.Fatalf("%d blocks, want 6", len(blocks))
	}
	up := exec.CommandContext(t.Context(), program(t, "meander"), "up", "--model", "synthetic")
	up.Dir = dir
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- up.Wait() }()
	bustest.Until(t, "a store in use", func() error {
		if info, held := natsd.Running(filepath.Join(dir, "meander-data")); !held || info.PID != up.Process.Pid {
			return fmt.Errorf("held: %v, by %d", held, info.PID)
		}
		return nil
	})
	for i, b := range blocks {
		whole := i == 3
		if whole {
			if out, err := sh(b[1]); err == nil {
				t.Errorf("a store in use was copied:\n%s\n%s", b[1], out)
			}
			if err := up.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			if err := bustest.Receive(t, "the end of up", stopped); err != nil {
				t.Errorf("up: %v", err)
			}
		}
		out, err := sh(b[1])
		if err != nil {
			t.Fatalf("%s\n%v\n%s", b[1], err, out)
		}
		if strings.Contains(b[1], "verify") && !strings.Contains(out, "0 mismatches") {
			t.Errorf("%s\nsays\n%s", b[1], out)
		}
	}
}
