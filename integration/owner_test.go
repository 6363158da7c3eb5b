package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// task is a meander command that runs beside the test.
type task struct {
	cmd    *exec.Cmd
	stdout logbook // whole once ended
	stderr logbook
	ended  chan struct{}
}

// background starts a command; at the end of the test it is killed if it still runs.
func background(t *testing.T, dir string, args ...string) *task {
	t.Helper()
	x := &task{cmd: exec.Command(program(t, "meander"), args...), ended: make(chan struct{})}
	x.cmd.Dir, x.cmd.Stdout, x.cmd.Stderr = dir, &x.stdout, &x.stderr
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(x.ended)
		_ = x.cmd.Wait() // the status is looked at where it matters
	}()
	t.Cleanup(func() {
		_ = x.cmd.Process.Kill()
		<-x.ended
		if t.Failed() {
			t.Logf("meander %s: %v\n%s", args[0], x.cmd.ProcessState, &x.stderr)
		}
	})
	return x
}

// signal is sent to a task, if it still runs.
func (x *task) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := x.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatalf("%v: %v", s, err)
	}
}

// wait returns what the task did. One that hangs is asked for its stacks.
func (x *task) wait(t *testing.T) output {
	t.Helper()
	select {
	case <-x.ended:
	case <-time.After(5 * bustest.Patience):
		_ = x.cmd.Process.Signal(syscall.SIGQUIT)
		<-x.ended
		t.Fatalf("meander %v does not end:\n%s", x.cmd.Args[1:], &x.stderr)
	}
	return output{x.stdout.String(), x.stderr.String(), x.cmd.ProcessState.ExitCode()}
}

// says waits until the task has written the text.
func (x *task) says(t *testing.T, text string) {
	t.Helper()
	bustest.Until(t, text, func() error {
		if strings.Contains(x.stderr.String(), text) {
			return nil
		}
		select {
		case <-x.ended:
			return fmt.Errorf("ended: %v", x.cmd.ProcessState)
		default:
			return errors.New("not said")
		}
	})
}

// made waits until a run on the store of dir has that many trajectories, and returns how
// many it has: 0 when x, which makes them, has ended before.
func made(t *testing.T, dir string, run schemas.Run, want int, x *task) (got int) {
	t.Helper()
	bustest.Until(t, fmt.Sprintf("%d trajectories of %s", want, run), func() error {
		select {
		case <-x.ended:
			got = 0
			return nil
		default:
		}
		info, ok := natsd.Running(filepath.Join(dir, "meander-data"))
		if !ok {
			return errors.New("nobody serves")
		}
		// Of a server that was killed just now the store may still have the address.
		ctx, stop := context.WithTimeout(t.Context(), 2*time.Second)
		defer stop()
		b, err := bus.Connect(ctx, bus.Config{URL: info.URL, Token: info.Token, Name: "test", NoWait: true},
			zerolog.Nop())
		if err != nil {
			return err
		}
		defer b.Close()
		stored, err := b.Subjects(ctx, schemas.StreamTrajectories, string(schemas.Prefix+"trajectory."+run+".>"))
		if got = len(stored); err == nil && got < want {
			steps, err := b.StreamInfo(ctx, schemas.StreamSteps)
			if err != nil {
				return err
			}
			// Others' steps are something new, too: their samples may come first.
			return fmt.Errorf("%d; %d steps of all runs", got, steps.State.LastSeq)
		}
		return err
	})
	return got
}

// longRun is the arguments of a run of 2 groups x 8 samples, which takes seconds. Were a
// killed process's work not taken back at once, it would never end.
func longRun(id string, more ...string) []string {
	steps := "20"
	if raceEnabled {
		steps = "5" // each takes several times as long
	}
	return append([]string{
		"run", "--run", id, "--json", "--out", "-", "--seed", "3", "-n", "8", "--steps", steps, "--height", "256", "--width",
		"256", "--sde-steps", "0-4",
	}, append(more, "a red fox", "two owls")...)
}

var slowServices = []string{"--model", "synthetic", "--batch", "2", "--workers", "1", "--ack-wait", "10m"}

// complete checks that a run has all of its groups, and returns its digest.
func complete(t *testing.T, x *task) string {
	t.Helper()
	_, sum := x.wait(t).must(t, 0).parse(t)
	if sum.Complete != 2 || sum.Trajectories != sum.Samples {
		t.Errorf("%+v; want 2 groups complete, a trajectory per sample", sum)
	}
	return sum.Digest
}

// Two runs on one store: whichever ends first, and however, the other goes on.
func TestStore_EveryOrderOfEnding(t *testing.T) {
	t.Parallel()
	calm := complete(t, background(t, t.TempDir(), longRun("b", slowServices...)...))
	type end func(t *testing.T, x *task)
	endings := []struct {
		name string
		end  end
	}{
		{"finishes", func(t *testing.T, x *task) { complete(t, x) }},
		{"is interrupted", func(t *testing.T, x *task) { x.signal(t, os.Interrupt); x.wait(t) }},
		{"is killed", func(t *testing.T, x *task) { x.signal(t, os.Kill); x.wait(t) }},
	}
	for _, ending := range endings {
		t.Run("owner "+ending.name, func(t *testing.T) {
			dir := t.TempDir()
			// not over before the other joins
			owner := background(t, dir, longRun("a", append(slowServices, "-n", "16")...)...)
			running(t, dir)
			joiner := background(t, dir, longRun("b")...)
			joiner.says(t, "joining the pipeline at nats://127.0.0.1:")
			if ending.name == "finishes" {
				made(t, dir, "b", 1, joiner)
			}
			ending.end(t, owner)
			if digest := complete(t, joiner); digest != calm {
				t.Errorf("digest %s, alone %s", digest, calm)
			}
		})
		t.Run("joiner "+ending.name, func(t *testing.T) {
			dir := t.TempDir()
			owner := background(t, dir, longRun("b", slowServices...)...)
			running(t, dir)
			joiner := background(t, dir, longRun("a", "--priority", "1")...)
			joiner.says(t, "joining the pipeline at nats://127.0.0.1:")
			made(t, dir, "a", 1, joiner)
			ending.end(t, joiner)
			if digest := complete(t, owner); digest != calm {
				t.Errorf("digest %s, alone %s", digest, calm)
			}
		})
	}
}

// A chain of runs is killed one after the other, in the middle of their work: the last
// one does all that is left.
func TestStore_OwnersKilledInTurn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	long := []string{"-n", "32"} // not over before the others have joined
	if raceEnabled {
		long = []string{"-n", "12"} // each takes several times as long
	}
	runs := []*task{background(t, dir, longRun("r0", append(slowServices, long...)...)...)}
	running(t, dir)
	for i := 1; i < 4; i++ {
		if i == 3 {
			long = []string{"--priority", "1"} // what is left of the others may wait
		}
		x := background(t, dir, longRun(fmt.Sprintf("r%d", i), long...)...)
		x.says(t, "joining")
		runs = append(runs, x)
	}
	for i, x := range runs[:3] {
		made(t, dir, schemas.Run(fmt.Sprintf("r%d", i)), 1, x)
		x.signal(t, os.Kill)
	}
	complete(t, runs[3])
}

// Commands of all kinds outlive the pipeline that they joined, and go on with the next.
func TestStore_UpEndsUnderItsClients(t *testing.T) {
	t.Parallel()
	for _, end := range []os.Signal{os.Interrupt, os.Kill} {
		t.Run(end.String(), func(t *testing.T) {
			dir := t.TempDir()
			up := background(t, dir, "up", "--model", "synthetic", "--listen", "127.0.0.1:0", "--ack-wait", "10m")
			up.says(t, "meander is up")
			watch := background(t, dir, "watch", "--run", "p", "--kinds", "advantage", "--count", "12", "--json")
			watch.says(t, "watching nats://127.0.0.1:")
			publish := background(t, dir, "publish", "--run", "p", "-n", "2", "--wait", "5s", "--json",
				"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9", "p10", "p11")
			made(t, dir, "p", 1, up)
			up.signal(t, end)
			run := background(t, dir, "run", "--run", "r", "--model", "synthetic", "-n", "2", "--json", "--out", "-",
				"rain")
			up.wait(t)
			run.wait(t).must(t, 0)
			// No one serves any more. A reader has the store, and gives it to who comes.
			again := background(t, dir, "up", "--model", "synthetic", "--listen", "127.0.0.1:0")
			again.says(t, "meander is up")
			publish.wait(t) // some may not have been answered: they are stored
			if n := strings.Count(publish.stdout.String(), "\n"); n != 12 {
				t.Fatalf("publish says something of %d prompts, want 12\n%s", n, &publish.stderr)
			}
			out := watch.wait(t).must(t, 0)
			if n := strings.Count(out.stdout, `"kind":"advantage"`); n != 12 {
				t.Errorf("watch saw %d groups, want 12", n)
			}
			again.signal(t, os.Interrupt)
			again.wait(t).must(t, 0)
			out = meander(t, dir, "show", "--run", "p", "--json").must(t, 0)
			if n := strings.Count(out.stdout, "\n"); n != 12 {
				t.Errorf("%d groups are stored, want 12", n)
			}
		})
	}
}

// A run killed again and again, sooner than its work would be redelivered, makes progress, starts at once though the
// one before has hardly died, and ends with the groups and the digest of one that nothing disturbed.
func TestStore_KilledFasterThanRedelivery(t *testing.T) {
	t.Parallel()
	limit := soak(t, 3, 50)
	for n, kills := 8*limit, 0; kills < 2; n *= 2 { // work in hand would come back after 10 minutes
		if n > 64*limit {
			t.Fatalf("%d kills before the run came to its end, though it is 8 times longer than it has to be", kills)
		}
		dir := t.TempDir()
		args := longRun("k", append(slowServices, "-n", strconv.Itoa(n), "--height", "256", "--width", "256")...)
		x := background(t, dir, args...)
		kills = 0
		for have := 0; kills < limit; kills++ {
			if have = made(t, dir, "k", have+1, x); have == 0 {
				break
			}
			x.signal(t, os.Kill)
			x = background(t, dir, args...) // without waiting for the end
		}
		digest := complete(t, x)
		if calm := complete(t, background(t, t.TempDir(), args...)); digest != calm {
			t.Errorf("digest %s after %d kills, without %s", digest, kills, calm)
		}
		if stored := meander(t, dir, "show", "--run", "k", "--json").must(t, 0).stdout; strings.Count(stored,
			"\n") != 2 {
			t.Errorf("stored are\n%swant 2 groups", stored)
		}
	}
}

// up starts at once, on the same port, when the one before was killed.
func TestStore_UpRestartedAfterKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	address := harness.FreeAddress(t)
	for range soak(t, 3, 50) {
		up := background(t, dir, "up", "--model", "synthetic", "--listen", address)
		up.says(t, "meander is up on nats://"+address)
		up.signal(t, os.Kill)
	}
	up := background(t, dir, "up", "--model", "synthetic", "--listen", address)
	up.says(t, "meander is up on nats://"+address)
	meander(t, dir, "run", "-n", "2", "--out", "-", "rain").must(t, 0)
	// A second one is refused, naming the first.
	out := meander(t, dir, "up", "--listen", "127.0.0.1:0").must(t, 1)
	if want := fmt.Sprintf(`a pipeline runs on store "meander-data" already: process %d`,
		up.cmd.Process.Pid); !strings.Contains(out.stderr, want) {
		t.Errorf("a second up: %s\nwant %s", out.stderr, want)
	}
}

// What only the owner of a pipeline can honour is refused where it differs from what
// runs; what is left out is as it runs.
func TestStore_FlagsOfWhoJoins(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	up := background(t, dir, "up", "--model", "synthetic", "--batch", "4", "--listen", "127.0.0.1:0")
	up.says(t, "meander is up on")
	where := fmt.Sprintf(`the pipeline on store "meander-data" (process %d)`, up.cmd.Process.Pid)
	for _, name := range []string{"x.yaml", "a"} { // what is not there is refused as such
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		args []string
		want string // empty: accepted
	}{
		{nil, ""},
		{[]string{"--model", "synthetic", "--batch", "4"}, ""},
		{[]string{"--model", "signs"}, `--model: "signs"; ` + where + ` runs with "synthetic"; leave this flag out, or use another --store`},
		{[]string{"--batch", "8"}, `--batch: "8"; ` + where + ` runs with "4"`},
		{[]string{"--scorers", "x.yaml"}, `--scorers: "x.yaml"; ` + where + ` runs with ""`},
		{[]string{"--threads", "1", "--ack-wait", "1s"}, `--ack-wait: "1s"; ` + where},
		{[]string{"--metrics-addr", "127.0.0.1:0"}, `--metrics-addr: "127.0.0.1:0"; ` + where},
		{[]string{"--nats", running(t, dir).URL, "--adapter", "a"}, `--adapter: "a"; the services at nats://127.0.0.1:`},
		{[]string{"--dry-run", "--batch", "8"}, `--batch: "8"; ` + where + ` runs with "4"`},
		{[]string{"--dry-run", "--batch", "4"}, ""},
		{[]string{"--nats-creds", "c"}, "--nats-creds: given without a server"},
	} {
		out := meander(t, dir, append([]string{"run", "-n", "2", "--out", "-", "rain"}, tt.args...)...)
		switch {
		case tt.want == "":
			out.must(t, 0)
		case !strings.Contains(out.must(t, 2).stderr, tt.want):
			t.Errorf("%q:\n%s\nwant %s", tt.args, out.stderr, tt.want)
		}
	}
	out := meander(t, dir, "up", "--nats", "nats://127.0.0.1:1", "--listen", "127.0.0.1:0").must(t, 2)
	if !strings.Contains(out.stderr, "--listen") {
		t.Errorf("up with both: %s", out.stderr)
	}
}

// With a token, no one without it may connect.
func TestUp_Token(t *testing.T) {
	t.Setenv("MEANDER_NATS_TOKEN", "s3cret")
	dir := t.TempDir()
	up := background(t, dir, "up", "--model", "synthetic", "--listen", "127.0.0.1:0")
	up.says(t, "meander is up on")
	url := running(t, dir).URL
	for _, token := range []string{"", "guess"} {
		nc, err := nats.Connect(url, nats.Token(token))
		if err == nil {
			nc.Close()
		}
		if !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("token %q: %v, want a refusal", token, err)
		}
	}
	meander(t, dir, "run", "-n", "2", "--out", "-", "rain").must(t, 0) // on the store
	// with the token
	meander(t, t.TempDir(), "run", "--nats", url, "-n", "2", "--out", "-", "rain").must(t, 0)
	// written in the URL
	meander(t, t.TempDir(), "streams", "--nats", strings.Replace(url, "://", "://s3cret@", 1)).must(t, 0)
	// with another
	out := meander(t, t.TempDir(), "streams", "--nats", url, "--nats-token", "other", "--json").must(t, 1)
	if strings.Contains(up.stderr.String()+out.stderr, "s3cret") {
		t.Error("the token is printed")
	}
}

// Credentials in a URL are shown by no one.
func TestURL_CredentialsAreHidden(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	url := running(t, func() string { serve(t, dir); return dir }()).URL
	for _, secret := range []string{"s3cret@", "user:s3cret@", "s3cret:x@"} {
		address := strings.Replace(url, "://", "://"+secret, 1)
		for _, args := range [][]string{
			{"watch", "--all", "--count", "1", "--run", "c", "--log-level", "debug"},
			{"run", "--run", "c", "-n", "2", "--out", "-", "--log-level", "debug", "rain"},
			{"run", "--adapter", "a", "rain"},
			{"up", "--listen", "127.0.0.1:0"},
		} {
			if args[0] == "watch" {
				meander(t, dir, "run", "--run", "c", "-n", "2", "--out", "-", "rain").must(t, 0)
			}
			out := meander(t, dir, append(args, "--nats", address)...)
			if strings.Contains(out.stdout+out.stderr, "s3cret") {
				t.Errorf("%s --nats %s prints\n%s%s", args[0], address, out.stdout, out.stderr)
			}
		}
		for _, bad := range []string{"nats://" + secret + "127.0.0.1:x", "nats://" + secret + "%zz"} {
			out := meander(t, dir, "streams", "--nats", bad).must(t, 1)
			if strings.Contains(out.stderr, "s3cret") || !strings.Contains(out.stderr, "***@") {
				t.Errorf("--nats %s: %s", bad, out.stderr)
			}
		}
		for _, args := range [][]string{
			{"--nats-url", address, "--print-config"},
			{"--nats-url", "http://" + secret + "h"},
		} {
			text, _ := exec.Command(program(t, "meander-reward"), args...).CombinedOutput()
			if strings.Contains(string(text), "s3cret") || !strings.Contains(string(text), "***@") {
				t.Errorf("meander-reward %s: %s", args, text)
			}
		}
	}
}
