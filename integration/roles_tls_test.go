package integration_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// A client that is not let in reads why, and what to do: a wrong authority, a server of another name or
// whose certificate has ended, files that are none of credentials.
func TestRoles_NotLetIn(t *testing.T) {
	t.Parallel()
	g := servers()["nats-server"](t)
	other := credentials(t)
	dir := t.TempDir()
	empty, garbage := filepath.Join(dir, "empty"), filepath.Join(dir, "garbage")
	if err := errors.Join(os.WriteFile(empty, nil, 0o600),
		os.WriteFile(garbage, []byte("SUGARBAGE\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	creds, ca := g.file("viewer.creds"), g.file("tls/ca.pem")
	for _, c := range []struct {
		name, url, creds, ca, token, want string
	}{
		{
			"another authority", g.url, creds, filepath.Join(other, "tls/ca.pem"), "",
			"is not the authority that signed its certificate",
		},
		{"no authority", g.url, creds, "", "", "name the authority that signed its certificate (nats-tls-ca"},
		{"an empty authority", g.url, creds, empty, "", "nats-tls-ca must be a PEM file"},
		{"an authority that is not there", g.url, creds, filepath.Join(dir, "none"), "", "none: no such file"},
		{
			"a user of another folder", g.url, filepath.Join(other, "viewer.creds"), ca, "",
			"the server does not know the user of",
		},
		{"empty credentials", g.url, empty, ca, "", "must have the seed of a user (SU...), or a JWT and its key"},
		{"garbage for credentials", g.url, garbage, ca, "", "must have the seed of a user (SU...), or a JWT and its key"},
		{"a folder for credentials", g.url, dir, ca, "", "not a file of credentials"},
		{"no credentials", g.url, "", ca, "", "it wants credentials (nats-creds"},
		{"a token", g.url, "", ca, "secret", "it does not know the token (MEANDER_NATS_TOKEN), or wants credentials"},
		{"an ended certificate", certified(t, -time.Hour, "127.0.0.1"), "", ca, "", "meander auth update DIR"},
		{
			"a certificate of another host", certified(t, time.Hour, "10.9.8.7"), "", ca, "",
			"meander auth update DIR --tls-host HOST",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			args := []string{"streams", "--nats", c.url}
			for flag, value := range map[string]string{
				"--nats-creds": c.creds, "--nats-tls-ca": c.ca,
				"--nats-token": c.token,
			} {
				if value != "" {
					args = append(args, flag, value)
				}
			}
			if out := meander(t, dir, args...); out.code != 1 || !strings.Contains(out.stderr, c.want) {
				t.Errorf("%d\n%s\nwant %q", out.code, out.stderr, c.want)
			}
		})
	}
}

// A certificate of meander up that has ended is said when it starts, by /readyz, and by doctor on its store and from
// elsewhere, with what to do.
func TestRoles_CertificateEnded(t *testing.T) {
	t.Parallel()
	dir, store := credentials(t), t.TempDir()
	authority, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls/ca.pem"), filepath.Join(dir, "tls/ca-key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	certify(t, &authority, -time.Hour, "127.0.0.1", filepath.Join(dir, "tls/server.pem"),
		filepath.Join(dir, "tls/server-key.pem"))
	health := harness.FreeAddress(t)
	up := background(t, store, "up", "--model", "synthetic", "--listen", "127.0.0.1:0", "--auth", dir, "--metrics-addr",
		health)
	up.says(t, "model ready")
	up.says(t, "the certificate of the server expired at")
	if strings.Contains(up.stderr.String(), "expires soon") {
		t.Errorf("it says that it expires soon: %s", &up.stderr)
	}
	answer, err := http.Get("http://" + health + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if body, err := io.ReadAll(answer.Body); err != nil || answer.StatusCode != http.StatusServiceUnavailable ||
		!strings.Contains(string(body), "certificate: the certificate of the server expired") {
		t.Errorf("/readyz: %s, %v: %s", answer.Status, err, body)
	}
	g := guarded{url: strings.Replace(running(t, store).URL, "nats://", "tls://", 1), dir: dir}
	for where, args := range map[string][]string{"on its store": nil, "elsewhere": g.flags("viewer")} {
		out := meander(t, store, append([]string{"doctor"}, args...)...).must(t, 1).stdout
		if !strings.Contains(out, "expired") || !strings.Contains(out,
			"-> make a new certificate ('meander auth update") {
			t.Errorf("doctor %s:\n%s", where, out)
		}
	}
}

// certified is a server whose certificate is for a host and ends after a while; it signs itself,
// for whether it is known is looked at last.
func certified(t *testing.T, ends time.Duration, host string) (url string) {
	t.Helper()
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	certify(t, nil, ends, host, certFile, keyFile)
	url, _ = harness.Server(t, t.TempDir(), "--tls", "--tlscert", certFile, "--tlskey", keyFile)
	return strings.Replace(url, "nats://", "tls://", 1)
}

// certify writes a certificate for a host, and its key, that ends after a while; without an authority it signs itself.
func certify(t *testing.T, authority *tls.Certificate, ends time.Duration, host, certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(ends),
		IPAddresses: []net.IP{net.ParseIP(host)},
	}
	parent, signer := template, any(key)
	if authority != nil {
		parent, signer = authority.Leaf, authority.PrivateKey
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	secret, err2 := x509.MarshalPKCS8PrivateKey(key)
	err = errors.Join(err, err2,
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
	if err == nil {
		_, err = tls.LoadX509KeyPair(certFile, keyFile)
	}
	if err != nil {
		t.Fatal(err)
	}
}
