package integration_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// A folder of an older release, whose users are all in the server's default account, gets a guest: what the
// commands say to do moves the streams, a server that runs learns of further guests by a reload, and
// one who is removed and comes again with other runs finds nothing of before.
func TestRoles_Update(t *testing.T) {
	t.Parallel()
	dir, store := filepath.Join(t.TempDir(), "auth"), t.TempDir()
	auth := func(args ...string) string {
		t.Helper()
		return meander(t, t.TempDir(), append([]string{"auth"}, args...)...).must(t, 0).stdout
	}
	auth("init", dir, "--tls")
	edit(t, filepath.Join(dir, "users.json"), `\n *"account": "meander",`, "")
	auth("update", dir)
	if text := contents(t, filepath.Join(dir, "auth.conf")); !strings.Contains(text, "authorization {") {
		t.Fatalf("a folder of an older release without guests does not stay as it is:\n%s", text)
	}
	edit(t, filepath.Join(dir, "nats.conf"), `(?m)^(http:| *store_dir:).*$`, "")
	logged := filepath.Join(t.TempDir(), "log")
	url, server := harness.Server(t, store, "-c", filepath.Join(dir, "nats.conf"), "-l", logged)
	g := guarded{url: strings.Replace(url, "nats://", "tls://", 1), dir: dir}
	setup := func() {
		t.Helper()
		meander(t, t.TempDir(), append([]string{"streams", "setup", "--auth", dir}, g.flags("admin")...)...).must(t, 0)
	}
	setup()
	admin := g.user(t, "admin")
	for _, run := range []string{"a", "b"} {
		if _, err := admin.nc.Request("mdr.v1.advantage."+run+".u", []byte("x"), 10*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	// As a guest of an older release: with the others, and known by his file alone.
	edit(t, filepath.Join(dir, "viewer.creds"), `# runs: \*`, "# runs: a")
	if out := meander(t, t.TempDir(), append([]string{"doctor"}, g.flags("viewer")...)...).must(t,
		1); !strings.Contains(out.stdout, "meander auth update") {
		t.Errorf("doctor does not name a guest in the account of all:\n%s", out.stdout)
	}
	if out := auth("add", dir, "guest", "--role", "viewer", "--run", "a"); !strings.Contains(out,
		"move jetstream/$G in its store_dir to jetstream/meander") || !strings.Contains(out, "streams setup --auth") {
		t.Errorf("auth add: %s", out)
	}
	admin.nc.Close()
	up := server.KillFor(t)
	if err := os.Rename(filepath.Join(store, "store", "jetstream", "$G"),
		filepath.Join(store, "store", "jetstream", "meander")); err != nil {
		t.Fatal(err)
	}
	up()
	bustest.Until(t, "the server is back", func() error {
		nc, err := nats.Connect(g.url, nats.RootCAs(g.file("tls/ca.pem")))
		if err == nil {
			nc.Close()
		} else if strings.Contains(err.Error(), "uthorization") {
			return nil
		}
		return err
	})
	setup()
	g.user(t, "admin").holds(t, "the streams are there", "MDR_ADVANTAGES", 2)
	g.user(t, "guest").holds(t, "the guest has what is of his run", "MDR_ADVANTAGES", 1)
	if out := meander(t, t.TempDir(), append([]string{"doctor"}, g.flags("guest")...)...); !strings.Contains(out.stdout,
		"in the account guest-guest of its own") {
		t.Errorf("doctor of a guest:\n%s", out.stdout)
	}
	auth("add", dir, "more", "--role", "viewer", "--run", "b")
	reload(t, server, logged)
	setup()
	g.user(t, "more").holds(t, "one more has what is of his run", "MDR_ADVANTAGES", 1)
	// The name comes again, for another run.
	auth("rm", dir, "more")
	auth("add", dir, "more", "--role", "viewer", "--run", "none")
	reload(t, server, logged)
	setup()
	g.user(t, "more").holds(t, "nothing of the runs before is left", "MDR_ADVANTAGES", 0)
	g.user(t, "guest").holds(t, "and others have what they had", "MDR_ADVANTAGES", 1)
}

// edit changes what a file must have.
func edit(t *testing.T, file, pattern, with string) {
	t.Helper()
	text := contents(t, file)
	if !regexp.MustCompile(pattern).MatchString(text) {
		t.Fatalf("%s has no %s", file, pattern)
	}
	if err := os.WriteFile(file, []byte(regexp.MustCompile(pattern).ReplaceAllString(text, with)), 0o600); err != nil {
		t.Fatal(err)
	}
}

// reload has a server read its configuration twice: the requests of an account that is new to it lead out of
// that after the second time.
func reload(t *testing.T, server *harness.Process, logged string) {
	t.Helper()
	for range 2 {
		before := strings.Count(contents(t, logged), "Reloaded server configuration")
		if err := syscall.Kill(server.PID(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		bustest.Until(t, "the server has read its configuration", func() error {
			if strings.Count(contents(t, logged), "Reloaded server configuration") == before {
				return errors.New("not yet")
			}
			return nil
		})
	}
}
