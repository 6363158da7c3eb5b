// Package harness has what tests of the whole stand on: the programs, built once; processes
// that are killed, paused and started again, as by a supervisor; and books of what the streams
// hold at the end, with what is lost, doubled or wrong in them.
package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// Race says whether the race detector is built in, into the programs too.
const Race = bustest.Race

const serverModule = "github.com/nats-io/nats-server/v2"

// built has the programs, as a user would build them. They stay: what has not changed since is not
// linked again, nor by each of the packages whose tests start them.
var built = sync.OnceValues(func() (string, error) { return build("github.com/meander-rl/meander/services/cmd/...") })

// builtServer has the server that go.mod names beside them.
var builtServer = sync.OnceValues(func() (string, error) {
	dir, err := build(serverModule)
	return filepath.Join(dir, "nats-server"), err
})

// builtWorker has the worker of tests beside them.
var builtWorker = sync.OnceValues(func() (string, error) {
	dir, err := build("github.com/meander-rl/meander/integration/tools/torchworker")
	return filepath.Join(dir, "torchworker"), err
})

// builtBench has the program of make bench-NAME beside them.
var builtBench = sync.OnceValues(func() (string, error) {
	dir, err := build("github.com/meander-rl/meander/integration/tools/bench")
	return filepath.Join(dir, "bench"), err
})

// build has packages built into a folder of the module. One builds at a time.
func build(packages string) (dir string, err error) {
	module, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("where the module is: %w", err)
	}
	dir = filepath.Join(filepath.Dir(strings.TrimSpace(string(module))), "build", "test")
	args := []string{"build", "-trimpath", "-ldflags", "-s -w"}
	if Race {
		dir += "-race"
		if packages != serverModule {
			args = append(args, "-race")
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.Create(filepath.Join(dir, ".lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close()
	err = syscall.EINTR
	for errors.Is(err, syscall.EINTR) {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	cmd := exec.Command("go", append(args, "-o", dir+string(filepath.Separator), packages)...)
	if !Race {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	return dir, nil
}

// SkipShort skips a test that takes long where tests run in their short form, as in make test.
func SkipShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes long: make integration, or go test without -short")
	}
}

// Program is the path of one built program. In the short form the test is skipped.
func Program(t testing.TB, name string) string {
	t.Helper()
	SkipShort(t)
	dir, err := built()
	if err != nil {
		t.Fatalf("build: %v", err)
	}
	return filepath.Join(dir, name)
}

// ServerProgram is the path of the server that go.mod names.
func ServerProgram(t testing.TB) string {
	t.Helper()
	SkipShort(t)
	path, err := builtServer()
	if err != nil {
		t.Fatalf("build nats-server: %v", err)
	}
	return path
}

// WorkerProgram is the path of a worker for --engine torch that needs no Python.
func WorkerProgram(t testing.TB) string {
	t.Helper()
	SkipShort(t)
	path, err := builtWorker()
	if err != nil {
		t.Fatalf("build the worker: %v", err)
	}
	return path
}

// BenchProgram is the path of the program that make bench-NAME runs.
func BenchProgram(t testing.TB) string {
	t.Helper()
	SkipShort(t)
	path, err := builtBench()
	if err != nil {
		t.Fatalf("build the bench: %v", err)
	}
	return path
}

// FreeAddress is an address on loopback that is not in use, with a port below those that systems give to connections
// and to listeners that name none: another test's server must not take it before the caller's.
func FreeAddress(t testing.TB) string {
	t.Helper()
	const first, last = 10_000, 32_767
	for range 1000 {
		address := fmt.Sprintf("127.0.0.1:%d", first+rand.IntN(last-first+1))
		if l, err := net.Listen("tcp", address); err == nil {
			_ = l.Close()
			return address
		}
	}
	t.Fatalf("no free port from %d to %d", first, last)
	return ""
}

// Kept is a folder for what a test that fails leaves to be read: logs, and what is stored. It goes with a test that
// passes; else the log of the test names it.
func Kept(t testing.TB) string {
	t.Helper()
	//nolint:usetesting // it stays where the test fails
	dir, err := os.MkdirTemp("", strings.ReplaceAll(t.Name(), "/", "-")+"-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("what it left is in %s", dir)
		} else if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Server is the server that go.mod names, as a process with its store and its log in a folder: on a port and
// a store that stay when it is killed. It listens when Server returns.
func Server(t testing.TB, dir string, more ...string) (url string, v *Process) {
	t.Helper()
	path := ServerProgram(t)
	address := FreeAddress(t)
	_, port, _ := strings.Cut(address, ":")
	v = Raise(t, &Process{Name: "nats-server", Path: path, Dir: dir, Args: append([]string{
		"-a", "127.0.0.1", "-p", port, "-js", "-sd", filepath.Join(dir, "store"),
	}, more...)})
	bustest.Until(t, "the server listens", func() error {
		c, err := net.Dial("tcp", address)
		if err != nil {
			return err
		}
		return c.Close()
	})
	return "nats://" + address, v
}

// Verify runs the program that recomputes every log-prob and every digest of a run.
func Verify(t testing.TB, url string, run schemas.Run, trajectories int) {
	t.Helper()
	var report struct {
		Trajectories int               `json:"trajectories"`
		Steps        int               `json:"steps"`
		Max          float64           `json:"max_abs_ratio_minus_1"`
		Mismatches   []json.RawMessage `json:"mismatches"`
	}
	out, err := exec.CommandContext(t.Context(), Program(t, "meander"), "verify", "--nats", url, "--run", string(run),
		"--json").Output()
	if len(out) == 0 {
		t.Fatalf("verify: %v", err)
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("verify: %v\n%s", err, out)
	}
	if err != nil || report.Trajectories != trajectories || report.Steps == 0 || report.Max != 0 ||
		len(report.Mismatches) != 0 {
		t.Errorf("verify: %v, %d trajectories, %d log-probs, max |ratio-1| %g, mismatches %s; want success, %d, "+
			"some, 0, none",
			err, report.Trajectories, report.Steps, report.Max, report.Mismatches, trajectories)
	}
}

// WriteProgram writes a program, a script for instance, that a test is about to start. A process that another goroutine
// starts meanwhile would inherit the open file, and the kernel runs no file that is open for writing (ETXTBSY).
func WriteProgram(path string, data []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, data, 0o755)
}
