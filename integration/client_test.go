package integration_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
)

// serveNATS runs a NATS server in this process, with JetStream.
func serveNATS(t *testing.T, options *server.Options) (url string) {
	t.Helper()
	options.Host, options.Port, options.NoLog, options.NoSigs = "127.0.0.1", server.RANDOM_PORT, true, true
	options.JetStream, options.StoreDir = true, t.TempDir()
	s, err := server.NewServer(options)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(bustest.Patience) {
		t.Fatal("the server does not start")
	}
	return s.ClientURL()
}

// Without JetStream for a user all that needs streams fails at once, with what to do.
func TestBus_NoJetStream(t *testing.T) {
	t.Parallel()
	guests := server.NewAccount("guests")
	url := serveNATS(t, &server.Options{
		Accounts: []*server.Account{guests}, Users: []*server.User{{Username: "u", Password: "p", Account: guests}},
	})
	b, err := bus.Connect(t.Context(), bus.Config{URL: strings.Replace(url, "//", "//u:p@", 1)}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	_, examined := b.Examine(t.Context(), false)
	for name, err := range map[string]error{
		"setup": b.Setup(t.Context()), "ready": b.Ready(t.Context()), "examine": examined,
	} {
		if !errors.Is(err, bus.ErrNoJetStream) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// setUp makes the streams, as somebody who is let in.
func setUp(t *testing.T, c bus.Config) {
	t.Helper()
	b, err := bus.Connect(t.Context(), c, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.Setup(t.Context()), b.Close()); err != nil {
		t.Fatal(err)
	}
}

// authority signs certificates; its own is in the file.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T, dir, name string) *authority {
	t.Helper()
	a := &authority{}
	certFile, _ := a.sign(t, dir, name, &x509.Certificate{
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	})
	a.file = certFile
	return a
}

// sign writes a certificate for this machine and its key; the first is signed by itself.
func (a *authority) sign(t *testing.T, dir, name string, c *x509.Certificate) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.SerialNumber, c.Subject.CommonName = big.NewInt(time.Now().UnixNano()), name
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	if a.cert == nil {
		a.cert, a.key = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	for file, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: der},
		keyFile:  {Type: "PRIVATE KEY", Bytes: private},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

// The client trusts the server of its authority alone, and shows the certificate that the
// server asks for.
func TestClient_TLS(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ours, theirs := newAuthority(t, dir, "ours"), newAuthority(t, dir, "theirs")
	serverCert, serverKey := ours.sign(t, dir, "server",
		&x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	asClient := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	cert, key := ours.sign(t, dir, "client", &x509.Certificate{ExtKeyUsage: asClient})
	forged, forgedKey := theirs.sign(t, dir, "forged", &x509.Certificate{ExtKeyUsage: asClient})
	serve := func(verify bool) string {
		config, err := server.GenTLSConfig(&server.TLSConfigOpts{
			CertFile: serverCert, KeyFile: serverKey, CaFile: ours.file, Verify: verify,
		})
		if err != nil {
			t.Fatal(err)
		}
		url := serveNATS(t, &server.Options{
			TLSConfig: config, TLSVerify: verify, TLSTimeout: bustest.Patience.Seconds(),
		})
		setUp(t, bus.Config{URL: url, CAFile: ours.file, CertFile: cert, KeyFile: key})
		return url
	}
	secure, mutual, plain := serve(false), serve(true), serveNATS(t, &server.Options{})
	for _, test := range []struct {
		name    string
		url     string
		options []client.Option
		is      error
	}{
		{"our authority", secure, []client.Option{client.WithCA(ours.file)}, nil},
		{"authorities of the system", secure, nil, client.ErrUntrusted},
		{"another authority", secure, []client.Option{client.WithCA(theirs.file)}, client.ErrUntrusted},
		{"no TLS there", plain, []client.Option{client.WithCA(ours.file)}, client.ErrUntrusted},
		{"our certificate", mutual, []client.Option{client.WithCA(ours.file), client.WithCertificate(cert, key)}, nil},
		{"no certificate", mutual, []client.Option{client.WithCA(ours.file)}, client.ErrUnauthorized},
		{"a certificate of another authority", mutual, []client.Option{
			client.WithCA(ours.file),
			client.WithCertificate(forged, forgedKey),
		}, client.ErrUnauthorized},
	} {
		err := client.ErrUnreachable
		for errors.Is(err, client.ErrUnreachable) { // a busy machine
			var c *client.Client
			if c, err = client.Connect(t.Context(), test.url, append(test.options,
				client.WithConnectTimeout(time.Millisecond))...); err == nil {
				err = c.Close()
			}
		}
		if (err == nil) != (test.is == nil) || test.is != nil && !errors.Is(err, test.is) {
			t.Errorf("%s: %v; want %v", test.name, err, test.is)
		}
		if test.name == "another authority" {
			if _, ok := errors.AsType[*tls.CertificateVerificationError](err); !ok {
				t.Errorf("%v does not say what is wrong with the certificate", err)
			}
		}
	}
}

// A file of credentials is the user's JWT and key.
func TestClient_Credentials(t *testing.T) {
	t.Parallel()
	options, err := server.ProcessConfigFile("testdata/credentials/nats.conf")
	if err != nil {
		t.Fatal(err)
	}
	url, creds := serveNATS(t, options), "testdata/credentials/worker.creds"
	setUp(t, bus.Config{URL: url, CredsFile: creds})
	c, err := client.Connect(t.Context(), url, client.WithCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := client.Connect(t.Context(), url); !errors.Is(err, client.ErrUnauthorized) {
		t.Errorf("without credentials: %v; want ErrUnauthorized", err)
	}
	garbage := filepath.Join(t.TempDir(), "garbage.creds")
	if err := os.WriteFile(garbage, []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Connect(t.Context(), url, client.WithCredentials(garbage)); err == nil ||
		strings.Contains(err.Error(), "no key") {
		t.Errorf("with a file that is none: %v; want a refusal that does not show it", err)
	}
}
