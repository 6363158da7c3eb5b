package integration_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// What deploy/guide/secure-it.md says shares one run with an account of its own: that run can be read there, and
// verified, and no other.
func TestRoles_ShareARun(t *testing.T) {
	t.Parallel()
	var files, commands string
	for _, b := range blocksOf(t, "secure-it.md", read(t, "deploy/guide/secure-it.md")) {
		switch {
		case strings.Contains(b.text, "# accounts.conf"):
			files = b.text
		case strings.Contains(b.text, "STREAM.CREATE.MDR_"):
			commands = b.text
		}
	}
	exports, accounts, _ := strings.Cut(files, "# accounts.conf")
	dir := credentials(t)
	for name, text := range map[string]string{
		"exports.conf": exports, "accounts.conf": strings.ReplaceAll(accounts, "$FRIEND_PASSWORD", "secret"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	meander(t, t.TempDir(), "auth", "update", dir).must(t, 0)
	g := ownServer(t, dir)
	runs := t.TempDir()
	for _, run := range []string{"demo", "other"} {
		meander(t, runs, "run", "--run", run, "-n", "2", "--steps", "2", "--model", "synthetic", "--out", "-",
			"a fox").must(t, 0)
		meander(t, runs, "runs", "export", run, "--out", run+".archive").must(t, 0)
		meander(t, runs, append([]string{"runs", "import", run + ".archive"}, g.flags("admin")...)...).must(t, 0)
	}
	tools, work := t.TempDir(), t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(tools, "nats"),
		"./testdata/nats").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for link, to := range map[string]string{"bin": filepath.Dir(harness.Program(t, "meander")), "auth": dir} {
		if err := os.Symlink(to, filepath.Join(work, link)); err != nil {
			t.Fatal(err)
		}
	}
	friend := strings.Replace(g.url, "tls://", "tls://friend:secret@", 1)
	sh := exec.CommandContext(t.Context(), "sh", "-euc", commands)
	sh.Dir, sh.Env = work, append(os.Environ(), onPath(tools), "FRIEND_PASSWORD=secret")
	sh.Args[2] = strings.NewReplacer("nats-server --signal reload", ":", "nats.example.org:4222",
		strings.TrimPrefix(g.url, "tls://")).Replace(commands)
	if out, err := sh.CombinedOutput(); err != nil || strings.Count(string(out), "a-fox ") != 5 {
		t.Fatalf("%v\n%s", err, out)
	}
	flags := []string{"--nats", friend, "--nats-tls-ca", g.file("tls/ca.pem")}
	meander(t, work, append([]string{"verify", "--run", "demo"}, flags...)...).must(t, 0)
	if out := meander(t, work, append([]string{"runs", "ls", "--json"}, flags...)...).must(t, 0); !strings.Contains(out.stdout, `"run":"demo"`) || strings.Contains(out.stdout, "other") {
		t.Errorf("runs in the friend's account:\n%s", out.stdout)
	}
	out := meander(t, work, append([]string{"doctor"}, flags...)...)
	if !strings.Contains(out.stdout, "streams as this version expects") {
		t.Errorf("doctor in the friend's account:\n%s", out.stdout)
	}
	// Nothing else is exported: a mirror of another run stays empty.
	nc, err := nats.Connect(friend, nats.RootCAs(g.file("tls/ca.pem")))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	for _, subject := range []string{
		"CONSUMER.CREATE.MDR_ADVANTAGES.x.mdr.v1.*.other.>", "CONSUMER.CREATE.MDR_ADVANTAGES.x.mdr.v1.>",
		"CONSUMER.CREATE.MDR_ADVANTAGES", "STREAM.PURGE.MDR_ADVANTAGES", "CONSUMER.CREATE.MDR_PROMPTS.x.mdr.v1.prompt.demo",
	} {
		if m, err := nc.Request("pipeline.API."+subject, []byte("{}"), 10*time.Second); !errors.Is(err,
			nats.ErrNoResponders) {
			t.Errorf("%s: %v, %v; must lead nowhere", subject, m, err)
		}
	}
}
