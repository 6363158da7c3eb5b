package remote

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

// exitConfig is the exit status of a worker that a restart does not help.
const exitConfig = 78

// process is a worker that this process started.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	dir   *scratch      // of the socket
	ready chan struct{} // closed when it listens
	ended chan struct{} // closed when it has ended and err is set
	err   error

	mu     sync.Mutex
	listen bool
	tail   []string    // the last lines on stderr
	log    func(Event) // of the one who uses it now
}

// Bounds of what is kept and logged of a worker's stderr.
const (
	tailLines      = 20
	lineBytes      = 1000
	linesPerSecond = 20
	finishWithin   = 10 * time.Second
	longestSocket  = 100 // bytes of a path, which Linux bounds at 107
)

// startProcess starts a worker for the model in a folder and waits until it listens at its socket.
func startProcess(ctx context.Context, model string, cfg Config) (_ *process, err error) {
	python, err := interpreter()
	if err != nil {
		return nil, err
	}
	dir, err := socketFolder()
	if err != nil {
		return nil, err
	}
	p := &process{dir: dir, ready: make(chan struct{}), ended: make(chan struct{}), log: cfg.log}
	args := append([]string{"-m", "meander.torch", "--model", model, "--socket", p.socket(), "--exit-with-stdin"},
		cfg.flags()...)
	p.cmd = exec.Command(python, args...)
	p.cmd.Env = append(os.Environ(), "PYTHONUNBUFFERED=1")
	p.cmd.Stdout = &lines{each: p.takeReady}
	limit := &limiter{log: p.logged}
	p.cmd.Stderr = &lines{each: func(line string) {
		p.keep(line)
		limit.line(line)
	}}
	p.cmd.WaitDelay = finishWithin // its own children may hold the pipes
	own(p.cmd)
	if p.stdin, err = p.cmd.StdinPipe(); err == nil {
		err = p.launch()
	}
	if err != nil {
		dir.remove()
		return nil, fmt.Errorf("start %s: %w", python, err)
	}
	cfg.log(Event{Text: fmt.Sprintf("started a worker, process %d: %s", p.cmd.Process.Pid, python)})
	defer cfg.tell(func() string { return "Python starts; " + p.lastLine() })()
	select {
	case <-p.ready:
		return p, nil
	case <-p.ended:
		return nil, p.why()
	case <-ctx.Done():
		p.kill()
		return nil, ctx.Err()
	case <-time.After(readyPatience):
		p.kill()
		return nil, fmt.Errorf("the worker does not listen after %v (%s); try '%s -m meander.torch --help': if that "+
			"hangs, too, repair this Python or its disk, or name another with MEANDER_PYTHON", readyPatience,
			p.lastLine(),
			python)
	}
}

// flags returns the settings of a worker that is started, as it takes them; what is auto or not set it chooses.
func (c Config) flags() (args []string) {
	for _, f := range [][2]string{
		{"--device", c.Device},
		{"--dtype", c.DType},
		{"--text-encoder-device", c.TextEncoderDevice},
		{"--threads", strconv.Itoa(c.Threads)},
		{"--family", c.Family},
		{"--network", c.Network},
	} {
		if f[1] != "" && f[1] != "auto" && f[1] != "0" {
			args = append(args, f[:]...)
		}
	}
	for i, set := range []bool{c.Deterministic, c.Compile, c.VAETiling, c.Generic, c.TrustClass} {
		if set {
			args = append(args, []string{
				"--deterministic", "--compile", "--vae-tiling", "--generic", "--trust-class",
			}[i])
		}
	}
	return args
}

// logged logs an event of the process.
func (p *process) logged(e Event) {
	p.mu.Lock()
	log := p.log
	p.mu.Unlock()
	log(e)
}

// lastLine says what the process wrote last.
func (p *process) lastLine() string {
	if said := p.lastWords(); said != "" {
		return "it said: " + said
	}
	return "it wrote nothing on stderr"
}

// interpreter returns the Python that has the worker.
func interpreter() (string, error) {
	name := os.Getenv("MEANDER_PYTHON")
	if name == "" {
		name = cmp.Or(ofEnvironment(), "python3")
	}
	path, err := exec.LookPath(name)
	if errors.Is(err, fs.ErrPermission) {
		return "", &wire.Fault{Class: wire.ClassConfig, Message: fmt.Sprintf(
			"MEANDER_PYTHON: %s; must be a program that may be executed: %v", name, err)}
	}
	if err != nil {
		return "", &wire.Fault{Class: wire.ClassConfig, Message: fmt.Sprintf(
			"no Python called %s; install Python 3.10 or newer and %s, or name a Python that has it with "+
				"MEANDER_PYTHON",
			name, Install)}
	}
	return path, nil
}

// ofEnvironment returns the Python of the environment that this program was installed into by pip, "" if it is in none.
func ofEnvironment() string {
	program, err := os.Executable()
	if err == nil {
		program, err = filepath.EvalSymlinks(program)
	}
	bin := filepath.Dir(program)
	if _, lacks := os.Stat(filepath.Join(bin, "..", "pyvenv.cfg")); err != nil || lacks != nil {
		return ""
	}
	return filepath.Join(bin, "python3")
}

// socketFolder makes a folder that only this user can enter.
func socketFolder() (*scratch, error) {
	at := os.TempDir()
	if len(at) > longestSocket-50 {
		at = "/tmp"
	}
	s, err := makeScratch(at)
	if err != nil {
		return nil, fmt.Errorf("temporary folder: %w; name one that can be written to with TMPDIR", err)
	}
	return s, nil
}

// socket returns the path at which the process listens.
func (p *process) socket() string { return filepath.Join(p.dir.path, "worker.sock") }

// launch starts the process in a thread of its own: the system ends a child when the thread that started it ends.
func (p *process) launch() error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = p.cmd.Wait()
		p.dir.remove()
		close(p.ended)
	}()
	return <-started
}

// takeReady reads the line on stdout that says where the worker listens.
func (p *process) takeReady(line string) {
	var said struct {
		Ready bool `json:"ready"`
	}
	if json.Unmarshal([]byte(line), &said) != nil || !said.Ready {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.listen {
		p.listen = true
		close(p.ready)
	}
}

func (p *process) keep(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tail = append(p.tail, line); len(p.tail) > tailLines {
		p.tail = p.tail[1:]
	}
}

// lastWords returns the last line that the process wrote on stderr; empty: none, or there is no process.
func (p *process) lastWords() string {
	if p == nil {
		return ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.tail) == 0 {
		return ""
	}
	return p.tail[len(p.tail)-1]
}

// why waits for the end of the process and returns its reason; one of class config: a restart does not help.
func (p *process) why() error {
	<-p.ended
	said := strings.TrimPrefix(p.lastWords(), "error: ")
	p.mu.Lock()
	for _, line := range p.tail {
		if _, module, ok := strings.Cut(line, "No module named "); ok {
			p.mu.Unlock()
			return &wire.Fault{Class: wire.ClassConfig, Message: fmt.Sprintf(
				"%s has no module %s; %s, or name a Python that has it with MEANDER_PYTHON", p.cmd.Path,
				strings.TrimRight(module, ")"), Install)}
		}
	}
	p.mu.Unlock()
	if p.cmd.ProcessState.ExitCode() == exitConfig {
		return &wire.Fault{Class: wire.ClassConfig, Message: said}
	}
	if said == "" {
		said = "it wrote nothing on stderr"
	}
	return &lostError{fmt.Errorf("the worker ended: %v: %s", p.cmd.ProcessState, said)}
}

// reason returns why a call was lost: how the process, if there is one, ended says more than a broken connection.
func (p *process) reason(err error) error {
	if p == nil {
		return err
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		select {
		case <-p.ended:
			return p.why()
		case <-time.After(endPatience):
		}
	}
	if said := p.lastWords(); said != "" {
		err = fmt.Errorf("%w; the worker said: %s", err, said)
	}
	return err
}

// Spare has a worker that Inspect started, until Open takes it. The zero value has none.
type Spare struct {
	mu      sync.Mutex
	process *process
	of      Config // it was started with
	dir     string
}

// put keeps a process; false: it has one.
func (s *Spare) put(p *process, dir string, cfg Config) bool {
	if s == nil || p == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process != nil {
		return false
	}
	s.process, s.dir, s.of = p, dir, cfg
	return true
}

// claim returns the process for a model, if it runs with these settings; nil: there is none.
func (s *Spare) claim(dir string, cfg Config) *process {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.process
	if p == nil || dir != s.dir || !slices.Equal(cfg.flags(), s.of.flags()) {
		return nil
	}
	s.process = nil
	select {
	case <-p.ended:
		return nil
	default:
	}
	p.mu.Lock()
	p.log = cfg.log
	p.mu.Unlock()
	cfg.log(Event{Text: fmt.Sprintf("took the worker of the inspection, process %d", p.cmd.Process.Pid)})
	return p
}

// Close ends the worker if no model uses it.
func (s *Spare) Close() {
	s.mu.Lock()
	p := s.process
	s.process = nil
	s.mu.Unlock()
	if p != nil {
		p.kill()
	}
}

// finish has the process end after the call in hand, for a short while.
func (p *process) finish() {
	interrupt(p.cmd)
	_ = p.stdin.Close()
	select {
	case <-p.ended:
	case <-time.After(finishWithin):
	}
}

// kill ends the process and its children now, and waits for that.
func (p *process) kill() {
	select {
	case <-p.ended: // its number may be that of another process by now
	default:
		killAll(p.cmd)
		_ = p.stdin.Close()
		<-p.ended
	}
}

// lines is a writer that calls each with every line.
type lines struct {
	each func(line string)
	rest []byte
}

// Write calls each with every complete line, in valid UTF-8 and cut at lineBytes; of a progress bar the last state.
func (l *lines) Write(b []byte) (int, error) {
	n := len(b)
	for {
		line, after, found := bytes.Cut(b, []byte{'\n'})
		l.rest = append(l.rest, line[:min(len(line), max(0, lineBytes-len(l.rest)))]...)
		if !found {
			return n, nil
		}
		text := strings.ToValidUTF8(strings.TrimRight(string(l.rest), "\r "), "?")
		if text = text[strings.LastIndexByte(text, '\r')+1:]; text != "" { // the last state of a progress bar
			l.each(text)
		}
		l.rest, b = l.rest[:0], after
	}
}

// limiter logs at most linesPerSecond lines.
type limiter struct {
	log    func(Event)
	second int64
	lines  int
}

// line logs one line of output, unless there were too many in this second; then their number follows.
func (l *limiter) line(text string) {
	if now := time.Now().Unix(); now != l.second {
		if left := l.lines - linesPerSecond; left > 0 {
			l.log(Event{Text: fmt.Sprintf("%d lines of the worker are not shown", left)})
		}
		l.second, l.lines = now, 0
	}
	if l.lines++; l.lines <= linesPerSecond {
		l.log(Event{Output: text})
	}
}
