package integration_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// victim is a program that is killed, paused and started again, as by a supervisor.
type victim struct {
	name, path string
	args, env  []string
	dir, log   string

	mu       sync.Mutex
	process  *os.Process
	killed   bool // by us: start it again
	stopping bool // by us: let it end
	starts   int
	// deaths are ends that nobody asked for.
	deaths []string
	done   chan struct{}
}

// raise starts the victim and keeps it running until bury.
func raise(t *testing.T, v *victim) *victim {
	t.Helper()
	v.log, v.done = filepath.Join(v.dir, v.name+".log"), make(chan struct{})
	first := make(chan error, 1)
	go v.supervise(first)
	if err := <-first; err != nil {
		t.Fatalf("start %s: %v", v.name, err)
	}
	t.Cleanup(func() {
		v.end(syscall.SIGKILL)
		<-v.done
		if data, err := os.ReadFile(v.log); err == nil && t.Failed() {
			t.Logf("%s ended last with:\n%s", v.name, data[max(0, len(data)-4000):])
		}
	})
	return v
}

func (v *victim) supervise(first chan<- error) {
	defer close(v.done)
	for {
		log, err := os.OpenFile(v.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			first <- err
			return
		}
		cmd := exec.Command(v.path, v.args...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = v.dir, log, log
		cmd.Env = append(os.Environ(), v.env...)
		v.mu.Lock()
		if v.stopping {
			v.mu.Unlock()
			_ = log.Close()
			return
		}
		err = cmd.Start()
		v.process, v.killed = cmd.Process, false
		v.starts++
		v.mu.Unlock()
		if first != nil {
			first <- err
			first = nil
		}
		if err == nil {
			err = cmd.Wait()
		}
		_ = log.Close()
		v.mu.Lock()
		if !v.killed && !(v.stopping && err == nil) {
			v.deaths = append(v.deaths, fmt.Sprint("ended by itself: ", err))
		}
		stopping := v.stopping
		v.mu.Unlock()
		if stopping {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// kill ends the process without warning. It is started again.
func (v *victim) kill() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.killed = true
	_ = v.process.Kill()
}

// pause makes a zombie for d: to the others the process is dead, and then it goes on
// with what it had in hand.
func (v *victim) pause(d time.Duration) {
	v.mu.Lock()
	p := v.process
	v.mu.Unlock()
	_ = p.Signal(syscall.SIGSTOP)
	time.AfterFunc(d, func() { _ = p.Signal(syscall.SIGCONT) })
}

// end asks the process to stop, once: a second signal would not let it drain. SIGKILL
// always goes through.
func (v *victim) end(sig os.Signal) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.stopping && sig != syscall.SIGKILL {
		return
	}
	v.stopping = true
	v.killed = v.killed || sig == syscall.SIGKILL
	_ = v.process.Signal(syscall.SIGCONT)
	_ = v.process.Signal(sig)
}

// bury asks the process to stop and waits for it; it must end well.
func (v *victim) bury(t *testing.T) {
	t.Helper()
	v.end(syscall.SIGTERM)
	select {
	case <-v.done:
	case <-time.After(bustest.Patience):
		t.Errorf("%s still runs %v after SIGTERM", v.name, bustest.Patience)
	}
}

// mortalServer is the server that go.mod names, on a port and a store that stay when it
// is killed. It is up when mortalServer returns.
func mortalServer(t *testing.T, more ...string) (url string, v *victim) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().(*net.TCPAddr)
	_ = l.Close()
	dir := t.TempDir()
	v = raise(t, &victim{name: "nats-server", path: natsBinary(t), dir: dir, args: append([]string{
		"-a", "127.0.0.1", "-p", strconv.Itoa(address.Port), "-js", "-sd", filepath.Join(dir, "store"),
	}, more...)})
	bustest.Until(t, "the server listens", func() error {
		c, err := net.Dial("tcp", address.String())
		if err != nil {
			return err
		}
		return c.Close()
	})
	return "nats://" + address.String(), v
}

var natsBuild = sync.OnceValue(func() error {
	dir, err := binaries() // removed at the end of the run
	if err != nil {
		return err
	}
	out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "nats-server"), "github.com/nats-io/nats-server/v2").CombinedOutput()
	if err != nil {
		return errors.Join(err, errors.New(string(out)))
	}
	return nil
})

func natsBinary(t *testing.T) string {
	t.Helper()
	if err := natsBuild(); err != nil {
		t.Fatalf("build nats-server: %v", err)
	}
	return program(t, "nats-server")
}
