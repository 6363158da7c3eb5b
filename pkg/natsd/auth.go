package natsd

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
	"github.com/rs/zerolog"
)

// User is who may come through the socket, and what he may do then. Subjects may have wildcards.
type User struct {
	// Name is for the server's log.
	Name string
	// Key is the public key (NKey) whose seed proves that it is he.
	Key string
	// Unlimited may do everything; of the others, what is not allowed is refused, and so is what is denied.
	Unlimited                       bool
	Publish, DenyPublish, Subscribe []string
	// Answers is how many answers he may give to each request that comes to him, within AnswerWithin.
	Answers      int
	AnswerWithin time.Duration
	// Account is that of a guest; empty: the one of everybody else.
	Account string
}

// gate lets in whoever shows the token, each user who proves that he has his key, and every
// connection from within the process.
type gate struct {
	token string
	users map[string]*server.User // by public key
	// guests are the names of the accounts of users who are in others than the rest, and server is where they are.
	guests map[string]string
	server *atomic.Pointer[server.Server]
}

func (o Options) gate() gate {
	g := gate{token: o.Token, users: map[string]*server.User{}, guests: map[string]string{}, server: &atomic.Pointer[server.Server]{}}
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
		g.users[u.Key] = user
		if u.Account != "" {
			g.guests[u.Key] = u.Account
		}
	}
	return g
}

// Check says whether a connection may be used, and gives it the rights of its user.
func (g gate) Check(c server.ClientAuthentication) bool {
	addr := c.RemoteAddress()
	if addr != nil && addr.Network() == "pipe" {
		return true
	}
	opts := c.GetOpts()
	if opts.Nkey == "" {
		return g.token != "" && equal(opts.Token, g.token)
	}
	user := g.users[opts.Nkey]
	if user == nil || !signed(opts.Nkey, opts.Sig, c.GetNonce()) {
		return false
	}
	if name, guest := g.guests[opts.Nkey]; guest {
		ns := g.server.Load()
		if ns == nil {
			return false // not let in before there is his account
		}
		account, err := ns.LookupAccount(name)
		if err != nil {
			return false
		}
		in := *user
		in.Account, user = account, &in
	}
	c.RegisterUser(user)
	return true
}

// equal compares digests, so that neither length nor content of the token leaks in
// the time it takes.
func equal(given, want string) bool {
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// signed says whether the server's nonce of this connection was signed with the key.
func signed(key, signature string, nonce []byte) bool {
	sig, err := base64.RawURLEncoding.DecodeString(signature)
	if err != nil {
		sig, err = base64.StdEncoding.DecodeString(signature)
	}
	public, keyErr := nkeys.FromPublicKey(key)
	return err == nil && keyErr == nil && len(nonce) > 0 && public.Verify(nonce, sig) == nil
}

// logBridge hands the server's log to zerolog. What the server calls a notice
// (banner, recovery, listening) is detail here.
type logBridge struct {
	log zerolog.Logger

	mu    sync.Mutex
	cause error
}

func (b *logBridge) Noticef(format string, v ...any) { b.log.Debug().Msg(fmt.Sprintf(format, v...)) }

func (b *logBridge) Debugf(format string, v ...any) { b.log.Trace().Msg(fmt.Sprintf(format, v...)) }

func (b *logBridge) Tracef(format string, v ...any) { b.log.Trace().Msg(fmt.Sprintf(format, v...)) }
func (b *logBridge) Warnf(format string, v ...any)  { b.log.Warn().Msg(fmt.Sprintf(format, v...)) }
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
