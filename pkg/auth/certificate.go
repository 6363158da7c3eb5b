package auth

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Files of the authority and of the server's certificate, in a folder of credentials.
const (
	caCert     = "tls/ca.pem"
	caKey      = "tls/ca-key.pem"
	serverCert = "tls/server.pem"
	serverKey  = "tls/server-key.pem"
)

// The authority's certificate is valid for caYears, the server's for serverYears.
const caYears, serverYears = 10, 2

// CAFile returns the path of the authority's certificate, with which clients check the server's certificate.
func (f *Folder) CAFile() string { return f.path(caCert) }

// ServerFiles returns the paths of the server's certificate and of its key.
func (f *Folder) ServerFiles() (cert, key string) { return f.path(serverCert), f.path(serverKey) }

// localHosts are in every certificate of a server.
var localHosts = []string{"localhost", "127.0.0.1", "::1"}

// HasTLS reports whether the folder has a certificate of the server.
func (f *Folder) HasTLS() bool {
	_, err := os.Stat(f.path(serverCert))
	return err == nil
}

// createAuthority makes the authority that signs the server's certificate.
func (f *Folder) createAuthority() error {
	if err := os.MkdirAll(f.path(filepath.Dir(caCert)), 0o700); err != nil {
		return err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "meander authority"}, IsCA: true, BasicConstraintsValid: true,
		MaxPathLenZero: true,
		KeyUsage:       x509.KeyUsageCertSign | x509.KeyUsageCRLSign, NotAfter: time.Now().AddDate(caYears, 0, 0),
	}
	return f.createSigned(template, nil, caCert, caKey)
}

// createCertificate makes the server's certificate with a new key, signed by the folder's authority, for localHosts
// and the given names and addresses. Create makes the first one, Update a new one. An error is about the authority's
// or the certificate's files.
func (f *Folder) createCertificate(hosts []string) error {
	ca, err := tls.LoadX509KeyPair(f.path(caCert), f.path(caKey))
	if err != nil {
		return fmt.Errorf("authority of %q: %w", f.dir, err)
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "meander server"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotAfter: time.Now().AddDate(serverYears, 0, 0),
	}
	hosts = slices.Concat(localHosts, hosts)
	slices.Sort(hosts)
	for _, host := range slices.Compact(hosts) {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return f.createSigned(template, &ca, serverCert, serverKey)
}

// createSigned makes a key and a certificate from the template, and writes both files. The authority ca signs the
// certificate; with nil it signs itself, as the authority's own does.
func (f *Folder) createSigned(template *x509.Certificate, ca *tls.Certificate, certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return err
	}
	template.NotBefore = time.Now().Add(-time.Hour) // clocks differ
	parent, signer := template, any(key)
	if ca != nil {
		parent, signer = ca.Leaf, ca.PrivateKey
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		return err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(
		replaceFile(f.path(keyFile), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600),
		replaceFile(f.path(certFile), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o644),
	)
}

// Certificate returns the server's certificate; nil without an error if the folder has none, because it was made
// without TLS. It fails if the file cannot be read or has no certificate.
func (f *Folder) Certificate() (*x509.Certificate, error) {
	if !f.HasTLS() {
		return nil, nil
	}
	data, err := os.ReadFile(f.path(serverCert))
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, fmt.Errorf("%s: no certificate in it", f.path(serverCert))
	}
	return x509.ParseCertificate(block.Bytes)
}

// RenewBefore is how long before the end of the server's certificate there is a warning.
const RenewBefore = 30 * 24 * time.Hour

// CheckExpiry returns an error if a server's certificate has expired at the time now: clients refuse the server.
func CheckExpiry(c *x509.Certificate, now time.Time) error {
	if now.Before(c.NotAfter) {
		return nil
	}
	return fmt.Errorf("the certificate of the server expired at %s: clients refuse it",
		c.NotAfter.UTC().Format(time.RFC3339))
}

// Hosts returns the names and addresses that a certificate is for.
func Hosts(c *x509.Certificate) []string {
	hosts := slices.Clone(c.DNSNames)
	for _, ip := range c.IPAddresses {
		hosts = append(hosts, ip.String())
	}
	return hosts
}
