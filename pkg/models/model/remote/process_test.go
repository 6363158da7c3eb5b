package remote_test

import (
	"context"
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

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// interpret makes this test binary the Python of workers that are started, with a fault of remotetest.Main.
func interpret(t *testing.T, fault string) (temporary string) {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	temporary, err = os.MkdirTemp("/tmp", "remotetest-") //nolint:usetesting // a socket needs a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left, err := os.ReadDir(temporary); err != nil || len(left) > 1 {
			t.Errorf("%d files are left in %s, %v", len(left), temporary, err)
		}
		_ = os.RemoveAll(temporary)
	})
	for name, value := range map[string]string{
		playsWorker: "1", "MEANDER_PYTHON": program, "TMPDIR": temporary, remotetest.FaultVariable: fault,
		remotetest.FileVariable: filepath.Join(temporary, "died"),
	} {
		t.Setenv(name, value)
	}
	return temporary
}

// events collects what is logged.
type events struct {
	mu   sync.Mutex
	list []remote.Event
}

func (e *events) add(event remote.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, event)
}

// having returns how many events have a text or an output with says.
func (e *events) having(says string) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, x := range e.list {
		if strings.Contains(x.Text+x.Output, says) {
			n++
		}
	}
	return n
}

// A worker that is to compile, or to encode elsewhere, says that it does, and a spare one that does not is not taken
// for it.
func TestProcess_SaysItsSettings(t *testing.T) {
	interpret(t, "")
	for says, options := range map[string]remote.Options{
		"/compiled/nondeterministic": {Compile: true}, "/encoders-cuda:7/": {TextEncoderDevice: "cuda:7"},
		"/vae-tiling/": {VAETiling: true}, "/generic/": {Generic: true}, "/trust-class/": {TrustClass: true},
		"/family-Mine-0/": {Family: "mine.py:Mine"}, "/vllm-omni-0/": {Network: "vllm-omni"},
	} {
		cfg := remote.Config{Options: options}
		dir, spare := remotetest.Folder(t, class, 1), &remote.Spare{}
		if _, err := remote.Inspect(t.Context(), dir, remote.Config{Spare: spare}); err != nil {
			t.Fatal(err)
		}
		defer spare.Close()
		cfg.Spare = spare
		m := opened(t, dir, cfg)
		if b := m.Card().Backend; !strings.Contains(b, says) {
			t.Errorf("backend %s; must have %s", b, says)
		}
		velocity(t, m, rowsOf(t, m, 2))
	}
}

// A worker that is started has the settings, its stderr is in the log, and it ends with the model.
func TestProcess(t *testing.T) {
	interpret(t, "")
	var log events
	dir := remotetest.Folder(t, class, 1)
	cfg := remote.Config{DType: "bf16", Deterministic: true, Threads: 1, Log: log.add}
	m, err := remote.Open(t.Context(), dir, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c := m.Card(); !strings.Contains(c.Backend, "/bf16/deterministic") || !c.IndependentRows {
		t.Errorf("backend %s", c.Backend)
	}
	velocity(t, m, rowsOf(t, m, 2))
	if weights, working := m.MemoryBytes(); weights != 1000 || working < 500 {
		t.Errorf("%d bytes of weights, %d besides", weights, working)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	if log.having("serves "+dir) != 1 || log.having("started a worker") != 1 {
		t.Errorf("logged %+v", log.list)
	}
	if err := m.Velocity(t.Context(), nil, size); err != nil {
		t.Error(err)
	}
	if _, err := m.Encode(t.Context(), []string{"another"}); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("a closed model: %v", err)
	}
	info, err := remote.Inspect(t.Context(), dir, remote.Config{})
	if err != nil || len(info.Problems) > 0 || len(info.Parts) != 3 || info.Parts[1].Name != "transformer" ||
		info.Parts[1].Parameters != 256 {
		t.Errorf("%+v, %v", info, err)
	}
}

// A worker that dies in a call is started again, and the call repeated: nothing is lost.
func TestProcess_DiesOnce(t *testing.T) {
	interpret(t, remotetest.FaultOnce)
	var log events
	dir := remotetest.Folder(t, class, 1)
	m := opened(t, dir, remote.Config{Deterministic: true, Log: log.add})
	rows := rowsOf(t, m, 2)
	want := velocity(t, m, rows)
	for range 3 {
		if got := velocity(t, m, rows); !slices.EqualFunc(got, want, slices.Equal) {
			t.Error("other velocities")
		}
	}
	if log.having("started a worker") != 2 || log.having("the worker is lost") != 1 {
		t.Errorf("logged %+v; want one loss and two starts", log.list)
	}
}

// A call in which a worker dies each time is given up after five. Meanwhile the model is away, and says until when.
func TestProcess_DiesAlways(t *testing.T) {
	interpret(t, remotetest.FaultCrash)
	var log events
	remote.SetRetry(t, time.Hour, time.Hour)
	m := opened(t, remotetest.Folder(t, class, 1), remote.Config{Log: log.add})
	rows := rowsOf(t, m, 1)
	err := m.Velocity(t.Context(), rows, size)
	if away := m.Away(); !errors.Is(err, model.ErrAway) || away == nil || !strings.Contains(away.Error(),
		"lost 2 times in a row; the next try is at 20") || !strings.Contains(away.Error(), "exit status 9") {
		t.Errorf("%v, away %v", err, away)
	}
	remote.SetRetry(t, 0, 0)
	m = opened(t, remotetest.Folder(t, class, 1), remote.Config{Log: log.add})
	err = m.Velocity(t.Context(), rows, size)
	if !errors.Is(err, model.ErrKills) || !strings.Contains(err.Error(),
		"5 times in velocity, the last by: the worker "+
			"ended: exit status 9") || log.having("started a worker") < 2+5 {
		t.Errorf("%v; logged %+v", err, log.list)
	}
}

// A prompt in which a worker dies ends with an error, the rows beside it do not, and neither do other calls.
func TestProcess_Poison(t *testing.T) {
	interpret(t, remotetest.FaultPoison)
	remote.SetRetry(t, 0, 0)
	var log events
	m := opened(t, remotetest.Folder(t, class, 1), remote.Config{Log: log.add})
	rows := rowsOf(t, m, 4)
	bad, err := m.Encode(t.Context(), []string{"poison"})
	if err != nil {
		t.Fatal(err)
	}
	rows[1].Conditioning, rows[3].Conditioning = bad[0], bad[0]
	if err := m.Velocity(t.Context(), rows, size); err == nil || errors.Is(err, model.ErrKills) {
		t.Errorf("together: %v; want an error of none of them", err)
	}
	for i := range rows {
		if err := m.Velocity(t.Context(), rows[i:i+1], size); errors.Is(err, model.ErrKills) != (i%2 == 1) {
			t.Errorf("row %d: %v", i, err)
		}
	}
	if n := log.having("the worker is lost"); n != 5 {
		t.Errorf("lost %d times; want 2 together, 3 alone and none for its sibling", n)
	}
	if err := m.Velocity(t.Context(), rows[:1], size); err != nil || m.Away() != nil {
		t.Errorf("%v, %v", err, m.Away())
	}
}

// A worker that is killed again and again while it computes costs time alone.
func TestProcess_KilledSixTimes(t *testing.T) {
	interpret(t, "")
	remote.SetRetry(t, time.Millisecond, time.Millisecond)
	var log events
	pids := make(chan int, 16)
	m := opened(t, remotetest.Folder(t, class, 1), remote.Config{Deterministic: true, Log: func(e remote.Event) {
		log.add(e)
		var pid int
		if n, _ := fmt.Sscanf(e.Text, "started a worker, process %d:", &pid); n == 1 {
			pids <- pid
		}
	}})
	rows := rowsOf(t, m, 2)
	want := velocity(t, m, rows)
	for range 6 {
		if err := syscall.Kill(<-pids, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for err := model.ErrAway; errors.Is(err, model.ErrAway); {
			err = m.Velocity(t.Context(), rows, size)
		}
		if !slices.Equal(rows[0].Dst, want[0]) || !slices.Equal(rows[1].Dst, want[1]) {
			t.Error("other velocities")
		}
	}
	if n := log.having("started a worker"); n != 7 {
		t.Errorf("started %d times; want 7", n)
	}
}

// What keeps a worker from starting is said with what to do, at once.
func TestProcess_DoesNotStart(t *testing.T) {
	dir := remotetest.Folder(t, class, 1)
	for fault, says := range map[string][]string{
		remotetest.FaultNoModule: {"has no module 'torch'", `pip install "meander-rl[torch]"`, "MEANDER_PYTHON"},
		remotetest.FaultConfig:   {"worker: model: no weights in " + dir},
		remotetest.FaultMute:     {"the worker ended: exit status 3: Segmentation fault"},
	} {
		interpret(t, fault)
		var log events
		_, err := remote.Open(t.Context(), dir, remote.Config{Log: log.add}, nil)
		for _, part := range says {
			if err == nil || !strings.Contains(err.Error(), part) || log.having("started a worker") != 1 {
				t.Errorf("%s: %v; want %q after one start", fault, err, part)
			}
		}
	}
	t.Setenv("MEANDER_PYTHON", "/nowhere/python3")
	if _, err := remote.Open(t.Context(), dir, remote.Config{}, nil); err == nil ||
		!strings.Contains(err.Error(), "no Python called /nowhere/python3; install Python 3.10 or newer and pip") {
		t.Errorf("without Python: %v", err)
	}
	plain := filepath.Join(t.TempDir(), "python3")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("MEANDER_PYTHON", plain)
	if _, err := remote.Open(t.Context(), dir, remote.Config{}, nil); err == nil ||
		!strings.Contains(err.Error(), plain+"; must be a program that may be executed") {
		t.Errorf("a Python that may not be executed: %v", err)
	}
}

// A Python that hangs before it listens is told of, regularly, and given up with what to do.
func TestProcess_HangsAtImport(t *testing.T) {
	interpret(t, remotetest.FaultImport)
	dir := remotetest.Folder(t, class, 1)
	remote.SetWaiting(t, time.Millisecond, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	told, over := 0, 0
	_, err := remote.Inspect(ctx, dir, remote.Config{Log: func(e remote.Event) {
		switch {
		case e.Waiting && strings.Contains(e.Text, "waiting for the torch worker since") &&
			strings.Contains(e.Text, "Python starts; it said: site: slow disk"):
			if told++; told == 3 {
				cancel()
			}
		case e.Waiting && e.Text == "":
			over++
		}
	}})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), ": waiting for the torch worker since ") ||
		told < 3 || over != 1 {
		t.Errorf("%v, told %d times, %d ends", err, told, over)
	}
	remote.SetWaiting(t, time.Hour, time.Second)
	_, err = remote.Inspect(t.Context(), dir, remote.Config{})
	for _, part := range []string{"does not listen after 1s", "-m meander.torch --help", "MEANDER_PYTHON"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v; want %q", err, part)
		}
	}
}

// The worker that Inspect started is the one that Open takes, if it is for the same model and settings.
func TestProcess_Spare(t *testing.T) {
	interpret(t, "")
	dir := remotetest.Folder(t, class, 1)
	for other, starts := range map[string]int{"": 1, "bf16": 2} {
		var log, open events
		spare := &remote.Spare{}
		info, err := remote.Inspect(t.Context(), dir, remote.Config{Spare: spare, Log: log.add})
		if err != nil || info.Family != "sd3" {
			t.Fatalf("%+v, %v", info, err)
		}
		m, err := remote.Open(t.Context(), dir, remote.Config{DType: other, Spare: spare, Log: open.add}, nil)
		if err != nil {
			t.Fatal(err)
		}
		velocity(t, m, rowsOf(t, m, 1))
		spare.Close()
		velocity(t, m, rowsOf(t, m, 1))
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if n := log.having("started a worker") + open.having("started a worker"); n != starts ||
			open.having("the worker is lost") > 0 {
			t.Errorf("dtype %q: %d workers were started; want %d", other, n, starts)
		}
	}
}

// The worker ends when the process that started it is killed: its stdin ends.
func TestProcess_EndsWithStdin(t *testing.T) {
	temporary := interpret(t, "")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(program, "-m", "meander.torch", "--model", remotetest.Folder(t, class, 1), "--socket",
		filepath.Join(temporary, "s"), "--exit-with-stdin")
	in, err := c.StdinPipe()
	if err == nil {
		err = c.Start()
	}
	if err == nil {
		err = errors.Join(in.Close(), c.Wait())
	}
	if err != nil {
		t.Errorf("the worker ended with %v", err)
	}
}

// A process that was killed leaves its folder behind, which the next one removes; that of a process that runs stays.
func TestProcess_LeftFolders(t *testing.T) {
	temporary := interpret(t, "")
	left := filepath.Join(temporary, "meander-worker-left")
	if err := os.MkdirAll(filepath.Join(left, "deeper"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(left, "weights-00001.safetensors"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := remotetest.Folder(t, class, 1)
	first := opened(t, dir, remote.Config{})
	second := opened(t, dir, remote.Config{})
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a killed process left is there: %v", err)
	}
	folders, err := filepath.Glob(filepath.Join(temporary, "meander-worker-*", "worker.sock"))
	if err != nil || len(folders) != 2 {
		t.Errorf("sockets %q, %v; want those of both workers", folders, err)
	}
	for _, m := range []*remote.Model{first, second} {
		velocity(t, m, rowsOf(t, m, 1))
	}
}
