package command

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// words returns what a shell makes of a line that begins with meander: its arguments, and its standard input.
func words(t *testing.T, line string) (args []string, stdin string) {
	t.Helper()
	c := exec.Command("sh", "-c", `meander() { printf '%s\0' "$@"; cat >&2; }`+"\n"+line+"\n")
	var out, errs text
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	return strings.Split(strings.TrimSuffix(out.String(), "\x00"), "\x00"), errs.String()
}

// digestOf is the digest of a run with --json.
func digestOf(t *testing.T, stdout string) string {
	t.Helper()
	lines := linesOf(t, stdout)
	summary, _ := lines[len(lines)-1]["summary"].(map[string]any)
	d, _ := summary["digest"].(string)
	if d == "" {
		t.Fatalf("no digest in %v", summary)
	}
	return d
}

// settingsOf is what 'runs show' says of a run.
func settingsOf(t *testing.T, run string) *view.Settings {
	t.Helper()
	var x struct{ Settings *view.Settings }
	if err := json.Unmarshal([]byte(expect(t, exitOK, "", "runs", "show", run, "--json")), &x); err != nil {
		t.Fatal(err)
	}
	return x.Settings
}

// The command that the settings of a run show makes the same samples, whatever the prompts have in them; and so does
// that of a run with many prompts, which are in a file.
func TestAgain(t *testing.T) {
	bustest.Sequential(t, others)
	inEmptyDir(t)
	prompts := []string{`it's a "$HOME" of ` + "`ls`\nEND\n\\n", "a 狐 <b>🦊</b>", "{\"prompt\": 1}"}
	for _, c := range []struct {
		run, store string
		flags      []string
	}{
		{"seeded", "s1", []string{"--seed", "7", "--sde-window", "2:0-3", "--noise-level", "0.5", "--reward", "jpeg_compressibility=0.5", "--return-steps", "0,4", "--estimator", "grpo"}},
		{"named", "s2", []string{"--sde-type", "cps", "--log-prob-kind", "squared", "--initial-noise", "shared", "--zero-std", "drop", "--negative-prompt", "a b,c"}},
		{"many", "s3", []string{"--seed", "8"}},
	} {
		given := prompts
		if c.run == "many" {
			given = append(given, strings.Repeat("a long prompt ", 700))
		}
		all := append([]string{
			"run", "--run", c.run, "--store", c.store, "--model", "synthetic", "--steps", "4",
			"--group-size", "2", "--out", "-", "--json",
		}, c.flags...)
		t.Setenv("MEANDER_STORE", c.store)
		want := digestOf(t, expect(t, exitOK, "", append(all, given...)...))
		s := settingsOf(t, c.run)
		lines := strings.SplitN(s.Again.Command, "\n", 2)
		command := s.Again.Command
		if c.run == "many" {
			if lines[0] != "meander runs prompts many > many.jsonl" {
				t.Fatalf("%s", command)
			}
			if err := os.WriteFile("many.jsonl", []byte(expect(t, exitOK, "", "runs", "prompts", "many")),
				0o600); err != nil {
				t.Fatal(err)
			}
			command = lines[1]
		}
		args, stdin := words(t, command)
		var out, errs text
		args = append(args, "--store", "again-"+c.store, "--model", "synthetic", "--out", "-", "--json")
		if status := Execute(t.Context(), args, strings.NewReader(stdin), &out, &errs); status != exitOK {
			t.Fatalf("%q: %d\n%s", args, status, &errs)
		}
		if got := digestOf(t, out.String()); got != want {
			t.Errorf("%s: the digest is %s, want %s of\n%s", c.run, got, want, command)
		}
		for _, n := range s.Again.Notes {
			if strings.Contains(n, "not all of it") {
				t.Error(n)
			}
		}
	}
}

// Tags and notes are in the list, and go with the run.
func TestRuns_Notes(t *testing.T) {
	inStore(t)
	expect(t, exitOK, "tags baseline, cfg 4", "runs", "tag", "r1", "cfg 4", "baseline", "cfg 4")
	expect(t, exitOK, "<b>it</b>\nfell", "runs", "note", "r1", "<b>it</b>\nfell")
	list := linesOf(t, expect(t, exitOK, "", "runs", "ls", "--json"))
	if r := list[0]; len(r["tags"].([]any)) != 2 || r["note"] != "<b>it</b>\nfell" || r["model"] != "synthetic" ||
		r["mean_reward"] == nil {
		t.Errorf("%v", r)
	}
	expect(t, exitOK, "baseline", "runs", "ls")
	expect(t, exitOK, "tags baseline", "runs", "tag", "r1", "cfg 4", "--remove")
	expect(t, exitUsage, "without a comma", "runs", "tag", "r1", "a,b")
	expect(t, exitUsage, "that can be seen", "runs", "note", "r1", "\x1b[2J")
	expect(t, exitFailed, "nothing is stored of it", "runs", "tag", "none", "a")
	expect(t, exitOK, "tags baseline\n", "runs", "note", "r1")
}

// A sampler is there before its model is announced: the run publishes its prompts, and waits.
func TestRun_JoinsBeforeTheModel(t *testing.T) {
	p := bustest.New(t, func(o *natsd.Options) { o.Listen = "127.0.0.1:0" })
	p.Forge(t, schemas.PresenceSubject("s"), bustest.Encode(t, &schemas.Presence{
		Service: schemas.ServiceSampler, Instance: "s", Lane: "signs", At: time.Now().UnixNano(),
	}))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan int, 1)
	go func() {
		ended <- Execute(ctx, []string{"run", "--nats", p.Server.ClientURL(), "--out", t.TempDir(), "a fox"},
			strings.NewReader(""), io.Discard, io.Discard)
	}()
	bustest.Await(t, p.Bus, 1, schemas.StreamPrompts)
	stop()
	if status := <-ended; status == exitOK {
		t.Errorf("exit status %d of a run that was stopped", status)
	}
}
