package integration_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// composeFiles are docker-compose.yml and the forms over it, make up PROFILE=secure,cluster.
var composeFiles = []string{
	"docker-compose.yml", "deploy/compose.secure.yml", "deploy/compose.cluster.yml",
	"deploy/compose.secure-cluster.yml",
}

// keys makes a folder of credentials and those of the containers, as make up does, and gives this
// test's clients those of a role.
func (c *composed) keys(t *testing.T, role string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "auth")
	keysOfContainers(t, dir)
	c.env = append(c.env, "MEANDER_AUTH="+dir)
	c.url = strings.Replace(c.url, openScheme, "tls://", 1)
	t.Setenv("MEANDER_NATS_URL", c.url)
	t.Setenv("MEANDER_NATS_CREDS", filepath.Join(dir, role+".creds"))
	t.Setenv("MEANDER_NATS_TLS_CA", filepath.Join(dir, "tls/ca.pem"))
	return dir
}

// secure is the form with roles and TLS.
func (c *composed) secure(t *testing.T, want summary) {
	dir := c.keys(t, "trainer")
	c.up("--wait")
	t.Run("containers", func(t *testing.T) {
		c.contained(t, 6) // the server, what made the streams, four services
		for _, service := range []string{"intake", "sampler", "reward", "advantage"} {
			for _, m := range c.inspect(t, c.containers(t, service)[0]).Mounts {
				if strings.HasPrefix(m.Source, dir) && m.Source != filepath.Join(dir, "containers", service) {
					t.Errorf("%s has %s", service, m.Source)
				}
			}
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v; what containers may read is nobody else's on the host", dir, info.Mode(), err)
		}
	})
	t.Run("command line", func(t *testing.T) { c.same(t, want) })
	t.Run("Python client", func(t *testing.T) {
		interpreter := pythonWith(t, "nats, msgpack, blake3, nkeys, numpy")
		script := `import asyncio, os
import meander

async def main():
    async with meander.connect(os.environ["MEANDER_NATS_URL"], credentials=os.environ["MEANDER_NATS_CREDS"], ca=os.environ["MEANDER_NATS_TLS_CA"]) as client:
        await client.publish("python", 'a red sign that says "OPEN"', group_size=2)
        async for group in client.stream_groups("python"):
            return print(group.advantage["status"])

asyncio.run(asyncio.wait_for(main(), 120))
`
		cmd := exec.Command(interpreter, "-c", script)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"))
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "complete") {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("others are refused", func(t *testing.T) {
		t.Setenv("MEANDER_NATS_CREDS", filepath.Join(dir, "viewer.creds"))
		if out := meander(t, t.TempDir(), composeRun("viewer", 4)...); out.code == 0 ||
			!strings.Contains(out.stderr, "role viewer") {
			t.Errorf("a viewer's run: %d\n%s", out.code, out.stderr)
		}
		t.Setenv("MEANDER_NATS_CREDS", "")
		t.Setenv("MEANDER_NATS_URL", strings.Replace(c.url, "tls://", "tls://meander:"+stackToken+"@", 1))
		if out := meander(t, t.TempDir(), "streams"); out.code == 0 {
			t.Errorf("a token lets in:\n%s", out.stdout)
		}
	})
	t.Run("one more user", func(t *testing.T) {
		meander(t, t.TempDir(), "auth", "add", dir, "alice", "--role", "viewer").must(t, 0)
		keysOfContainers(t, dir)
		c.compose("exec", "-T", "nats", "nats-server", "--signal", "reload=1").must(t, 0)
		t.Setenv("MEANDER_NATS_CREDS", filepath.Join(dir, "alice.creds"))
		bustest.Until(t, "alice is let in", func() error { return meander(t, t.TempDir(), "runs", "ls").fault() })
	})
	t.Run("sampler and server are killed", func(t *testing.T) {
		c.crash(t, "sampler")
		c.crash(t, "nats")
		c.same(t, want)
	})
	t.Setenv("MEANDER_NATS_CREDS", filepath.Join(dir, "viewer.creds")) // who lists runs
	t.Run("taken down", func(t *testing.T) { c.takenDown(t, "command-line") })
}

// keysOfContainers brings the containers' part of a folder of credentials up to date.
func keysOfContainers(t *testing.T, dir string) {
	t.Helper()
	if out, err := exec.Command("make", "-C", root, "credentials", "MEANDER_AUTH="+dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// cluster is the form with three servers.
func (c *composed) cluster(t *testing.T, want summary) {
	c.url = c.servers(openScheme)
	t.Setenv("MEANDER_NATS_URL", c.url)
	c.up("--wait")
	t.Run("containers", func(t *testing.T) { c.contained(t, 7) })
	t.Run("command line", func(t *testing.T) { c.same(t, want) })
	c.loses(t, want)
	t.Run("taken down", func(t *testing.T) { c.takenDown(t, "lost") })
}

// servers are the URLs of three.
func (c *composed) servers(scheme string) string {
	return scheme + "127.0.0.1:" + strings.Join(c.ports[:3], ","+scheme+"127.0.0.1:")
}

// loses runs prompts while each of the servers in turn is away.
func (c *composed) loses(t *testing.T, want summary) {
	for _, server := range []string{"nats", "nats-3"} {
		t.Run("without "+server, func(t *testing.T) {
			done := make(chan output, 1)
			go func() { defer close(done); done <- meander(t, t.TempDir(), composeRun("lost-"+server, 4)...) }()
			c.compose("kill", server).must(t, 0)
			if _, got := (<-done).must(t, 0).parse(t); got.Digest != want.Digest {
				t.Errorf("digest %s with a server killed, want %s", got.Digest, want.Digest)
			}
			c.same(t, want)
			c.up("--wait") // it catches up, before the next one goes
			bustest.Until(t, "each stream is on three servers", func() error {
				return meander(t, t.TempDir(),
					"doctor").fault()
			})
		})
	}
}

// both forms at once.
func (c *composed) both(t *testing.T, want summary) {
	c.env = append(c.env, "MEANDER_STREAM_REPLICAS=3")
	c.keys(t, "trainer")
	t.Setenv("MEANDER_NATS_URL", c.servers("tls://"))
	c.up("--wait")
	t.Run("no server takes a token", func(t *testing.T) {
		for _, url := range strings.Split(c.servers("nats://"), ",") {
			ca := nats.RootCAs(os.Getenv("MEANDER_NATS_TLS_CA"))
			nc, err := nats.Connect(url, nats.Token(stackToken), nats.UserInfo("meander", stackToken), ca)
			if err == nil {
				nc.Close()
				t.Errorf("%s lets in who has the token", url)
			}
		}
	})
	t.Run("containers", func(t *testing.T) { c.contained(t, 8) })
	t.Run("command line", func(t *testing.T) { c.same(t, want) })
	c.loses(t, want)
}

// changes takes the stack from a form to another and back, on the same volumes: each finds the runs of those before.
func (c *composed) changes(t *testing.T, images map[string]string, forms ...[]string) {
	var runs []string
	for i := range 2*len(forms) - 1 {
		form := forms[i%len(forms)]
		c.form(t, images, form...)
		t.Setenv("MEANDER_NATS_CREDS", "")
		t.Setenv("MEANDER_NATS_TLS_CA", "")
		clustered, scheme := slices.Contains(form, "cluster"), openScheme
		if clustered {
			c.env = append(c.env, "MEANDER_STREAM_REPLICAS=3")
		}
		if slices.Contains(form, "secure") {
			c.keys(t, "trainer")
			scheme = "tls://"
		}
		t.Setenv("MEANDER_NATS_URL", c.url)
		if clustered {
			t.Setenv("MEANDER_NATS_URL", c.servers(scheme))
		}
		c.up("--wait", "--remove-orphans")
		stored := meander(t, t.TempDir(), "runs", "ls").must(t, 0).stdout
		for _, run := range runs {
			if !strings.Contains(stored, run) {
				t.Errorf("form %v: run %s is gone:\n%s", form, run, stored)
			}
		}
		runs = append(runs, fmt.Sprint("change-", i))
		meander(t, t.TempDir(), composeRun(runs[i], 2)...).must(t, 0)
		other := "cluster"
		if clustered {
			other = ""
		}
		for _, ask := range []struct {
			forms, apart, says string
		}{{strings.Join(form, " "), "", ""}, {other, "", "the streams cannot come along"}, {other, "1", ""}} {
			cmd := exec.Command(filepath.Join(root, "deploy/compose.check"), ask.forms, "")
			cmd.Env = append(os.Environ(), "COMPOSE_PROJECT_NAME="+c.project, "APART="+ask.apart)
			cmd.Env = append(cmd.Env, "MEANDER_NATS_TOKEN="+stackToken)
			out, err := cmd.CombinedOutput()
			if (err == nil) != (ask.says == "") || !strings.Contains(string(out), ask.says) {
				t.Errorf("from %v to %q, apart %q: %v, %s", form, ask.forms, ask.apart, err, out)
			}
		}
	}
}

// fault is what a command that failed said.
func (o output) fault() error {
	if o.code == 0 {
		return nil
	}
	return errors.New(o.stdout + o.stderr)
}
