package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
)

// tap is a proxy that writes down what clients send; it may take TLS out of the server's greeting.
type tap struct {
	url  string
	mu   sync.Mutex
	said bytes.Buffer
}

func (p *tap) Write(data []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.Write(data)
}

// heard is what was sent since it was asked last.
func (p *tap) heard() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.said.Reset()
	return p.said.String()
}

var offersTLS = regexp.MustCompile(`"tls_(required|available)":true`)

func newTap(t *testing.T, server string, strips bool) *tap {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &tap{url: "tls://" + l.Addr().String()}
	var serving sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", u.Host)
			if err != nil {
				_ = from.Close()
				continue
			}
			serving.Go(func() {
				_, _ = io.Copy(to, io.TeeReader(from, p))
				_ = to.Close()
			})
			serving.Go(func() {
				in := bufio.NewReader(to)
				greeting, _ := in.ReadString('\n')
				if strips {
					greeting = offersTLS.ReplaceAllString(greeting, `"tls_$1":false`)
				}
				_, _ = io.WriteString(from, greeting)
				_, _ = io.Copy(from, in)
				_ = from.Close()
			})
		}
	})
	return p
}

// No client says who it is before the connection is over TLS: neither to the server itself, nor through a proxy that
// takes TLS out of its greeting. Where TLS is only offered, the library of Python does, with tls:// too.
func TestRoles_NothingInTheClear(t *testing.T) {
	t.Parallel()
	interpreter := pythonWith(t, "nats, msgpack, blake3, nkeys, PIL, numpy")
	dir, store := credentials(t), t.TempDir()
	up := background(t, store, "up", "--model", "synthetic", "--listen", "127.0.0.1:0", "--auth", dir)
	up.says(t, "meander is up on")
	g := guarded{running(t, store).URL, dir, up.stderr.String}
	meander(t, store, "streams").must(t, 0) // another process on the store: over TLS, too
	genuine, stripped := newTap(t, g.url, false), newTap(t, g.url, true)

	seed := regexp.MustCompile(`(?m)^SU\w+$`).FindString(contents(t, g.file("viewer.creds")))
	ca, creds := g.file("tls/ca.pem"), g.file("trainer.creds")
	environment := append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"), "SEED="+seed,
		"CREDS="+creds, "CA="+ca)
	ctx, stop := context.WithTimeout(t.Context(), 5*bustest.Patience) // one that says too much may try for ever
	defer stop()
	python := func(p *tap, script string) (string, error) {
		const imports = "import asyncio, os, ssl, nats, meander\nURL, CA = os.environ['URL'], os.environ['CA']\n"
		lines := strings.ReplaceAll(script, "\n", "\n    ")
		cmd := exec.CommandContext(ctx, interpreter, "-c", imports+
			"async def refused(e): pass\nasync def main():\n    "+lines+"\nasyncio.run(main())\n")
		cmd.Env = append(environment, "URL="+p.url)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	ours := `async with meander.connect(URL, credentials=os.environ["CREDS"], ca=CA) as client:
    print((await client.publish("a", "a red fox", group_size=1))["accepted"])`
	token := `async with meander.connect(URL, token="a-secret-token", ca=CA) as client: print("connected")`
	goClient := func(p *tap) (string, error) {
		c, err := client.Connect(t.Context(), p.url, client.WithCredentials(creds), client.WithCA(ca))
		if err == nil {
			err = c.Close()
		}
		return "", err
	}
	scorer := func(p *tap) (string, error) {
		out, err := exec.CommandContext(ctx, interpreter, filepath.Join(root, "deploy/scorers/worker.py"),
			"--url", p.url, "--creds", g.file("scorer.creds"), "--tls-ca", ca).CombinedOutput()
		return string(out), err
	}
	as := func(script string) func(p *tap) (string, error) {
		return func(p *tap) (string, error) { return python(p, script) }
	}
	for _, c := range []struct {
		name  string
		via   *tap
		do    func(p *tap) (string, error)
		says  string
		fails bool
	}{
		{"Go", genuine, goClient, "", false},
		{"nats-py with tls://", genuine, as(`tls = ssl.create_default_context(cafile=CA)
nc = await nats.connect(URL, nkeys_seed_str=os.environ["SEED"], tls=tls)
print(nc.is_connected)`), "True", false},
		{"nats-py with nats:// and a token", genuine, as(`url = URL.replace("tls:", "nats:")
await nats.connect(url, token="a-secret-token", allow_reconnect=False, error_cb=refused)`), "certificate", true},
		{"ours", genuine, as(ours), "True", false},
		{"Go, stripped", stripped, goClient, "", true},
		{"ours, stripped", stripped, as(ours), "the server does not want TLS", true},
		{"ours with a token, stripped", stripped, as(token), "the server does not want TLS", true},
		{"a worker, stripped", stripped, scorer, "the server does not want TLS", true},
	} {
		out, err := c.do(c.via)
		if (err != nil) != c.fails || !strings.Contains(out, c.says) {
			t.Errorf("%s: %v\n%s", c.name, err, out)
		}
		said := c.via.heard()
		for _, secret := range []string{"CONNECT", "nkey", "sig", "a-secret-token"} {
			if strings.Contains(said, secret) {
				t.Errorf("%s says %q in the clear: %.200q", c.name, secret, said)
			}
		}
		if c.via == genuine && said == "" {
			t.Errorf("%s: nothing came through: the rest shows nothing", c.name)
		}
		if c.via == stripped && said != "" {
			t.Errorf("%s, without TLS, says %.200q", c.name, said)
		}
	}
}
