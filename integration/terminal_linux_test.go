package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// terminal is the keyboard and the screen of a pseudo-terminal.
type terminal struct {
	keys *os.File
	tty  *os.File      // the program's side
	read chan struct{} // closed when nothing more comes

	mu     sync.Mutex
	screen bytes.Buffer
}

// newTerminal opens a pseudo-terminal of so many columns; what is written on it is collected.
func newTerminal(t *testing.T, columns uint16) *terminal {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	n, err := unix.IoctlGetInt(int(keys.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(keys.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(int(keys.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns})
	}
	if err != nil {
		t.Fatalf("pseudo-terminal: %v", err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("pseudo-terminal: %v", err)
	}
	x := &terminal{keys: keys, tty: tty, read: make(chan struct{})}
	go func() {
		defer close(x.read)
		buffer := make([]byte, 4096)
		for {
			n, err := keys.Read(buffer)
			x.mu.Lock()
			x.screen.Write(buffer[:n])
			x.mu.Unlock()
			if err != nil {
				return // the last program has closed its side
			}
		}
	}()
	t.Cleanup(func() {
		_ = tty.Close() // again, mostly
		<-x.read
		_ = keys.Close()
	})
	return x
}

func (x *terminal) String() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.screen.String()
}

// press types keys.
func (x *terminal) press(t *testing.T, keys string) {
	t.Helper()
	if _, err := x.keys.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// start runs meander in a session of its own with x as its terminal. The channel has its
// end; a program that hangs is asked for its stacks.
func (x *terminal) start(t *testing.T, dir string, args ...string) <-chan error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*bustest.Patience)
	cmd := exec.CommandContext(ctx, program(t, "meander"), args...)
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, x.tty, x.tty, x.tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		defer cancel()
		err := cmd.Wait()
		_ = x.tty.Close()
		<-x.read
		ended <- err
	}()
	t.Cleanup(cancel)
	return ended
}

// busy keeps every core at work until the test ends, in a soak. Beside the short form other tests do.
func busy(t *testing.T) {
	var load sync.WaitGroup
	stop := make(chan struct{})
	for range soak(t, 0, runtime.NumCPU()) {
		load.Go(func() {
			for n := uint64(1); ; n = n*6364136223846793005 + 1 {
				if n%(1<<20) != 1 {
					continue
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	t.Cleanup(func() {
		close(stop)
		load.Wait()
	})
}

// A run on a terminal ends, however the bar and the events come together.
func TestTerminal_RunsEnd(t *testing.T) {
	t.Parallel()
	busy(t)
	for i := range soak(t, 5, 200) {
		dir := t.TempDir()
		x := newTerminal(t, 100)
		if err := <-x.start(t, dir, "run", "--model", "synthetic", "--run", "x", "--out", "-", "-n", "4", "--steps",
			"50",
			"--workers", "2", "a red fox", "two owls"); err != nil {
			t.Fatalf("run %d of a terminal: %v\n%s", i, err, x)
		}
		if screen := x.String(); !strings.Contains(screen, "400/400 steps") || !strings.Contains(screen, "2/2 groups") {
			t.Fatalf("run %d: the bar did not come to its end:\n%s", i, screen)
		}
		if err := os.RemoveAll(filepath.Join(dir, "meander-data")); err != nil {
			t.Fatal(err)
		}
	}
}

// runOf is a command that takes a while, with groups of so many samples.
func runOf(samples string) []string {
	steps := "200"
	if raceEnabled {
		steps = "40" // each takes several times as long
	}
	return []string{
		"run", "--model", "synthetic", "--run", "x", "--out", "-", "-n", samples, "--steps", steps, "--return-steps", steps,
		"a red fox", "two owls",
	}
}

// interrupted is a run on a terminal in dir in which Ctrl-C was pressed once steps were on the bar.
func interrupted(t *testing.T, dir, samples string) (x *terminal, ended <-chan error) {
	t.Helper()
	x = newTerminal(t, 100)
	ended = x.start(t, dir, runOf(samples)...)
	x.shows(t, "steps on the bar", func(screen string) bool {
		return regexp.MustCompile("/[0-9]{4,6} steps").MatchString(screen) &&
			!strings.Contains(screen[strings.LastIndex(screen, "\r")+1:], " 0/")
	})
	x.press(t, "\x03")
	x.shows(t, "the choice", func(screen string) bool {
		return strings.Contains(screen,
			"Ctrl-C: leave run x, or cancel it?")
	})
	return x, ended
}

// shows waits until the screen is as it should be.
func (x *terminal) shows(t *testing.T, what string, is func(screen string) bool) {
	t.Helper()
	bustest.Until(t, what, func() error {
		if screen := x.String(); !is(screen) {
			return fmt.Errorf("screen:\n%s", screen)
		}
		return nil
	})
}

// Ctrl-C on a terminal asks what is to become of the run. One that is left can be taken up again,
// and says how.
func TestTerminal_CtrlC(t *testing.T) {
	t.Parallel()
	busy(t)
	for i := range soak(t, 1, 40) {
		x, ended := interrupted(t, t.TempDir(), "256")
		if i%2 == 0 {
			x.press(t, "l\n")
		} // else no one answers
		if err := <-ended; err == nil || !strings.Contains(x.String(),
			"interrupted; continue with: meander run --run x") {
			t.Fatalf("after Ctrl-C: %v\n%s", err, x)
		}
	}
}

// A second Ctrl-C, or the key, cancels: each group gets its result, and the table says so.
func TestTerminal_CtrlCCancels(t *testing.T) {
	t.Parallel()
	for _, keys := range []string{"\x03", "c\n"} {
		dir := t.TempDir()
		x, ended := interrupted(t, dir, "256")
		x.press(t, keys)
		err := <-ended
		if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 1 ||
			strings.Count(escapes.ReplaceAllString(x.String(), ""), "cancelled: run x was cancelled by ") < 2 {
			t.Fatalf("after %q: %v\n%s", keys, err, x)
		}
		y := newTerminal(t, 100)
		if err := <-y.start(t, dir, "status", "x"); err != nil || !strings.Contains(y.String(), "cancelled") ||
			!strings.Contains(y.String(), "2 of 2 have their result") {
			t.Errorf("status after %q: %v\n%s", keys, err, y)
		}
	}
}

// A run that is left goes on in the pipeline that it has joined.
func TestTerminal_CtrlCLeavesAPipeline(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	up := newTerminal(t, 100)
	served := up.start(t, dir, "up", "--model", "synthetic", "--listen", "127.0.0.1:0")
	up.shows(t, "the pipeline", func(screen string) bool { return strings.Contains(screen, "meander is up") })
	x, ended := interrupted(t, dir, "24")
	x.press(t, "l\n")
	if err := <-ended; err == nil || !strings.Contains(x.String(), "left; run x continues at ") {
		t.Fatalf("after Ctrl-C: %v\n%s", err, x)
	}
	again := newTerminal(t, 100)
	if err := <-again.start(t, dir, runOf("24")...); err != nil ||
		!strings.Contains(again.String(), "2 of 2 groups complete") {
		t.Fatalf("the run once more: %v\n%s", err, again)
	}
	up.press(t, "\x03")
	if err := <-served; err != nil {
		t.Errorf("up: %v\n%s", err, up)
	}
}

// Plans, bars, tables and help stay within the terminal, but for what cannot be broken: the
// digest, a path, a word of one's own.
func TestTerminal_Fits(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run := []string{"run", "--model", "synthetic", "--run", "x", "--out", "-", "-n", "12", "--steps", "5", "a red fox"}
	talk := []string{
		"run", "--model", sumsFolder(t), "--run", "talk", "--out", "-", "-n", "4", "--seed", "2",
		"--interaction", "sums", "--reward", "turns", "--reward", "confidence=0.3", "512-798=?",
	}
	for _, columns := range []uint16{50, 80, 200} {
		for _, args := range [][]string{
			run,
			{"show", "--run", "x", "0000-a-red-fox"},
			talk,
			{"show", "--run", "talk", "0000-512-798"},
			{"run", "--help"},
			{"--help"},
		} {
			x := newTerminal(t, columns)
			if err := <-x.start(t, dir, args...); err != nil {
				t.Fatalf("%q: %v\n%s", args, err, x)
			}
			for _, line := range strings.FieldsFunc(escapes.ReplaceAllString(x.String(), ""),
				func(r rune) bool { return r == '\r' || r == '\n' }) {
				_, example := strings.CutPrefix(line, "  meander ")
				long := strings.HasPrefix(line, "digest ") || example || strings.HasPrefix(line, "  # ")
				if n := utf8.RuneCountInString(line); n > int(columns) && !long {
					t.Errorf("%q in %d columns: %d wide: %s", args, columns, n, line)
				}
			}
		}
	}
}

// escapes are what colours and moves of the cursor are made of.
var escapes = regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]")
