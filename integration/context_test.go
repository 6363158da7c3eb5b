package integration_test

import (
	"context"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// startServer starts a bare NATS server on a free port.
func startServer(t *testing.T, o server.Options) *server.Server {
	t.Helper()
	o.Host, o.Port, o.NoSigs, o.NoLog = "127.0.0.1", server.RANDOM_PORT, true, true
	if o.JetStream {
		o.StoreDir = t.TempDir()
	}
	s, err := server.NewServer(&o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(bustest.Patience) {
		t.Fatal("the server does not start")
	}
	return s
}

// contexts makes the folder of contexts of the nats command, with one of that name.
func contexts(t *testing.T, name, text string) (file string) {
	t.Helper()
	home := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", home)
	file = filepath.Join(home, "nats", "context", name+".json")
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// A context names the server and the user; what the caller gives comes before it.
func TestConnect_Context(t *testing.T) {
	s := startServer(t, server.Options{Users: []*server.User{{Username: "ann", Password: "secret"}}})
	connect := func(c bus.Config) error {
		c.NoWait = true
		b, err := bus.Connect(t.Context(), c, zerolog.Nop())
		if err == nil {
			err = b.Close()
		}
		return err
	}
	bare := strings.TrimPrefix(s.ClientURL(), "nats://")
	file := contexts(t, "mine", fmt.Sprintf(`{"url": %q, "user": "ann", "password": "secret", "color_scheme": "red"}`, bare))
	for _, name := range []string{"mine", file} {
		if err := connect(bus.Config{Context: name}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, of := range []struct {
		config bus.Config
		want   string
	}{
		{bus.Config{Context: "mine", Token: "wrong"}, "does not know the token"},
		{bus.Config{Context: "mine", URL: "nats://127.0.0.1:1"}, "127.0.0.1:1"},
		{bus.Config{Context: "other"}, `context: "other"; must be a file by its full path, or one of those in ` + filepath.Dir(file) + ": mine"},
		{bus.Config{Context: "../context/mine"}, "must be a file by its full path"},
		{bus.Config{Context: "mine", Domain: "a", APIPrefix: "b"}, "js_domain: excludes js_prefix"},
		{bus.Config{Context: "mine", Domain: "a.b"}, "a domain no dots"},
	} {
		if err := connect(of.config); err == nil || !strings.Contains(err.Error(), of.want) {
			t.Errorf("%+v: %v; want %q", of.config, err, of.want)
		}
	}
	for setting, want := range map[string]string{
		`{"nsc": "nsc://a/b/c"}`: "nsc: set; must be absent", `{"user_jwt": "ey"}`: "user_jwt: set; must be absent",
		`{`: "unexpected end of JSON",
	} {
		contexts(t, "bad", setting)
		if err := connect(bus.Config{Context: "bad"}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", setting, err, want)
		}
	}
}

// Streams that are behind a leaf node are reached by their domain: all that a bus does works from the hub.
func TestConnect_Domain(t *testing.T) {
	t.Parallel()
	hub, leaf := leafNode(t)
	testDomain(t, hub, leaf)
}

// leafNode starts a server, and another that is its leaf node, with streams in the domain site.
func leafNode(t *testing.T) (hub, leaf *server.Server) {
	t.Helper()
	hub = startServer(t, server.Options{
		JetStream: true, JetStreamDomain: "hub", LeafNode: server.LeafNodeOpts{Host: "127.0.0.1", Port: server.RANDOM_PORT},
	})
	v, err := hub.Varz(nil)
	if err != nil {
		t.Fatal(err)
	}
	to := &url.URL{Scheme: "nats-leaf", Host: fmt.Sprintf("127.0.0.1:%d", v.LeafNode.Port)}
	leaf = startServer(t, server.Options{
		JetStream: true, JetStreamDomain: "site", LeafNode: server.LeafNodeOpts{Remotes: []*server.RemoteLeafOpts{{URLs: []*url.URL{to}}}},
	})
	bustest.Until(t, "the leaf node", func() error {
		if leaf.NumLeafNodes() == 0 {
			return context.DeadlineExceeded
		}
		return nil
	})
	return hub, leaf
}

// testDomain fails unless a bus does all from the hub that it does at the leaf.
func testDomain(t *testing.T, hub, leaf *server.Server) {
	t.Helper()
	connect := func(c bus.Config) *bus.Bus {
		b, err := bus.Connect(t.Context(), c, zerolog.Nop())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.Close() })
		return b
	}
	b := connect(bus.Config{URL: hub.ClientURL(), Domain: "site"})
	if err := b.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ref, err := b.PutBlob(t.Context(), make([]byte, 300<<10))
	if err != nil {
		t.Fatal(err)
	}
	data, err := schemas.Encode(&schemas.Prompt{Prompt: "a red fox"})
	if err == nil {
		_, _, err = b.CreateRun(t.Context(), "r", []byte("spec"))
	}
	if err == nil {
		_, err = b.PublishPrompt(t.Context(), "r", data, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	consumesPrompt(t, b)
	// What is stored is in the domain, and is the same for who connects there.
	inside, outside := bus.Config{URL: leaf.ClientURL()}, bus.Config{URL: hub.ClientURL(), APIPrefix: "$JS.site.API"}
	for of, b := range map[string]*bus.Bus{"hub": b, "site": connect(inside), "prefix": connect(outside)} {
		blob, err := b.GetBlob(t.Context(), ref)
		spec, err2 := b.Run(t.Context(), "r")
		if err != nil || err2 != nil || len(blob) != 300<<10 || string(spec) != "spec" {
			t.Errorf("%s: %d bytes, %q, %v, %v", of, len(blob), spec, err, err2)
		}
		read := ""
		for m, err := range b.Read(t.Context(), schemas.StreamPrompts, nil, bus.ReadOptions{}) {
			if err != nil {
				t.Fatalf("%s: %v", of, err)
			}
			read += string(m.Data)
		}
		if read != string(data) {
			t.Errorf("%s: read %q", of, read)
		}
	}
	if _, err := b.Purge(t.Context(), "r"); err != nil {
		t.Error(err)
	}
}

// consumesPrompt takes the one prompt that is stored.
func consumesPrompt(t *testing.T, b *bus.Bus) {
	t.Helper()
	taken := make(chan *bus.Message, 1)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- b.Consume(ctx, bus.ConsumerConfig{Durable: schemas.PromptsDurable(), AckWait: time.Second},
			func(_ context.Context, m *bus.Message) error { taken <- m; return nil })
	}()
	if m := bustest.Receive(t, "the prompt", taken); m.Subject != schemas.PromptSubject("r") ||
		m.Stream != schemas.StreamPrompts || m.Seq != 1 {
		t.Errorf("%+v", m)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A context says that the TLS handshake comes first, and names a proxy.
func TestConnect_ContextTLSFirstAndProxy(t *testing.T) {
	dir := t.TempDir()
	ours := newAuthority(t, dir, "ours")
	cert, key := ours.sign(t, dir, "server",
		&x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	config, err := server.GenTLSConfig(&server.TLSConfigOpts{CertFile: cert, KeyFile: key, CaFile: ours.file})
	if err != nil {
		t.Fatal(err)
	}
	first := startServer(t, server.Options{
		TLSConfig: config, TLSHandshakeFirst: true, TLSTimeout: bustest.Patience.Seconds(),
	})
	plain := startServer(t, server.Options{Users: []*server.User{{Username: "ann", Password: "secret"}}})
	proxy, calls := socksProxy(t)
	for settings, want := range map[string]bool{
		fmt.Sprintf(`{"url": %q, "ca": %q, "tls_first": true}`, first.ClientURL(), ours.file):                                     true,
		fmt.Sprintf(`{"url": %q, "ca": %q}`, first.ClientURL(), ours.file):                                                        false,
		fmt.Sprintf(`{"url": %q, "user": "ann", "password": "secret", "socks_proxy": "socks5://%s"}`, plain.ClientURL(), proxy):   true,
		fmt.Sprintf(`{"url": %q, "user": "ann", "password": "secret", "socks_proxy": "socks5://127.0.0.1:1"}`, plain.ClientURL()): false,
		fmt.Sprintf(`{"url": %q, "user": "ann", "password": "wrong", "socks_proxy": "socks5://%s"}`, plain.ClientURL(), proxy):    false,
	} {
		contexts(t, "mine", settings)
		timeout := bustest.Patience
		if !want {
			timeout = 3 * time.Second // it would try until then
		}
		b, err := bus.Connect(t.Context(), bus.Config{Context: "mine", NoWait: true, ConnectTimeout: timeout},
			zerolog.Nop())
		if (err == nil) != want {
			t.Errorf("%s: %v", settings, err)
		}
		if err == nil {
			err = b.Close()
		}
		if want && err != nil {
			t.Errorf("%s: %v", settings, err)
		}
	}
	if calls.Load() < 2 {
		t.Errorf("%d connections went through the proxy", calls.Load())
	}
	// The client in Python has the first handshake, too, and says that it has no proxy.
	t.Run("python", func(t *testing.T) {
		python, before := pythonWith(t, "nats, msgpack, blake3, numpy"), calls.Load()
		for settings, want := range map[string]string{
			fmt.Sprintf(`{"url": %q, "ca": %q, "tls_first": true}`, first.ClientURL(), ours.file): "connected True",
			fmt.Sprintf(`{"url": %q, "socks_proxy": "socks5://%s"}`, plain.ClientURL(), proxy): "ValueError: context FILE: " +
				"socks_proxy: set; must be absent: this client cannot use it",
		} {
			file := contexts(t, "mine", settings)
			cmd := exec.Command(python, "-c", connectInPython)
			cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"))
			out, err := cmd.Output()
			if err != nil || strings.TrimSpace(string(out)) != strings.Replace(want, "FILE", file, 1) {
				t.Errorf("%s: %v\n%s\nwant %s", settings, err, out, want)
			}
		}
		if calls.Load() != before {
			t.Error("it has used the proxy")
		}
	})
}

// connectInPython connects by the context mine.
const connectInPython = `import asyncio, meander

async def main():
    try:
        async with meander.connect(context="mine", patience=60) as client:
            print("connected", client.nc.is_connected)
    except ValueError as e:
        print(f"ValueError: {e}")

asyncio.run(main())
`

// socksProxy is a SOCKS5 proxy for addresses of IPv4, without log-in, that counts its connections.
func socksProxy(t *testing.T) (address string, calls *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	calls = &atomic.Int64{}
	relay := func(c net.Conn) {
		defer c.Close()
		hello := make([]byte, 2)
		if _, err := io.ReadFull(c, hello); err != nil {
			return
		}
		_, _ = io.CopyN(io.Discard, c, int64(hello[1])) // the methods
		_, _ = c.Write([]byte{5, 0})
		ask := make([]byte, 10) // version, connect, 0, IPv4, address, port
		if _, err := io.ReadFull(c, ask); err != nil || ask[3] != 1 {
			t.Errorf("the proxy is asked %v, %v", ask, err)
			return
		}
		to, err := net.Dial("tcp", netip.AddrPortFrom(netip.AddrFrom4([4]byte(ask[4:8])),
			binary.BigEndian.Uint16(ask[8:])).String())
		if err != nil {
			return
		}
		defer to.Close()
		calls.Add(1)
		_, _ = c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
		go func() { _, _ = io.Copy(to, c) }()
		_, _ = io.Copy(c, to)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go relay(c)
		}
	}()
	return l.Addr().String(), calls
}

// A client in Python publishes and reads batches of a pipeline whose streams are in a domain.
func TestConnect_DomainInPython(t *testing.T) {
	skipShort(t)
	t.Parallel()
	python := pythonWith(t, "nats, msgpack, blake3, numpy")
	hub, _ := leafNode(t)
	up := exec.Command(program(t, "meander"), "up", "--model", "synthetic", "--nats", hub.ClientURL(), "--js-domain",
		"site")
	up.Dir, up.Stderr = t.TempDir(), os.Stderr
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = up.Process.Signal(os.Interrupt); _ = up.Wait() })
	c := exec.CommandContext(limited(t), python, "-c", `
import asyncio, sys, meander

async def main():
    async with meander.connect(sys.argv[1], js_domain="site") as client:
        while True:
            try:
                await client.publish("demo", "a red fox", uid="u", group_size=2, num_inference_steps=3, timeout=20)
                break
            except TimeoutError:
                pass
        async for batch in client.batches("demo", "trainer", groups=1):
            print(batch["latents"].shape[:2], len(batch.samples), flush=True)
            break

asyncio.run(main())
`, hub.ClientURL())
	c.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"), "PYTHONDONTWRITEBYTECODE=1")
	if out, err := c.CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "(2, ") {
		t.Errorf("%v\n%s", err, out)
	}
}
