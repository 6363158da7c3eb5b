package natsd

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"
)

// maxGreeting bounds the first line that a server sends.
const maxGreeting = 64 << 10

// TLS names the PEM files of the server's certificate and its key.
type TLS struct{ Cert, Key string }

func (t *TLS) config() (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the server: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}, nil
}

// certificatePEM returns the certificate that clients see, as PEM; "" without TLS.
func (o Options) certificatePEM() (string, error) {
	if o.TLS == nil || o.Listen == "" {
		return "", nil
	}
	text, err := os.ReadFile(o.TLS.Cert)
	return string(text), err
}

// startTLS secures a connection to the server that the store's info file names, before another process of the machine
// uses it. The server's certificate must be the one in the info file, which only the store's owner can write; no
// authority and no clock is needed. Nothing is sent before that is checked. It fails if the server has another
// certificate or speaks no TLS.
func (i Info) startTLS(conn net.Conn) (net.Conn, error) {
	block, _ := pem.Decode([]byte(i.Certificate))
	if block == nil {
		return nil, errors.New("no certificate in the store's folder")
	}
	if err := conn.SetDeadline(time.Now().Add(tlsTimeout)); err != nil {
		return nil, err
	}
	// The server's greeting is not encrypted.
	raw := bufio.NewReader(io.LimitReader(conn, maxGreeting))
	line, err := raw.ReadString('\n')
	if err != nil {
		return nil, err
	}
	text, isInfo := strings.CutPrefix(line, "INFO ")
	greeting := map[string]json.RawMessage{}
	if err := json.Unmarshal([]byte(text), &greeting); err != nil || !isInfo || raw.Buffered() > 0 {
		return nil, errors.New("it is no NATS server")
	}
	if string(greeting["tls_required"]) != "true" {
		return nil, errors.New("it does not speak TLS")
	}
	greeting["tls_required"] = json.RawMessage("false") // the client must not start TLS again on the secured connection
	rest, err := json.Marshal(greeting)
	if err != nil {
		return nil, err
	}
	secured := tls.Client(conn, &tls.Config{
		MinVersion: tls.VersionTLS12, InsecureSkipVerify: true, // compared instead, byte by byte
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || !bytes.Equal(s.PeerCertificates[0].Raw, block.Bytes) {
				return errors.New("its certificate is not the one in the store's folder")
			}
			return nil
		},
	})
	if err := errors.Join(secured.Handshake(), conn.SetDeadline(time.Time{})); err != nil {
		return nil, err
	}
	return &greeted{Conn: secured, in: io.MultiReader(strings.NewReader("INFO "+string(rest)+"\r\n"), secured)}, nil
}

// greeted is a connection whose first line was read already, and is read again from in.
type greeted struct {
	net.Conn
	in io.Reader
}

func (g *greeted) Read(p []byte) (int, error) { return g.in.Read(p) }
