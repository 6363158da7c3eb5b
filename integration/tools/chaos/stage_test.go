package chaos_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/chaos"
	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// stage is a pipeline of real programs around a real server, and what can be done to it. Each
// program reaches the server through a proxy of its own.
type stage struct {
	url      string
	bus      *bus.Bus
	server   *harness.Process
	disk     *chaos.Disk // nil: none can be made here
	programs []*harness.Process
	proxies  []*chaos.Proxy
	without  []chaos.Kind // that cannot be had here
	kept     string       // what is left of a run that fails: the store, logs of the programs, and the log of the test
	log      *os.File

	began     time.Time
	injected  map[chaos.Kind]int
	announced int // policies
}

// newStage starts the server and the programs.
func newStage(t *testing.T) *stage {
	t.Helper()
	s := &stage{began: time.Now(), injected: map[chaos.Kind]int{}, kept: harness.Kept(t)}
	t.Logf("the store and the logs, until it has passed: %s", s.kept)
	store := filepath.Join(s.kept, "store")
	var err error
	if s.log, err = os.Create(filepath.Join(s.kept, "chaos.log")); err == nil {
		t.Cleanup(func() { _ = s.log.Close() })
		err = os.Mkdir(store, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	disk, err := chaos.NewDisk(store)
	if err == nil {
		s.disk = disk
		t.Cleanup(func() { // after the processes have ended
			if t.Failed() {
				if err := os.CopyFS(filepath.Join(s.kept, "stored"), os.DirFS(store)); err != nil {
					t.Error(err)
				}
			}
			if err := disk.Close(); err != nil {
				t.Error(err)
			}
		})
	} else {
		s.without = append(s.without, chaos.DiskFull)
		t.Logf("NOT TESTED: a full disk; it takes the right to mount one (%v)", err)
	}
	s.url, s.server = harness.Server(t, s.kept)
	s.raise(t)
	s.bus = connect(t, s.url)
	return s
}

// modelOf is the model of the sampler that is the i-th program: images, and texts of the last.
func modelOf(t *testing.T, i int) string {
	t.Helper()
	if i < 7 {
		return "synthetic"
	}
	return textModel(t)
}

// raise starts intake, two of each other service, and a sampler of texts, each with a network of its own.
func (s *stage) raise(t *testing.T) {
	t.Helper()
	s.programs, s.proxies = nil, nil
	for i, name := range []string{
		"intake", "sampler", "sampler", "reward", "reward", "advantage", "advantage",
		"sampler",
	} {
		proxy, err := chaos.NewProxy(strings.TrimPrefix(s.url, "nats://"))
		if err != nil {
			t.Fatal(err)
		}
		p := &harness.Process{Name: fmt.Sprintf("%s-%d", name, i), Path: harness.Program(t,
			"meander-"+name), Dir: s.kept, Args: []string{
			"--nats-url", "nats://" + proxy.Addr(), "--health-addr", "", "--ack-wait", ackWait.String(),
			"--drain-timeout", "2s",
		}}
		switch name {
		case "intake": // which may know one sampler before the other
			p.Args = append(p.Args, "--models", "synthetic,sums")
		case "sampler":
			p.Args = append(p.Args, "--model", modelOf(t, i), "--batch", "2", "--workers", "1")
		}
		s.programs, s.proxies = append(s.programs, harness.Raise(t, p)), append(s.proxies, proxy)
		t.Cleanup(func() { _ = proxy.Close() })
	}
}

// inject waits for the time of a fault, injects it, logs it and counts it.
func (s *stage) inject(t *testing.T, f chaos.Fault) {
	t.Helper()
	s.apply(t, f)
	s.injected[f.Kind]++
}

// apply injects a fault: once its victim is there to be hurt, which may be starting.
func (s *stage) apply(t *testing.T, f chaos.Fault) {
	t.Helper()
	time.Sleep(f.After)
	who := "nats-server"
	if !f.Kind.OfServer() {
		who = s.programs[f.Victim].Name
	}
	for end := time.Now().Add(time.Minute); !s.hurt(t, f); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s, %s: not there to be hurt for a minute", who, f)
		}
	}
	s.say(t.Log, fmt.Sprintf("%9.3f s  %-12s %s", time.Since(s.began).Seconds(), who, f))
}

// say says something in the log of the test, and in the file that stays when the test fails.
func (s *stage) say(in func(...any), what any) {
	in(what)
	_, _ = fmt.Fprintln(s.log, what)
}

// hurt is false where there was nothing to be hurt.
func (s *stage) hurt(t *testing.T, f chaos.Fault) bool {
	t.Helper()
	program, proxy := s.programs[f.Victim], s.proxies[f.Victim]
	switch f.Kind {
	case chaos.Kill:
		return program.Kill()
	case chaos.Pause:
		return program.Pause(f.Length)
	case chaos.Restart:
		return program.Restart()
	case chaos.ServerKill:
		return s.server.Kill()
	case chaos.ServerPause:
		return s.server.Pause(f.Length)
	case chaos.ServerRestart:
		return s.server.Restart()
	case chaos.Latency:
		return proxy.Latency(f.Delay, f.Length)
	case chaos.Cut:
		return proxy.Cut(f.Length)
	case chaos.HalfOpen:
		return proxy.HalfOpen(f.Told)
	case chaos.SlowReader:
		return proxy.SlowReader(f.Delay, f.Length)
	case chaos.DiskFull:
		return s.fill(t, f.Length)
	}
	t.Fatalf("no such fault: %s", f.Kind)
	return false
}

// fill leaves the server's disk without room for d. A server that failed to write refuses all
// writes until it is started again, so that is what an operator does.
func (s *stage) fill(t *testing.T, d time.Duration) bool {
	t.Helper()
	if err := s.disk.Fill(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(d)
	if err := s.disk.Empty(); err != nil {
		t.Fatal(err)
	}
	for !s.server.Kill() {
		time.Sleep(5 * time.Millisecond)
	}
	return true
}

// starts is how often programs and server were started.
func (s *stage) starts() (n int) {
	for _, p := range append(slices.Clone(s.programs), s.server) {
		n += p.Starts()
	}
	return n
}

// guardOff has the streams take any number of messages per subject, and forget message ids at once.
func (s *stage) guardOff(t *testing.T) {
	t.Helper()
	for _, name := range []string{schemas.StreamTrajectories, schemas.StreamRewards, schemas.StreamAdvantages} {
		stream, err := s.bus.JetStream().Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		c := stream.CachedInfo().Config
		c.MaxMsgsPerSubject, c.DiscardNewPerSubject, c.Duplicates = -1, false, 100*time.Millisecond
		if _, err := s.bus.JetStream().UpdateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
}
