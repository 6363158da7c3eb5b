package chaos_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

const (
	// clusterSize servers: the least that survive one.
	clusterSize = 3
	// pace leaves three servers and seven services on one machine time for an election.
	pace = time.Second
)

// newCluster is a cluster of the server that go.mod names, one process each, by name. Clients
// are given all of their URLs. More goes into the configuration of each. A test that fails keeps their stores and logs,
// and what each says then of its streams and consumers.
func newCluster(t *testing.T, more ...string) (url string, servers map[string]*harness.Process) {
	t.Helper()
	kept := harness.Kept(t)
	var clients, routes []string
	for range clusterSize {
		clients, routes = append(clients, harness.FreeAddress(t)), append(routes, harness.FreeAddress(t))
	}
	servers = map[string]*harness.Process{}
	for i := range clusterSize {
		name, monitor := fmt.Sprintf("server-%d", i), harness.FreeAddress(t)
		dir := filepath.Join(kept, name)
		_, port, _ := strings.Cut(clients[i], ":")
		config := filepath.Join(dir, "nats.conf")
		// More than the streams may take, whatever disk the tests have.
		text := fmt.Appendf(nil, "http: %q\njetstream { store_dir: %q, max_file_store: 1TB }\n%s\n", monitor,
			filepath.Join(dir, "store"), strings.Join(more, "\n"))
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(config, text, 0o600)); err != nil {
			t.Fatal(err)
		}
		servers[name] = harness.Raise(t, &harness.Process{
			Name: name, Path: harness.ServerProgram(t), Dir: dir,
			Args: []string{
				"-a", "127.0.0.1", "-p", port, "-c", config, "--server_name", name,
				"--cluster_name", "meander", "--cluster", "nats://" + routes[i], "--routes", "nats://" + strings.Join(routes, ",nats://"),
			},
		})
		t.Cleanup(func() {
			if t.Failed() {
				keepState(t, monitor, filepath.Join(dir, "state.json"))
			}
		})
	}
	return "nats://" + strings.Join(clients, ",nats://"), servers
}

// keepState writes what a server says of its streams and consumers.
func keepState(t *testing.T, monitor, file string) {
	t.Helper()
	resp, err := http.Get("http://" + monitor + "/jsz?accounts=true&consumers=true&config=true&raft=true")
	if err != nil {
		t.Log(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, os.WriteFile(file, body, 0o600)); err != nil {
		t.Log(err)
	}
}

// streamsOnCluster is a cluster with the streams on all of its servers.
func streamsOnCluster(t *testing.T) (*bus.Bus, map[string]*harness.Process) {
	t.Helper()
	url, servers := newCluster(t)
	b := bustest.Connect(t, bus.Config{URL: url, Name: "cluster-test"})
	if err := b.Setup(t.Context(), bus.Replicas(clusterSize)); err != nil {
		t.Fatal(err)
	}
	return b, servers
}

// leaderOf is the server that leads a stream.
func leaderOf(t *testing.T, b *bus.Bus, stream string) (name string) {
	t.Helper()
	bustest.Until(t, "a leader of "+stream, func() error {
		info, err := b.StreamInfo(t.Context(), stream)
		if err == nil && (info.Cluster == nil || info.Cluster.Leader == "") {
			err = errors.New("none")
		}
		if err == nil {
			name = info.Cluster.Leader
		}
		return err
	})
	return name
}

// readiness is what a program's /readyz says.
func readiness(t *testing.T, addr string) (ready bool, faults string) {
	t.Helper()
	resp, err := http.Get("http://" + addr + "/readyz")
	if err != nil {
		return false, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return false, err.Error()
	}
	return resp.StatusCode == http.StatusOK, string(body)
}

// lookout is a log that cancels when a line says something.
type lookout struct {
	says string
	stop func()
}

func (l lookout) Write(line []byte) (int, error) {
	if strings.Contains(string(line), l.says) {
		l.stop()
	}
	return len(line), nil
}

// A stream whose only server is down is there by its name, and has no leader: what waits for the streams says which,
// and goes on when the server comes again.
func TestCluster_ReadyAwaitsLeaders(t *testing.T) {
	t.Parallel()
	url, servers := newCluster(t)
	first := bustest.Connect(t, bus.Config{URL: url, Name: "cluster-test"})
	if err := first.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := first.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	up := servers[leaderOf(t, first, schemas.StreamSteps)].KillFor(t)
	ctx, stop := context.WithCancel(t.Context())
	log := zerolog.New(lookout{"the leader of ", stop})
	b, err := bus.Connect(t.Context(), bus.Config{URL: url, Name: "cluster-test"}, log)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Ready(ctx); err == nil || !strings.Contains(err.Error(), "is missing") ||
		!strings.Contains(err.Error(), "the leader of ") {
		t.Errorf("ready without a leader: %v", err)
	}
	up()
	bustest.Until(t, "all leaders", func() error { return b.Ready(t.Context()) })
}

// A cluster of three servers, each stream on all of them: the server that leads the stream of
// steps is killed under load and comes again; then two are, and health says that there is no
// majority. Every group comes out once and complete, with the bits that it has without.
func TestCluster(t *testing.T) {
	if harness.Race {
		t.Skip("TestCluster: built with -race the programs are too slow beside three servers; it runs without")
	}
	t.Parallel()
	losses := 1
	if os.Getenv("MEANDER_SOAK") != "" {
		losses = 20
	}
	url, servers := newCluster(t)
	services, health := clusterServices(t, url)
	b := bustest.Connect(t, bus.Config{URL: url, Name: "cluster-test"})
	bustest.Until(t, "the streams are there", func() error { return b.Ready(t.Context()) })
	f := publishing(t, b, "cluster", pace)
	f.more(t, 1)
	// Streams of one server each become streams of three, under load.
	limit := exec.CommandContext(t.Context(), harness.Program(t, "meander"), "streams", "limit", "--nats", url,
		"--stream-replicas", "3")
	if out, err := limit.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	replicated(t, b)

	for i := range losses {
		name := leaderOf(t, b, schemas.StreamSteps)
		if i > 0 {
			name = fmt.Sprintf("server-%d", i%clusterSize)
		}
		up := servers[name].KillFor(t)
		f.more(t, window+1)
		diagnosed(t, url, name+" is down, or behind", "connection refused")
		up()
		replicated(t, b)
	}
	leader := leaderOf(t, b, schemas.StreamSteps)
	var again []func()
	for name, v := range servers {
		if name != leader {
			again = append(again, v.KillFor(t))
		}
	}
	bustest.Until(t, "health says that there is no majority", func() error {
		if ready, faults := readiness(t, health); ready ||
			!strings.Contains(faults, "no leader: its servers elect one, or too few of them are up") {
			return errors.New(faults)
		}
		return nil
	})
	diagnosed(t, addressOf(t, b), "no leader|is down, or behind") // named by the one that is left
	for _, up := range again {
		up()
	}
	bustest.Until(t, "health is good again", func() error {
		if ready, faults := readiness(t, health); !ready {
			return errors.New(faults)
		}
		return nil
	})
	f.more(t, 1)
	f.stop()
	f.wait(t)
	redone := harness.AwaitIdle(t, b)
	got := f.books(t, b)
	wrong, _ := got.StepFaults(harness.ReadSteps(t, b, f.run))
	for _, fault := range slices.Concat(got.Faults(f.asked, steps), wrong, f.batchFaults(got), got.Differs(f.calm(t))) {
		t.Error(fault)
	}
	harness.NoDead(t, b)
	harness.Verify(t, url, f.run, len(got.Trajectories))
	t.Logf("%d groups of %d; %d servers lost, then a majority; %d redeliveries", len(f.asked), group, losses, redone)
	for _, v := range services {
		v.End(syscall.SIGTERM)
	}
	for _, v := range services {
		v.Bury(t)
		for _, death := range v.Deaths() {
			t.Errorf("%s %s", v.Name, death)
		}
	}
}

// clusterServices are two of each service but intake, which says at health how it is.
func clusterServices(t *testing.T, url string) (services []*harness.Process, health string) {
	t.Helper()
	dir := harness.Kept(t)
	health = harness.FreeAddress(t)
	for i, name := range []string{
		"intake", "sampler", "sampler", "reward", "reward", "advantage", "advantage",
		"sampler",
	} {
		v := &harness.Process{
			Name: fmt.Sprintf("%s-%d", name, i), Path: harness.Program(t, "meander-"+name), Dir: dir,
			Args: []string{
				"--nats-url", url, "--health-addr", "", "--ack-wait", ackWait.String(),
			},
		}
		switch name {
		case "intake":
			v.Args[3] = health
		case "sampler":
			v.Args = append(v.Args, "--model", modelOf(t, i), "--batch", "2", "--workers", "1")
		}
		services = append(services, harness.Raise(t, v))
	}
	return services, health
}

// diagnosed fails unless doctor finds faults that say so.
func diagnosed(t *testing.T, url string, says ...string) {
	t.Helper()
	args := []string{"doctor", "--nats", url, "--json", "--timeout", "3s"}
	bustest.Until(t, "doctor finds the faults", func() error { // the streams that it asks first elect new leaders
		out, err := exec.CommandContext(t.Context(), harness.Program(t, "meander"), args...).Output()
		exit, _ := errors.AsType[*exec.ExitError](err)
		if exit == nil || exit.ExitCode() != 1 {
			return fmt.Errorf("doctor does not end with status 1, but with %s", fmt.Sprint(err))
		}
		for _, s := range says {
			found := slices.ContainsFunc(strings.Split(string(out), "\n"), func(line string) bool {
				return regexp.MustCompile(s).MatchString(line) && strings.Contains(line, `"state":"fault"`)
			})
			if !found {
				return fmt.Errorf("doctor has no fault that says %q:\n%s", s, out)
			}
		}
		return nil
	})
}

// addressOf is the one server that a client is connected to.
func addressOf(t *testing.T, b *bus.Bus) (url string) {
	t.Helper()
	bustest.Until(t, "a server is left", func() error {
		if url = b.Conn().ConnectedUrl(); url == "" {
			return errors.New("none")
		}
		return nil
	})
	return url
}

// replicated waits until every stream is on all servers.
func replicated(t *testing.T, b *bus.Bus) {
	t.Helper()
	bustest.Until(t, "all streams are on all servers", func() error {
		stats, err := b.Stats(t.Context())
		for _, s := range stats {
			if s.Replicas != clusterSize || s.Current != clusterSize {
				return fmt.Errorf("%s is on %d of %d", s.Name, s.Current, s.Replicas)
			}
		}
		return err
	})
}

// more waits until n more groups have closed.
func (f *feed) more(t *testing.T, n int) {
	t.Helper()
	closed := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.closed)
	}
	was := closed()
	bustest.Until(t, "more groups closed", func() error {
		if now := closed(); now < was+n {
			return fmt.Errorf("%d more", now-was)
		}
		return nil
	})
}

// Readers that follow a stream go on when a server is lost for good, whichever of them it had.
func TestCluster_ReadersGoOn(t *testing.T) {
	if harness.Race {
		t.Skip("TestCluster_ReadersGoOn: of servers that are not built with -race; it runs without")
	}
	t.Parallel()
	b, servers := streamsOnCluster(t)
	publish := func(run schemas.Run) {
		t.Helper()
		bustest.Until(t, "a prompt is stored", func() error {
			_, err := b.PublishPrompt(t.Context(), run, []byte("prompt"), nil)
			return err
		})
	}
	publish("before")
	const readers = 24
	seen := make(chan string, 2*readers)
	ctx, stop := context.WithCancel(t.Context())
	var reading sync.WaitGroup
	for range readers {
		reading.Go(func() {
			for m, err := range b.Read(ctx, schemas.StreamPrompts, nil, bus.ReadOptions{Live: true}) {
				if err != nil {
					t.Error(err)
					return
				}
				seen <- m.Subject
			}
		})
	}
	all := func(run schemas.Run) {
		t.Helper()
		for range readers {
			if got := bustest.Receive(t, "the prompt of "+string(run), seen); got != schemas.PromptSubject(run) {
				t.Errorf("read %s, want the prompt of %s, once", got, run)
			}
		}
	}
	all("before")
	// Those that were asked of the servers in the moment in which one goes may be given to that one.
	defer servers[b.Conn().ConnectedServerName()].KillFor(t)()
	publish("after")
	all("after")
	stop()
	reading.Wait()
}

// What is stored on a cluster is found, whichever server answers. Direct gets,
// which any server answers, do not promise that.
func TestCluster_ReadsWhatIsStored(t *testing.T) {
	if harness.Race {
		t.Skip("TestCluster_ReadsWhatIsStored: of servers that are not built with -race; it runs without")
	}
	t.Parallel()
	b, _ := streamsOnCluster(t)
	err := b.SetReplicas(t.Context(), bus.MaxReplicas)
	if !errors.Is(err, bus.ErrTooFewServers) || !strings.Contains(fmt.Sprint(err),
		"must be at most the servers of the cluster") {
		t.Errorf("five replicas on three servers: %v", err)
	}
	stale := 0
	for i := range 10 {
		run := schemas.Run(fmt.Sprintf("run-%d", i))
		ack, err := b.PublishPrompt(t.Context(), run, []byte("prompt"), nil)
		if err != nil {
			t.Fatal(err)
		}
		subject := schemas.PromptSubject(run)
		ask, err := json.Marshal(map[string]string{"last_by_subj": subject})
		if err != nil {
			t.Fatal(err)
		}
		raw, err := b.Conn().RequestWithContext(t.Context(), "$JS.API.DIRECT.GET."+ack.Stream, ask)
		if err != nil {
			t.Fatal(err)
		}
		if raw.Header.Get("Status") == "404" {
			stale++
		}
		if m, err := b.Last(t.Context(), ack.Stream, subject); err != nil || m.Seq != ack.Seq {
			t.Errorf("last of %s: %v, %v; stored as %d", subject, m, err, ack.Seq)
		}
		if many, err := b.LastMany(t.Context(), ack.Stream, []string{subject}); err != nil || len(many) != 1 {
			t.Errorf("last of each of %s: %d, %v", subject, len(many), err)
		}
		if m, err := b.Get(t.Context(), ack.Stream, ack.Seq); err != nil || m.Subject != subject {
			t.Errorf("message %d: %v, %v", ack.Seq, m, err)
		}
		if n := len(harness.Subjects(t, b, ack.Stream, subject)); n != 1 {
			t.Errorf("read of %s: %d messages", subject, n)
		}
	}
	t.Logf("a direct get did not find %d of them", stale)
}
