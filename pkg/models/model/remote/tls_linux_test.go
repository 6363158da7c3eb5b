package remote_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// sign returns a certificate of a template, signed by a, or by itself where a is nil.
func (a *authority) sign(t *testing.T, template *x509.Certificate) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber, template.Subject = big.NewInt(1), pkix.Name{CommonName: "test"}
	by := a
	if by == nil {
		by = &authority{template, key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.cert, &key.PublicKey, by.key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

// newAuthority returns an authority that signs.
func newAuthority(t *testing.T) *authority {
	return (*authority)(nil).sign(t, &x509.Certificate{
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
	})
}

// server returns the settings of a server with a certificate for a host, which is valid until then.
func (a *authority) server(t *testing.T, host string, until time.Time) *tls.Config {
	template := &x509.Certificate{NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: until}
	if ip := net.ParseIP(host); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{host}
	}
	c := a.sign(t, template)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{c.cert.Raw}, PrivateKey: c.key}}}
}

// trusted is the one authority that this process knows: it reads SSL_CERT_FILE once.
var trusted *authority

// A worker at tls: is joined if its certificate is one that the system trusts, for that host and for now. Whatever else
// is there is refused with one error that says what to do.
func TestOpen_TLS(t *testing.T) {
	if trusted == nil {
		trusted = newAuthority(t)
	}
	other := newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.pem")
	block := &pem.Block{Type: "CERTIFICATE", Bytes: trusted.cert.Raw}
	if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SSL_CERT_FILE", file)
	const host, token = "127.0.0.1", "secret"
	later := time.Now().Add(time.Hour)
	dir := remotetest.Folder(t, class, 1)
	for _, tt := range []struct {
		name, scheme, token string
		tls                 *tls.Config
		says                []string
	}{
		{"good", "tls:", token, trusted.server(t, host, later), nil},
		{"wrong authority", "tls:", token, other.server(t, host, later), []string{
			"certificate of 127.0.0.1:", "unknown authority", "name the file of its authority in SSL_CERT_FILE",
		}},
		{"wrong host", "tls:", token, trusted.server(t, "gpu-7", later), []string{
			"certificate of 127.0.0.1:", "use a name that it is for in torch=tls:NAME:PORT",
		}},
		{"expired", "tls:", token, trusted.server(t, host, time.Now().Add(-time.Hour)), []string{
			"certificate of 127.0.0.1:", "expired", "give the worker another",
		}},
		{"wrong token", "tls:", "wrong", trusted.server(t, host, later), []string{"token: wrong"}},
		{"clear text to TLS", "", token, trusted.server(t, host, later), []string{
			"hello: ", "a worker with --tls-cert wants torch=tls:127.0.0.1:",
		}},
		{"TLS to clear text", "tls:", token, nil, []string{
			"TLS: ", "a worker without --tls-cert wants torch=127.0.0.1:",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, err := remotetest.New(remotetest.Options{Dir: dir, Token: token, TLS: tt.tls})
			if err == nil {
				err = w.Listen("tcp", host+":0")
			}
			if err != nil {
				t.Fatal(err)
			}
			defer w.Stop()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var waits error // for a worker that may come to its senses
			m, err := remote.Open(ctx, dir, remote.Config{
				Address: tt.scheme + w.Address(), Token: tt.token, Log: func(e remote.Event) {
					if e.Err != nil && waits == nil {
						waits = e.Err
						cancel()
					}
				},
			}, nil)
			if errors.Is(err, context.Canceled) {
				err = waits
			}
			if len(tt.says) == 0 {
				if err != nil {
					t.Fatal(err)
				}
				velocity(t, m, rowsOf(t, m, 2))
				if err := m.Close(); err != nil {
					t.Error(err)
				}
				return
			}
			for _, part := range tt.says {
				if err == nil || !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), "\n") {
					t.Errorf("%v; want one line with %q", err, part)
				}
			}
		})
	}
}
