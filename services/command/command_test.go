package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/services/internal/boot"
)

// text is what is written to it, by several goroutines perhaps.
type text struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (w *text) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.Write(p)
}

func (w *text) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

// command runs a command line in this process; a status other than 0 is an exitError.
func command(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	var out, errs text
	if status := Execute(ctx, args, strings.NewReader(""), &out, &errs); status != exitOK {
		err = &exitError{status, fmt.Errorf("%q: exit status %d\n%s", args, status, &errs)}
	}
	return out.String(), errs.String(), err
}

// others is why some tests run without the race detector.
const others = "they give the same commands as other tests, one after the other, and look at what is said"

// expect runs a command line and checks its exit status, and that it says what it has to.
func expect(t *testing.T, status int, say string, args ...string) (stdout string) {
	t.Helper()
	var out, errs text
	if got := Execute(t.Context(), args, strings.NewReader(""), &out, &errs); got != status ||
		!strings.Contains(out.String()+errs.String(), say) {
		t.Fatalf("%q: exit status %d, want %d, and %q said:\n%s%s", args, got, status, say, &out, &errs)
	}
	return out.String()
}

// linesOf is the JSON lines of a command.
func linesOf(t *testing.T, stdout string) (lines []map[string]any) {
	t.Helper()
	for line := range strings.Lines(stdout) {
		var v map[string]any
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		lines = append(lines, v)
	}
	return lines
}

// inStore moves to a new folder whose store has the run r1: a group of two samples, uid p.
func inStore(t *testing.T) {
	t.Helper()
	inEmptyDir(t)
	if stored != nil {
		if err := os.CopyFS(".", stored); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err := os.WriteFile("p.jsonl", []byte(`{"prompt": "a red fox", "uid": "p"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitOK, "1 of 1 groups complete", append([]string{"run", "--run", "r1"}, small...)...)
	b := joined(t)
	bustest.Until(t, "no service is said to run", func() error { // those that could not say that they end expire
		present, err := b.Present(t.Context())
		if err == nil && len(present) > 0 {
			err = fmt.Errorf("%d are", len(present))
		}
		return err
	})
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	stored = inMemory(t, "p.jsonl", "meander-data")
}

// stored is what inStore has made.
var stored fs.FS

// inMemory has the files of this folder, and of those below it, that are named here.
func inMemory(t *testing.T, names ...string) fs.FS {
	t.Helper()
	files := fstest.MapFS{}
	for _, name := range names {
		err := fs.WalkDir(os.DirFS("."), name, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			data, err := os.ReadFile(path)
			files[path] = &fstest.MapFile{Data: data, Mode: 0o600}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// small are flags of a run that takes a moment.
var small = []string{
	"--prompts", "p.jsonl", "--model", "synthetic", "-n", "2", "--steps", "3", "--sde-steps", "1", "--return-steps", "1,2", "--out", "-",
}

var errNotYet = errors.New("not yet")

// serving is meander up on the store of this folder, with these flags, until the test ends.
func serving(t *testing.T, args ...string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, _, err := command(ctx, append([]string{"up", "--listen", "127.0.0.1:0", "--log-level", "error"}, args...)...)
		ended <- err
	}()
	t.Cleanup(func() {
		stop()
		err := <-ended
		exit, _ := errors.AsType[*exitError](err)
		if exit != nil && exit.status == exitInterrupted { // on a busy machine it was still starting
			err = nil
		}
		if err != nil {
			t.Error(err)
		}
	})
	bustest.Until(t, "a pipeline on the store", func() error {
		if _, running := natsd.Running("meander-data"); !running {
			return errNotYet
		}
		return nil
	})
}

// Servers are dialled where the client library would.
func TestApp_addresses(t *testing.T) {
	t.Parallel()
	for given, want := range map[string]string{
		"nats://a": "[a:4222]", "a:1": "[a:1]", "a": "[a:4222]", "nats://u:p@a:1/": "[a:1]", "tls://[::1]": "[[::1]:4222]",
		"ws://a": "[a:80]", "wss://a/x": "[a:443]", "nats://a:1,tls://b": "[a:1 b:4222]", "nats://": "[]",
	} {
		if got := fmt.Sprint((&app{nats: boot.NATS{Config: bus.Config{URL: given}}}).addresses()); got != want {
			t.Errorf("%s: %s, want %s", given, got, want)
		}
	}
}

func TestExecute(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitUsage, `meander has no command "runn"; did you mean 'meander run'?`, "runn")
	expect(t, exitUsage, "did you mean --run?", "show", "--runn", "x")
	expect(t, exitUsage, "--log-level: \"loud\"; must be debug, info, warn or error", "streams", "--log-level", "loud")
	expect(t, exitUsage, "is empty; make a rollout first", "show")
	expect(t, exitOK, "Commands:\n", "--help")
	for _, args := range [][]string{
		{"show"},
		{"run", "a fox"},
		{"streams", "setup"},
		{"publish", "a fox"},
		{"run", "--dry-run", "a fox"},
	} {
		expect(t, exitFailed, "connect: connection refused; is the server up? 'meander up' starts one",
			append(args, "--nats", "nats://127.0.0.1:1")...)
	}
	expect(t, exitUsage, `--nats: "http://127.0.0.1:1"; must be nats://`, "show", "--nats", "http://127.0.0.1:1")
	if err := os.WriteFile("file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitUsage, `--store: "file"; must be a folder`, "streams", "--store", "file")
	ended, stop := context.WithCancel(t.Context())
	stop()
	_, stderr, err := command(ended, "run", "--model", "synthetic", "a fox")
	if exit, ok := errors.AsType[*exitError](err); !ok || exit.status != exitInterrupted ||
		!strings.HasPrefix(stderr, "meander: interrupted (") || strings.Contains(stderr, "context canceled") {
		t.Errorf("a run that is interrupted before it begins: %v, %s", err, stderr)
	}
}

// full is a file on a disk that is full.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// Results that cannot be written are a failure, whatever writes them.
func TestExecute_FullOutput(t *testing.T) {
	bustest.Sequential(t, others)
	file, err := filepath.Abs(reports + "07-geneval/metadata.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	inStore(t)
	for _, args := range [][]string{
		{"--help"},
		{"version"},
		{"run", "--help"},
		{"show"},
		{"show", "p"},
		{"show", "--json"},
		{"status"},
		{"verify"},
		{"verify", "--json"},
		{"streams"},
		{"runs", "ls"},
		{"runs", "show", "r1"},
		{"report", "r1"},
		{"policy", "ls"},
		{"watch", "--all", "--count", "1"},
		{"top"},
		{"gc", "--gc-age", "1h"},
		{"model", "info", "synthetic"},
		{"prompts", file},
		{"run", "--dry-run", "--model", "synthetic", "a fox"},
		append([]string{"run", "--run", "r1"}, small...),
		{"rescore", "--reward", "jpeg_incompressibility", "--out", "-"},
		{"completion", "bash"},
		{"doctor"},
	} {
		var errs text
		if status := Execute(t.Context(), args, strings.NewReader(""), full{}, &errs); status != exitFailed ||
			!strings.Contains(errs.String(), "meander: ") || !strings.Contains(errs.String(), syscall.ENOSPC.Error()) {
			t.Errorf("%q with a full disk behind stdout: exit status %d, want %d, and the reason:\n%s", args, status,
				exitFailed, &errs)
		}
	}
}

// A folder or file of results that cannot be written is refused before anything is sampled.
func TestRun_OutIsTried(t *testing.T) {
	bustest.Sequential(t, others)
	inStore(t)
	if err := os.WriteFile("file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"--out", "file"},
		{"--out", "file/below"},
		{"--out", "-", "--save-latents", "none/x.safetensors"},
		{"--out", "-", "--save-latents", "meander-data"},
	} {
		expect(t, exitUsage, "can be w", append([]string{"run", "--run", "r2", "--model", "synthetic", "a fox"},
			args...)...)
	}
	expect(t, exitUsage, "--out: ", "rescore", "--reward", "jpeg_incompressibility", "--pass", "r2", "--out", "file")
	if out := expect(t, exitOK, "r1", "runs", "ls"); strings.Contains(out, "r2") {
		t.Errorf("something is stored of a run that could not have written its results:\n%s", out)
	}
}

// A command that does not come to its end after a signal is ended.
func TestUntilSignal(t *testing.T) {
	for _, signal := range boot.EndSignals() { // under nohup without SIGHUP
		overdue := make(chan struct{})
		ctx := untilSignal(time.Millisecond, func() { close(overdue) })
		if err := ctx.Err(); err != nil {
			t.Fatalf("before the signal: %v", err)
		}
		self, err := os.FindProcess(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		if err := self.Signal(signal); err != nil {
			t.Fatal(err)
		}
		<-ctx.Done()
		<-overdue
	}
}

func TestVersion(t *testing.T) {
	expect(t, exitOK, "meander ", "version")
	lines := linesOf(t, expect(t, exitOK, "", "version", "--json"))
	if len(lines) != 1 || lines[0]["go"] != runtime.Version() || lines[0]["subjects"] != "mdr.v1.>" {
		t.Errorf("JSON %v", lines)
	}
}

// A flag or folder from a variable that is not set is a mistake.
func TestAuth_Empty(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitUsage, `folder of credentials: ""`, "auth", "init", "")
	expect(t, exitUsage, `--tls-host: ""`, "auth", "init", "auth", "--tls-host", "")
	expect(t, exitUsage, `--tls-host: "a,"`, "auth", "init", "auth", "--tls-host", "a,")
	expect(t, exitOK, "auth is ready", "auth", "init", "auth", "--tls")
	expect(t, exitUsage, `--tls-host: ""`, "auth", "update", "auth", "--tls-host", "")
	expect(t, exitUsage, `role: ""`, "auth", "add", "auth", "alice", "--role", "")
	expect(t, exitOK, "has the role trainer", "auth", "add", "auth", "alice", "--role", "trainer")
}

func TestUI_Usage(t *testing.T) {
	inEmptyDir(t)
	expect(
		t,
		exitUsage,
		`--listen: "0.0.0.0:80"; others reach it there, so set a token in MEANDER_UI_TOKEN`,
		"ui",
		"--listen",
		"0.0.0.0:80",
	)
	expect(t, exitUsage, `--listen: "80"; must be host:port`, "ui", "--listen", "80")
	expect(t, exitUsage, `--host: "http://x/"; must be a name`, "ui", "--host", "http://x/")
	expect(t, exitUsage, "--tokenizer: open tokenizer: ", "ui", "--tokenizer", "nowhere")
	expect(t, exitUsage, "--ui-listen: given without the page; add --ui", "up", "--ui-listen", "127.0.0.1:0")
	expect(t, exitUsage, `--ui-listen: "80"; must be host:port`, "up", "--ui", "--ui-listen", "80")
	expect(t, exitUsage, "takes no arguments", "ui", "now")
}

func TestUp_Usage(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitUsage, "--listen: ", "up", "--nats", "nats://127.0.0.1:1", "--listen", "127.0.0.1:0")
	expect(t, exitUsage, "replicas: 0; must be between 1 and 64", "up", "--replicas", "0")
	expect(t, exitUsage, `folder of credentials: ""`, "up", "--auth", "")
	expect(t, exitUsage, "--nats-tls-ca: given without a server", "up", "--nats-tls-ca", "ca.pem")
	t.Setenv("MEANDER_NATS_TLS_CA", "ca.pem")
	t.Setenv("MEANDER_NATS_CREDS", "x.creds")
	expect(t, exitUsage, "--nats-creds (from MEANDER_NATS_CREDS): given without a server", "up")
	expect(t, exitUsage, "--nats-tls-ca (from MEANDER_NATS_TLS_CA): given without a server", "up")
	expect(t, exitUsage, "--nats-creds: given", "up", "--nats-creds", "y.creds") // the flag wins
	t.Setenv("MEANDER_NATS_URL", "nats://127.0.0.1:1")
	expect(t, exitUsage, "leave one of --listen and --nats (from MEANDER_NATS_URL) out", "up", "--listen",
		"127.0.0.1:0")
	expect(t, exitUsage, "leave one of --auth and --nats (from MEANDER_NATS_URL) out", "up", "--auth", "auth")
	t.Setenv("MEANDER_LOG_LEVEL", "loud")
	expect(t, exitUsage, `--log-level (from MEANDER_LOG_LEVEL): "loud"`, "streams")
	expect(t, exitUsage, "takes no arguments", "up", "now")
}

// What is wrong with the command line of a teacher is said before anything is opened, by the flag.
func TestTeacher_Usage(t *testing.T) {
	for want, args := range map[string][]string{
		"--model: empty; must be a folder of a model": {},
		`--name: "a.b"`: {"--model", "sums", "--name", "a.b"},
		"--workers: -1": {"--model", "sums", "--workers", "-1"},
		`--engine: "vllm=http://x"; must be torch`: {"--model", "sums", "--engine", "vllm=http://x"},
		`--dtype: "f8"; must be auto, f32 or bf16`: {"--model", "sums", "--dtype", "f8"},
		`model "nothing": no such model`:           {"--model", "nothing"},
	} {
		var out, errs bytes.Buffer
		args := append([]string{"teacher", "--store", t.TempDir(), "--log-level", "error"}, args...)
		if status := Execute(context.Background(), args, strings.NewReader(""), &out, &errs); status != exitUsage ||
			!strings.Contains(errs.String(), want) {
			t.Errorf("%q: status %d, %s; want %q", args, status, errs.String(), want)
		}
	}
}

func TestStreams(t *testing.T) {
	inStore(t)
	lines := linesOf(t, expect(t, exitOK, "", "streams", "--json"))
	messages := map[any]any{}
	steps := 0.0
	for _, s := range lines {
		messages[s["name"]] = s["messages"]
		if s["name"] == "MDR_STEPS" {
			steps = s["bytes"].(float64)
		}
	}
	if messages["MDR_STEPS"] != 6.0 || messages["MDR_TRAJECTORIES"] != 2.0 || messages["MDR_ADVANTAGES"] != 1.0 {
		t.Errorf("messages %v", messages)
	}
	// One group is stored, of two samples.
	expect(t, exitOK, "space for about 100 more groups, 200 samples, of the mean size of the 1 stored groups",
		"streams", "limit", "--max-steps-bytes", fmt.Sprintf("%dB", int64(101*steps)))
	expect(t, exitOK, "", "streams", "limit", "--max-steps-bytes", "123MiB")
	expect(t, exitOK, "123.0 MiB", "streams")
	expect(t, exitOK, "run r1: ", "runs", "rm", "r1")
	expect(t, exitFailed, `run "r1": nothing is stored of it`, "runs", "rm", "r1")
	for _, s := range linesOf(t, expect(t, exitOK, "", "streams", "--json")) {
		if s["name"] == "MDR_STEPS" && s["messages"] != 0.0 {
			t.Errorf("after the purge: %v", s)
		}
	}
	expect(t, exitOK, "store a group first: its size then says how many more fit", "streams", "limit",
		"--max-steps-bytes", "123MiB")
}

// What intake answers is printed and decides the exit status.
func TestPublish(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	expect(t, exitOK, `accepted  p1  2 samples x 4 steps  "a red fox"`, "publish", "-n", "2", "--steps", "4", "a red fox")
	if err := os.WriteFile("again.jsonl", []byte(`{"prompt": "another fox", "uid": "p1"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	lines := linesOf(t, expect(t, exitFailed, "", "publish", "--json", "--prompts", "again.jsonl"))
	if len(lines) != 1 || lines[0]["uid"] != "p1" || lines[0]["accepted"] == true || lines[0]["error"] == "" {
		t.Errorf("another prompt of the uid: %v", lines)
	}
	expect(t, exitOK, `warning    uid: "p1" is already used in run "default" by another prompt`, "publish", "--dry-run", "--prompts", "again.jsonl")
	expect(t, exitFailed, `refused   "a fox"  model: "elsewhere" is not served here`, "publish", "--prompts", unservedPrompt(t))
	expect(t, exitUsage, "--run: ", "publish", "--run", "a b", "a red fox")
	// What the estimate has said of all prompts is not said again of each.
	_, said, err := command(t.Context(), "publish", "-n", "2", "--initial-noise", "shared", "--sde-type", "ode",
		"a hen", "a cow")
	if n := strings.Count(said, "no step is stochastic"); err != nil || n != 1 {
		t.Errorf("%v, warned %d times:\n%s", err, n, said)
	}
}

// A prompt that cannot be sent is named by its text where it has no uid yet.
func TestPublish_TooLarge(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "sums")
	turn := `{"role":"user","content":"` + strings.Repeat("a", 300000) + `"},`
	if err := os.WriteFile("messages.json", []byte("["+strings.Repeat(turn, 4)+`{"role":"user","content":"1+1=?"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitFailed, `meander: prompt "1+1=?": publish prompt: `, "publish", "-n", "2", "--messages", "messages.json")
}
