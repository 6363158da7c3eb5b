package integration_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// openStore opens the store of dir between two commands.
func openStore(t *testing.T, dir string, use func(b *bus.Bus)) {
	t.Helper()
	server, err := natsd.Start(t.Context(), natsd.Options{StoreDir: filepath.Join(dir, "meander-data"), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	b, err := bus.Connect(t.Context(), bus.Config{InProcess: server.InProcess(), Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(errors.Join(err, server.Close()))
	}
	use(b)
	if err := errors.Join(b.Close(), server.Close()); err != nil {
		t.Fatal(err)
	}
}

// verified is the report of verify --json.
type verified struct {
	Trajectories, Failed, Steps int
	Gone                        int `json:"steps_gone"`
	Mismatches                  []struct{ What string }
	Unproven                    string
}

// verifyRun runs verify and checks its exit status.
func verifyRun(t *testing.T, dir, run string, code int) (v verified) {
	t.Helper()
	out := meander(t, dir, "verify", "--run", run, "--json").must(t, code)
	if err := json.Unmarshal([]byte(out.stdout), &v); err != nil {
		t.Fatalf("verify: %v\n%s", err, out.stdout)
	}
	return v
}

// What has been removed is counted, and the rest is checked.
func TestVerify_StepsGone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	meander(t, dir, "run", "--run", "r1", "--model", "synthetic", "-n", "2", "--steps", "6", "a red fox").must(t, 0)
	if v := verifyRun(t, dir, "r1", 0); v.Trajectories != 2 || v.Steps != 12 || v.Gone != 0 || v.Unproven != "" {
		t.Fatalf("a whole run: %+v", v)
	}
	openStore(t, dir, func(b *bus.Bus) {
		m, err := b.Last(t.Context(), schemas.StreamSteps, schemas.Prefix+"step.r1.*.0.*.3")
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Delete(t.Context(), schemas.StreamSteps, m.Seq); err != nil {
			t.Fatal(err)
		}
	})
	// Step 3 of sample 0 is gone, and with it the state that step 2 led to.
	if v := verifyRun(t, dir, "r1", 1); v.Trajectories != 2 || v.Steps != 10 || v.Gone != 1 || len(v.Mismatches) != 0 || !strings.Contains(v.Unproven, "1 step event gone") {
		t.Errorf("one step is gone: %+v", v)
	}
	openStore(t, dir, func(b *bus.Bus) {
		if _, err := b.PurgeSubject(t.Context(), schemas.StreamSteps, schemas.Prefix+"step.>"); err != nil {
			t.Fatal(err)
		}
	})
	if v := verifyRun(t, dir, "r1", 1); v.Steps != 0 || v.Gone != 12 || v.Unproven == "" {
		t.Errorf("every step is gone: %+v", v)
	}
}

// A check of nothing is no proof.
func TestVerify_NothingChecked(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for run, test := range map[string]struct {
		args []string
		want string
	}{
		"ode":  {[]string{"--sde-type", "ode"}, "no step is stochastic"},
		"bare": {[]string{"--sde-steps", "2", "--return-steps", "5"}, "--return-steps"},
		"kept": {[]string{"--sde-steps", "2"}, ""},
	} {
		meander(t, dir, append([]string{"run", "--run", run, "--model", "synthetic", "-n", "2", "--steps", "6", "a red fox"}, test.args...)...).must(t, 0)
		if test.want == "" {
			if v := verifyRun(t, dir, run, 0); v.Steps != 2 || v.Unproven != "" {
				t.Errorf("%s: %+v", run, v)
			}
			continue
		}
		if v := verifyRun(t, dir, run, 1); v.Steps != 0 || !strings.Contains(v.Unproven, test.want) {
			t.Errorf("%s: %+v", run, v)
		}
	}
	// Garbage on a trajectory's subject is one mismatch among what is checked.
	openStore(t, dir, func(b *bus.Bus) {
		if _, err := b.PublishRaw(t.Context(), schemas.TrajectorySubject("kept", "zz", 0), []byte("junk"), nil, ""); err != nil {
			t.Fatal(err)
		}
	})
	if v := verifyRun(t, dir, "kept", 1); v.Trajectories != 3 || v.Steps != 2 || len(v.Mismatches) != 1 {
		t.Errorf("with garbage: %+v", v)
	}
}

// One letter that cannot be read hides none of the others.
func TestDead_FromTheCommandLine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	meander(t, dir, "run", "--run", "r1", "--model", "synthetic", "-n", "1", "--steps", "2", "a red fox").must(t, 0)
	large := bytes.Repeat([]byte("x"), 1000<<10)
	var ids []string
	openStore(t, dir, func(b *bus.Bus) {
		ctx := t.Context()
		letter := func(m *bus.Message) {
			if err := b.Dead(ctx, "intake", schemas.CodeDecode, "not an event", m); err != nil {
				t.Fatal(err)
			}
		}
		letter(&bus.Message{Subject: schemas.PromptSubject("r2"), Data: []byte("x"), Stream: schemas.StreamPrompts, Seq: 90})
		if _, err := b.PublishRaw(ctx, schemas.DeadSubject("intake", "r2", "u1"), []byte("junk"), nil, ""); err != nil {
			t.Fatal(err)
		}
		letter(&bus.Message{Subject: schemas.PromptSubject("r2"), Data: large, Stream: schemas.StreamPrompts, Seq: 91})
		for m, err := range b.Read(ctx, schemas.StreamDead, nil, bus.ReadOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, strconv.FormatUint(m.Seq, 10))
		}
	})
	out := meander(t, dir, "dead", "ls").must(t, 0)
	if lines := strings.Split(strings.TrimSpace(out.stdout), "\n"); len(lines) != 4 || !strings.Contains(lines[2], "unreadable") || !strings.Contains(lines[3], "not an event") {
		t.Errorf("dead ls:\n%s", out.stdout)
	}
	if out := meander(t, dir, "dead", "ls", "--json").must(t, 0); strings.Count(out.stdout, "\n") != 3 {
		t.Errorf("dead ls --json:\n%s", out.stdout)
	}
	if out := meander(t, dir, "dead", "show", ids[1]).must(t, 0); !strings.Contains(out.stdout, "unreadable") {
		t.Errorf("dead show of junk:\n%s", out.stdout)
	}
	if out := meander(t, dir, "dead", "show", ids[2]).must(t, 0); !strings.Contains(out.stdout, "original, "+strconv.Itoa(len(large))+" bytes") {
		t.Errorf("dead show of a large one:\n%s", out.stdout)
	}
	meander(t, dir, "dead", "replay", ids[1]).must(t, 1)
	meander(t, dir, "dead", "replay", ids[2]).must(t, 0)
	meander(t, dir, "dead", "drop", ids[1]).must(t, 0)
	openStore(t, dir, func(b *bus.Bus) {
		m, err := b.Last(t.Context(), schemas.StreamPrompts, schemas.PromptSubject("r2"))
		if err != nil || !bytes.Equal(m.Data, large) {
			t.Errorf("replayed: %v, want the %d bytes", err, len(large))
		}
		n, err := b.Subjects(t.Context(), schemas.StreamDead, ">")
		if err != nil || len(n) != 1 {
			t.Errorf("letters left: %v, %v; want one", n, err)
		}
	})
}
