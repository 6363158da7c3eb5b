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
			for flag, value := range map[string]string{"--nats-creds": c.creds, "--nats-tls-ca": c.ca, "--nats-token": c.token} {
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

// certified is a server whose certificate is for a host and ends after a while; it signs itself,
// for whether it is known is looked at last.
func certified(t *testing.T, ends time.Duration, host string) (url string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(ends),
		IPAddresses: []net.IP{net.ParseIP(host)},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	secret, err2 := x509.MarshalPKCS8PrivateKey(key)
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	err = errors.Join(err, err2,
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
	if err == nil {
		_, err = tls.LoadX509KeyPair(certFile, keyFile)
	}
	if err != nil {
		t.Fatal(err)
	}
	url, _ = harness.Server(t, t.TempDir(), "--tls", "--tlscert", certFile, "--tlskey", keyFile)
	return strings.Replace(url, "nats://", "tls://", 1)
}
