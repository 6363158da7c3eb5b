package natsd_test

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
)

// certified is a certificate of this machine that signs itself.
func certified(t *testing.T) *natsd.TLS {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	secret, err2 := x509.MarshalPKCS8PrivateKey(key)
	dir := t.TempDir()
	out := &natsd.TLS{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	err = errors.Join(err, err2,
		os.WriteFile(out.Cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600),
		os.WriteFile(out.Key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// handshakes counts the failed handshakes in a server's log.
type handshakes struct{ atomic.Int64 }

func (h *handshakes) Write(line []byte) (int, error) {
	if strings.Contains(string(line), "handshake error") {
		h.Add(1)
	}
	return len(line), nil
}

// A server with a certificate lets no one in without TLS: not with the token, not from the same machine. Other
// processes on the store come over TLS too, and go on in it when they take the server over.
func TestMember_TLS(t *testing.T) {
	dir := t.TempDir()
	secure := func(o *natsd.MemberOptions) { o.TLS = certified(t) }
	failures := &handshakes{}
	serving, err := natsd.Join(t.Context(), natsd.MemberOptions{ServesPipeline: true, Options: natsd.Options{
		StoreDir: dir, Listen: "127.0.0.1:0", Token: "secret", TLS: certified(t), Log: zerolog.New(failures),
	}})
	if err != nil {
		t.Fatal(err)
	}
	holder, _ := natsd.Running(dir)
	u, err := url.Parse(holder.URL)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	var info struct {
		Required bool `json:"tls_required"`
	}
	if err = errors.Join(err, json.Unmarshal([]byte(strings.TrimPrefix(line, "INFO ")), &info)); err != nil ||
		!info.Required {
		t.Fatalf("it greets with %q, %v; must require TLS", line, err)
	}
	if _, err := conn.Write([]byte("CONNECT {\"auth_token\":\"secret\"}\r\nPING\r\n")); err != nil {
		t.Fatal(err)
	}
	if answer, _ := in.ReadString('\n'); strings.HasPrefix(answer, "PONG") {
		t.Error("it lets in who speaks in the clear")
	}

	strangers := failures.Load()
	other := member(t, dir, false, secure)
	nc, again := through(t, other)
	if err := nc.Flush(); err != nil || other.Owns() {
		t.Fatalf("another process on the store: %v", err)
	}
	if n := failures.Load(); n != strangers {
		t.Errorf("the server logs %d failed handshakes of it; want none", n-strangers)
	}
	leave(t, serving)
	bustest.Receive(t, "connected to its own server", again)
	if err := nc.Flush(); err != nil || !other.Owns() {
		t.Errorf("after it took the server over: %v", err)
	}
}

// Who is not the server that the store's folder names is told nothing.
func TestMember_TLSImpostor(t *testing.T) {
	dir := t.TempDir()
	member(t, dir, true, func(o *natsd.MemberOptions) { o.TLS = certified(t) })
	file := filepath.Join(dir, "meander.json")
	genuine, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	other := start(t, natsd.Options{StoreDir: t.TempDir(), Listen: "127.0.0.1:0", Token: "x", TLS: certified(t)})
	for name, c := range map[string]struct{ impostor, says string }{
		"in the clear":        {"INFO {\"server_id\":\"x\",\"max_payload\":1048576}\r\n", "does not speak TLS"},
		"TLS, if you like":    {"INFO {\"tls_available\":true}\r\n", "does not speak TLS"},
		"another program":     {"HTTP/1.1 400 Bad Request\r\n", "no NATS server"},
		"another certificate": {"", "not the one in the store's folder"},
	} {
		t.Run(name, func(t *testing.T) {
			address, heard := strings.TrimPrefix(other.ClientURL(), "tls://"), make(chan string, 1)
			if c.impostor != "" {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				go func() {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					defer conn.Close()
					_, _ = conn.Write([]byte(c.impostor))
					said := make([]byte, 1024)
					n, _ := conn.Read(said)
					heard <- string(said[:n])
				}()
				address = l.Addr().String()
			}
			var info map[string]any
			if err := json.Unmarshal(genuine, &info); err != nil {
				t.Fatal(err)
			}
			joined := member(t, dir, false)
			defer func() { // before it leaves
				if err := os.WriteFile(file, genuine, 0o600); err != nil {
					t.Error(err)
				}
			}()
			info["url"] = "nats://" + address
			text, err := json.Marshal(info)
			if err == nil {
				err = os.WriteFile(file, text, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			if nc, err := nats.Connect("", nats.InProcessServer(joined), nats.TokenHandler(joined.Token)); err == nil {
				nc.Close()
				t.Error("connected")
			} else if !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v; want %q", err, c.says)
			}
			if c.impostor != "" {
				if said := bustest.Receive(t, "the end of the connection", heard); said != "" {
					t.Errorf("it heard %q", said)
				}
			}
		})
	}
}
