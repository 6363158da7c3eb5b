package natsd

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
	"github.com/rs/zerolog"
)

// User is a client that may connect through the socket, and what it may do then. Subjects may have wildcards.
type User struct {
	// Name is for the server's log.
	Name string
	// Key is the public key (NKey) whose seed proves the user.
	Key string
	// Unlimited users may do everything. Others may publish and subscribe only as listed here; DenyPublish wins over
	// Publish.
	Unlimited                       bool
	Publish, DenyPublish, Subscribe []string
	// Answers is how many replies the user may send to each request that it gets, within AnswerWithin.
	Answers      int
	AnswerWithin time.Duration
}

// authenticator decides which clients may connect: those with the token, users who prove that they have their key,
// and every connection from within the process that shows no key.
type authenticator struct {
	token string
	users map[string]*server.User // by public key
}

// newAuthenticator returns the check that the server makes of each client that connects: by the token and the users
// of the options.
func (o Options) newAuthenticator() authenticator {
	auth := authenticator{token: o.Token, users: map[string]*server.User{}}
	for _, u := range o.Users {
		user := &server.User{Username: u.Name}
		if !u.Unlimited {
			user.Permissions = &server.Permissions{
				Publish:   &server.SubjectPermission{Allow: slices.Concat([]string{}, u.Publish), Deny: u.DenyPublish},
				Subscribe: &server.SubjectPermission{Allow: slices.Concat([]string{}, u.Subscribe)},
			}
			if u.Answers > 0 {
				user.Permissions.Response = &server.ResponsePermission{MaxMsgs: u.Answers, Expires: u.AnswerWithin}
			}
		}
		auth.users[u.Key] = user
	}
	return auth
}

// Check reports whether a client may connect, and gives it the rights of its user. The server calls it for each new
// connection; connections inside the process need no credentials, and have the rights of those that they show.
func (auth authenticator) Check(c server.ClientAuthentication) bool {
	opts := c.GetOpts()
	if opts.Nkey == "" {
		if addr := c.RemoteAddress(); addr != nil && addr.Network() == "pipe" {
			return true
		}
		return auth.token != "" && sameToken(opts.Token, auth.token)
	}
	user := auth.users[opts.Nkey]
	if user == nil || !signed(opts.Nkey, opts.Sig, c.GetNonce()) {
		return false
	}
	c.RegisterUser(user)
	return true
}

// sameToken compares digests, so that the time it takes tells neither length nor content of the token.
func sameToken(given, want string) bool {
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

func signed(key, signature string, nonce []byte) bool {
	sig, err := base64.RawURLEncoding.DecodeString(signature)
	if err != nil {
		sig, err = base64.StdEncoding.DecodeString(signature)
	}
	public, keyErr := nkeys.FromPublicKey(key)
	return err == nil && keyErr == nil && len(nonce) > 0 && public.Verify(nonce, sig) == nil
}

// logBridge passes the server's log to zerolog. What the server calls a notice (banner, recovery, listening) becomes
// debug level. cause collects fatal errors.
type logBridge struct {
	log zerolog.Logger

	mu    sync.Mutex
	cause error
}

func (b *logBridge) Noticef(format string, v ...any) { b.log.Debug().Msg(fmt.Sprintf(format, v...)) }

func (b *logBridge) Debugf(format string, v ...any) { b.log.Trace().Msg(fmt.Sprintf(format, v...)) }

func (b *logBridge) Tracef(format string, v ...any) { b.log.Trace().Msg(fmt.Sprintf(format, v...)) }

// Warnf logs a warning of the server; at debug level what it says of each stream after a process was killed, and puts
// right by itself.
func (b *logBridge) Warnf(format string, v ...any) {
	level, text := zerolog.WarnLevel, fmt.Sprintf(format, v...)
	if strings.Contains(text, "state outdated") && strings.HasSuffix(text, "will rebuild") {
		level = zerolog.DebugLevel
	}
	b.log.WithLevel(level).Msg(text)
}

func (b *logBridge) Errorf(format string, v ...any) { b.log.Error().Msg(fmt.Sprintf(format, v...)) }

// Fatalf must not end the process: Start returns the error instead.
func (b *logBridge) Fatalf(format string, v ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cause = errors.Join(b.cause, fmt.Errorf(format, v...))
}

func (b *logBridge) fatal() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cause
}

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
