package integration_test

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// process is a long-running program of a test.
type process struct {
	cmd *exec.Cmd
	log *logbook
}

// logbook is what a program has written, while it writes.
type logbook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// launch starts a program that is stopped, with time to drain, at the end of the test.
func launch(t *testing.T, dir, path string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(path, args...), log: &logbook{}}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, p.log, p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		done := make(chan error, 1)
		go func() { done <- p.cmd.Wait() }()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s did not stop cleanly: %v\n%s", filepath.Base(path), err, p.log)
			}
		case <-time.After(bustest.Patience):
			_ = p.cmd.Process.Kill()
			t.Errorf("%s did not stop within %v of SIGTERM\n%s", filepath.Base(path), bustest.Patience, p.log)
		}
		if t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(path), p.log)
		}
	})
	return p
}

// natsServer runs the server that go.mod names, as a process of its own.
func natsServer(t *testing.T) (url string) {
	t.Helper()
	url, _ = harness.Server(t, t.TempDir())
	return url
}

// Four programs around a NATS server of their own give the digest of the single process.
func TestExternal_SameDigest(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run := func(more ...string) summary {
		args := append([]string{
			"run", "--json", "--seed", "3", "-n", "5", "--sde-steps", "1-4", "--out", "-", "a red fox",
			"two owls", "rain",
		}, more...)
		_, sum := meander(t, dir, args...).must(t, 0).parse(t)
		return sum
	}
	want := run("--model", "synthetic")

	url := natsServer(t)
	for _, service := range []string{"advantage", "reward", "sampler", "sampler", "intake"} {
		args := []string{"--nats-url", url, "--health-addr", ""}
		if service == "sampler" {
			args = append(args, "--model", "synthetic", "--batch", "2")
		}
		launch(t, dir, program(t, "meander-"+service), args...)
	}
	if got := run("--nats", url); got.Digest != want.Digest || got.Trajectories != 15 {
		t.Errorf("digest %s of %d trajectories, want %s of 15", got.Digest, got.Trajectories, want.Digest)
	}
	meander(t, dir, "verify", "--nats", url, "--json").must(t, 0)
}
