package bus

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

var (
	// ErrStreamFull is returned when a stream or the server's storage has no space. A later try can succeed, after
	// consumers, age or a purge have freed some.
	ErrStreamFull = errors.New("stream is full")
	// ErrNotFound is returned when no stored message or object has the name asked for.
	ErrNotFound = errors.New("not found")
	// ErrTooLarge is returned when a message is larger than the server's payload limit.
	ErrTooLarge = errors.New("message too large for the server")
	// ErrPermission is returned for what the server's permissions do not allow. The server does not answer then, but
	// sends a note on the connection. The text names the missing right, and the roles that have it.
	ErrPermission = errors.New("no permission")
	// ErrAcknowledged is returned when a message is acknowledged, nakked or terminated a second time.
	ErrAcknowledged = errors.New("message already acknowledged")
	// ErrClosed is returned when the bus, a publisher or a subscription has been closed.
	ErrClosed = errors.New("closed")
	// ErrIncompatible is returned when a stream or bucket exists with settings that break the contract and cannot be
	// changed.
	ErrIncompatible = errors.New("exists with incompatible settings")
	// ErrCursor is returned when a cursor cannot be read, or belongs to another stream than the one that is there now.
	ErrCursor = errors.New("not a position in this stream")
	// ErrEvicted is returned when messages behind a cursor are gone before they were read.
	ErrEvicted = errors.New("evicted before it was read")
	// ErrCorrupt is returned when stored bytes do not have the digest or size by which they are named.
	ErrCorrupt = errors.New("digest mismatch")
	// ErrFailed is returned for a sample that was not completed, with its reason.
	ErrFailed = errors.New("the sample failed")
)

// TerminalError marks a failure that no retry can change.
type TerminalError struct {
	// Code is the class of the reason, one of schemas.DeadCodes or a handler's own.
	Code string
	Err  error
	// Garbage means that the message is not the event that its subject is for.
	Garbage bool
}

func (e *TerminalError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *TerminalError) Unwrap() error { return e.Err }

// Terminal marks err as terminal, with the code for the dead letter; nil stays nil.
func Terminal(code string, err error) error {
	if err == nil {
		return nil
	}
	return &TerminalError{Code: code, Err: err}
}

// Garbage is Terminal for a message that is not the event that its subject is for. Beside
// the dead letter, the message is deleted, so that the true event can be stored, and
// OnGiveUp is not called: later stages must not hear that the event will never come. nil stays nil.
func Garbage(code string, err error) error {
	if err == nil {
		return nil
	}
	return &TerminalError{Code: code, Err: err, Garbage: true}
}

// Code returns the code of a terminal error, and "exhausted" for any other error:
// that is what it becomes when the deliveries have run out.
func Code(err error) string {
	if t, ok := errors.AsType[*TerminalError](err); ok {
		return t.Code
	}
	return schemas.CodeExhausted
}

// Codes of the server's API errors that publishing meets (nats-server, errors.json).
const (
	codeResourceLimits     = 10002
	codeInsufficient       = 10023
	codeMemoryExceeded     = 10028
	codeStorageExceeded    = 10047
	codeMessageExceeds     = 10054
	codeStoreFailed        = 10077 // one code for three limits; see classOf
	codeStreamWrongLastSeq = 10071
	codeDuplicateInFlight  = 10158
)

type errorClass int

const (
	classRetry   errorClass = iota // a later try may succeed
	classRefused                   // the stream is full, or has the subject already
	classFull                      // the server has no space
	classFatal                     // no try will succeed
)

// classOf says what the error of a publish, or of a change of a stream, means for the caller: try again, wait for
// space, a refusal, or never again.
func classOf(err error) errorClass {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		switch api.ErrorCode {
		case codeStoreFailed:
			// "maximum messages exceeded", "maximum bytes exceeded" and "maximum messages
			// per subject exceeded" share this code with failures of the disk.
			if strings.Contains(api.Description, "maximum") {
				return classRefused
			}
			if strings.Contains(api.Description, "no space left") {
				return classFull
			}
			return classRetry
		case codeStreamWrongLastSeq:
			return classRefused
		case codeDuplicateInFlight: // a cluster is still storing the message
			return classRetry
		case codeNoPeers: // no server of the cluster has space, or too few are up
			if strings.Contains(api.Description, "insufficient storage") {
				return classFull
			}
			return classRetry
		case codeResourceLimits, codeInsufficient, codeMemoryExceeded, codeStorageExceeded:
			return classFull
		case codeMessageExceeds:
			return classFatal
		}
		if api.Code >= 400 && api.Code < 500 && api.Code != 404 && api.Code != 408 {
			return classFatal
		}
		return classRetry
	}
	switch {
	case errors.Is(err, ErrPermission), errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject),
		errors.Is(err, nats.ErrHeadersNotSupported),
		errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		return classFatal
	}
	return classRetry
}

// wasOutage reports whether a try failed because the server was away or not ready, which is no fault of the message.
// reconnects is the number of reconnects before the try.
func (b *Bus) wasOutage(err error, reconnects uint64) bool {
	if !b.nc.IsConnected() || b.nc.Stats().Reconnects != reconnects {
		return true
	}
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.Code >= 500 && api.ErrorCode != codeStoreFailed
	}
	return errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrNoResponders) ||
		errors.Is(err, jetstream.ErrNoStreamResponse) ||
		errors.Is(err, nats.ErrDisconnected) || errors.Is(err, nats.ErrConnectionReconnecting)
}

// publishError adds to the error of a publish the subject, and the error value that a caller can test for.
func publishError(subject string, err error) error {
	api, _ := errors.AsType[*jetstream.APIError](err)
	switch {
	case errors.Is(err, nats.ErrMaxPayload), api != nil && api.ErrorCode == codeMessageExceeds:
		err = Terminal(schemas.CodeTooLarge, fmt.Errorf("%w: %w", ErrTooLarge, err))
	case errors.Is(err, ErrPermission):
		err = Terminal(schemas.CodeInvalid, err)
	default:
		err = closedError(err)
	}
	return fmt.Errorf("publish %q: %w", subject, err)
}

func closedError(err error) error {
	if errors.Is(err, nats.ErrConnectionClosed) || errors.Is(err, jetstream.ErrConnectionClosed) ||
		errors.Is(err, nats.ErrConnectionDraining) {
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// connectHint returns the end of the error of Connect when the server refuses the connection: it says what to do. It
// returns "" when there is no advice.
func connectHint(cfg Config, err error) string {
	text := strings.ToLower(err.Error()) // the client library and TLS alerts of the server have no values to compare
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	_, otherHost := errors.AsType[x509.HostnameError](err)
	_, otherAuthority := errors.AsType[x509.UnknownAuthorityError](err)
	switch {
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired),
		strings.Contains(text, "nkeys not supported"):
		switch {
		case cfg.CredsFile != "" && cfg.CAFile == "" && cfg.CertFile == "":
			return fmt.Sprintf("; the server does not know the user of %s, or wants TLS (nats-tls-ca)", cfg.CredsFile)
		case cfg.CredsFile != "":
			return fmt.Sprintf("; the server does not know the user of %s", cfg.CredsFile)
		case cfg.Token == "" && cfg.TokenHandler == nil:
			return "; it wants credentials (nats-creds, MEANDER_NATS_CREDS) or a token (MEANDER_NATS_TOKEN)"
		}
		return "; it does not know the token (MEANDER_NATS_TOKEN), or wants credentials (nats-creds, " +
			"MEANDER_NATS_CREDS)"
	case isInvalid && invalid.Reason == x509.Expired:
		return "; make the server a new certificate (meander auth update DIR) and have it read that; or a clock is " +
			"wrong"
	case otherHost:
		return "; connect by a name that its certificate has, or give it this one: meander auth update DIR " +
			"--tls-host HOST"
	case strings.Contains(text, "parse root certificate"):
		return "; nats-tls-ca must be a PEM file with the certificate of an authority, such as tls/ca.pem of meander " +
			"auth init"
	case otherAuthority && cfg.CAFile != "":
		return fmt.Sprintf("; %s is not the authority that signed its certificate (nats-tls-ca, MEANDER_NATS_TLS_CA)",
			cfg.CAFile)
	case otherAuthority:
		return "; name the authority that signed its certificate (nats-tls-ca, MEANDER_NATS_TLS_CA)"
	case strings.Contains(text, "certificate required"), strings.Contains(text, "bad certificate"):
		return "; it wants a certificate of ours (nats-tls-cert, nats-tls-key)"
	}
	return ""
}

// The server does not answer a request that its permissions do not allow. It only sends a note on the connection that
// names the subject. The code here gives that note to the caller who waits for the answer.

const (
	// deniedGrace is how long a request of the client library may still be answered after a note that could be about
	// it. An answer takes milliseconds.
	deniedGrace = time.Second
	// Denied reports notes of the last deniedFor, and at most deniedMost of them.
	deniedFor  = time.Minute
	deniedMost = 16
)

// denials has the notes of what the server did not allow, and the callers that wait for such notes.
type denials struct {
	mu      sync.Mutex
	waiting map[*waiter]struct{}
	recent  []denial
}

type denial struct {
	err *deniedError
	at  time.Time
}

// waiter is a caller that wants notes about its subject, or, with an empty one, about any. told must not block.
type waiter struct {
	subject string
	told    func(subject string, err error)
}

// deniedError is the error of one note. It is ErrPermission.
type deniedError struct {
	subject, text string
}

func (e *deniedError) Error() string { return e.text }
func (e *deniedError) Unwrap() error { return ErrPermission }

var notes = regexp.MustCompile(`(?i)permissions violation for (publish|subscription) to "([^"]*)"`)

// noteDenial gives a denial of the server to all callers that wait for an answer on its subject, and keeps it for
// Denied. It returns the denial as an error, and in met whether some caller was waiting.
func (b *Bus) noteDenial(note error) (denied error, met bool) {
	m := notes.FindStringSubmatch(note.Error())
	if m == nil {
		return note, false
	}
	err := &deniedError{subject: m[2]}
	verb := "publish on"
	if strings.EqualFold(m[1], "subscription") {
		verb = "subscribe to"
	}
	err.text = fmt.Sprintf("%v: %s may not %s %q", ErrPermission, b.user, verb, err.subject)
	if verb == "publish on" {
		err.text += b.user.MissingRight(err.subject)
	}
	d := &b.denials
	d.mu.Lock()
	defer d.mu.Unlock()
	known := false
	for i := range d.recent {
		if *d.recent[i].err == *err {
			d.recent[i].at, known = time.Now(), true
		}
	}
	if !known {
		if len(d.recent) == deniedMost {
			d.recent = d.recent[1:]
		}
		d.recent = append(d.recent, denial{err, time.Now()})
	}
	for w := range d.waiting {
		if w.subject == "" || w.subject == err.subject {
			met = true
			w.told(err.subject, err)
		}
	}
	return err, met
}

// listen calls told for each denial about a subject (empty: any) until stop is called. told is called under the lock:
// it must not block, nor call listen or stop.
func (d *denials) listen(subject string, told func(subject string, err error)) (stop func()) {
	w := &waiter{subject, told}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting == nil {
		d.waiting = map[*waiter]struct{}{}
	}
	d.waiting[w] = struct{}{}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.waiting, w)
	}
}

// Denied returns what the server did not allow in the last minute, joined, or nil; services show it in their health.
// Work that needs it stands still.
func (b *Bus) Denied() error {
	d := &b.denials
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, r := range d.recent {
		if time.Since(r.at) < deniedFor {
			errs = append(errs, r.err)
		}
	}
	return errors.Join(errs...)
}

// watchDenials returns a context for calls of the client library. It ends when the server denied a request of the
// library and did not answer; denied returns the note then, else nil. Call stop at the end.
func (b *Bus) watchDenials(ctx context.Context) (try context.Context, denied func() error, stop func()) {
	try, cancel := context.WithCancelCause(ctx)
	unlisten := b.denials.listen("", func(subject string, err error) {
		if strings.HasPrefix(subject, "$") { // a request of the library's
			time.AfterFunc(deniedGrace, func() { cancel(err) })
		}
	})
	denied = func() error {
		note, _ := errors.AsType[*deniedError](context.Cause(try))
		if note == nil || ctx.Err() != nil {
			return nil
		}
		return note
	}
	return try, denied, func() { unlisten(); cancel(nil) }
}
