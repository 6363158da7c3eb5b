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
	// Account is the account of a guest; empty: the account of all other users.
	Account string
}

// gate decides which clients may connect: those with the token, users who prove that they have their key, and every
// connection from within the process.
type gate struct {
	token string
	users map[string]*server.User // by public key
	// guests are the accounts of users who have their own, by public key. server is set once these accounts exist;
	// before that, guests are refused.
	guests map[string]string
	server *atomic.Pointer[server.Server]
}

// gate returns the gate for the token and the users of the options.
func (o Options) gate() gate {
	g := gate{
		token: o.Token, users: map[string]*server.User{}, guests: map[string]string{},
		server: &atomic.Pointer[server.Server]{},
	}
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

// Check reports whether a client may connect, and gives it the rights of its user. The server calls it.
func (g gate) Check(c server.ClientAuthentication) bool {
	addr := c.RemoteAddress()
	if addr != nil && addr.Network() == "pipe" {
		return true
	}
	opts := c.GetOpts()
	if opts.Nkey == "" {
		return g.token != "" && sameToken(opts.Token, g.token)
	}
	user := g.users[opts.Nkey]
	if user == nil || !signed(opts.Nkey, opts.Sig, c.GetNonce()) {
		return false
	}
	if name, guest := g.guests[opts.Nkey]; guest {
		ns := g.server.Load()
		if ns == nil {
			return false // the account does not exist yet
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

// sameToken compares digests, so that the time it takes tells neither length nor content of the token.
func sameToken(given, want string) bool {
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// signed reports whether the client signed the server's nonce of this connection with the key.
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
func (b *logBridge) Warnf(format string, v ...any)  { b.log.Warn().Msg(fmt.Sprintf(format, v...)) }
func (b *logBridge) Errorf(format string, v ...any) { b.log.Error().Msg(fmt.Sprintf(format, v...)) }

// Fatalf must not end the process: Start returns the error instead.
func (b *logBridge) Fatalf(format string, v ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cause = errors.Join(b.cause, fmt.Errorf(format, v...))
}

// fatal returns the fatal errors of the server so far, or nil.
func (b *logBridge) fatal() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cause
}
