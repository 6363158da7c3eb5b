package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// Process is a program that is killed, paused and started again, as by a supervisor.
type Process struct {
	// Name is that of its log, and Path that of its program; it runs in Dir, and logs to a file there.
	Name, Path, Dir string
	Args, Env       []string
	// Group is set of a program that starts others: signals go to all of them.
	Group bool

	log string

	mu       sync.Mutex
	process  *os.Process
	running  bool
	killed   bool          // by us: start it again
	again    bool          // by us: let it end, and start it again
	stopping bool          // by us: let it end
	held     chan struct{} // by us: not started again until it is closed
	starts   int
	deaths   []Death
	done     chan struct{}
}

// Raise starts a process and keeps it running until it is asked to end.
func Raise(t testing.TB, v *Process) *Process {
	t.Helper()
	v.log, v.done = filepath.Join(v.Dir, v.Name+".log"), make(chan struct{})
	first := make(chan error, 1)
	go v.supervise(first)
	if err := <-first; err != nil {
		t.Fatalf("start %s: %v", v.Name, err)
	}
	t.Cleanup(func() {
		v.End(syscall.SIGKILL)
		<-v.done
		if t.Failed() {
			t.Logf("%s ended last with:\n%s", v.Name, v.tail(4000))
		}
	})
	return v
}

func (v *Process) supervise(first chan<- error) {
	defer close(v.done)
	for {
		log, err := os.OpenFile(v.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			if first != nil {
				first <- err
			} else { // after a restart nothing receives from it
				v.mu.Lock()
				v.deaths = append(v.deaths, Death{Err: err})
				v.mu.Unlock()
			}
			return
		}
		cmd := exec.Command(v.Path, v.Args...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = v.Dir, log, log
		cmd.Env = append(os.Environ(), v.Env...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: v.Group}
		v.mu.Lock()
		if v.stopping {
			v.mu.Unlock()
			_ = log.Close()
			return
		}
		err = cmd.Start()
		v.process, v.running, v.killed, v.again = cmd.Process, err == nil, false, false
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
		v.running = false
		// A signal that comes before the program listens to it ends it, too.
		signalled := cmd.ProcessState != nil && cmd.ProcessState.String() == "signal: "+syscall.SIGTERM.String()
		if asked := v.stopping || v.again; !v.killed && !(asked && (err == nil || signalled)) {
			v.deaths = append(v.deaths, Death{asked, err, string(v.tail(1000))})
		}
		stopping, held := v.stopping, v.held
		v.held = nil
		v.mu.Unlock()
		if stopping {
			return
		}
		if held != nil {
			<-held
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Kill ends the process without warning; it is started again. False: there was none to kill.
func (v *Process) Kill() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.running {
		return false
	}
	v.killed = true
	return v.signal(v.process, syscall.SIGKILL) == nil
}

// KillFor is Kill, but the process is started again only when up is called, or the test ends.
func (v *Process) KillFor(t testing.TB) (up func()) {
	t.Helper()
	held := make(chan struct{})
	v.mu.Lock()
	v.held = held
	v.mu.Unlock()
	up = sync.OnceFunc(func() { close(held) })
	t.Cleanup(up)
	bustest.Until(t, v.Name+" is there to be killed", func() error {
		if !v.Kill() {
			return errors.New("it is not")
		}
		return nil
	})
	return up
}

// Restart asks the process to end; it is started again. False: there was none, or it is asked
// already.
func (v *Process) Restart() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.running || v.again || v.stopping {
		return false
	}
	v.again = true
	return v.signal(v.process, syscall.SIGTERM) == nil
}

// Pause makes a zombie for d: to the others the process is dead, and then it goes on
// with what it had in hand. False: there was none.
func (v *Process) Pause(d time.Duration) bool {
	v.mu.Lock()
	p, running := v.process, v.running
	v.mu.Unlock()
	if !running || v.signal(p, syscall.SIGSTOP) != nil {
		return false
	}
	time.AfterFunc(d, func() { _ = v.signal(p, syscall.SIGCONT) })
	return true
}

// Starts is how often the process was started.
func (v *Process) Starts() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.starts
}

// PID is that of the process as it runs now.
func (v *Process) PID() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.process.Pid
}

// Death is the end of a process without a signal from the test, or after one with a status other than 0.
type Death struct {
	Asked bool
	Err   error  // nil: status 0
	Last  string // what it said last
}

func (d Death) String() string {
	return fmt.Sprintf("ended (asked to: %t): %v; last it said\n%s", d.Asked, d.Err, d.Last)
}

// Deaths are those of the process since Raise; kills by the test do not count.
func (v *Process) Deaths() []Death {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.deaths)
}

// Log returns all that the process has written to its standard output and error.
func (v *Process) Log(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile(v.log)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Logged counts the lines of its log with a message.
func (v *Process) Logged(t testing.TB, message string) int {
	t.Helper()
	return strings.Count(v.Log(t), `"message":"`+message+`"`)
}

// End asks the process to stop, once: a second signal would not let it drain. SIGKILL
// always goes through.
func (v *Process) End(sig os.Signal) {
	v.mu.Lock()
	defer v.mu.Unlock()
	asked := v.stopping || v.again
	v.stopping = true
	if asked && sig != syscall.SIGKILL {
		return
	}
	v.killed = v.killed || sig == syscall.SIGKILL
	_ = v.signal(v.process, syscall.SIGCONT)
	_ = v.signal(v.process, sig.(syscall.Signal))
}

// signal sends a signal to the process, or to all of its group.
func (v *Process) signal(p *os.Process, sig syscall.Signal) error {
	if v.Group {
		return syscall.Kill(-p.Pid, sig)
	}
	return p.Signal(sig)
}

// tail is the end of its log, in bytes.
func (v *Process) tail(n int) []byte {
	data, err := os.ReadFile(v.log)
	if err != nil {
		return []byte(err.Error())
	}
	return data[max(0, len(data)-n):]
}

// Bury asks the process to stop and waits for it; it must end well.
func (v *Process) Bury(t testing.TB) {
	t.Helper()
	v.End(syscall.SIGTERM)
	select {
	case <-v.done:
	case <-time.After(bustest.Patience):
		t.Errorf("%s still runs %v after SIGTERM", v.Name, bustest.Patience)
	}
}
